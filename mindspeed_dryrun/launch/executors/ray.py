"""Ranks as tasks on a Ray cluster. A machine that is lost loses nothing: its ranks run again elsewhere.

Each task prepares the engine on its own machine, runs the rank there in a temporary folder, and sends the folder home
through Ray: the record is the same as a local run's. Ray is needed on every machine, and so is this package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.executors import Event, SharedPlaces, interrupted
from mindspeed_dryrun.launch.executors.local import ending_on_signals
from mindspeed_dryrun.launch.executors.rank import run_rank
from mindspeed_dryrun.launch.executors.relocate import Machine, check_same, prepare_packages, relocated, survey
from mindspeed_dryrun.record.model import RankReport, Status
from mindspeed_dryrun.record.store import Record, place_files, rank_folder, read_json, write_json
from mindspeed_dryrun.schema import read_as
from mindspeed_dryrun.temporary import temporary_folder

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.plan import RankTask

_RETRIES = 3  # of a rank whose machine was lost
_TICK_S = 0.3
_PATIENCE_S = 5.0  # for ranks to end and clean up after themselves, before their Ray workers are killed

Files = dict[str, bytes]  # path in the rank's folder → compressed content


@dataclass
class RayExecutor:
    """At most `jobs` ranks at once; by default as many as the cluster has CPUs."""

    jobs: int | None = None
    shared: SharedPlaces | None = None

    def run(self, tasks: Sequence[RankTask], record: Path, on_event: Callable[[Event], None]) -> None:
        """See `Executor`."""
        if not tasks:
            return
        ray = connected()
        shared = self.shared or SharedPlaces(self.jobs or len(tasks))
        with Record(record).claimed(task.rank for task in tasks), ending_on_signals(shared.stop) as caught:
            state = _State(
                ray=ray,
                record=record,
                pending=deque(tasks),
                shared=shared,
                here=survey(tasks[0]),
                on_event=on_event,
            )
            try:
                while (state.pending or state.running) and not shared.stop.is_set():
                    state.submit()
                    state.collect()
            finally:
                state.end()
        if shared.stop.is_set():
            raise interrupted(caught)


@dataclass(kw_only=True)
class _State:
    ray: Any
    record: Path
    pending: deque[RankTask]
    shared: SharedPlaces
    here: Machine
    on_event: Callable[[Event], None]
    running: dict[Any, RankTask] = field(default_factory=dict)  # by object reference
    mailbox: Any = None
    remote: Any = None

    def __post_init__(self) -> None:
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        home = affinity(self.ray.get_runtime_context().get_node_id(), soft=False)
        self.mailbox = self.ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=home).remote()
        self.remote = self.ray.remote(_run_on_machine).options(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")

    def submit(self) -> None:
        patches = self.record / "patches.json"
        content = patches.read_bytes() if patches.exists() else None
        while self.pending and self.shared.take():
            task = self.pending.popleft()
            self.running[self.remote.remote(task, content, self.here, self.mailbox)] = task

    def collect(self) -> None:
        if not self.running:  # others have all the places
            time.sleep(_TICK_S)
            return
        ready, _ = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=_TICK_S)
        self._news()
        for reference in ready:
            self.shared.give_back()
            self._finish(self.running.pop(reference), reference)

    def _news(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            for event in self.ray.get(self.mailbox.empty.remote()):
                if any(task.rank == event.rank for task in self.running.values()):
                    self.on_event(event)

    def _finish(self, task: RankTask, reference: Any) -> None:
        folder = rank_folder(self.record, task.rank)
        try:
            bring_home(self.ray.get(reference), folder)
            report = _report(task, read_json(folder / "result.json") or {})
        except self.ray.exceptions.RayError as error:
            report = RankReport(
                rank=task.rank,
                represents=task.represents,
                stage=task.stage,
                status=Status.FAILED,
                error=_sentence(error),
                why=task.why,
            )
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_json(folder / "result.json", dataclasses.asdict(report))
        self.on_event(Event(rank=task.rank, kind="finished", memory_mb=report.used_peak_mb, result=report))

    def end(self) -> None:
        """No rank outlives the run: those still there are asked to end, then their workers are killed."""
        for reference in self.running:
            self.ray.cancel(reference, force=False)
        deadline = time.monotonic() + _PATIENCE_S
        left = list(self.running)
        while left and time.monotonic() < deadline:
            _, left = self.ray.wait(left, num_returns=len(left), timeout=_TICK_S)
        for reference in left:
            self.ray.cancel(reference, force=True)
        for _ in self.running:
            self.shared.give_back()
        self.ray.kill(self.mailbox)


class _Mailbox:
    """Lives beside the launcher; machines put what happens into it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)

    def empty(self) -> list[Event]:
        events, self.events = self.events, []
        return events


def _run_on_machine(task: RankTask, patches: bytes | None, here: Machine, mailbox: Any) -> Files:
    """One rank, on whatever machine Ray chose."""
    there = survey(task)
    check_same(here, there, socket.gethostname())
    task = relocated(task, here, prepare_packages(task, here, there), os.environ)
    said: tuple[object, ...] = ()

    def send(event: Event) -> None:
        nonlocal said
        if event.kind != "finished" and said != (event.phase, event.done):
            said = (event.phase, event.done)
            mailbox.put.remote(event)

    with temporary_folder() as record:
        if patches is not None:
            (record / "patches.json").write_bytes(patches)
        run_rank(task, record, send, leave=True)
        return pack(rank_folder(record, task.rank))


def pack(folder: Path) -> Files:
    """The files below a folder, to be sent."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): zlib.compress(path.read_bytes(), 1) for path in files}


def bring_home(files: Files, folder: Path) -> None:
    """The files into a rank's folder of the record, which appears as a whole."""
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DryRunError(f"A machine sent a file with the name {name}; the record takes none outside {folder}.")
    try:
        place_files({name: zlib.decompress(content) for name, content in files.items()}, folder)
    except OSError as error:
        raise DryRunError(f"Cannot write {folder}: {error.strerror or error}. Make room and run again.") from None


def connected() -> Any:
    """The cluster: the one this process is part of, else $RAY_ADDRESS, else the one on this machine."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise UsageError("--executor ray needs Ray: pip install 'mindspeed-dryrun[ray]'") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"No Ray cluster answers at '{address}' ({reason}). Start one with `ray start --head`, "
                "set RAY_ADDRESS, or use --executor local."
            ) from None
    return ray


def _report(task: RankTask, result: dict[str, Any]) -> RankReport:
    placed = {"rank": task.rank, "represents": task.represents, "stage": task.stage}
    return read_as(RankReport, {"status": Status.FAILED, **result, **placed}, message(f"The result of rank {task.rank}"))


def _sentence(error: BaseException) -> str:
    """What went wrong on the machine, without Ray's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ModuleNotFoundError):
        return f"a machine of the cluster lacks '{cause.name}': install mindspeed-dryrun[engine,ray] on every one"
    if cause is not None:
        return str(cause) or type(cause).__name__
    return f"the machine that ran this rank was lost {_RETRIES + 1} times ({type(error).__name__})"
