"""The slots of the stand-in library: where a function of CANN must answer something, Python answers, with its real signature.

The library calls what the slot of a function holds, and returns 0 while it is empty.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOT = "standin_slot_"
# Beside `lib64` of the stand-in: the operators that this torch_npu knows, one a line.
OPERATORS = "operators.txt"
QUESTION = "GetWorkspaceSize"  # aclnnXGetWorkspaceSize is called before aclnnX, each time
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "I": ctypes.c_uint32,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "b": ctypes.c_bool,
    "h": ctypes.c_int8,
}
ANSWERS: dict[str, tuple[str, Callable[..., int]]] = {}
called: set[str] = set()  # operators without a formula for their workspace that this process has used
# Of these, the ones whose workspace grows with their inputs (hicann/ops-nn and ops-transformer), by the beginning of their names.
GROWING = ("aclnnAddmm", "aclnnAddbmm", "aclnnGroupedMatmul", "aclnnSort", "aclnnTopk", "aclnnCumsum", "aclnnMoe",
           "aclnnSparse", "aclnnLightningIndexer", "aclnnConvolution", "aclnnFlashAttention")  # fmt: skip
launched_at: dict[str, int] = {}  # operator of GROWING → the most that was allocated when it was launched
observe: list[Callable[[], int]] = []  # what is allocated now, in bytes, once torch_npu can say it
_kept: list[Any] = []


def answers(signature: str, *functions: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers the answer of CANN functions. `signature`: a letter for each argument, then `>` and the result if not int."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        for name in functions:
            ANSWERS[name] = (signature, function)
        return function

    return register


def fill_slots(library: str) -> None:
    """Fills the slots of the stand-in library at this path; they are emptied again before Python ends."""
    loaded = ctypes.CDLL(library, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    slots = []
    for name, (signature, function) in ANSWERS.items():
        arguments, _, result = signature.partition(">")
        kind = ctypes.CFUNCTYPE(_TYPES[result or "i"], *(_TYPES[letter] for letter in arguments))
        slots.append(_fill(loaded, name, kind(function)))
    listed = Path(library).parents[1] / OPERATORS
    for name in listed.read_text().split() if listed.is_file() else ():
        if name + QUESTION not in ANSWERS:
            slots.append(_fill(loaded, name + QUESTION, _noting(loaded, name)))
    atexit.register(_empty, slots)


def _fill(loaded: ctypes.CDLL, name: str, callback: Any) -> ctypes.c_void_p | None:
    try:
        slot = ctypes.c_void_p.in_dll(loaded, SLOT + name)
    except ValueError:  # this torch_npu does not ask for it
        return None
    _kept.append(callback)
    slot.value = ctypes.cast(callback, ctypes.c_void_p).value
    return slot


def _noting(loaded: ctypes.CDLL, name: str) -> Any:
    """Notes the first call of an operator, then leaves its slot empty: later calls cost nothing. GROWING ones stay."""

    def note() -> int:
        if note_unknown(name):
            return 0
        ctypes.c_void_p.in_dll(loaded, SLOT + name + QUESTION).value = None
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int)(note)


def note_unknown(name: str) -> bool:
    """Notes an operator whose workspace is not known; true if it grows with its inputs, and every call is to be noted."""
    called.add(name)
    growing = name.startswith(GROWING)
    if growing:
        for allocated in observe:
            launched_at[name] = max(launched_at.get(name, 0), allocated())
    return growing


def _empty(slots: list[ctypes.c_void_p | None]) -> None:
    for slot in slots:
        if slot is not None:
            slot.value = None


def store(address: int | None, value: int, kind: Any) -> int:
    """Writes a number to an out-parameter, where there is one; 0, for success."""
    if address:
        kind.from_address(address).value = value
    return 0


def store_text(address: int, text: str) -> int:
    """Writes a C string to an out-parameter; 0, for success."""
    ctypes.memmove(address, text.encode() + b"\0", len(text.encode()) + 1)
    return 0
