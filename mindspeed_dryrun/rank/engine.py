"""The engine as a rank's own process knows it. The activation names it; a module of this shape stands behind each name."""

from __future__ import annotations

from typing import Any, Protocol

from mindspeed_dryrun.rank import activation as config

TORCH_NPU = "torch_npu"


class RankEngine(Protocol):
    """What differs between the engines while a rank runs."""

    def check_simulation(self) -> None:
        """Before anything else: `DryRunError` unless nothing that the trainer does can reach a real NPU."""

    def prepare(self) -> None:
        """Before the trainer is imported."""

    def memory(self) -> dict[str, Any]:
        """`memory_mb`, the peak so far, and whatever else the engine says; called after each iteration."""

    def allocated(self) -> int:
        """Bytes that are allocated now."""

    def finish(self) -> dict[str, Any]:
        """The figures of the whole run, from an engine that does not print them itself. Called when the trainer has ended."""


def rank_engine() -> RankEngine:
    """The engine of this process."""
    if config.current().engine == TORCH_NPU:
        from mindspeed_dryrun.rank.torch_npu import rank as torch_rank

        return torch_rank
    from mindspeed_dryrun.rank import mindspore_rank

    return mindspore_rank
