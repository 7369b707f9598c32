"""Peak memory of every stage, predicted from a few dry runs.

Memory is linear in what a stage holds (layers, microbatches in flight, tokens), so a handful of small dry runs gives
the coefficients and large ones are extrapolated. A stage peaks in one of five places, each a line of its own, and its
peak is the largest of them:

- backward: after the warm-up, in the last layer, or in one that is recomputed for it;
- loss: on the last stage, with the logits in 16 and 32 bits;
- head: its backward pass, with the gradient of the logits and that of the output layer's weight;
- embedding: its backward pass on the first stage, with the gradient of the whole table, when one microbatch's
  activations are gone;
- step: no activations, but a mask over the largest gradient, whose zeros are counted.

Each coefficient starts from what the tensors say and is moved by what the dry runs count; the spread that is left, and
the residual that is seen, say how far a prediction can be trusted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_dryrun.estimate.lower_bound import stage_parameters, state_mb, token_share
from mindspeed_dryrun.estimate.regression import Features, LinearBelief, Prior
from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape

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
                for place in _places(shape, strategy, stage):
                    for name in place:
                        if name not in self._names:
                            self._names[name] = _prior(name, shape)
        self._belief = LinearBelief(self._names)
        self._fragments = _FRAGMENTS

    def add(self, observations: Sequence[Observation]) -> None:
        """Learns from dry runs and fits again from the start: where a stage peaks may look different with more of them
        known."""
        self.observations.extend(observations)
        for _ in range(4):
            belief = LinearBelief(self._names)
            for seen in self.observations:
                rest = seen.used_mb - state_mb(seen.shape, seen.strategy, seen.stage)
                noise = _NOISE_MB + _NOISE_SHARE * seen.used_mb
                belief.observe(self._peak(seen.shape, seen.strategy, seen.stage), rest, noise)
            self._belief = belief
        self._fragments = _fragment_ratio(self.observations)

    def _peak(self, shape: ModelShape, strategy: Strategy, stage: int) -> Features:
        """The place where this stage is believed to peak."""
        return max(_places(shape, strategy, stage), key=self._belief.mean_of)

    def stage(self, strategy: Strategy, stage: int, shape: ModelShape | None = None) -> tuple[float, float]:
        """Used peak of one stage and its spread, MB."""
        shape = shape or self.shape
        mean, spread = self._belief.predict(self._peak(shape, strategy, stage))
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
        wanted = self._peak(self.shape, target, stage)
        return max(
            self._belief.gain(wanted, self._peak(probe_shape, probe, probed), _NOISE_MB) for probed in range(probe.pp)
        )

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
def _places(shape: ModelShape, strategy: Strategy, stage: int) -> tuple[Features, ...]:
    """Where this stage may peak, and what it holds there beside the states."""
    tokens = token_share(shape, strategy)
    unit = tokens * shape.hidden * 2.0 / strategy.tp / _MB  # one hidden-sized bf16 tensor, shared out
    table = 2.0 * shape.vocabulary_parameters / strategy.tp / _MB  # a gradient of the embedding's or the head's weight
    logits = tokens * shape.vocab * 4.0 / strategy.tp / _MB
    held = strategy.in_flight(stage, strategy.microbatches(shape.global_batch))
    full = _held(strategy, stage, unit, held)
    again = any(
        recomputed and recomputed == layers
        for recomputed, layers in zip(strategy.recomputed(stage), strategy.stages[stage], strict=True)
    )
    # Without a plain layer to go back through first, all that a layer keeps is there again beside its gradients.
    backward = {**full, "work": unit * _work(shape), **({"layer recomputed whole": unit * _layer(shape)} if again else {})}
    if strategy.cp > 1:
        backward[f"context work {strategy.cp_algorithm}"] = unit
    places = [backward]
    if stage == strategy.pp - 1:
        places.append({**full, "logits": logits, "loss": unit})
        places.append({**full, "gradient of logits": logits, "gradient of table": table})
    if stage == 0:
        fewer = (max(0, held[0] - 1), *held[1:])
        places.append({**_held(strategy, stage, unit, fewer), "gradient of table": table, "embedding": unit})
    largest = shape.hidden * shape.ffn * (2 if shape.gated else 1)
    if stage in (0, strategy.pp - 1):
        largest = max(largest, shape.vocabulary_parameters)
    shares = strategy.dp * strategy.cp if strategy.distributed_optimizer else 1
    places.append({"step constant": 1.0, "step mask": largest / strategy.tp / shares / _MB})
    states = state_mb(shape, strategy, stage)
    common = {"states": states}
    if strategy.distributed_optimizer:
        common["distributed"] = 2.0 * stage_parameters(shape, strategy, stage) / _MB
    return tuple({**place, **common} for place in places)


def _held(strategy: Strategy, stage: int, unit: float, held: Sequence[int]) -> dict[str, float]:
    """Activations of so many microbatches of each chunk, and what comes with them."""
    kind = "selective" if strategy.recompute.kind == "selective" else "whole"
    plain = again = passes = 0.0
    layers, recomputed, empty = strategy.stages[stage], strategy.recomputed(stage), strategy.recomputed_noop(stage)
    for chunk, microbatches in enumerate(held):
        plain += microbatches * (layers[chunk] - recomputed[chunk])
        again += microbatches * (recomputed[chunk] + empty[chunk])
        passes += microbatches
    found = {
        "constant": 1.0,
        f"layer {kind}": plain * unit,
        f"layer {kind} tp{strategy.tp}": plain * unit,
        "layer recomputed": again * unit,
    }
    if stage > 0:
        found["received"] = passes * unit
    if strategy.tp > 1:
        found["gathered"] = unit
    if strategy.chunks > 1:
        found["interleaved layer"] = plain * unit
        found["interleaved microbatch"] = passes * unit
    if strategy.tp > 1 and not strategy.sequence_parallel:
        found["unshared layer"] = plain * unit * (strategy.tp - 1)
        found["unshared recomputed"] = again * unit * (strategy.tp - 1)
        found["unshared work"] = unit * (strategy.tp - 1)
    if strategy.cp > 1:
        found[f"context layer {strategy.cp_algorithm}"] = plain * unit
    return found


def _layer(shape: ModelShape) -> float:
    """What a layer keeps, in hidden-sized tensors: inputs and outputs of two norms; queries, keys, values and the result
    of attention with its sums in 32 bits; input and output of the activation function."""
    width = shape.head_dim * shape.heads / shape.hidden
    grouped = 2 * width * shape.query_groups / shape.heads
    sums = 32.0 * shape.heads / shape.hidden
    norms = 4 + (2 * width + grouped if shape.qk_norm else 0)
    return norms + 2 * width + grouped + sums + (3 if shape.gated else 2) * shape.ffn / shape.hidden


def _work(shape: ModelShape) -> float:
    """Gradients alive at once in a layer's backward pass: of the activation function's input and of the layer's output."""
    return (2 if shape.gated else 1) * shape.ffn / shape.hidden + 1


