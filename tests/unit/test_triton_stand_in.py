"""Triton is there for modules that hold kernels, and for nobody else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from mindspeed_dryrun.rank.torch_npu import triton_stand_in

KERNELS = """
import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice
import triton.runtime.driver as driver

@triton.heuristics({"IS_LONG": lambda args: args["n"] > 8})
@triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=4)], key=["n"])
@triton.jit(do_not_specialize=["n"])
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.load(x) + tldevice.fast_expf(tl.float32))

@triton.jit
def plain(x):
    raise RuntimeError("is never run")

def launch(x):
    kernel[(triton.cdiv(len(x), 32),)](x, len(x), BLOCK=triton.next_power_of_2(33))
    plain[1](x)
    return x, triton.cdiv(65, 32), triton.next_power_of_2(33), driver.active.utils.get_device_properties(0)["num_aicore"]
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mindspeed" / "ops" / "triton"
    folder.mkdir(parents=True)
    for part in (folder.parents[1], folder.parent, folder):
        (part / "__init__.py").write_text("")
    (folder / "norm.py").write_text(KERNELS)
    (tmp_path / "mindspeed" / "asks.py").write_text(
        "try:\n    import triton\n    found = True\nexcept ImportError:\n    found = False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(triton_stand_in, "_kept", {})
    monkeypatch.setattr(triton_stand_in, "launched", set())
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_kernels_are_imported_and_never_run(tree: Path) -> None:
    triton_stand_in.install()
    module = importlib.import_module("mindspeed.ops.triton.norm")
    assert module.launch([1, 2, 3]) == ([1, 2, 3], 3, 64, 24)
    assert triton_stand_in.launched == {"kernel", "plain"}  # the report says that they were not run
    assert "triton" not in sys.modules
    assert importlib.import_module("mindspeed.asks").found is False


def test_a_module_named_after_its_kernel_sees_it_too(tree: Path) -> None:
    (tree / "mindspeed" / "rmsnorm_triton_kernel.py").write_text(KERNELS)
    triton_stand_in.install()
    assert importlib.import_module("mindspeed.rmsnorm_triton_kernel").launch([1])[1] == 3


def test_what_is_done_without_triton_stays_so(tree: Path) -> None:
    folder = tree / "mindspeed" / "lite" / "ops" / "triton"
    folder.mkdir(parents=True)
    for part in (folder.parents[1], folder.parent, folder):
        (part / "__init__.py").write_text("")
    (folder / "sort_chunks_by_idx.py").write_text(KERNELS)
    triton_stand_in.install()
    with pytest.raises(ImportError, match="triton"):
        importlib.import_module("mindspeed.lite.ops.triton.sort_chunks_by_idx")


def test_an_installed_triton_is_left_alone(tree: Path) -> None:
    (tree / "triton").mkdir()
    (tree / "triton" / "__init__.py").write_text("jit = 'the real one'\n")
    finders = len(sys.meta_path)
    triton_stand_in.install()
    assert len(sys.meta_path) == finders
