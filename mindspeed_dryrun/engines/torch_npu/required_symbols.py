"""Finds what an installed torch_npu asks of CANN: libraries, symbols, and names that it looks up itself."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_dryrun.engines.cann.elf import SharedLibrary
from mindspeed_dryrun.engines.cann.required_symbols import RequiredSymbols
from mindspeed_dryrun.errors import DryRunError

_CANN = re.compile(
    r"acl.*|Hccl.*|rt[A-Z].*|Msprof.*|_ZNK?2ge.*|_ZNK?3atb.*|_ZT[VIS]N?(2ge|3atb).*|(v?s?n?printf|mem\w+|str\w+)_s"
)
_LOOKED_UP = re.compile(
    rb"(?:acl(?:nn|rt|mdl|op|prof|sys|tdt|rand|blas|dump)?[A-Z]|Hccl[A-Z]|Hcom[A-Z]|PTA[A-Z]|(?:Un)?Init(?:Huge|PTA)|ReleaseHuge|"
    rb"CanUsePTA|SetPTA|AddTensorAddr)[A-Za-z0-9_]{1,120}"
)
_OPERATOR_CALL = re.compile(r"aclnn[A-Z]\w+")
_QUESTION = "GetWorkspaceSize"
# Libraries that it opens by name (Register in torch_npu/csrc/**/…Interface.cpp); their names are built at run time.
_OPENED_BY_NAME = (
    "acl_op_compiler", "acl_tdt_channel", "ascend_dump", "ascend_hal", "ascend_protobuf", "ascendcl", "atb", "fmk_parser",
    "ge_runner", "graph", "hccl", "hcomm", "msprofiler", "nnopbase", "opapi", "opapi_legacy", "opapi_math", "opapi_nn",
    "opapi_cv", "opapi_transformer", "profapi", "runtime",
)  # fmt: skip
# Short names that a compiler turns into immediates of the code, where no string shows them (acl.h, hccl.h).
_SHORT = ("aclInit", "aclFinalize", "HcclSend", "HcclRecv", "HcclReduce", "HcclScatter", "HcclAlltoAll", "HcclAllGather",
          "HcclAllReduce", "HcclBroadcast", "aclrtFree", "aclrtMalloc")  # fmt: skip


def find_torch_npu_symbols(package: Path) -> RequiredSymbols:
    """Reads the libraries of the torch_npu package folder given; runs nothing."""
    main = package / "lib" / "libtorch_npu.so"
    if not main.is_file():
        raise DryRunError(f"The torch_npu at {package} has no lib/libtorch_npu.so. Install it again: pip install torch-npu")
    libraries = [SharedLibrary(path) for path in sorted(package.rglob("*.so"))]
    defined = {symbol.name for library in libraries for symbol in library.symbols if symbol.defined}
    symbols = {
        symbol.name
        for library in libraries
        for symbol in library.symbols
        if not (symbol.defined or symbol.versioned) and _CANN.fullmatch(symbol.name)
    } - defined
    looked_up = set(_SHORT).union(*(library.names_matching(_LOOKED_UP) for library in libraries))
    calls = {name.removesuffix(_QUESTION) for name in looked_up if _OPERATOR_CALL.fullmatch(name)}
    pairs = calls | {name + _QUESTION for name in calls}
    return RequiredSymbols(
        architecture=libraries[0].architecture,
        sonames=tuple(f"lib{name}.so" for name in _OPENED_BY_NAME),
        symbols=tuple(sorted(symbols | looked_up | pairs)),
    )
