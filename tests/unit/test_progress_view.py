"""Progress is plain lines where there is no terminal, a live table where there is one, and never on stdout."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import threading
import time

import pytest
from report_samples import rank as sample_rank

from mindspeed_dryrun.launch.executors import Event
from mindspeed_dryrun.launch.plan import RankTask
from mindspeed_dryrun.report.progress import progress_view, time_left_s


def tasks(count: int) -> list[RankTask]:
    return [
        RankTask(rank=rank, represents=(rank,), stage=rank % 2, why="", argv=("x",), env={}, timeout_s=1, iterations=2)
        for rank in range(count)
    ]


def finished(rank: int, status: str = "ok", error: str | None = None) -> Event:
    result = sample_rank(rank, (rank,), 0, status, error=error, used_peak_mb=500, actual_peak_mb=600, seconds=65.2)
    return Event(rank=rank, kind="finished", result=result)


EVENTS = [
    Event(rank=0, kind="started", total=2),
    Event(rank=0, kind="progress", phase="importing"),
    Event(rank=0, kind="progress", phase="importing", host_rss_mb=300),
    Event(rank=0, kind="progress", phase="iteration", done=1, total=2, memory_mb=400),
    finished(0),
    Event(rank=1, kind="started", total=2),
    finished(1, "failed", "ValueError: [red]x"),
]


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with progress_view(tasks(2), stream=stream) as view:
        for event in EVENTS:
            view(event)
    assert stream.getvalue().splitlines() == [
        "rank 0: starting",
        "rank 0: importing",
        "rank 0: iteration 1 of 2, 400M so far",
        "[1/2] rank 0: 500M used, 600M with fragments, 1 min 05 s · about 1 min 05 s left",
        "rank 1: starting",
        "[2/2] rank 1: failed: ValueError: [red]x, 1 min 05 s",
    ]
    assert capsys.readouterr().out == ""


def test_many_ranks_get_one_line_each() -> None:
    stream = io.StringIO()
    with progress_view(tasks(512), stream=stream) as view:
        for event in EVENTS:
            view(event)
    assert [line[:7] for line in stream.getvalue().splitlines()] == ["[1/512]", "[2/512]"]


def test_quiet_shows_nothing() -> None:
    stream = io.StringIO()
    with progress_view(tasks(2), quiet=True, stream=stream) as view:
        for event in EVENTS:
            view(event)
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    shown = ""

    def read() -> None:
        nonlocal shown
        with contextlib.suppress(OSError):  # how a terminal says that the other side is closed
            while data := os.read(leader, 1 << 16):
                shown += data.decode(errors="replace")

    reader = threading.Thread(target=read)
    reader.start()
    with open(follower, "w", encoding="utf-8") as stream, progress_view(tasks(2), stream=stream) as view:
        for event in EVENTS[:4]:
            view(event)
        time.sleep(0.6)
        for event in EVENTS[4:]:
            view(event)
    reader.join(10)
    os.close(leader)
    assert "0 of 2 ranks done · 1 running" in shown
    assert "iteration 1 of 2, 400M so far" in shown
    assert "rank 1: failed: ValueError: [red]x" in shown


def test_time_left() -> None:
    assert time_left_s([], [1.0], 3) is None
    assert time_left_s([10.0, 20.0], [5.0, 25.0], 2) == (10 + 0 + 30) / 2
    assert time_left_s([10.0], [], 0) == 0
