"""What every engine offers: what is installed, the environment of a rank, and how to record each allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mindspeed_dryrun.record.model import EngineSummary


class Engine(Protocol):
    """What counts the memory of a rank. Its counterpart inside a rank is `rank/engine.py`."""

    @property
    def name(self) -> str:
        """`mindspore` or `torch_npu`."""

    @property
    def version(self) -> str:
        """Of the framework."""

    @property
    def cann(self) -> str:
        """`stand-in`, or the version of the real one."""

    @property
    def level(self) -> int:
        """The simulation level."""

    @property
    def title(self) -> str:
        """The framework's name and version, for people."""

    @property
    def summary(self) -> EngineSummary:
        """What a record says of it."""

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What it cannot see of a rank's memory, whatever the job."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about its figures."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a simulated rank, made from the user's."""

    def place(self, rank: int, nodes: Sequence[int]) -> dict[str, str]:
        """The variables by which the launcher tells a process which rank it is; `nodes` are the ranks of each node."""

    def recording(self) -> dict[str, str]:
        """The variables that make the engine write down every allocation, in the folder where a rank works: its own."""
