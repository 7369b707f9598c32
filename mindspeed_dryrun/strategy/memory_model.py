"""Peak memory of every stage, predicted from a few dry runs.

Memory is linear in what a stage holds (layers, microbatches in flight, tokens), so a handful of small dry runs gives
the coefficients and large ones are extrapolated. A stage peaks in one of two places: in the backward pass after the
warm-up, or in the optimizer step, which holds no activations but works on the largest parameter. Both are linear; the
peak is the larger. Each coefficient starts from what the layer's tensors say and is moved by what the dry runs count;
the spread that is left, and the residual that is seen, say how far a prediction can be trusted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_dryrun.strategy.bound import stage_parameters, state_mb, token_share
from mindspeed_dryrun.strategy.linear import Features, LinearBelief, Prior
from mindspeed_dryrun.strategy.shape import ModelShape
from mindspeed_dryrun.strategy.strategy import Strategy

_MB = 1024.0 * 1024.0
# What a repeat of the same dry run may differ by, and what the two straight lines cannot follow.
_NOISE_MB, _NOISE_SHARE = 20.0, 0.002
# Fragments on top of the used peak, before any were seen: mean and spread, relative.
_FRAGMENTS = (0.04, 0.03)


@dataclass(frozen=True)
class Prediction:
    """Of the worst stage. `spread_mb` is one standard deviation of `actual_mb`."""

    used_mb: float
    actual_mb: float
    spread_mb: float
    stage: int


@dataclass(frozen=True)
class Observation:
    """A stage that was dry-run."""

    shape: ModelShape
    strategy: Strategy
    stage: int
    used_mb: float
    actual_mb: float


class MemoryModel:
    """Learns from `add`, answers `predict`. Strategies and probes whose features it must know are named at the start."""

    def __init__(self, shape: ModelShape, strategies: Iterable[Strategy]):
        self.shape = shape
        self.observations: list[Observation] = []
        self._names: dict[str, Prior] = {}
        for strategy in strategies:
            for stage in {0, strategy.pp // 2, strategy.pp - 1}:
                for features in _features(shape, strategy, stage):
                    for name in features:
                        if name not in self._names:
                            self._names[name] = _prior(name, shape)
        self._backward = LinearBelief(self._names)
        self._step = LinearBelief(self._names)
        self._fragments = _FRAGMENTS

    def add(self, observations: Sequence[Observation]) -> None:
        """Learns from dry runs and fits again from the start: which of the two peaks a stage has may look different
        with more of them known."""
        self.observations.extend(observations)
        for _ in range(4):
            belief = (LinearBelief(self._names), LinearBelief(self._names))
            for seen in self.observations:
                backward, step = _features(seen.shape, seen.strategy, seen.stage)
                in_step = self._step.predict(step)[0] > self._backward.predict(backward)[0]
                rest = seen.used_mb - state_mb(seen.shape, seen.strategy, seen.stage)
                noise = _NOISE_MB + _NOISE_SHARE * seen.used_mb
                belief[in_step].observe(step if in_step else backward, rest, noise)
            self._backward, self._step = belief
        self._fragments = _fragment_ratio(self.observations)

    def stage(self, strategy: Strategy, stage: int, shape: ModelShape | None = None) -> tuple[float, float]:
        """Used peak of one stage and its spread, MB."""
        shape = shape or self.shape
        backward, step = _features(shape, strategy, stage)
        mean, spread = max(self._backward.predict(backward), self._step.predict(step))
        used = mean + state_mb(shape, strategy, stage)
        return used, math.hypot(spread, _NOISE_MB + _NOISE_SHARE * used)

    @property
    def fragments(self) -> float:
        """What fragments are expected to add to the used peak, relative."""
        return self._fragments[0]

    def predict(self, strategy: Strategy) -> Prediction:
        """The worst stage: the first, a middle one or the last, by what they hold."""
        used, spread, stage = max((*self.stage(strategy, stage), stage) for stage in _distinct(strategy))
        ratio, ratio_spread = self._fragments
        return Prediction(
            used, used * (1 + ratio), math.hypot(spread * (1 + ratio), used * ratio_spread), stage
        )

    def gain(self, target: Strategy, stage: int, probe: Strategy, probe_shape: ModelShape) -> float:
        """How much a dry run of `probe` would tell about the target's worst stage (variance, MB²)."""
        backward, step = _features(self.shape, target, stage)
        in_step = self._step.predict(step)[0] > self._backward.predict(backward)[0]
        belief, wanted = (self._step, step) if in_step else (self._backward, backward)
        total = 0.0
        for probed in range(probe.pp):
            features = _features(probe_shape, probe, probed)[in_step]
            total = max(total, belief.gain(wanted, features, _NOISE_MB))
        return total

    def residuals(self) -> list[float]:
        """Relative error of the fit on what it has seen."""
        return [
            self.stage(seen.strategy, seen.stage, seen.shape)[0] / seen.used_mb - 1 for seen in self.observations
        ]


