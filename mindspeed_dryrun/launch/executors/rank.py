"""One rank, wherever it runs: started, watched, ended as a whole tree, judged, recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.executors import Event
from mindspeed_dryrun.launch.executors.warm import ColdStart, Guard, Servers
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import guard
from mindspeed_dryrun.record.communication import used_groups
from mindspeed_dryrun.record.model import RankReport, Status
from mindspeed_dryrun.record.store import rank_folder, write_json
from mindspeed_dryrun.record.worker_log import RankLog, read_worker_log

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.plan import RankTask

_TICK_S = 0.2
_TOLD = (
    "groups",
    "workspace",
    "workspace_unknown",
    "workspace_room",
    "kernels_not_run",
    "collected_mb",
    "uncollected_mb",
)  # what a rank says of itself at the end
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank's process ended, as its guard saw it."""

    ended: str  # "exit", "timeout", "stopped" or "lost" (the guard itself was killed)
    exit_status: int | None = None
    signal: int | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    rss_mb: int | None = None

    @property
    def crash(self) -> int | None:
        """The signal that ended it, also where a shell turned it into 128 + signal."""
        if self.signal is not None:
            return self.signal
        return self.exit_status - 128 if self.exit_status is not None and 128 < self.exit_status < 160 else None


@dataclass(kw_only=True)
class RankProgress:
    """What `progress.jsonl` says so far. Reads only what is new; a line that is still being written waits."""

    path: Path
    phase: str | None = None
    done: int = 0
    total: int | None = None
    memory_mb: int | None = None
    allocator: list[dict[str, int]] = field(default_factory=list)  # the engine's own figures, after each iteration and last
    told: dict[str, Any] = field(default_factory=dict)  # what else the engine said at the end of the run
    _offset: int = 0

    def read(self) -> bool:
        """True when there was something new."""
        try:
            with open(self.path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return False
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for line in data.splitlines():
            with contextlib.suppress(ValueError):
                self._take(json.loads(line))
        return bool(data)

    def details(self) -> dict[str, Any]:
        """What an engine told beside its peaks, for `result.json`."""
        details = {"allocator": self.allocator, **self.told}
        return {name: value for name, value in details.items() if value}

    def _take(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            return
        self.phase = str(entry.get("phase", self.phase))
        done, total, memory_mb = entry.get("done"), entry.get("total"), entry.get("memory_mb")
        self.done = max(self.done, done) if isinstance(done, int) else self.done
        self.total = total if isinstance(total, int) else self.total
        self.memory_mb = max(self.memory_mb or 0, memory_mb) if isinstance(memory_mb, int) else self.memory_mb
        if entry.get("allocator"):
            self.allocator.append(entry["allocator"])
        self.told |= {name: entry[name] for name in _TOLD if name in entry}

    def with_figures(self, log: RankLog) -> RankLog:
        """The log with the figures of an engine that tells them here (torch_npu) instead of printing them (MindSpore)."""
        if not self.allocator:
            return log
        used, reserved = (max(item[name] for item in self.allocator) for name in ("max_allocated", "max_reserved"))
        return dataclasses.replace(log, used_peak_mb=round(used / 2**20), actual_peak_mb=round(reserved / 2**20))


def _empty(folder: Path) -> None:
    for place in (folder.parent, folder):
        if place.is_symlink():
            raise DryRunError(f"{place} is a symbolic link: a rank would write where it points. Choose another --out.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def run_rank(
    task: RankTask,
    record: Path,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: threading.Event | None = None,
    leave: bool = False,
    servers: Servers | None = None,
) -> RankReport | None:
    """Runs one rank in `ranks/NNNNN` of the record and writes its `result.json` last of all.

    None when `stop` ended it: then nothing is left of it but its log, and it counts as not run. `DryRunError` when the
    record cannot be written. With `leave` the guard leaves the side of this process. With `servers` the rank is
    forked from a process that has imported everything, if it can be; `result.json` says how it was started.
    """
    record = record.absolute()
    folder = rank_folder(record, task.rank)
    log_path, progress = folder / "worker.log", RankProgress(path=folder / "progress.jsonl")
    command = [_placed(word, record) for word in task.argv]
    try:
        _empty(folder)
        with open(log_path, "ab") as log_file:
            run = _Run(
                task=task,
                record=record,
                log=log_file.fileno(),
                progress=progress,
                on_event=on_event,
                stop=stop or threading.Event(),
            )
            outcome = run.watch(run.start_guard(command, leave, servers))
    except OSError as error:
        raise DryRunError(f"Cannot run rank {task.rank} in {folder}: {error.strerror or error}.") from None
    if outcome.ended == "stopped":
        return None
    progress.read()
    log = progress.with_figures(read_worker_log(log_path, task.rank))
    judged = judge(task, outcome, log, progress.done, progress.phase)
    report = _report(task, outcome, log, judged, progress.done)
    result = {**_result(report, outcome, log, command, judged.note), "groups": used_groups(record, task.rank), "start": run.start}
    result |= progress.details()
    write_json(folder / "result.json", result)
    on_event(
        Event(
            rank=task.rank,
            kind="finished",
            phase=progress.phase,
            done=progress.done,
            total=progress.total,
            memory_mb=log.used_peak_mb,
            result=report,
        )
    )
    return report


@dataclass(frozen=True)
class Judgement:
    """What became of a rank: the error where it failed, a note where its figures need one."""

    status: Status
    error: str | None = None
    note: str | None = None


def judge(task: RankTask, outcome: Outcome, log: RankLog, done: int, phase: str | None) -> Judgement:
    """Exit status first, figures second: the block is printed by failed runs too.

    `ok` needs the planned iterations, the block, and a good exit; a crash counts as one only when it came in the
    tear-down, after all of that was done and nothing had been raised.
    """
    if outcome.ended == "timeout":
        where = f" in phase '{phase}', {done} of {task.iterations} iterations done" if phase else ""
        return Judgement(Status.TIMEOUT, f"timed out after {task.timeout_s:g} s{where}")
    if outcome.ended == "lost":
        return Judgement(Status.FAILED, "the process that guards this rank was killed, most likely for lack of host memory")
    if outcome.crash is not None:
        return _judge_crash(outcome.crash, log, complete=done >= task.iterations and log.whole)
    missed = (
        f"exit status {outcome.exit_status}; its log shows no error" if outcome.exit_status != 0
        else _what_is_missing(log, done, task.iterations)
    )  # fmt: skip
    if missed:
        return Judgement(Status.FAILED, log.first_error or missed)
    note = "several memory blocks with different figures; the largest are shown" if log.differs else None
    return Judgement(Status.OK, note=note)


def _judge_crash(crash: int, log: RankLog, complete: bool) -> Judgement:
    name = signal.Signals(crash).name if crash in set(signal.Signals) else str(crash)
    if complete and not log.raised and crash in _CRASHES:
        note = f"crashed with {name} in the tear-down, after the last iteration and the block; its figures are good"
        return Judgement(Status.OK, note=note)
    if crash == signal.SIGKILL:
        return Judgement(Status.FAILED, log.raised or "killed by the system (SIGKILL), most likely for lack of host memory")
    return Judgement(Status.FAILED, log.first_error or f"ended by signal {name}; its log shows no error")


def _what_is_missing(log: RankLog, done: int, iterations: int) -> str | None:
    if done < iterations:
        return f"ended without an error after {done} of {iterations} iterations: its memory is not the job's"
    if not log.whole:
        cut = "the log ends inside the memory block" if log.truncated else "the engine printed no memory block"
        return f"{cut}; is GLOG_v 3 or the disk full?"
    return None


@dataclass(kw_only=True)
class _Run:
    """A rank under way, from its guard's start to its end."""

    task: RankTask
    record: Path
    log: int
    progress: RankProgress
    on_event: Callable[[Event], None]
    stop: threading.Event
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    start: str = "cold"

    def start_guard(self, command: list[str], leave: bool, servers: Servers | None) -> Guard:
        """The guard of this rank: forked where a server can do it, else started."""
        folder = rank_folder(self.record, self.task.rank)
        placed = {name: _placed(value, self.record, name == config.VARIABLE) for name, value in self.task.env.items()}
        environment = {**placed, guard.MARK: self.mark}
        if servers is not None and not leave:
            try:
                guard_process = servers.fork(self.task, environment, folder, self.log, self.stop.is_set)
                self.start = "warm"
                return guard_process
            except ColdStart as reason:
                self.start = f"cold: {reason}"
        options = ["--leave"] if leave else []
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *options, str(self.task.timeout_s), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin and process.stdout
        return Guard(process.stdin, process.stdout, process.wait)

    def watch(self, rank: Guard) -> Outcome:
        """Follows the guard to its end."""
        last: dict[str, Any] = {}
        rss_mb: int | None = None
        try:
            self.on_event(Event(rank=self.task.rank, kind="started", total=self.task.iterations, start=self.start))
            with selectors.DefaultSelector() as selector:
                selector.register(rank.stdout, selectors.EVENT_READ)
                text = b""
                while True:
                    ready = selector.select(_TICK_S)
                    if self.stop.is_set() and not rank.stdin.closed:
                        rank.stdin.close()
                    if ready:
                        data = os.read(rank.stdout.fileno(), 1 << 16)
                        if not data:
                            break
                        *lines, text = (text + data).split(b"\n")
                        last = json.loads(lines[-1]) if lines else last
                        rss_mb = last.get("rss_mb", rss_mb)
                    if self.progress.read() or ready:
                        self._say_progress(rss_mb)
        finally:
            rank.stdin.close()  # in any case, also an exception's: the guard ends the tree
            rest = rank.stdout.read()  # until the guard has gone
            rank.stdout.close()
            rank.wait()
            if "ended" not in last and b'"ended"' not in rest:
                guard.end_marked(self.mark)
        if "ended" not in last:
            return Outcome(ended="stopped" if self.stop.is_set() else "lost", rss_mb=rss_mb)
        return Outcome(**{name: value for name, value in last.items() if name != "left"})

    def _say_progress(self, rss_mb: int | None) -> None:
        at = self.progress
        total = at.total or self.task.iterations
        self.on_event(
            Event(
                rank=self.task.rank,
                kind="progress",
                phase=at.phase,
                done=at.done,
                total=total,
                memory_mb=at.memory_mb,
                host_rss_mb=rss_mb,
            )
        )


def _placed(text: str, record: Path, in_json: bool = False) -> str:
    """`{record}` becomes the record's folder."""
    path = str(record)
    return text.replace("{record}", json.dumps(path)[1:-1] if in_json else path)


def _report(task: RankTask, outcome: Outcome, log: RankLog, judged: Judgement, iterations: int) -> RankReport:
    return RankReport(
        rank=task.rank,
        represents=task.represents,
        stage=task.stage,
        status=judged.status,
        error=judged.error,
        used_peak_mb=log.used_peak_mb,
        actual_peak_mb=log.actual_peak_mb,
        seconds=outcome.seconds,
        host_rss_mb=outcome.rss_mb,
        device_total_mb=log.device_total_mb,
        usable_mb=log.usable_mb,
        iterations=iterations,
        why=task.why,
    )


def _result(report: RankReport, outcome: Outcome, log: RankLog, command: list[str], note: str | None) -> dict[str, Any]:
    return {
        **dataclasses.asdict(report),
        "exit_status": outcome.exit_status,
        "signal": outcome.signal,
        "cpu_seconds": outcome.cpu_seconds,
        "base_address": log.base_address,
        "log_bytes": log.size_bytes,
        "note": note,
        "host": socket.gethostname(),
        "command": command,
    }
