"""What the page asked for, run one after the other by one thread on one set of warm servers, and remembered.

Each try is run twice over: without tracking, for figures and verdict as fast as they come; then its worst rank with every
allocation recorded, for what fills the peak and what to change. Both are records like any other, below the studio's folder.

What is looked at now comes first: the newest try, its figures and then their explanation. A search lets tries pass between
two of its dry runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_dryrun.advise.levers import Lever, levers
from mindspeed_dryrun.devices.hardware import Hardware, read_hardware
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.estimate.strategy import Strategy, apply, decided_flags
from mindspeed_dryrun.estimate.time_model import Estimate
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.executors import Event, SharedPlaces, host
from mindspeed_dryrun.launch.job import Job, changed
from mindspeed_dryrun.launch.run import Execution, dry_run_beside
from mindspeed_dryrun.megatron.arguments import Arguments, override_args, pairs
from mindspeed_dryrun.record.criteria import named_device
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.store import folder_name
from mindspeed_dryrun.report.explain import Explanation, explain_ranks
from mindspeed_dryrun.search.measure import Measurement, read_measurement
from mindspeed_dryrun.studio.choices import Choice, Subject, as_patch
from mindspeed_dryrun.sweep.sweep import predict
from mindspeed_dryrun.units import parse_size_mb

MOST_WAITING = 16
MOST_TRIES = 500
DEFAULT_DEVICE = "ascend910b-64g"

_STOPPED = message("The search was stopped before it had found a strategy that fits.")
_NONE_FITS = message("No strategy of this model fits the budget.")

Tell = Callable[[str, dict[str, Any]], None]


@dataclass(kw_only=True)
class Try:
    """One choice and what became of it."""

    number: int
    choice: Choice
    state: str = "waiting"  # "waiting", "running", "figures" (being explained), "done" or "failed"
    name: str = ""
    error: str | None = None
    job: Job | None = None
    report: Report | None = None
    record: Path | None = None
    time: Estimate | None = None
    explained: Explanation | None = None
    levers: list[Lever] = field(default_factory=list)
    seconds: float = 0.0
    by_search: bool = False

    def asks_for(self, job: Job, choice: Choice) -> bool:
        """Is it this job on this card, however that is said? A flag with the script's own value changes nothing."""
        mine, other = ((one.device, one.budget, one.sets) for one in (self.choice, choice))
        return mine == other and self.job is not None and sorted(pairs(self.job.args)) == sorted(pairs(job.args))


@dataclass(frozen=True)
class _Search:
    """A search that was asked for, from this choice on."""

    choice: Choice


# What is waited for, in the order in which it is done. Of the tries the newest comes first, its figures and what explains them.
_STOP, _TRY, _SEARCH = range(3)


class Busy(UsageError):
    """More is asked for than can wait."""


