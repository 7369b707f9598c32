"""Chooses the engine and knows the environment that a rank needs to run on it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from mindspeed_dryrun.engines.cann.real import RealCann, find_real_cann, npus
from mindspeed_dryrun.engines.cann.stand_in import StandIn, stand_in_for
from mindspeed_dryrun.engines.mindspore.callback_pause import pause_folder
from mindspeed_dryrun.engines.packages import package_folder, version_in
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.record.model import EngineSummary

STAND_IN = "stand-in"
LEVELS = (0, 1, 2, 3)
# What simulation itself needs, and what makes it quick and repeatable: blocking launches keep MindSpore's threads from
# spinning, and at GLOG_v=2 the memory block is printed once, as a warning.
_SIMULATION = {"GLOG_v": "2", "MS_DEV_LAUNCH_BLOCKING": "1"}
# Left-overs of a real job that would lead MindSpore off the simulated path. GLOG_log_dir and its like would send the
# block to a file instead of the rank's log.
_UNSET = (
    "RANK_TABLE_FILE", "MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_NODE_ID", "MS_NODE_RANK", "MS_TOPO_TIMEOUT",
    "GLOG_log_dir", "GLOG_logtostderr", "MS_SUBMODULE_LOG_v", "MS_ALLOC_CONF", "MS_MEMORY_STATISTIC", "ASCEND_CUSTOM_OPP_PATH",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MindSporeEngine:
    """MindSpore in simulation, on a real CANN or on the stand-in."""

    version: str
    cann: str
    level: int
    base: StandIn | RealCann = field(repr=False)
    pause: Path | None = field(default=None, repr=False)  # folder of the library that stops threads from spinning
    name: ClassVar[str] = "mindspore"

    @property
    def title(self) -> str:
        """The framework's name and version, for people."""
        return f"MindSpore {self.version}"

    @property
    def summary(self) -> EngineSummary:
        """What a record says of it."""
        return EngineSummary(self.name, self.version, self.cann, self.level)

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What it cannot see of a rank's memory, whatever the job."""
        return ("operator workspace (level 1 does not ask CANN for it)",) if self.level < 2 else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about its figures: nothing."""
        return ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a simulated rank, made from the user's."""
        environ = {name: value for name, value in base.items() if name not in _UNSET}
        environ |= self.base.variables() | _SIMULATION | {"MS_SIMULATION_LEVEL": str(self.level)}
        for name, folders in self.base.search_paths().items():
            if isinstance(self.base, RealCann) and folders[0] in environ.get(name, "").split(":"):
                continue  # set_env.sh was sourced: its order stays
            rest = environ.get(name, "")
            environ[name] = ":".join([*folders, rest] if rest else folders)
        if self.pause:
            environ["LD_LIBRARY_PATH"] = f"{environ['LD_LIBRARY_PATH']}:{self.pause}"
        return environ

    def place(self, rank: int, nodes: Sequence[int]) -> dict[str, str]:
        """What msrun sets in simulation."""
        world_size = sum(nodes)
        return {
            "RANK_ID": str(rank),
            "RANK_SIZE": str(world_size),
            "MS_WORKER_NUM": str(world_size),
            "DEVICE_ID": str(rank % 8),
            "LOCAL_RANK": str(rank % nodes[0]),
        }

    def recording(self) -> dict[str, str]:
        """MindSpore's memory tracker."""
        return {"MS_ALLOC_CONF": "memory_tracker:True,memory_tracker_path:."}  # a rank works in its own folder


def choose_engine(level: int = 1, environ: Mapping[str, str] | None = None) -> MindSporeEngine:
    """The engine that dry runs use here. A complete CANN is always taken; the stand-in otherwise."""
    if sys.platform != "linux":
        raise DryRunError(
            f"MindSpore's Ascend plugin exists for Linux only, and this is {sys.platform}. "
            "Use a Linux machine, a container or WSL 2."
        )
    if level not in LEVELS:
        raise DryRunError(f"Simulation level {level} does not exist: choose 0, 1, 2 or 3.")
    folder, version = find_mindspore()
    real = find_real_cann(environ)
    if level >= 2 and not (real and real.complete and npus()):
        lacking = "a card" if real and real.complete else "a real CANN and a card"
        raise DryRunError(
            f"Level {level} counts operator workspace{' and time' if level == 3 else ''} by asking the device: "
            f"it needs {lacking}, and this machine has none. Use --level 1, or run it on an Ascend host."
        )
    if real and real.complete:
        pause = None
        with contextlib.suppress(DryRunError):  # no cache folder: ranks are slower, nothing else
            pause = pause_folder(folder, version)
        return MindSporeEngine(version=version, cann=real.version, level=level, base=real, pause=pause)
    return MindSporeEngine(
        version=version, cann=STAND_IN, level=level, base=stand_in_for(folder, version), pause=pause_folder(folder, version)
    )


def find_mindspore() -> tuple[Path, str]:
    """The package folder and version of the MindSpore that this Python would import, without importing it."""
    folder = package_folder("mindspore")
    if folder is None:
        raise DryRunError(f"MindSpore is not installed for {sys.executable}. Install it: pip install 'mindspeed-dryrun[engine]'")
    return folder, version_in(folder.parent, "mindspore") or _own_version(folder)


def _own_version(folder: Path) -> str:
    try:
        return (folder / "version.py").read_text().split("'")[1]
    except (OSError, IndexError):
        return "unknown"
