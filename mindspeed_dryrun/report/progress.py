"""What a person sees while ranks run: a live table on a terminal, plain lines elsewhere. On stderr; stdout is the report's."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch.executors import Event
from mindspeed_dryrun.terminal import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mindspeed_dryrun.launch.plan import RankTask

_FEW = 8  # ranks of which every phase is a line worth printing
_LIVE_HEAD = ("rank", "stage", "phase", "host", "time")
_ROWS = 16  # running ranks that a terminal shows


@contextlib.contextmanager
def progress_view(
    tasks: Sequence[RankTask], quiet: bool = False, stream: TextIO | None = None
) -> Iterator[Callable[[Event], None]]:
    """A view of these ranks, to be called with each event. `quiet` shows nothing."""
    stream = stream or sys.stderr
    state = _State(total=len(tasks), stages={task.rank: task.stage for task in tasks})
    if quiet:
        yield lambda event: None
    elif stream.isatty() and os.environ.get("TERM") != "dumb":
        with _live(state, stream) as view:
            yield view
    else:

        def view(event: Event) -> None:
            if text := state.line(event):
                print(text, file=stream, flush=True)

        yield view


@dataclass(kw_only=True)
class _State:
    total: int
    stages: dict[int, int | None]
    started: dict[int, float] = field(default_factory=dict)  # of ranks that run
    latest: dict[int, Event] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of ranks that ended
    begun: float = field(default_factory=time.monotonic)

    def take(self, event: Event) -> bool:
        """Notes an event; True when it says something new in words."""
        before = self.latest.get(event.rank)
        if event.kind == "finished":
            begun = self.started.pop(event.rank, time.monotonic())
            self.seconds.append((event.result and event.result.seconds) or time.monotonic() - begun)
            self.latest.pop(event.rank, None)
            return True
        if event.kind == "started":
            self.started[event.rank] = time.monotonic()
            self.total = max(self.total, len(self.seconds) + len(self.started))  # more ranks decide a close verdict
        self.latest[event.rank] = event
        return before is None or phase_text(before) != phase_text(event)

    def line(self, event: Event) -> str | None:
        """The event as a line of text, where it deserves one."""
        if not self.take(event):
            return None
        if event.kind == "finished":
            return f"[{len(self.seconds)}/{self.total}] {finished_text(event)}{self.left_text()}"
        return f"rank {event.rank}: {phase_text(event)}" if self.total <= _FEW else None

    def left_text(self) -> str:
        now = time.monotonic()
        waiting = self.total - len(self.seconds) - len(self.started)
        left_s = time_left_s(self.seconds, [now - begun for begun in self.started.values()], waiting)
        return " · " + t(f"about {_duration(left_s)} left") if left_s else ""


def time_left_s(ended_s: Sequence[float], running_s: Sequence[float], waiting: int) -> float | None:
    """Seconds until the last rank ends, if all take as long as those that ended; None before one has."""
    if not ended_s:
        return None
    typical = sum(ended_s) / len(ended_s)
    work = sum(max(0.0, typical - so_far) for so_far in running_s) + waiting * typical
    return work / max(1, len(running_s))


def phase_text(event: Event) -> str:
    """`importing`, `iteration 1 of 2, 34946M so far`, …"""
    if event.phase == "iteration":
        if event.memory_mb:
            return t(f"iteration {event.done} of {event.total}, {event.memory_mb}M so far")
        return t(f"iteration {event.done} of {event.total}")
    if event.start and event.start.startswith("cold: "):
        return t(f"starting cold: {event.start.removeprefix('cold: ')}")
    return plain(t(event.phase or "starting"))


def finished_text(event: Event) -> str:
    """`rank 0: ok, 55389M used, 57341M with fragments, 12 s`"""
    result = event.result
    if result is None:
        return t(f"rank {event.rank}: ended")
    took = f", {_duration(result.seconds)}" if result.seconds is not None else ""
    if not result.status.broken:
        return t(f"rank {event.rank}: {result.used_peak_mb}M used, {result.actual_peak_mb}M with fragments{took}")
    return plain(f"rank {event.rank}: {t(str(result.status))}: {t(result.error or '')}{took}")


@contextlib.contextmanager
def _live(state: _State, stream: TextIO) -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    # get_renderable: the clock moves between events
    with Live(console=console, refresh_per_second=4, transient=True, get_renderable=lambda: _table(state)) as live:

        def view(event: Event) -> None:
            state.take(event)
            if event.kind == "finished":
                live.console.print(finished_text(event), markup=False, highlight=False)

        yield view


def _table(state: _State) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    now = time.monotonic()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in _LIVE_HEAD:
        table.add_column(t(name), style="dim" if name in ("host", "time") else "")
    for rank in sorted(state.started)[:_ROWS]:
        event = state.latest[rank]
        stage = state.stages.get(rank)
        table.add_row(
            str(rank),
            "" if stage is None else str(stage),
            phase_text(event),
            f"{event.host_rss_mb}M" if event.host_rss_mb else "",
            _duration(now - state.started[rank]),
        )
    hidden = len(state.started) - _ROWS
    head = Text(
        t(f"{len(state.seconds)} of {state.total} ranks done · {len(state.started)} running · {_duration(now - state.begun)}")
        + state.left_text()
    )
    bar = ProgressBar(total=max(1, state.total), completed=len(state.seconds), width=40)
    return Group(head, bar, table, *([Text(t(f"and {hidden} more"))] if hidden > 0 else []))


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
