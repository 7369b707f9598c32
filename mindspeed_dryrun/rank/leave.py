"""How a rank ends: as a Python program does, but for taking the interpreter apart."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(run: Callable[[], int]) -> NoReturn:
    """Runs and ends the process: errors go to the log, threads are joined, exit functions called, streams flushed.

    MindSpore prints its memory block and writes its tracker files in an exit function. What Python does after those, taking
    the interpreter and the engine's libraries apart object by object, takes a tenth of a second; the kernel does it faster.
    """
    status = 1
    try:
        status = run()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if status and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed
    os._exit(status & 0xFF)
