"""Finds what MindSpore's Ascend plugin lacks on a machine without CANN: sonames, symbols, and names it looks up itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.engines.cann.elf import SharedLibrary
from mindspeed_dryrun.errors import DryRunError

# Loading the plugin starts at these; everything they need follows.
_ROOTS = re.compile(
    r"libmindspore_ascend\.so.*|libmindspore_ops_ascend\.so|libhccl_plugin\.so|libmindspore_graph_ir\.so|libshmem\.so"
)
# What every Linux system or Python itself provides.
_SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|pthread|rt|util|stdc\+\+|gcc_s|gomp|atomic|z|numa|python3.*))\.so.*")
# Symbols of Python, of the C++ library and of the loader, where a library names them without a version.
_NOT_CANN = re.compile(r"_?Py[A-Z_].*|_ZNK?S[a-z].*|_ZS[a-z].*|__cxa_.*|_Unwind_.*|dl(addr|close|error|open|sym)")
# Libraries that MindSpore opens by name instead of linking: no NEEDED entry tells of them.
_OPENED_BY_NAME = (
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libacl_tdt_queue.so",
    "libascend_hal.so",
    "libascendcl.so",
    "libc_sec.so",
    "libcust_opapi.so",
    "libnnopbase.so",
    "libopapi.so",
    "libprofapi.so",
    "libruntime.so",
)
_LOOKED_UP = re.compile(rb"(?:acl(?:rt|mdl|op|prof|tdt|dump|nn|[A-Z])|Hccl|Hcom|hal|rt[A-Z])[A-Za-z0-9_]+")
# Helpers of libopapi.so, named here because linkers fold one of two constants that end alike.
_LOOKED_UP_TOO = {
    "CanUsePTACache",
    "InitHugeMemThreadLocal",
    "InitPTACacheThreadLocal",
    "PTAGetExecCache",
    "ReleaseHugeMem",
    "SetPTAHashKey",
    "UnInitHugeMemThreadLocal",
}
_OPERATOR_CALL = re.compile(r"aclnn[A-Z]\w+")


@dataclass(frozen=True)
class RequiredSymbols:
    """What a stand-in for one MindSpore build has to provide."""

    architecture: str
    sonames: tuple[str, ...]
    symbols: tuple[str, ...]


def find_required_symbols(mindspore: Path) -> RequiredSymbols:
    """Reads the libraries of the MindSpore package folder given; runs nothing."""
    own = {path.name: SharedLibrary(path) for path in _libraries(mindspore)}
    roots = [name for name in own if _ROOTS.fullmatch(name)]
    if not any(name.startswith("libmindspore_ascend.so") for name in roots):
        raise DryRunError(
            f"The MindSpore at {mindspore} has no Ascend plugin (lib/plugin/libmindspore_ascend.so): it is a CPU-only build. "
            "Install the Linux wheel: pip install mindspore==2.7.1"
        )
    closure, sonames = _closure(own, roots)
    ascend = [library for library in closure if "plugin" in library.path.parts]
    defined = {symbol.name for library in own.values() for symbol in library.symbols if symbol.defined}
    undefined = set[str]().union(*(_undefined(library) for library in ascend)) - defined
    looked_up = _LOOKED_UP_TOO.union(*(library.names_matching(_LOOKED_UP) for library in ascend))
    # An operator call of CANN is a pair: the call, and the question how much workspace it needs.
    calls = {name for name in looked_up if _OPERATOR_CALL.fullmatch(name) and not name.endswith("GetWorkspaceSize")}
    pairs = {f"{name}GetWorkspaceSize" for name in calls}
    return RequiredSymbols(
        architecture=own[roots[0]].architecture,
        sonames=tuple(sorted(sonames | set(_OPENED_BY_NAME))),
        symbols=tuple(sorted(undefined | looked_up | pairs)),
    )


def _undefined(library: SharedLibrary) -> set[str]:
    """What a library takes from CANN."""
    return {
        symbol.name
        for symbol in library.symbols
        if not (symbol.defined or symbol.weak or symbol.versioned or _NOT_CANN.fullmatch(symbol.name))
    }


def _libraries(mindspore: Path) -> list[Path]:
    lib = mindspore / "lib"
    # 2.7.0 also needs what lies in plugin/cpu; the GPU plugins are of no interest and 150 MB to read.
    folders = [lib, lib / "plugin", lib / "plugin" / "ascend", lib / "plugin" / "cpu"]
    found = [path for folder in folders for path in sorted(folder.glob("*.so*")) if "_gpu" not in path.name]
    # From 2.8 on the plugin also loads libshmem.so, which lies deep below; other libraries down there are device kernels.
    deep = [path for path in sorted((lib / "plugin" / "ascend").rglob("libshmem.so")) if path not in found]
    return found + deep + sorted(mindspore.glob("_c_*.so"))


def _closure(own: dict[str, SharedLibrary], roots: list[str]) -> tuple[list[SharedLibrary], set[str]]:
    seen: set[str] = set()
    missing: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for needed in own[name].needed:
            if needed in own:
                todo.append(needed)
            elif not _SYSTEM.fullmatch(needed):
                missing.add(needed)
    return [own[name] for name in sorted(seen)], missing
