"""Where ranks run. An executor is a small protocol; nothing else in the code knows on which machine a rank is.

`rank` runs one rank and decides what became of it, `warm` has ranks forked instead of started, `local` runs
ranks on this machine, `ray` on a Ray cluster.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mindspeed_dryrun.errors import Interrupted as Interrupted
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.executors.warm import Servers
from mindspeed_dryrun.record.model import RankReport

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.plan import RankTask


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something a view may show. Events of one run arrive one after the other, in the thread that called `run`."""

    rank: int
    kind: str  # "started", "progress" or "finished"
    phase: str | None = None  # "importing", "building", "iteration" or "finished"
    done: int | None = None  # iterations
    total: int | None = None
    memory_mb: int | None = None  # device memory so far
    host_rss_mb: int | None = None
    result: RankReport | None = None  # with "finished"
    start: str | None = None  # with "started": "warm", "cold", or "cold: " and why it could not be warm


class SharedPlaces:
    """What executors that run at the same time in one process share: places for ranks, warm servers, and the order to stop.

    Use it as a context manager where runs follow one another: their servers end with it.
    """

    def __init__(self, jobs: int, cold: bool = False) -> None:
        self.stop = threading.Event()
        self.servers = None if cold else Servers()
        self._free = threading.Semaphore(jobs)

    def __enter__(self) -> SharedPlaces:
        return self

    def __exit__(self, *_: object) -> None:
        if self.servers:
            self.servers.close()

    def take(self) -> bool:
        """A place for one more rank, if there is one."""
        return self._free.acquire(blocking=False)

    def give_back(self) -> None:
        self._free.release()


class Executor(Protocol):
    """Runs every task and leaves `ranks/NNNNN/` of each in the record. A rank that fails does not stop the others.

    Raises `Interrupted` after Ctrl-C or SIGTERM, when every process is gone: ranks that had finished are in the record.
    """

    def run(self, tasks: Sequence[RankTask], record: Path, on_event: Callable[[Event], None]) -> None: ...


def interrupted(caught: Sequence[int]) -> Interrupted:
    """What a run raises after signals: its record is whole."""
    return Interrupted(caught[0] if caught else signal.SIGINT, "The same launch continues with what is missing.")


def get_executor(name: str, jobs: int | None = None, shared: SharedPlaces | None = None, *, cold: bool = False) -> Executor:
    """`local` or `ray`. `jobs` bounds how many ranks run at once; by default the machine, or the cluster, does.

    `cold` starts every rank by itself; ranks on a cluster always are.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least one rank must run at a time.")
    if name == "local":
        from mindspeed_dryrun.launch.executors.local import LocalExecutor

        return LocalExecutor(jobs, shared, cold)
    if name == "ray":
        from mindspeed_dryrun.launch.executors.ray import RayExecutor

        return RayExecutor(jobs, shared)
    raise UsageError(f"There is no executor '{name}'; choose local or ray.")
