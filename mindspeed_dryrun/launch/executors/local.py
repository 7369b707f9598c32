"""Ranks on this machine, as many at once as cores and free memory allow."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_dryrun.errors import received
from mindspeed_dryrun.launch.executors import Event, SharedPlaces, host, interrupted
from mindspeed_dryrun.launch.executors.rank import run_rank
from mindspeed_dryrun.record.store import Record

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.plan import RankTask

# Until a rank of this job has been measured. Simulated ranks were seen at 450 to 600 MB, badly behaved ones at 4300.
_UNMEASURED_MB = 2048
_TICK_S = 0.2


@dataclass
class LocalExecutor:
    """`jobs` ranks at once; by default as many as there are cores. Free host memory bounds both.

    Ranks are forked from a warm server where there is more than one, unless `cold`.
    """

    jobs: int | None = None
    shared: SharedPlaces | None = None
    cold: bool = False

    def run(self, tasks: Sequence[RankTask], record: Path, on_event: Callable[[Event], None]) -> None:
        """See `Executor`."""
        if self.shared:
            self._run(tasks, record, on_event, self.shared)
            return
        with SharedPlaces(self.jobs or host.usable_cores(), self.cold or len(tasks) < 2) as shared:
            self._run(tasks, record, on_event, shared)

    def _run(self, tasks: Sequence[RankTask], record: Path, on_event: Callable[[Event], None], shared: SharedPlaces) -> None:
        state = _State(pending=deque(tasks), record=record, shared=shared)
        with Record(record).claimed(task.rank for task in tasks), ending_on_signals(shared.stop) as caught:
            try:
                while state.pending or state.running:
                    state.start_what_fits()
                    for event in state.news():
                        on_event(event)
            finally:
                state.end()
        if shared.stop.is_set():
            raise interrupted(caught)
        if state.errors:
            raise state.errors[0]


@dataclass(kw_only=True)
class _State:
    pending: deque[RankTask]
    record: Path
    shared: SharedPlaces
    stop: threading.Event = field(default_factory=threading.Event)  # of this run
    running: dict[int, threading.Thread] = field(default_factory=dict)
    rss_mb: dict[int, int] = field(default_factory=dict)  # of ranks that run
    peak_mb: int = 0  # the largest of any rank so far
    measured: bool = False  # a rank has been measured to its end
    errors: list[BaseException] = field(default_factory=list)
    events: queue.Queue[Event | int] = field(default_factory=queue.Queue)

    def start_what_fits(self) -> None:
        if self.shared.stop.is_set():
            self.stop.set()
        if self.stop.is_set() or self.errors:
            self.pending.clear()
        while self.pending and self._has_memory() and self.shared.take():
            task = self.pending.popleft()
            thread = threading.Thread(target=self._run, args=(task,), name=f"rank {task.rank}")
            self.running[task.rank] = thread
            thread.start()

    def news(self) -> Iterator[Event]:
        """What happened since; waits a moment when nothing did."""
        with contextlib.suppress(queue.Empty):
            item = self.events.get(timeout=_TICK_S)
            while True:
                if isinstance(item, int):
                    self.running.pop(item).join()
                    self.shared.give_back()
                    self.rss_mb.pop(item, None)
                else:
                    self._measure(item)
                    yield item
                item = self.events.get_nowait()

    def end(self) -> None:
        """Whatever happened, no thread and no rank's process outlives the run."""
        self.stop.set()
        for thread in self.running.values():
            thread.join()
            self.shared.give_back()

    def _measure(self, event: Event) -> None:
        measured = event.result.host_rss_mb if event.result else event.host_rss_mb
        if measured:
            self.rss_mb[event.rank] = measured
            self.peak_mb = max(self.peak_mb, measured)
            self.measured = self.measured or event.result is not None

    def _has_memory(self) -> bool:
        now = {rank: self.rss_mb.get(rank, 0) for rank in self.running}
        # One that is still growing says little about its peak.
        expected = self.peak_mb if self.measured else max(self.peak_mb, _UNMEASURED_MB)
        return may_start(now, expected, host.available_mb())

    def _run(self, task: RankTask) -> None:
        try:
            run_rank(task, self.record, self.events.put, self.stop, servers=self.shared.servers)
        except BaseException as error:
            # The record cannot be written, or a fault of ours: more ranks would end the same way.
            self.errors.append(error)
        finally:
            self.events.put(task.rank)


def may_start(running_mb: Mapping[int, int], expected_mb: int, available_mb: int) -> bool:
    """Is there memory for one more rank when those that run grow to what one is expected to need? One always runs."""
    still_to_come = sum(max(0, expected_mb - now_mb) for now_mb in running_mb.values())
    return not running_mb or available_mb - still_to_come >= expected_mb


@contextlib.contextmanager
def ending_on_signals(stop: threading.Event) -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and SIGHUP set `stop` and are noted, instead of tearing through the middle of things.

    What waits in this thread meanwhile, as a capture does, hears of them by `check_interrupted`.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: object) -> None:
        caught.append(number)
        received.append(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:  # nohup
            signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for heard in caught:
            received.remove(heard)
