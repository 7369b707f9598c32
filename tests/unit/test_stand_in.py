"""The stand-in CANN: the library it writes, the cache it lives in, and what it refuses."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dryrun import cache
from mindspeed_dryrun.engines.cann import real
from mindspeed_dryrun.engines.cann.library_writer import write_library
from mindspeed_dryrun.engines.cann.machine_code import HBM_BYTES, behaviour_of
from mindspeed_dryrun.engines.cann.required_symbols import find_required_symbols
from mindspeed_dryrun.engines.cann.stand_in import stand_in_for
from mindspeed_dryrun.engines.mindspore import engine as choice
from mindspeed_dryrun.errors import DryRunError

NAMES = [
    "aclInit",
    "aclrtGetSocName",
    "aclrtGetMemInfo",
    "aclrtGetDeviceCount",
    "aclDataTypeSize",
    "aclCreateTensorDesc",
    "_ZN2ge8OperatorC1ERKSs",
    "_ZN2ge15OperatorFactory14CreateOperatorEPKcS2_",
    "_ZN2ge10TensorDescC1Ev",
    "_ZNK2ge5Shape7GetDimsEv",
    "_ZNK2ge8Operator7GetNameEv",
    "_ZNK2ge12AscendString9GetStringEv",
    "_ZN2ge13StatusFactory8InstanceEv",
    "_ZN9mindspore6device6ascend27SimuFuncIaclrtProcessReportIiEET_i",
    "_ZTVN2ge9AllocatorE",
]


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    """A library of this machine's architecture, loaded into this process."""
    path = tmp_path / "libnames.so"
    path.write_bytes(write_library(NAMES, os.uname().machine, "libnames.so", "Ascend910B2"))
    return ctypes.CDLL(str(path))


def test_plain_functions_answer_0(library: ctypes.CDLL) -> None:
    assert library.aclInit(None) == 0


def test_texts(library: ctypes.CDLL) -> None:
    library.aclrtGetSocName.restype = ctypes.c_char_p
    assert library.aclrtGetSocName() == b"Ascend910B2"
    get_string = library["_ZNK2ge12AscendString9GetStringEv"]
    get_string.restype = ctypes.c_char_p
    assert get_string(None) == b""


def test_out_parameters(library: ctypes.CDLL) -> None:
    free, total, count = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint32()
    assert library.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total)) == 0
    assert (free.value, total.value) == (HBM_BYTES, HBM_BYTES)
    assert library.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 8


def test_the_callback_function_sleeps(library: ctypes.CDLL) -> None:
    begun, used = time.monotonic(), time.thread_time()
    assert [library["_ZN9mindspore6device6ascend27SimuFuncIaclrtProcessReportIiEET_i"](-1) for _ in range(5)] == [0] * 5
    assert time.monotonic() - begun >= 0.05 > time.thread_time() - used


@pytest.mark.parametrize(("number", "size"), [(0, 4), (1, 2), (2, 1), (9, 8), (11, 8), (12, 1), (27, 2)])
def test_data_type_sizes(library: ctypes.CDLL, number: int, size: int) -> None:
    """float, half, int8, int64, double, bool, bfloat16."""
    assert library.aclDataTypeSize(number) == size


def test_objects_are_filled_in_and_nothing_beyond_them(library: ctypes.CDLL) -> None:
    for name, words in (("_ZN2ge8OperatorC1ERKSs", 3), ("_ZN2ge10TensorDescC1Ev", 2)):
        memory = (ctypes.c_uint64 * 8)(*[0xAB] * 8)
        library[name](memory)
        assert list(memory)[words:] == [0xAB] * (8 - words), name
        assert list(memory)[1:words] == [0] * (words - 1), name
    table = ctypes.cast(memory[0] or 0, ctypes.POINTER(ctypes.c_uint64))
    assert not table  # a TensorDesc starts with an empty pointer
    library["_ZN2ge8OperatorC1ERKSs"](memory)
    functions = ctypes.cast(memory[0], ctypes.POINTER(ctypes.c_void_p))
    destructor = ctypes.CFUNCTYPE(ctypes.c_long)(functions[0])
    assert destructor() == 0  # an Operator starts with a table of callable functions


def test_the_empty_map_is_empty(library: ctypes.CDLL) -> None:
    instance = library["_ZN2ge13StatusFactory8InstanceEv"]
    instance.restype = ctypes.POINTER(ctypes.c_uint64)
    words = instance()
    header = ctypes.addressof(words.contents) + 8
    assert (words[3], words[4], words[5]) == (header, header, 0)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,40}", fullmatch=True), min_size=1, max_size=300))
