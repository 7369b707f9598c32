"""A process that may write in its own folder only.

Linux's Landlock (5.13 and later, no privileges needed) does it for the whole process and all that it starts. An audit hook
refuses the same from Python's side on any kernel: there it is what stands between a rank and the user's files, and with
Landlock it is what says in a sentence what the kernel would refuse with an error number.

`python -I -S confinement.py FOLDER COMMAND…` becomes a command that is confined by the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on x86_64 and aarch64
_WRITE_FILE, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 5, 1 << 8, 1 << 14
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 13))  # remove and make, files of every type
_REFER = 1 << 13
_SCOPE_SIGNALS = 1 << 1
_PR_SET_NO_NEW_PRIVS = 38
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that change files: the positions of the paths among their arguments.
# https://docs.python.org/3/library/audit_events.html
_CHANGES = {
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "shutil.rmtree": (0,),
}  # fmt: skip


def kernel_confines() -> bool:
    """Whether this kernel has Landlock, and it is switched on."""
    return _version() >= 1


def confine(folder: str) -> None:
    """From here on this process writes below `folder` only. Call it before the first thread starts."""
    lock = write_only_below(folder)
    if lock is not None:
        lock()
    sys.addaudithook(_refuse_outside((os.path.realpath(folder), "/dev", "/proc")))


def write_only_below(folder: str | os.PathLike[str]) -> Callable[[], None] | None:
    """A function after which files outside `folder` stay as they are. None where the kernel cannot do it."""
    version = _version()
    if version < 1:
        return None
    access = _WRITE_FILE | _CHANGE_FOLDERS | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=QQQ", access, 0, _SCOPE_SIGNALS if version >= 6 else 0)
    attributes = attributes[: 8 if version < 4 else 16 if version < 6 else 24]
    libc = ctypes.CDLL(None, use_errno=True)
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        return None
    shared_memory = access & (_WRITE_FILE | _TRUNCATE | _MAKE_REG | _REMOVE_FILE)
    for place, allowed in ((folder, access), ("/dev", access & (_WRITE_FILE | _TRUNCATE)), ("/dev/shm", shared_memory)):
        if not _allow(libc, ruleset, place, allowed):
            os.close(ruleset)
            return None

    def lock() -> None:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
        os.close(ruleset)

    return lock


def _version() -> int:
    if os.uname().machine not in ("x86_64", "aarch64"):
        return 0
    return int(ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def _allow(libc: ctypes.CDLL, ruleset: int, place: str | os.PathLike[str], allowed: int) -> bool:
    try:
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    rule = struct.pack("=Qi", allowed, descriptor)
    done = libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    os.close(descriptor)
    return bool(done == 0)


def _refuse_outside(folders: Sequence[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook. It is called for every event of the interpreter: what does not concern it leaves at once."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITING:
                refuse(path, os.path.realpath)
        elif event in _CHANGES:
            for position in _CHANGES[event]:
                refuse(args[position], _entry)

    def refuse(path: object, resolve: Callable[[str], str]) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor that is open already
        try:
            place = resolve(os.fsdecode(path))
        except (OSError, ValueError):
            return  # the call itself will say what is wrong with this path
        if not any(place == folder or place.startswith(folder + "/") for folder in folders):
            raise PermissionError(errno.EACCES, "A dry run writes below its record only", place)

    return hook


def _entry(path: str) -> str:
    """The folder that holds an entry decides: a link itself may be removed, whatever it points at."""
    path = os.path.join(os.getcwd(), path)  # noqa: PTH109 (pathlib resolves links)
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


if __name__ == "__main__":
    confine(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
