"""A process that may write in one folder only, by Linux's Landlock (5.13 and later, no privileges needed).

The second lock on the door: programs that stand in for `mkdir`, `tee` and the like keep a captured script harmless
already; this stops whatever they do not know.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable
from pathlib import Path

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on x86_64 and aarch64
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 13))  # remove and make, files of every type
_REFER = 1 << 13
_SCOPE_SIGNALS = 1 << 1
_PR_SET_NO_NEW_PRIVS = 38


def write_only_below(folder: Path) -> Callable[[], None] | None:
    """For `preexec_fn`: from then on files outside `folder` stay as they are. None where the kernel cannot do it."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return None
    access = _WRITE_FILE | _CHANGE_FOLDERS | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=QQQ", access, 0, _SCOPE_SIGNALS if version >= 6 else 0)
    attributes = attributes[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        return None
    for place, allowed in ((folder, access), (Path("/dev"), access & (_WRITE_FILE | _TRUNCATE))):
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, descriptor)
        done = libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
        os.close(descriptor)
        if done != 0:
            os.close(ruleset)
            return None

    def lock() -> None:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
        os.close(ruleset)

    return lock
