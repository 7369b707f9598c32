"""The search: the fastest strategies (by the time model) that fit (by dry run).

1. Every strategy that Megatron allows is listed; those whose lower bound exceeds the budget are struck out.
2. The rest are put in order of predicted time. Small dry runs (a layer or a few, two stages) teach the memory model
   until it can tell, for the fastest ones, which side of the budget they are on.
3. With `per_stage`, strategies are added whose stages recompute different numbers of layers: as few each as the memory
   model says.
4. Fastest first: a strategy whose predicted peak lies above the budget beyond doubt is passed over, any other is dry-run
   at full size, its worst stages first, and what it counted is learnt. The first that fit are the winners.
5. The closest of those passed over is dry-run as well. If it fits after all, the doubt was too small: the search goes on
   with more of it. So a wrong prediction costs time, not the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.estimate.lower_bound import lower_bound_mb
from mindspeed_dryrun.estimate.memory_model import MemoryModel, Observation, Prediction
from mindspeed_dryrun.estimate.operators import Operators
from mindspeed_dryrun.estimate.stage_parts import keeps_mixtures
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy
from mindspeed_dryrun.estimate.time_model import USUAL, iteration_seconds
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.search.balance import balanced
from mindspeed_dryrun.search.measure import Measure, Measurement
from mindspeed_dryrun.search.probes import Probe, ProbeKey, probes_for

# Standard deviations that a prediction must lie above the budget to be passed over without a dry run.
_DOUBT = 3.0
# Small dry runs are worth it while they settle what a full one would; this many at most, for as many of the fastest.
_MOST_PROBES, _LOOK_AHEAD = 16, 100
# Stages of a doubtful strategy that are dry-run before the others.
_FIRST_STAGES = 2
# When dry run after dry run fails, it is not the strategies.
_MOST_FAILURES = 3

# Why the trainer would not start with a strategy; None where it would.
Refusal = Callable[[Strategy], "str | None"]
# The model and its operators with some more trainer arguments.
Variant = Callable[[tuple[str, ...]], tuple[ModelShape, Operators]]


@dataclass(kw_only=True)
class Candidate:
    """A strategy with all that is known of it."""

    strategy: Strategy
    seconds: float  # of one iteration, predicted
    bound_mb: float
    operators: Operators = USUAL  # how its layers compute
    prediction: Prediction | None = None
    measurement: Measurement | None = None

    @property
    def key(self) -> tuple[float, float, str]:
        """The order of a search: fastest first, then least memory by the bound, then by name."""
        return (self.seconds, self.bound_mb, self.strategy.name)


@dataclass
class SearchProgress:
    """Told to the caller before and after every dry run."""

    phase: str
    what: str
    dry_runs: int
    seconds_left: float | None


@dataclass(kw_only=True)
class SearchResult:
    """What a search found, and what it took."""

    budget_mb: int
    considered: int
    struck_out: int  # by the lower bound
    candidates: list[Candidate]  # not struck out, in order of time
    winners: list[Candidate] = field(default_factory=list)
    probes: int = 0
    dry_runs: int = 0  # at full size
    ranks_run: int = 0
    passed_over: int = 0  # by prediction, faster than the slowest winner
    failed: list[Candidate] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)  # by the trainer, before a rank starts: reason, strategies met
    residual_worst: float = 0.0
    residual_median: float = 0.0
    seconds: float = 0.0
    interrupted: KeyboardInterrupt | None = None
    stopped: str | None = None  # why the search ended before it had all it wanted
    closest: Candidate | None = None  # when nothing fits
    least_bound: tuple[str, float] | None = None  # when everything was struck out

    @property
    def predicted(self) -> int:
        return sum(candidate.prediction is not None for candidate in self.candidates)


class Search:
    """One search. `run` may be interrupted; the result then holds what is known."""

    def __init__(
        self,
        shape: ModelShape,
        strategies: Sequence[Strategy],
        hardware: Hardware,
        budget_mb: int,
        measure: Measure,
        winners: int = 3,
        on_progress: Callable[[SearchProgress], None] = lambda _: None,
        per_stage: bool = False,
        operators: Operators = USUAL,
        variant: Variant | None = None,
        refusal: Refusal = lambda _: None,
    ):
        self.shape, self.hardware, self.budget_mb, self.measure = shape, hardware, budget_mb, measure
        self.wanted, self.on_progress, self.per_stage = winners, on_progress, per_stage
        self.result = SearchResult(budget_mb=budget_mb, considered=0, struck_out=0, candidates=[])
        self._variant = functools.cache(variant or (lambda _: (shape, operators)))
        self._known: set[Strategy] = set()
        self._probes: dict[ProbeKey, Probe] = {}
        self._refusal, self._runs = refusal, set[Strategy]()
        fitting = self._consider(strategies)
        if strategies and not fitting:
            least = min(strategies, key=lambda strategy: lower_bound_mb(shape, strategy))
            self.result.least_bound = (least.name, lower_bound_mb(shape, least))
        self.model = MemoryModel(shape)
        self.doubt = _DOUBT
        self._probed: set[Strategy] = set()
        self._took: list[float] = []
        self._failures = 0  # in a row

    def run(self) -> SearchResult:
        """Searches, and returns what was found even when interrupted."""
        started = time.monotonic()
        try:
            self._learn()
            if self.result.refused and not self.result.candidates:
                raise DryRunError(f"The trainer would start with no strategy of this space: {'; '.join(self.result.refused)}")
            if self._balance():
                self._learn()
            self._verify()
        except KeyboardInterrupt as stop:
            self.result.interrupted = stop
        except DryRunError as error:
            if not self.result.winners:
                raise
            self.result.stopped = str(error)
        finally:
            self.result.seconds = time.monotonic() - started
            errors = sorted(abs(value) for value in self.model.residuals())
            if errors:
                self.result.residual_worst, self.result.residual_median = errors[-1], errors[len(errors) // 2]
        return self.result

    def _consider(self, strategies: Iterable[Strategy]) -> list[Candidate]:
        """New candidates: what has not been considered before and is not struck out by the lower bound."""
        new = [strategy for strategy in dict.fromkeys(strategies) if strategy not in self._known]
        self._known.update(new)
        found = []
        hopeless: dict[Strategy, bool] = {}
        for strategy in new:
            shape, operators = self._variant(strategy.options)
            layout = strategy.layout
            if layout not in hopeless:  # recomputing every layer holds the least
                least = dataclasses.replace(layout, recompute=Recompute("full", 1))
                hopeless[layout] = lower_bound_mb(shape, least) > self.budget_mb
            if hopeless[layout]:
                continue
            bound = lower_bound_mb(shape, strategy)
            if bound <= self.budget_mb:
                seconds = iteration_seconds(shape, strategy, self.hardware, operators)
                found.append(Candidate(strategy=strategy, seconds=seconds, bound_mb=bound, operators=operators))
        self.result.considered += len(new)
        self.result.struck_out += len(new) - len(found)
        self.result.candidates = sorted([*self.result.candidates, *found], key=lambda candidate: candidate.key)
        return found

    def _runnable(self) -> Iterator[Candidate]:
        """Candidates in order of time. Each is asked about once, when it is met; what the trainer refuses is taken out."""
        refused: set[Strategy] = set()
        try:
            for candidate in self.result.candidates:
                strategy = candidate.strategy
                reason = None if strategy in self._runs else self._refusal(strategy)
                if reason is None:
                    self._runs.add(strategy)
                    yield candidate
                else:
                    refused.add(strategy)
                    self.result.refused[reason] = self.result.refused.get(reason, 0) + 1
        finally:
            if refused:
                self.result.candidates = [item for item in self.result.candidates if item.strategy not in refused]

    # -- small dry runs

    def _learn(self) -> None:
        while self.result.probes < _MOST_PROBES:
            target = self._most_doubtful()
            if target is None or target.prediction is None:
                return
            best, worth = None, 0.0
            for probe, shape in self._probes_for(target.strategy):
                if probe not in self._probed:
                    gain = self.model.gain(target.strategy, target.prediction.stage, probe, shape)
                    value = gain / (2.0 + 0.5 * sum(probe.stages[0]) * probe.pp)  # a rank costs its start and its layers
                    if value > worth:
                        best, worth = (probe, shape), value
            if best is None or worth * 10 < (0.01 * self.budget_mb) ** 2:
                return
            probe, shape = best
            self._probed.add(probe)
            self._say(message("probing"), f"{probe.name}, layers a stage: {sum(probe.stages[0])}")
            measurement = self._timed(probe)
            self.result.probes += 1
            self.result.ranks_run += measurement.ranks
            if measurement.error is None:
                self._learn_from(shape, probe, measurement)
            else:
                self._count_failure(probe, measurement)

    def _most_doubtful(self) -> Candidate | None:
        """Of the fastest candidates that may or may not fit, the one that is least known."""
        worst, spread = None, 0.0
        looked = found = 0
        for candidate in self._runnable():
            looked += 1
            prediction = candidate.prediction = self.model.predict(candidate.strategy)
            if prediction.least_mb(self.doubt) > self.budget_mb:
                continue
            found += 1
            # One that certainly fits and is the fastest of all needs no more knowledge, only its dry run.
            if prediction.actual_mb + self.doubt * prediction.spread_mb > self.budget_mb and prediction.spread_mb > spread:
                worst, spread = candidate, prediction.spread_mb
            if found >= _LOOK_AHEAD or looked >= 5 * _LOOK_AHEAD:
                break
        return worst

    def _probes_for(self, strategy: Strategy) -> list[Probe]:
        found = probes_for(self.shape, strategy)
        probes = [self._probes.setdefault(key, probe) for key, probe in found.items()]
        return [probe for probe in probes if self._refusal(probe[0]) is None]

    def _balance(self) -> bool:
        """Adds strategies whose stages recompute different numbers of layers, by what is known of memory now. True if
        one of them would come before the last winner."""
        if not self.per_stage:
            return False
        limit = self._time_to_beat()
        found: list[Strategy] = []
        for layout in self._layouts_to_balance(limit):
            doubt = self.doubt * self.model.predict(layout).spread_mb
            low, high = ((self.budget_mb + side) / (1 + self.model.fragments) for side in (-doubt, doubt))
            found += balanced(layout, lambda item, stage: self.model.stage(item, stage)[0], low, high)
        found = [item for item in found if keeps_mixtures(self.shape, item)]
        added = self._consider(found)
        winners = self.result.winners
        return any(len(winners) < self.wanted or item.key < winners[-1].key for item in added)

    def _time_to_beat(self) -> float:
        """Seconds of the last of as many candidates as are searched for that certainly fit; nothing slower can win."""
        certain = 0
        for item in self._runnable():
            prediction = item.prediction = self.model.predict(item.strategy)
            fits = prediction.actual_mb + self.doubt * prediction.spread_mb <= self.budget_mb
            certain += self._fits(item) if item.measurement else fits
            if certain == self.wanted:
                return item.seconds
        return math.inf

    def _layouts_to_balance(self, limit: float) -> list[Strategy]:
        """Layouts that recompute a block of layers, and would be fast enough if they recomputed none."""
        found = dict.fromkeys(
            item.strategy.layout
            for item in self.result.candidates
            if item.strategy.recompute.kind == "block" and item.strategy.chunks == 1 and item.strategy.pp > 1
        )
        return [layout for layout in found if self._seconds(layout) < limit]

    def _seconds(self, strategy: Strategy) -> float:
        shape, operators = self._variant(strategy.options)
        return iteration_seconds(shape, strategy, self.hardware, operators)

    # -- full dry runs

    def _verify(self) -> None:
        result = self.result
        while True:
            passed = self._pass_over()
            if (len(result.winners) < self.wanted and self._find_smallest_if_none()) or self._balance():
                continue
            closest = min(passed, key=lambda item: self._excess(item), default=None)
            result.passed_over = len(passed)
            if closest is None or not result.winners:
                return
            self._say(message("checking the closest one passed over"), closest.strategy.name)
            self._dry_run(closest)
            if not self._fits(closest):
                return
            self.doubt *= 2
            result.winners = sorted([*result.winners, closest], key=lambda item: item.key)[: self.wanted]

    def _pass_over(self) -> list[Candidate]:
        """Goes through the candidates, fastest first, until enough of them fit; returns those it did not dry-run."""
        result = self.result
        result.winners = []
        passed = []
        for candidate in self._runnable():
            if len(result.winners) == self.wanted:
                break
            if candidate.strategy.recompute.each and any(
                won.strategy.layout == candidate.strategy.layout for won in result.winners
            ):
                continue  # it recomputes more than it needs
            if candidate.measurement is None:
                candidate.prediction = self.model.predict(candidate.strategy)
                if self._excess(candidate) > 0:
                    passed.append(candidate)
                    continue
                self._say(message("dry-running"), candidate.strategy.name)
                self._dry_run(candidate)
            if self._fits(candidate):
                result.winners.append(candidate)
        last = result.winners[-1].key if result.winners else None
        return [candidate for candidate in passed if last is None or candidate.key < last]

    def _find_smallest_if_none(self) -> bool:
        """Nothing fits so far: dry-runs the smallest candidate, so that the answer names it. True if it fits."""
        if self.result.winners or not self.result.candidates:
            return False
        open_ones = [item for item in self.result.candidates if item.measurement is None and item.prediction]
        smallest = min(open_ones, key=lambda item: item.prediction.actual_mb if item.prediction else 0, default=None)
        if smallest is not None:
            self._say(message("dry-running the smallest"), smallest.strategy.name)
            self._dry_run(smallest, whole=True)
            if self._fits(smallest):
                self.doubt *= 2
                return True
        known = [item for item in self.result.candidates if item.measurement and item.measurement.error is None]
        known = known or [item for item in self.result.candidates if item.measurement]
        closest = min(
            known, key=lambda item: item.measurement.actual_mb if item.measurement and item.measurement.stages else 1e12
        )
        if closest.measurement and closest.measurement.stages and len(closest.measurement.stages) < closest.strategy.pp:
            self._dry_run(closest, whole=True)
        self.result.closest = closest
        return False

    def _excess(self, candidate: Candidate) -> float:
        """By how much the prediction lies above the budget beyond doubt; below 0 it may fit."""
        prediction = candidate.prediction or self.model.predict(candidate.strategy)
        return prediction.least_mb(self.doubt) - self.budget_mb

    def _fits(self, candidate: Candidate) -> bool:
        measured = candidate.measurement
        if measured is None or measured.error is not None or measured.actual_mb > self.budget_mb:
            return False
        # What the pool does not take must hold the communicators of this layout.
        return measured.actual_mb + measured.outside_mb <= max(self.hardware.total_mb, self.budget_mb)

    def _dry_run(self, candidate: Candidate, whole: bool = False) -> None:
        """Of a strategy that may not fit the worst stages come first (unless `whole`): if they do not, that is enough."""
        strategy = candidate.strategy
        prediction = candidate.prediction = self.model.predict(strategy)
        counted = candidate.measurement.ranks if candidate.measurement else 0
        self.result.dry_runs += candidate.measurement is None
        doubtful = prediction.actual_mb + self.doubt * prediction.spread_mb > self.budget_mb
        if doubtful and not whole and strategy.pp > _FIRST_STAGES:
            worst = sorted(range(strategy.pp), key=lambda stage: -self.model.stage(strategy, stage)[0])[:_FIRST_STAGES]
            candidate.measurement = self._timed(strategy, worst)
        if candidate.measurement is None or whole or self._fits(candidate):
            candidate.measurement = self._timed(strategy)
        self.result.ranks_run += candidate.measurement.ranks - counted
        if candidate.measurement.error is None:
            self._learn_from(self.shape, candidate.strategy, candidate.measurement)
        else:
            self.result.failed.append(candidate)
            self._count_failure(strategy, candidate.measurement)

    def _count_failure(self, strategy: Strategy, measurement: Measurement) -> None:
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            raise DryRunError(f"{_MOST_FAILURES} dry runs in a row failed, the last one {strategy.name}: {measurement.error}")

    def _learn_from(self, shape: ModelShape, strategy: Strategy, measurement: Measurement) -> None:
        self._failures = 0
        self.model.add(
            [
                Observation(shape=shape, strategy=strategy, stage=stage, used_mb=peak.used_mb, actual_mb=peak.actual_mb)
                for stage, peak in measurement.stages.items()
            ]
        )

    def _timed(self, strategy: Strategy, stages: Collection[int] | None = None) -> Measurement:
        started = time.monotonic()
        measurement = self.measure(strategy, stages)
        self._took.append(time.monotonic() - started)
        return measurement

    def _say(self, phase: str, what: str) -> None:
        left = None
        if self._took:
            open_winners = self.wanted - len(self.result.winners)
            left = max(self._took[-3:]) * (open_winners + 1)
        self.on_progress(SearchProgress(phase, what, self.result.probes + self.result.dry_runs, left))
