"""The stand-in CANN of torch_npu: generated from the installed wheel, made once and kept."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from mindspeed_dryrun.cache import cache_root, make_once
from mindspeed_dryrun.engines.cann.library_writer import write_library
from mindspeed_dryrun.engines.cann.machine_code import SCRATCH, Behaviour, behaviour_of
from mindspeed_dryrun.engines.cann.required_symbols import RequiredSymbols
from mindspeed_dryrun.engines.cann.stand_in import SOC_NAME, StandIn
from mindspeed_dryrun.engines.torch_npu.required_symbols import find_torch_npu_symbols
from mindspeed_dryrun.rank.activation import STAND_IN_LIBRARY
from mindspeed_dryrun.rank.torch_npu import answers
from mindspeed_dryrun.rank.torch_npu.slots import OPERATORS, QUESTION

# Goes up whenever the generator makes something else, so that a kept folder of an older one is not used.
GENERATOR = 2
_FOLDERS = ("lib64", "runtime", "compiler/ccec_compiler/bin", "opp/built-in/op_impl/ai_core/tbe")
# Objects that nobody looks into: an address that is not null will do.
_OPAQUE = re.compile(
    r"aclCreate(Tensor|Scalar|(Int|Bool|Float)Array|(Tensor|Scalar)List|DataBuffer|TensorDesc|GraphDumpOpt)|aclopCreateAttr"
)


def torch_npu_stand_in(package: Path, version: str) -> StandIn:
    """The stand-in for the torch_npu package folder given: kept from last time, or made now (seconds)."""
    size = (package / "lib" / "libtorch_npu.so").stat().st_size
    digest = hashlib.sha256(f"{GENERATOR} {os.uname().machine} {size} {answers.names()}".encode()).hexdigest()[:12]
    folder = cache_root() / "stand_in" / f"torch_npu-{version}-{digest}"
    return StandIn(make_once(folder, lambda temporary: _build(temporary / "latest", package)) / "latest")


def torch_npu_behaviour(symbol: str) -> Behaviour:
    """What the stand-in's function of this name does: asks its slot, gives an address, or answers 0."""
    if symbol in answers.names() or symbol.endswith(QUESTION):
        return Behaviour("slot", place=answers.SLOT + symbol)
    if _OPAQUE.fullmatch(symbol):
        return Behaviour("address", place=SCRATCH)
    return behaviour_of(symbol)


def torch_npu_library(required: RequiredSymbols) -> bytes:
    """The library's bytes: every symbol that this torch_npu asks for, and a slot for each answer."""
    asked = {*answers.names(), *(name for name in required.symbols if name.endswith(QUESTION))}
    symbols = sorted({*required.symbols, *asked, *(answers.SLOT + name for name in asked)})
    return write_library(symbols, required.architecture, STAND_IN_LIBRARY, SOC_NAME, torch_npu_behaviour)


def _build(home: Path, package: Path) -> None:
    for folder in _FOLDERS:
        (home / folder).mkdir(parents=True, mode=0o755)
    required = find_torch_npu_symbols(package)
    (home / "lib64" / STAND_IN_LIBRARY).write_bytes(torch_npu_library(required))
    for soname in required.sonames:
        (home / "lib64" / soname).symlink_to(STAND_IN_LIBRARY)
    operators = [name.removesuffix(QUESTION) for name in required.symbols if name.endswith(QUESTION)]
    (home / OPERATORS).write_text("\n".join(operators) + "\n")
    module = home / "python" / "acl" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text(f'def get_soc_name():\n    return "{SOC_NAME}"\n')
    for name in ("version.info", "compiler/version.info", "runtime/version.info", "opp/version.info"):
        (home / name).write_text(f"Version={answers.CANN_VERSION}\n")