def _distinct(strategy: Strategy) -> Sequence[int]:
    """Stages that can be the worst one: later middle stages hold fewer microbatches of as many layers."""
    if strategy.pp <= 2 or strategy.recompute.each:
        return range(strategy.pp)
    found = {0, strategy.pp - 1}
    most = -1
    for stage in range(1, strategy.pp - 1):
        layers = sum(strategy.stages[stage])
        if layers > most:
            most = layers
            found.add(stage)
    return sorted(found)


@functools.lru_cache(maxsize=1 << 16)
def _features(shape: ModelShape, strategy: Strategy, stage: int) -> tuple[Features, Features]:
    """What the peak in the backward pass and the peak in the optimizer step are made of, beside the states."""
    tokens = token_share(shape, strategy)
    unit = tokens * shape.hidden * 2.0 / strategy.tp / _MB  # one hidden-sized bf16 tensor, shared out
    kind = "selective" if strategy.recompute.kind == "selective" else "whole"
    held = strategy.in_flight(stage, strategy.microbatches(shape.global_batch))
    plain = again = passes = 0.0
    chunks, recomputed, empty = strategy.stages[stage], strategy.recomputed(stage), strategy.recomputed_noop(stage)
    for chunk, microbatches in enumerate(held):
        plain += microbatches * (chunks[chunk] - recomputed[chunk])
        again += microbatches * (recomputed[chunk] + empty[chunk])
        passes += microbatches
    backward = {
        "constant": 1.0,
        "states": state_mb(shape, strategy, stage),
        f"layer {kind}": plain * unit,
        f"layer {kind} tp{strategy.tp}": plain * unit,
        "layer recomputed": again * unit,
        "work recomputed" if any(recomputed) else f"work {kind}": unit,
        "microbatch": passes * unit,
    }
    if stage == 0:
        backward["first"] = unit
    if stage == strategy.pp - 1:
        backward["logits"] = tokens * shape.vocab * 4.0 / strategy.tp / _MB
        backward["last"] = unit
    if strategy.chunks > 1:
        backward["interleaved layer"] = plain * unit
        backward["interleaved microbatch"] = passes * unit
    if strategy.tp > 1 and not strategy.sequence_parallel:
        backward["unshared layer"] = plain * unit * strategy.tp
        backward["unshared recomputed"] = again * unit * strategy.tp
        backward["unshared work"] = unit * strategy.tp
    if strategy.cp > 1:
        backward[f"context layer {strategy.cp_algorithm}"] = plain * unit
        backward[f"context work {strategy.cp_algorithm}"] = unit
    largest = shape.hidden * shape.ffn * (2 if shape.gated else 1)
    if stage in (0, strategy.pp - 1):
        largest = max(largest, shape.vocabulary_parameters)
    step = {
        "step constant": 1.0,
        "states": state_mb(shape, strategy, stage),
        "step largest": 4.0 * largest / strategy.tp / _MB,
    }
    if strategy.distributed_optimizer:
        backward["distributed"] = step["distributed"] = 2.0 * stage_parameters(shape, strategy, stage) / _MB
    return backward, step


def _prior(name: str, shape: ModelShape) -> Prior:
    """In units of one hidden-sized tensor a layer saves: inputs and outputs of two norms, of attention and its
    projections, of the activation function."""
    width = shape.head_dim * shape.heads / shape.hidden
    grouped = 2 * width * shape.query_groups / shape.heads
    layer = 4 + 2 * width + grouped + (3 if shape.gated else 2) * shape.ffn / shape.hidden
    fixed = {
        "constant": Prior(50.0, 300.0),
        "states": Prior(0.0, 0.02),
        "layer whole": Prior(layer, 0.3 * layer),
        "layer selective": Prior(layer, 0.3 * layer),
        "layer recomputed": Prior(1.0, 0.5),
        "work whole": Prior(4.0, 8.0),
        "work selective": Prior(4.0, 8.0),
        "work recomputed": Prior(1.3 * layer, 0.7 * layer),
        "microbatch": Prior(0.5, 1.0),
        "first": Prior(1.0, 3.0),
        "logits": Prior(1.5, 0.7),
        "last": Prior(3.0, 5.0),
        "interleaved layer": Prior(0.0, 0.05 * layer),
        "interleaved microbatch": Prior(0.5, 1.0),
        "unshared layer": Prior(4.0, 3.0),
        "unshared recomputed": Prior(1.0, 0.5),
        "unshared work": Prior(2.0, 4.0),
        "step constant": Prior(50.0, 200.0),
        "step largest": Prior(1.0, 0.7),
        "distributed": Prior(0.0, 0.5),
    }
    if name in fixed:
        return fixed[name]
    if name.startswith("context layer"):
        return Prior(2.0, 4.0)
    if name.startswith("context work"):
        return Prior(0.0, 10.0)
    return Prior(0.0, 0.06 * layer)  # of one tensor-parallel size


def _fragment_ratio(seen: Sequence[Observation]) -> tuple[float, float]:
    """Mean and spread of actual over used, the prior counted as four observations."""
    mean, spread = _FRAGMENTS
    ratios = [item.actual_mb / item.used_mb - 1 for item in seen]
    count = len(ratios) + 4
    centre = (4 * mean + sum(ratios)) / count
    variance = (4 * spread**2 + sum((ratio - centre) ** 2 for ratio in ratios)) / count
    return centre, math.sqrt(variance)
