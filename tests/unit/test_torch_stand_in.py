"""The stand-in CANN of torch_npu: its slots, its memory of zeros, and that a real CANN is never used."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from mindspeed_dryrun.engines.cann.elf import SharedLibrary
from mindspeed_dryrun.engines.cann.library_writer import write_library
from mindspeed_dryrun.engines.torch_npu import engine
from mindspeed_dryrun.engines.torch_npu.required_symbols import find_torch_npu_symbols
from mindspeed_dryrun.engines.torch_npu.stand_in import torch_npu_behaviour, torch_npu_library
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank.torch_npu import answers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    names = [*answers.names(), *(answers.SLOT + name for name in answers.names()), "aclnnMm", "aclCreateScalar"]
    path = tmp_path / "libanswers.so"
    path.write_bytes(write_library(names, os.uname().machine, "libanswers.so", "Ascend910B2", torch_npu_behaviour))
    return path


def test_an_empty_slot_answers_0(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    count = ctypes.c_uint32(7)
    assert loaded.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 7
    assert loaded.aclnnMm() == 0
    loaded.aclCreateScalar.restype = ctypes.c_void_p
    assert loaded.aclCreateScalar()


PROGRAM = """
import ctypes, os, sys
from mindspeed_dryrun.rank.torch_npu import answers
answers.install(sys.argv[1])
cann = ctypes.CDLL(sys.argv[1])
count, pointer, size = ctypes.c_uint32(), ctypes.c_void_p(), ctypes.c_size_t(1 << 20)
assert cann.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 8
os.environ["LOCAL_WORLD_SIZE"] = "16"  # an A3: the twelfth rank of a node takes its twelfth device
assert cann.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 16
assert cann.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(200 << 30), 0) == 0
assert answers.memory.holds(pointer.value) and answers.memory.holds(pointer.value + (200 << 30) - 1)
host = ctypes.create_string_buffer(b"x" * 16, 16)
cann.aclrtMemcpy(pointer, size, host, ctypes.c_size_t(16), 1)
assert host.raw == b"x" * 16
cann.aclrtMemcpy(host, ctypes.c_size_t(16), pointer, ctypes.c_size_t(16), 2)
assert host.raw == bytes(16), host.raw
assert ctypes.string_at(pointer.value + (100 << 30), 64) == bytes(64)
other = ctypes.c_void_p()
assert cann.aclrtMalloc(ctypes.byref(other), ctypes.c_size_t(1), 0) == 0
assert other.value >= pointer.value + (200 << 30)
assert cann.aclrtMalloc(ctypes.byref(other), ctypes.c_size_t(1 << 60), 0) == 207001 and other.value is None
communicator, rank = ctypes.c_void_p(), ctypes.c_uint32()
assert cann.HcclCommInitRootInfo(8, None, 3, ctypes.byref(communicator)) == 0
assert cann.HcclGetRankId(communicator, ctypes.byref(rank)) == 0 and rank.value == 3
assert answers.communicators == [(8, 3)]
size, executor = ctypes.c_uint64(7), ctypes.c_void_p()
adam = cann.aclnnApplyAdamWV2GetWorkspaceSize
adam.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_float] * 5 + [ctypes.c_bool] * 2 + [ctypes.c_void_p] * 2
ask = lambda: adam(None, None, None, None, None, None, 1.0, 0.9, 0.9, 0.1, 1e-8, False, False, ctypes.byref(size), ctypes.byref(executor))
assert ask() == 0 and size.value == 16 << 20
os.environ["MINDSPEED_DRYRUN_TASK_QUEUE"] = "2"  # the other allocator: outside the figure, and still known
assert ask() == 0 and size.value == 0 and answers.workspaces == {"aclnnApplyAdamWV2": 16 << 20}
dims = (ctypes.c_int64 * 2)(3, 5)
cann.aclCreateTensor.restype = ctypes.c_void_p
cann.aclCreateTensor.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
tensor = cann.aclCreateTensor(dims, 2, 27, (ctypes.c_int64 * 2)(1, 3), 0, 2, dims, 2, None)
found = answers.described(tensor)
assert (found.shape, found.elements, found.size, found.contiguous) == ((3, 5), 15, 30, False)
shape, number = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_uint64()
assert cann.aclGetViewShape(ctypes.c_void_p(tensor), ctypes.byref(shape), ctypes.byref(number)) == 0 and shape[:number.value] == [3, 5]
cann.aclDestroyTensor(ctypes.c_void_p(tensor))
assert answers.described(tensor) is None
pinned, whole = ctypes.c_void_p(), ctypes.c_size_t(8 << 30)
used = lambda: int(open("/proc/self/statm").read().split()[1]) << 12
assert cann.aclrtMallocHost(ctypes.byref(pinned), whole) == 0
ctypes.memset(pinned.value, 7, 32 << 20)
before = used()
cann.aclrtMemcpy(ctypes.c_void_p(pinned.value + 5), whole, pointer, ctypes.c_size_t((8 << 30) - 10), 2)
assert used() < before - (24 << 20)  # the copied zeros take no memory
assert ctypes.string_at(pinned.value, 8) == bytes([7] * 5 + [0] * 3)
assert ctypes.string_at(pinned.value + (16 << 20), 64) == bytes(64)
inside = ctypes.c_void_p(pinned.value + (1 << 20))
cann.aclrtMemcpy(inside, whole, host, ctypes.c_size_t(16), 0)  # from host to host: as it is
assert ctypes.string_at(inside.value, 16) == host.raw
assert cann.aclrtFreeHost(pinned) == 0
assert cann.aclrtMallocHost(ctypes.byref(pinned), ctypes.c_size_t(100)) == 0 and cann.aclrtFreeHost(pinned) == 0
print("done")
"""


def test_device_memory_reads_as_zeros_whatever_was_copied_to_it(library: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


def test_a_real_cann_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    with pytest.raises(DryRunError, match="real cards"):
        engine.choose_torch_engine(environ={"ASCEND_HOME_PATH": str(tmp_path)})


def test_a_python_without_torch_npu_gets_a_sentence() -> None:
    if importlib.util.find_spec("torch_npu"):
        pytest.skip("torch_npu is installed here")
    with pytest.raises(DryRunError, match="not installed"):
        engine.find_torch_npu()


@pytest.fixture
def package() -> Path:
    """An installed torch_npu, or the unpacked wheel that TORCH_NPU_PACKAGE names."""
    spec = importlib.util.find_spec("torch_npu")
    named = os.environ.get("TORCH_NPU_PACKAGE") or (
        spec and spec.submodule_search_locations and spec.submodule_search_locations[0]
    )
    if not named:
        pytest.skip("no torch_npu here: install it or name an unpacked wheel with TORCH_NPU_PACKAGE")
    return Path(named)


def test_every_undefined_symbol_of_the_wheel_is_there(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "libstandin.so"
    path.write_bytes(torch_npu_library(find_torch_npu_symbols(package)))
    with path.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".dynsym")
        defined = {symbol.name for symbol in table.iter_symbols()}
    main = SharedLibrary(package / "lib" / "libtorch_npu.so")
    asked = {s.name for s in main.symbols if not s.defined and s.name.startswith(("acl", "Hccl", "rt", "Msprof", "_ZN2ge"))}
    assert asked and asked <= defined
    assert {"aclnnMatmulGetWorkspaceSize", "aclnnMatmul"} <= defined
    assert set(find_torch_npu_symbols(package).symbols) <= defined


@pytest.mark.slow
def test_the_release_that_most_users_have_finds_all_it_asks_for() -> None:
    """torch_npu 2.7.1 from its wheel, which is downloaded (25 MB); torch is not needed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "torch_npu_versions.py"), "2.7.1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    if "CalledProcessError" in done.stderr:
        pytest.skip("the wheel of torch_npu 2.7.1 cannot be downloaded here")
    assert done.returncode == 0 and "| 2.7.1 |" in done.stdout and "| none |" in done.stdout, done.stdout + done.stderr
