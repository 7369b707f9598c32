"""A stand-in for Triton, seen only by the modules of MindSpeed and MindSpeed-LLM that hold Triton kernels.

A kernel writes into tensors that its caller has made, and is never run here: what these operators take is what their Python code
allocates. Nobody else sees it, so that what asks "is Triton there?" decides as before. An installed Triton is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from mindspeed_dryrun.rank import installed

_OWNERS = ("mindspeed", "mindspeed_llm")
# Where this import fails MindSpeed sorts chunks without Triton, by counts that it reads back.
# `moe_sort_chunks_by_index`: https://gitcode.com/Ascend/MindSpeed/blob/v26.0.0_core_r0.12.1/mindspeed/features_manager/fusions/fused_moe_permute.py#L85
_OPTIONAL = ("mindspeed.lite.ops.triton.sort_chunks_by_idx",)
_MODULES = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice", "triton.language.extra.cann",
            "triton.language.extra.cann.extension", "triton.runtime", "triton.runtime.driver")  # fmt: skip
_CORES = {"num_aicore": 24, "num_vectorcore": 48}  # Ascend 910B2
launched: set[str] = set()  # kernels that this process would have run


class Anything:
    """What kernels and their decorators name: types, functions of the kernel language. Never computed with."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    __getitem__ = __call__


class Kernel:
    """A function under `triton.jit`: `kernel[grid](…)` starts nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: launched.add(self.__name__)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return Anything()


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """With parentheses and without."""
    return Kernel(function) if function is not None else Kernel


def unchanged(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """`autotune` and `heuristics`: the kernel itself."""
    return lambda kernel: kernel


class _Utilities(Anything):
    def get_device_properties(self, device: Any) -> dict[str, int]:
        return dict(_CORES)


class _Driver(Anything):
    utils = _Utilities()

    def get_current_target(self) -> Any:
        target = Anything()
        target.__dict__.update(backend="npu", arch="Ascend910B2", warp_size=0)
        return target

    def get_current_device(self) -> int:
        return 0


def stand_ins() -> dict[str, ModuleType]:
    """The package and its modules, by name."""
    modules = {name: ModuleType(name) for name in _MODULES}
    for name, module in modules.items():
        module.__path__ = []
        module.__dict__["__getattr__"] = _unknown
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    top = modules["triton"].__dict__
    top.update(jit=jit, autotune=unchanged, heuristics=unchanged, Config=Anything(), __version__="3.2.0")
    top.update(cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << max(int(n) - 1, 0).bit_length())
    modules["triton.runtime.driver"].__dict__["active"] = _Driver()
    modules["triton.runtime"].__dict__["driver"] = modules["triton.runtime.driver"]
    return modules


def _unknown(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


class _WithTriton(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _seen():
            self.loader.exec_module(module)


@contextmanager
def _seen() -> Iterator[None]:
    added = {name: module for name, module in _kept.items() if name not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.split(".")[0] not in _OWNERS or "triton" not in name or name in _OPTIONAL:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithTriton(spec.loader)
        return spec


_kept: dict[str, ModuleType] = {}


def install() -> None:
    """For the rest of this process, unless there is a Triton."""
    if not installed.has_package("triton") and not _kept:
        _kept.update(stand_ins())
        sys.meta_path.insert(0, _Finder())