def _prior(name: str, shape: ModelShape) -> Prior:
    """What is believed of a coefficient before any dry run."""
    layer = _layer(shape)
    fixed = {
        "constant": Prior(60.0, 80.0),
        "states": Prior(0.0, 0.005),
        "distributed": Prior(0.0, 0.03),
        "layer whole": Prior(layer, 0.1 * layer),
        "layer selective": Prior(layer + 0.9, 0.1 * layer),  # flash attention keeps no scores: its inputs once more
        "layer recomputed": Prior(1.0, 0.2),
        "layer recomputed whole": Prior(1.0, 0.2),
        "work": Prior(1.0, 0.4),
        "received": Prior(1.0, 0.5),
        "gathered": Prior(2.0, 3.0),
        "logits": Prior(1.5, 0.3),
        "loss": Prior(2.0, 3.0),
        "gradient of logits": Prior(0.5, 0.2),
        "gradient of table": Prior(1.0, 0.1),
        "embedding": Prior(1.0, 2.0),
        "interleaved layer": Prior(0.0, 0.03 * layer),
        "interleaved microbatch": Prior(0.5, 1.0),
        "unshared layer": Prior(4.0, 2.0),
        "unshared recomputed": Prior(1.0, 0.5),
        "unshared work": Prior(2.0, 4.0),
        "step constant": Prior(100.0, 150.0),
        "step mask": Prior(1.0, 1.5),
    }
    if name in fixed:
        return fixed[name]
    if name.startswith("context layer"):  # Ulysses keeps what it has exchanged, a ring nothing more
        return Prior(1.2 if "ulysses" in name else 0.2, 1.5)
    if name.startswith("context work"):
        return Prior(0.0, 10.0)
    return Prior(0.0, 0.03 * layer)  # of one tensor-parallel size


def _fragment_ratio(seen: Sequence[Observation]) -> tuple[float, float]:
    """Mean and spread of actual over used, the prior counted as four observations."""
    mean, spread = _FRAGMENTS
    ratios = [item.actual_mb / item.used_mb - 1 for item in seen]
    count = len(ratios) + 4
    centre = (4 * mean + sum(ratios)) / count
    variance = (4 * spread**2 + sum((ratio - centre) ** 2 for ratio in ratios)) / count
    return centre, math.sqrt(variance)
