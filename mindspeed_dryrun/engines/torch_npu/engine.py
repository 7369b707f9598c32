"""Finds the installed torch_npu and knows the environment that a rank needs to run on it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from mindspeed_dryrun.engines.cann.real import find_real_cann
from mindspeed_dryrun.engines.cann.stand_in import StandIn
from mindspeed_dryrun.engines.packages import package_folder, version_in
from mindspeed_dryrun.engines.torch_npu.margin import margin_sentence
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.rank.torch_npu import (
    ENGINE,
    SNAPSHOT,
    SNAPSHOT_VARIABLE,
    TASK_QUEUE_VARIABLE,
)
from mindspeed_dryrun.record.model import EngineSummary

# Left-overs of a real job, or of an outer torchrun.
_UNSET = ("RANK_TABLE_FILE", "TORCHELASTIC_USE_AGENT_STORE", "ASCEND_CUSTOM_OPP_PATH", "ASCEND_LAUNCH_BLOCKING",
          "ASCEND_RT_VISIBLE_DEVICES", "ATB_HOME_PATH")  # fmt: skip
# One thread for what is computed on the host, as torchrun sets it (run.py, config_from_args).
# HCCL's watchdog is a thread that asks CANN, here Python, with a lock held that the main thread waits for while it holds Python
# (ProcessGroupHCCL.cpp: `Watchdog`, `getHcclCommName`): both would wait forever. There is nothing for it to watch.
# `getHcclCommName`: https://github.com/Ascend/pytorch/blob/v7.3.0-pytorch2.7.1/torch_npu/csrc/distributed/ProcessGroupHCCL.cpp#L3123
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TASK_QUEUE_ENABLE": "0",
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
    "HCCL_ASYNC_ERROR_HANDLING": "0",  # its older name
    "HCCL_DESYNC_DEBUG": "0",
    "TORCH_HCCL_DESYNC_DEBUG": "0",  # would turn it on again
}


@dataclass(frozen=True)
class TorchEngine:
    """torch_npu on the stand-in CANN."""

    version: str
    base: StandIn = field(repr=False)
    name: ClassVar[str] = ENGINE
    cann: ClassVar[str] = "stand-in"
    level: ClassVar[int] = 1

    @property
    def title(self) -> str:
        """The framework's name and version, for people."""
        return f"torch_npu {self.version}"

    @property
    def summary(self) -> EngineSummary:
        """What a record says of it."""
        return EngineSummary(self.name, self.version, self.cann, self.level)

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What it cannot see of a rank's memory; operators without a formula are named by the ranks themselves."""
        return (message("memory that another stream still uses: a real NPU reserves more, and waits for it before it runs out"),)

    @property
    def notes(self) -> tuple[str, ...]:
        """How far its figures were from real NPUs: the engine is experimental until they are close."""
        return (margin_sentence(),)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a simulated rank, made from the user's."""
        environ = {name: value for name, value in base.items() if name not in _UNSET} | self.base.variables() | _SETTINGS
        # A queue's second thread would wait for Python, which the first one holds while it waits for the queue. Without the queue
        # the same calls come in the same order; where workspace is taken from is decided by the script's own setting.
        environ[TASK_QUEUE_VARIABLE] = base.get("TASK_QUEUE_ENABLE", "1")
        # torch 2.13 asks for it in a broadcast, and torch_npu answers None without this; MindSpeed's own answer is 9.0 too.
        environ.setdefault("TORCH_NPU_DEVICE_CAPABILITY", "9.0")
        environ["ASCEND_TOOLKIT_HOME"] = str(self.base.home)
        for name, folders in self.base.search_paths().items():
            environ[name] = ":".join(part for part in (*folders, environ.get(name, "")) if part)
        return environ

    def place(self, rank: int, nodes: Sequence[int]) -> dict[str, str]:
        """What torchrun sets (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
        world_size, node, local = sum(nodes), 0, rank
        while local >= nodes[node]:
            local -= nodes[node]
            node += 1
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(nodes[node]),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }

    def recording(self) -> dict[str, str]:
        """torch_npu's own memory history, written by the rank when it ends."""
        return {SNAPSHOT_VARIABLE: SNAPSHOT}


def choose_torch_engine(level: int = 1, environ: Mapping[str, str] | None = None) -> TorchEngine:
    """The engine for the torch_npu that this Python would import. A real CANN is refused: cards would be used."""
    if sys.platform != "linux":
        raise DryRunError(f"torch_npu exists for Linux only, and this is {sys.platform}. Use a Linux machine or a container.")
    if level != 1:
        raise DryRunError(f"Level {level} is MindSpore's: a torchrun script is dry-run at level 1 only.")
    real = find_real_cann(environ)
    if real is not None:
        raise DryRunError(
            f"There is a real CANN at {real.home}, and torch_npu on it would run on real cards: it has no simulation. "
            "Dry-run torchrun scripts on a machine or in a container without CANN."
        )
    from mindspeed_dryrun.engines.torch_npu.stand_in import torch_npu_stand_in  # with what answers for CANN inside a rank

    package, version = find_torch_npu()
    return TorchEngine(version, torch_npu_stand_in(package, version))


def find_torch_npu() -> tuple[Path, str]:
    """The package folder and version of the torch_npu that this Python would import, without importing it."""
    folder = package_folder("torch_npu")
    if folder is None:
        raise DryRunError(f"torch_npu is not installed for {sys.executable}. Install it: pip install 'mindspeed-dryrun[torch]'")
    return folder, version_in(folder.parent, "torch_npu") or "unknown"
