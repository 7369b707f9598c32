"""Puts MindSpore's callback threads to sleep where they would spin: `cann/pause.py` has made the library for it."""

from __future__ import annotations

import contextlib
import ctypes

LIBRARY = "libmindspeed_dryrun_pause.so"


def load() -> bool:
    """Before MindSpore is imported: a symbol that is there already is taken instead of MindSpore's own."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        return True
    return False
