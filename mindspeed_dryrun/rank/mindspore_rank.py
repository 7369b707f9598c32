"""A rank on MindSpore, whose own simulation keeps it off the device and prints the figures when the process ends."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank import callback_pause, patcher
from mindspeed_dryrun.rank.activation import ERROR_PREFIX
from mindspeed_dryrun.rank.handlers import graph_mode
from mindspeed_dryrun.rank.patch_calls import ALWAYS


def check_simulation() -> None:
    """No real NPU is touched by accident: without simulation a rank does not start."""
    level = os.environ.get("MS_SIMULATION_LEVEL", "")
    if level not in ("0", "1", "2", "3"):
        raise DryRunError(
            f"Simulation is not on in this process (MS_SIMULATION_LEVEL={level or 'unset'}); "
            f"the trainer was not started, so that no NPU is touched. Start it through mindspeed-dryrun."
        )
    for variable in ("RANK_TABLE_FILE", "MS_ROLE"):
        if os.environ.get(variable):
            raise DryRunError(
                f"{variable} is set, and with it MindSpore leaves the simulation; the trainer was not started. Unset {variable}."
            )


def prepare() -> None:
    """Threads that do not spin, and a question to MindSpore itself as soon as it is there."""
    callback_pause.load()
    patcher.when_imported("mindspore", _stop_unless_simulated)
    if ALWAYS not in sys.argv:  # Megatron's jobs are not compiled into graphs
        patcher.when_imported("mindspore", graph_mode.enough_threads)


def memory() -> dict[str, Any]:
    """A figure for the progress line only; the peak comes from the engine's own block."""
    mindspore = sys.modules.get("mindspore")
    try:
        return {"memory_mb": int(mindspore.runtime.max_memory_allocated() / 2**20) if mindspore else None}
    except Exception:
        return {"memory_mb": None}


def allocated() -> int:
    """Bytes in use now; 0 where MindSpore is not there or does not say."""
    try:
        return int(sys.modules["mindspore"].runtime.memory_allocated())
    except Exception:
        return 0


def finish() -> dict[str, Any]:
    """MindSpore prints its figures itself."""
    return {}


def check_engine() -> None:
    """As soon as it is imported: at levels 0 and 1 MindSpore itself must say that no call of it goes to a device."""
    if os.environ["MS_SIMULATION_LEVEL"] in ("0", "1") and engine_simulates() is False:
        raise DryRunError("MindSpore says that it does not simulate; the trainer was not started, so that no NPU is touched.")


def _stop_unless_simulated() -> None:
    try:
        check_engine()
    except DryRunError as error:
        # At once: MindSpore does not survive an import that ends half way, and nothing has been done yet.
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        os._exit(error.exit_status)


def engine_simulates() -> bool | None:
    """MindSpore's own answer; None where this version has no such question."""
    try:
        folder = Path(str(sys.modules["mindspore"].__file__)).parent
        question = ctypes.CDLL(str(folder / "lib" / "libmindspore_core.so"))["_ZN9mindspore16UseSimulationApiEv"]
    except (KeyError, OSError, AttributeError):
        return None
    question.restype = ctypes.c_bool
    return bool(question())