def test_every_symbol_is_found_again(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    folder = tmp_path_factory.mktemp("elf")
    for architecture in ("x86_64", "aarch64"):
        # The loader takes a soname it has already loaded for the same library: each needs its own.
        path = folder / f"lib{folder.name}{architecture}.so"
        path.write_bytes(write_library(sorted(names), architecture, path.name, "chip"))
        with path.open("rb") as stream:
            table = ELFFile(stream).get_section_by_name(".hash")
            assert all(table.get_symbol(name) is not None for name in names)
        if architecture == os.uname().machine:
            loaded = ctypes.CDLL(str(path))
            assert all(loaded[name] for name in names)


def test_readelf_agrees(tmp_path: Path) -> None:
    readelf = shutil.which("readelf")
    if not readelf:
        pytest.skip("binutils is not installed")
    for architecture, machine in (("x86_64", "X86-64"), ("aarch64", "AArch64")):
        path = tmp_path / f"{architecture}.so"
        path.write_bytes(write_library(NAMES, architecture, "libnames.so", "Ascend910B2"))
        done = subprocess.run([readelf, "-hW", "--dyn-syms", "-d", "-l", str(path)], capture_output=True, text=True, check=True)
        assert machine in done.stdout and not done.stderr
        found = set(re.findall(r"(?:FUNC|OBJECT)\s+GLOBAL DEFAULT\s+\d+ (\S+)", done.stdout))
        assert found == set(NAMES)
        assert "GNU_STACK" in done.stdout and "RWE" not in done.stdout


def test_aarch64_code_runs_under_emulation(tmp_path: Path) -> None:
    """A small aarch64 program, linked with the library, calls every kind of function and returns how many went wrong."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if not (compiler and emulator):
        pytest.skip("gcc-aarch64-linux-gnu and qemu-user are not installed")
    (tmp_path / "libnames.so").write_bytes(write_library(NAMES, "aarch64", "libnames.so", "Ascend910B2"))
    (tmp_path / "main.c").write_text(
        r"""
#include <stdint.h>
#include <string.h>
#include <time.h>
struct operator_ { uint64_t words[3]; };           /* larger than 16 bytes: returned through x8 */
int aclInit(void); const char *aclrtGetSocName(void); unsigned long aclDataTypeSize(int);
int aclrtGetMemInfo(int, unsigned long *, unsigned long *); int aclrtGetDeviceCount(unsigned *);
struct operator_ create(const char *, const char *) __asm__("_ZN2ge15OperatorFactory14CreateOperatorEPKcS2_");
struct operator_ dims(void *) __asm__("_ZNK2ge5Shape7GetDimsEv");
void tensor(uint64_t *) __asm__("_ZN2ge10TensorDescC1Ev");
uint64_t *instance(void) __asm__("_ZN2ge13StatusFactory8InstanceEv");
int pause_(int) __asm__("_ZN9mindspore6device6ascend27SimuFuncIaclrtProcessReportIiEET_i");
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
int main(void) {
    int wrong = 0; unsigned long free_ = 0, total = 0; unsigned count = 0;
    wrong += aclInit() != 0;
    wrong += strcmp(aclrtGetSocName(), "Ascend910B2") != 0;
    wrong += aclDataTypeSize(27) != 2 || aclDataTypeSize(9) != 8 || aclDataTypeSize(0) != 4;
    wrong += aclrtGetMemInfo(0, &free_, &total) != 0 || total != 64ul << 30 || free_ != total;
    wrong += aclrtGetDeviceCount(&count) != 0 || count != 8;
    struct operator_ made = create("a", "b");
    wrong += made.words[0] == 0 || made.words[1] || made.words[2] || ((long (**)(void))made.words[0])[0]() != 0;
    struct operator_ empty = dims(&made);
    wrong += empty.words[0] || empty.words[1] || empty.words[2];
    uint64_t memory[3] = {7, 7, 7}; tensor(memory);
    wrong += memory[0] || memory[1] || memory[2] != 7;
    uint64_t *map = instance();
    wrong += map[3] != (uint64_t)(map + 1) || map[4] != (uint64_t)(map + 1) || map[5];
    double begun = now();
    wrong += pause_(0) != 0 || now() - begun < 0.01 || now() - begun > 1;
    return wrong;
}
"""
    )
    subprocess.run([compiler, "main.c", "libnames.so", "-o", "main"], cwd=tmp_path, check=True)
    run = [emulator, "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={tmp_path}", "./main"]
    assert subprocess.run(run, cwd=tmp_path, check=False).returncode == 0


# --- the cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    return folder


def _ask(folder: str, answers: multiprocessing.Queue) -> None:
    def build(temporary: Path) -> None:
        for number in range(50):
            (temporary / f"{number}").write_text("x")
            time.sleep(0.005)
        with (Path(folder).parent / "builders").open("a") as stream:
            stream.write("x")

    made = cache.make_once(Path(folder), build)
    answers.put(len(list(made.iterdir())))


def test_processes_that_ask_at_once_share_one_and_never_see_half(own_cache: Path) -> None:
    own_cache.mkdir(mode=0o700)
    answers: multiprocessing.Queue = multiprocessing.Queue()
    processes = [multiprocessing.Process(target=_ask, args=(str(own_cache / "made"), answers)) for _ in range(6)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=60) for _ in processes] == [50] * 6
    for process in processes:
        process.join()
    assert (own_cache / "builders").read_text() == "x"


def test_one_killed_half_way_leaves_nothing_that_counts(own_cache: Path) -> None:
    own_cache.mkdir(mode=0o700)
    answers: multiprocessing.Queue = multiprocessing.Queue()
    victim = multiprocessing.Process(target=_ask, args=(str(own_cache / "made"), answers))
    victim.start()
    while not list(own_cache.glob("made.tmp-*/10")):
        time.sleep(0.002)
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join()
    assert not (own_cache / "made").exists()
    _ask(str(own_cache / "made"), answers)
    assert answers.get(timeout=10) == 50
    assert not list(own_cache.glob("made.tmp-*"))


def test_a_folder_others_can_write_to_is_refused(own_cache: Path) -> None:
    own_cache.mkdir(mode=0o700)
    made = cache.make_once(own_cache / "made", lambda temporary: (temporary / "lib.so").write_text("x") and None)
    (made / "lib.so").chmod(0o666)
    with pytest.raises(DryRunError, match=r"can be written by other users.*chmod -R go-w"):
        cache.make_once(made, lambda _: None)
    (made / "lib.so").chmod(0o644)
    own_cache.chmod(0o777)
    with pytest.raises(DryRunError, match="can be written by other users"):
        cache.make_once(made, lambda _: None)


def test_a_folder_that_cannot_be_written_gets_a_sentence(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(DryRunError, match=rf"Cannot write the cache folder.*export {cache.VARIABLE}=DIR"):
        cache.make_once(own_cache / "made", lambda _: None)


def test_a_read_only_cache_folder_ends_the_command_with_a_sentence(own_cache: Path) -> None:
    """As a user who may not write there: root may write anywhere, so a read-only mount is asked for where possible."""
    own_cache.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(own_cache)], capture_output=True, check=False)
    if mounted.returncode:
        own_cache.chmod(0o500)
        if os.access(own_cache, os.W_OK):
            pytest.skip("neither a read-only mount nor an unprivileged user is to be had")
    try:
        done = subprocess.run([sys.executable, "-m", "mindspeed_dryrun", "setup"], capture_output=True, text=True, check=False)
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", str(own_cache)], check=True)
    assert done.returncode == 1
    assert "Cannot write the cache folder" in done.stderr and "Traceback" not in done.stderr


# --- what is refused ---------------------------------------------------------------------------------------------


def test_a_cpu_only_mindspore_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib" / "plugin").mkdir(parents=True)
    with pytest.raises(DryRunError, match=r"CPU-only build.*pip install"):
        find_required_symbols(tmp_path)


def test_a_broken_library_is_named(tmp_path: Path) -> None:
    plugin = tmp_path / "lib" / "plugin"
    plugin.mkdir(parents=True)
    (plugin / "libmindspore_ascend.so.2").write_bytes(b"not an ELF file")
    with pytest.raises(DryRunError, match=r"libmindspore_ascend.so.2 is not a readable library"):
        find_required_symbols(tmp_path)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(DryRunError, match=f"Linux only, and this is {platform}"):
        choice.choose_engine()


@pytest.mark.parametrize("level", [2, 3])
def test_levels_that_need_a_card_are_refused(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_real_cann", lambda environ=None: None)
    with pytest.raises(DryRunError, match=rf"Level {level} .*needs a real CANN and a card.*--level 1"):
        choice.choose_engine(level)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(DryRunError, match="level 7 does not exist"):
        choice.choose_engine(7)


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.fixture
def real_cann(tmp_path: Path) -> Path:
    """What an installed CANN looks like from outside."""
    home = tmp_path / "Ascend" / "latest"
    (home / "lib64").mkdir(parents=True)
    (home / "opp").mkdir()
    for name in ("libascendcl.so", "libge_runner.so", "libgraph.so", "libhccl.so", "libregister.so"):
        (home / "lib64" / name).touch()
    (home / "version.info").write_text("Version=8.2.RC1\n")
    return home


def test_a_complete_cann_is_always_taken_and_never_shadowed(real_cann: Path) -> None:
    engine = choice.choose_engine(environ={"ASCEND_HOME_PATH": str(real_cann)})
    assert engine.cann == "8.2.RC1"
    environ = engine.environment({"LD_LIBRARY_PATH": f"{real_cann}/lib64:/opt/mine", "RANK_TABLE_FILE": "0"})
    assert environ["LD_LIBRARY_PATH"] == f"{real_cann}/lib64:/opt/mine:{engine.pause}"
    assert engine.pause and [path.name for path in engine.pause.iterdir()] == ["libmindspeed_dryrun_pause.so"]
    assert "standin" not in str(environ) and "RANK_TABLE_FILE" not in environ
    assert environ["ASCEND_HOME_PATH"] == str(real_cann)


def test_a_complete_cann_needs_no_cache_folder(real_cann: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    engine = choice.choose_engine(environ={"ASCEND_HOME_PATH": str(real_cann)})
    assert engine.cann == "8.2.RC1" and engine.pause is None
    assert "mindspeed_dryrun" not in engine.environment({})["LD_LIBRARY_PATH"]


def test_an_incomplete_cann_is_not_used_and_says_why(real_cann: Path) -> None:
    (real_cann / "lib64" / "libhccl.so").unlink()
    found = real.find_real_cann({"ASCEND_HOME_PATH": str(real_cann)}, places=())
    assert found and found.missing == ("lib64/libhccl.so",)
    assert choice.choose_engine(environ={"ASCEND_HOME_PATH": str(real_cann)}).cann == "stand-in"


def test_the_stand_in_is_never_taken_for_a_real_cann(own_cache: Path) -> None:
    folder, version = choice.find_mindspore()
    home = stand_in_for(folder, version).home
    assert real.find_real_cann({"ASCEND_HOME_PATH": str(home)}, places=()) is None


def test_the_stand_in_is_made_in_seconds_and_kept(own_cache: Path) -> None:
    folder, version = choice.find_mindspore()
    started = time.monotonic()
    home = stand_in_for(folder, version).home
    assert time.monotonic() - started < 60  # seconds on an idle machine; this one may be busy
    assert home.name == "latest" and (home / "lib64" / "libascendcl.so").exists()
    before = (home / "lib64" / "libstandin.so").stat().st_mtime_ns
    assert stand_in_for(folder, version).home == home
    assert (home / "lib64" / "libstandin.so").stat().st_mtime_ns == before


@pytest.mark.parametrize(("version", "word"), [("2.7.1", "latest"), ("2.7.2", "scanner"), ("2.7.2", "cann")])
def test_a_cache_folder_that_would_mislead_mindspore_is_refused(
    version: str, word: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindSpore cuts the path of its library at such a word, and would look for CANN in the folder before it."""
    monkeypatch.setenv(cache.VARIABLE, str(own_cache / word))
    with pytest.raises(DryRunError, match=rf"wrong place.*{word}.*export {cache.VARIABLE}=DIR"):
        stand_in_for(choice.find_mindspore()[0], version)
    assert not own_cache.exists()


def test_the_stand_in_has_the_version_that_this_mindspore_accepts(own_cache: Path) -> None:
    """With another one MindSpore warns and counts down three seconds, twice."""
    folder, version = choice.find_mindspore()
    home = stand_in_for(folder, version).home
    accepted = {"2.7.1": "8.3.0", "2.7.2": "8.5.0"}[version]
    assert (home / "compiler" / "version.info").read_text() == f"Version={accepted}\n"
    assert f'version = "{accepted}"' in (home / "python" / "te" / "__init__.py").read_text()


def test_system_functions_are_not_replaced() -> None:
    """A stand-in that defined dlopen or a std::string function would break every process it is loaded into."""
    folder, _ = choice.find_mindspore()
    lacks = find_required_symbols(folder)
    assert not [name for name in lacks.symbols if re.match(r"dl|_ZNSs|_ZNSt|_ZSt|Py|__|mem|str|pthread", name)]
    assert len(lacks.sonames) >= 20 and len(lacks.symbols) >= 218
    assert behaviour_of("aclrtMalloc").kind == "return"