class Session:
    """Everything one studio does. Its methods may be called from any thread; `tell` is, from the one that runs."""

    def __init__(self, subject: Subject, folder: Path, tell: Tell, trainer: str = "auto", jobs: int | None = None) -> None:
        self.subject, self.folder, self.tell, self.trainer = subject, folder, tell, trainer
        self.tries: dict[int, Try] = {}
        self.searching = False
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._entries = itertools.count()
        self._waiting: queue.PriorityQueue[tuple[int, int, int, Try | _Search | None]] = queue.PriorityQueue()
        self._stop_search = threading.Event()
        self.shared = SharedPlaces(jobs or host.usable_cores())
        self._thread = threading.Thread(target=self._run, name="studio", daemon=True)
        self._thread.start()

    def ask(self, choice: Choice) -> Try:
        """A try of this choice: the one that was run before, or a new one that waits for its turn."""
        job = self.subject.job(choice)
        with self._lock:
            for found in self.tries.values():
                if found.state != "failed" and found.asks_for(job, choice):
                    self._look_closer(found)
                    return found
            waiting = sum(one.state == "waiting" for one in self.tries.values())
            if waiting >= MOST_WAITING or len(self.tries) >= MOST_TRIES:
                raise Busy("Too many runs are queued. Wait until some have finished.")
            one = Try(number=next(self._numbers), choice=choice, job=job, name=name_of(job))
            self.tries[one.number] = one
            self._put(_TRY, one)
        return one

    def _look_closer(self, one: Try) -> None:
        """What a search has counted is explained when somebody looks at it."""
        if one.by_search and one.state == "done" and one.explained is None:
            one.state = "figures"
            self._put(_TRY, one)

    def _put(self, kind: int, item: Try | _Search | None) -> None:
        newest_first = -item.number if isinstance(item, Try) else 0
        self._waiting.put((kind, newest_first, next(self._entries), item))

    def search(self, choice: Choice) -> None:
        """Starts a search over the strategies of this choice's model; what it dry-runs becomes tries.

        `UsageError` where Megatron would refuse the choice itself.
        """
        self.subject.job(choice)
        with self._lock:
            if self.searching:
                raise Busy("A search is running already.")
            self.searching = True
        self._stop_search.clear()
        self._put(_SEARCH, _Search(choice))

    def stop_search(self) -> None:
        """Ends the search after the dry run that it is at."""
        self._stop_search.set()

    def close(self) -> None:
        """Ends what runs and every process of it."""
        self.shared.stop.set()
        self._stop_search.set()
        self._put(_STOP, None)
        self._thread.join(30)
        self.shared.__exit__()

    def _run(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            while self._do(self._waiting.get()[-1]):
                pass

    def _do(self, item: Try | _Search | None) -> bool:
        """Does what is next; False at the end."""
        if item is None or self.shared.stop.is_set():
            return False
        try:
            if isinstance(item, _Search):
                self._search(item.choice)
            elif item.state == "waiting":
                self._count(item)
            else:
                self._explain(item)
        except (DryRunError, OSError) as error:
            self._failed(item, str(error))
        except Exception as error:  # one that nobody foresaw must not end the thread that runs everything
            self._failed(item, f"{type(error).__name__}: {error}")
        return True

    def _let_pass(self) -> None:
        """In the middle of a search: what the page shows meanwhile."""
        while True:
            try:
                item = self._waiting.get_nowait()[-1]
            except queue.Empty:
                return
            if not self._do(item):
                self._put(_STOP, None)  # for the thread itself
                raise KeyboardInterrupt

    def _failed(self, item: Try | _Search, sentence: str) -> None:
        if isinstance(item, Try):
            item.state, item.error = "failed", sentence
            self.tell("try", {"number": item.number, "state": "failed"})
        else:
            self.searching = False
            self.tell("search", {"state": "failed", "text": sentence})

    def _count(self, one: Try) -> None:
        assert one.job
        begun = time.monotonic()
        one.state = "running"
        self.tell("try", {"number": one.number, "state": "running"})
        spec = self._spec(one.choice)
        one.report, one.record = self._dry_run(one, spec)
        one.time = predict(one.job, self.hardware(one.choice))
        one.seconds = time.monotonic() - begun
        one.state = "figures"
        self.tell("try", {"number": one.number, "state": "figures"})
        self._put(_TRY, one)

    def _explain(self, one: Try) -> None:
        assert one.job and one.report
        if one.report.worst_rank is not None:
            tracked = dataclasses.replace(self._spec(one.choice), explain=True, ranks=str(one.report.worst_rank))
            report, record = self._dry_run(one, tracked)
            one.explained = explain_ranks(record, report.ranks).get(one.report.worst_rank)
            one.levers = levers(one.report, one.job, one.explained)
        one.state = "done"
        self.tell("try", {"number": one.number, "state": "done"})

    def _dry_run(self, one: Try, spec: RunSpec) -> tuple[Report, Path]:
        assert one.job

        def view(event: Event) -> None:
            what = {"number": one.number, "rank": event.rank, "phase": event.phase, "memory_mb": event.memory_mb}
            self.tell("progress", what)

        return dry_run_beside(one.job, self.folder / folder_name(one.name), spec, self._execution(), view=view)

    def _execution(self) -> Execution:
        return Execution(shared=self.shared, cache=True)

    def _spec(self, choice: Choice) -> RunSpec:
        return RunSpec(
            sets=choice.sets,
            overrides=choice.overrides,
            trainer=self.trainer,
            device=choice.device or DEFAULT_DEVICE,
            budget_mb=parse_size_mb(choice.budget) if choice.budget else None,
        )

    def hardware(self, choice: Choice) -> Hardware:
        """The card that times are predicted for."""
        return read_hardware(choice.device or DEFAULT_DEVICE)

    def budget_mb(self, choice: Choice) -> int:
        """What a strategy may need."""
        return parse_size_mb(choice.budget) if choice.budget else named_device(choice.device or DEFAULT_DEVICE).usable_mb

    def _search(self, choice: Choice) -> None:
        from mindspeed_dryrun.estimate.operators import Operators, read_operators
        from mindspeed_dryrun.estimate.strategy import read_dispatcher
        from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape
        from mindspeed_dryrun.search.search import Search, SearchProgress
        from mindspeed_dryrun.search.space import Space, strategies

        job = self.subject.job(choice)
        shape = read_shape(job.args)
        listed = strategies(shape, job.world_size, Space(), read_dispatcher(job.args))

        def on_progress(progress: SearchProgress) -> None:
            self.tell("search", {"state": "running", "text": f"{progress.phase}: {progress.what}"})

        def measure(strategy: Strategy, stages: Collection[int] | None = None) -> Measurement:
            if self._stop_search.is_set() or self.shared.stop.is_set():
                raise KeyboardInterrupt
            self._let_pass()
            return self._measure(choice, job, shape.layers, strategy, stages)

        def variant(options: tuple[str, ...]) -> tuple[ModelShape, Operators]:
            words = override_args(job.args, options)
            return read_shape(words), read_operators(words)

        found = Search(
            shape, listed, self.hardware(choice), self.budget_mb(choice), measure, 3, on_progress, variant=variant
        ).run()
        self.searching = False
        if found.winners:
            self.tell("search", {"state": "done", "text": found.winners[0].strategy.name})
        else:
            stopped = found.interrupted is not None
            self.tell("search", {"state": "stopped" if stopped else "none", "text": _STOPPED if stopped else _NONE_FITS})

    def _measure(self, choice: Choice, job: Job, layers: int, strategy: Strategy, stages: Collection[int] | None) -> Measurement:
        wanted = choice.changed({**dict.fromkeys(decided_flags(strategy)), **as_patch(strategy.arguments())})
        try:
            tried = changed(dataclasses.replace(job, arguments=Arguments(apply(job.args, strategy))), ())
            report, record = dry_run_beside(
                tried, self.folder / "search" / folder_name(name_of(tried)), self._spec(wanted), self._execution(), stages
            )
        except DryRunError as error:
            return Measurement(stages={}, error=str(error))
        if stages is None and strategy.world == job.world_size and strategy.layers == layers:
            self._keep(wanted, tried, report, record)
        return read_measurement(report, sum(rank.seconds or 0.0 for rank in report.ranks), str(record))

    def _keep(self, choice: Choice, job: Job, report: Report, record: Path) -> None:
        """A strategy that the search has dry-run at full size is a try like any other."""
        with self._lock:
            number = next(self._numbers)
            guess = predict(job, self.hardware(choice))
            self.tries[number] = Try(
                number=number,
                choice=choice,
                state="done",
                name=name_of(job),
                job=job,
                report=report,
                record=record,
                time=guess,
                by_search=True,
            )
        self.tell("try", {"number": number, "state": "done", "by_search": True})


def name_of(job: Job) -> str:
    """A few words for a row: `TP2 PP2 DP1 MBS1`."""
    at = job.parallel
    words = [f"TP{at.tp}", f"PP{at.pp}", f"DP{at.dp}"]
    words += [f"CP{at.cp}"] if at.cp > 1 else []
    words += [f"EP{at.ep}"] if at.ep > 1 else []
    words += [f"VPP{at.vpp}"] if at.vpp else []
    words += [f"MBS{job.micro_batch}", f"GBS{job.global_batch}"]
    words += [str(job.recompute).replace(" ", "-")] if job.recompute else []
    words += ["DO"] if job.distributed_optimizer else []
    return " ".join(words)
