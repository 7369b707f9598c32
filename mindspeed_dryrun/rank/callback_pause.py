"""Puts threads of MindSpore's to sleep where they would spin: those of callbacks (`engines/mindspore/callback_pause.py`
makes the library for it), and those of the actors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

LIBRARY = "libmindspeed_dryrun_pause.so"


def load() -> bool:
    """Before MindSpore is imported: a symbol that is there already is taken instead of MindSpore's own."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        return True
    return False


def rest_actors() -> bool:
    """Actors without work sleep at once, as MindSpore has them do between two graphs. False where it has no such setting.

    By default each asks 300,000 times first, which is most of the life of a simulated rank. The question for their pool makes
    one, as the first kernel on the CPU would: the one that draws Megatron's random states.
    """
    mindspore = sys.modules.get("mindspore")
    if mindspore is None:
        return False
    libraries = Path(str(mindspore.__file__)).parent / "lib"
    try:
        kernels = ctypes.CDLL(str(libraries / "plugin" / "libmindspore_ops_cpu.so"), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        core = ctypes.CDLL(str(libraries / "libmindspore_core.so"), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        pool_of_actors = kernels["_ZN9mindspore6kernel26GetActorMgrInnerThreadPoolEv"]
        rest = core["_ZN9mindspore10ThreadPool20SetSpinCountMinValueEv"]
    except (OSError, AttributeError):
        return False
    pool_of_actors.restype = ctypes.c_void_p
    rest.restype = None
    pool = pool_of_actors()
    if pool:
        rest(ctypes.c_void_p(pool))
    return bool(pool)
