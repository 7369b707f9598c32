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
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.estimate.lower_bound import state_mb
from mindspeed_dryrun.estimate.regression import Features, LinearBelief, Prior
from mindspeed_dryrun.estimate.stage_parts import (
    ChunkLayers,
    chunk_layers,
    expert_parameters,
    local_experts,
    replicated_parameters,
    routed_rows,
    stage_parameters,
    telling_stages,
)
from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape

_MB = 1024.0 * 1024.0
# What a repeat of the same dry run may differ by, and what the two straight lines cannot follow.
_NOISE_MB, _NOISE_SHARE = 20.0, 0.002
# Fragments on top of the used peak, before any were seen: mean and spread, relative.
_FRAGMENTS = (0.04, 0.03)
# How far strategies that differ in recomputation alone are believed to differ in them before two of them were seen.
_FRAGMENTS_WITHIN = 0.015


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of the worst stage. `spread_mb` is one standard deviation of `actual_mb`, `used_spread_mb` of `used_mb`."""

    used_mb: float
    actual_mb: float
    spread_mb: float
    stage: int
    used_spread_mb: float = math.inf

    def least_mb(self, doubt: float) -> float:
        """What is needed at least, a number of standard deviations away from what is believed: fragments are never below zero."""
        return max(self.actual_mb - doubt * self.spread_mb, self.used_mb - doubt * self.used_spread_mb)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A stage that was dry-run."""

    shape: ModelShape
    strategy: Strategy
    stage: int
    used_mb: float
    actual_mb: float


class MemoryModel:
    """Learns from `add`, answers `predict`."""

    def __init__(self, shape: ModelShape):
        self.shape = shape
        self.observations: list[Observation] = []
        self._belief = self._new_belief()
        self._by_layout: dict[tuple[Strategy, int], tuple[float, float]] = {}

    def _new_belief(self) -> LinearBelief:
        return LinearBelief(lambda name: _prior(name, self.shape))

    def add(self, observations: Sequence[Observation]) -> None:
        """Learns from dry runs and fits again from the start: where a stage peaks may look different with more of them
        known."""
        self.observations.extend(observations)
        for _ in range(4):
            belief = self._new_belief()
            for seen in self.observations:
                rest = seen.used_mb - state_mb(seen.shape, seen.strategy, seen.stage)
                noise = _NOISE_MB + _NOISE_SHARE * seen.used_mb
                belief.observe(self._peak(seen.shape, seen.strategy, seen.stage), rest, noise)
            self._belief = belief
        self._by_layout = _layout_ratios(self.observations)

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
        """What fragments are expected to add to the used peak of a large run, relative."""
        return _fragment_ratio(self.observations, max((item.used_mb for item in self.observations), default=1.0))[0]

    def predict(self, strategy: Strategy) -> Prediction:
        """The worst stage: the first, a middle one or the last, by what they hold."""
        layout = strategy.layout
        found = []
        for stage in telling_stages(self.shape, strategy):
            used, spread = self.stage(strategy, stage)
            ratio, ratio_spread = self._by_layout.get((layout, stage)) or _fragment_ratio(self.observations, used)
            whole = math.hypot(spread * (1 + ratio), used * ratio_spread)
            found.append(
                Prediction(used_mb=used, actual_mb=used * (1 + ratio), spread_mb=whole, stage=stage, used_spread_mb=spread)
            )
        return max(found, key=lambda prediction: prediction.actual_mb)

    def gain(self, target: Strategy, stage: int, probe: Strategy, probe_shape: ModelShape) -> float:
        """How much a dry run of `probe` would tell about the target's worst stage (variance, MB²)."""
        wanted = self._peak(self.shape, target, stage)
        return max(self._belief.gain(wanted, self._peak(probe_shape, probe, probed), _NOISE_MB) for probed in range(probe.pp))

    def residuals(self) -> list[float]:
        """Relative error of the fit on what it has seen."""
        return [self.stage(seen.strategy, seen.stage, seen.shape)[0] / seen.used_mb - 1 for seen in self.observations]


@dataclass(frozen=True, kw_only=True)
class _Units:
    """Sizes of a microbatch's tensors on a rank, MB."""

    hidden: float  # one hidden-sized bf16 tensor, shared out
    routed: float  # what the experts of one mixture keep, as the tensors say
    routed_work: float  # gradients alive at once in their backward pass
    router: float  # a number for each token and expert, in 32 bits
    logits: float
    table: float  # a gradient of the embedding's or the head's weight


@functools.lru_cache(maxsize=1 << 14)
def _units(shape: ModelShape, tp: int, cp: int, micro_batch: int, sequence_parallel: bool, etp: int) -> _Units:
    strategy = Strategy(
        tp=tp, pp=1, dp=1, cp=cp, micro_batch=micro_batch, stages=((1,),), sequence_parallel=sequence_parallel, etp=etp
    )
    tokens = strategy.tokens(shape.seq)
    routed = routed_work = router = 0.0
    if shape.experts:
        rows, inner = routed_rows(shape, strategy), shape.experts.ffn / max(1, etp)
        # Tokens as they come, input and output of the activation function, and the result that the router's weights scale.
        routed = rows * 2.0 * (2 * shape.hidden + (3 if shape.gated else 2) * inner) / _MB
        routed_work = rows * 2.0 * (shape.hidden + (2 if shape.gated else 1) * inner) / _MB
        router = tokens / (tp if sequence_parallel else 1) * shape.experts.number * 4.0 / _MB
    return _Units(
        hidden=tokens * shape.hidden * 2.0 / tp / _MB,
        routed=routed,
        routed_work=routed_work,
        router=router,
        logits=tokens * shape.vocab * 4.0 / tp / _MB,
        table=2.0 * shape.vocabulary_parameters / tp / _MB,
    )


@functools.lru_cache(maxsize=1 << 16)
def _places(shape: ModelShape, strategy: Strategy, stage: int) -> tuple[Features, ...]:
    """Where this stage may peak, and what it holds there beside the states."""
    units = _units(shape, strategy.tp, strategy.cp, strategy.micro_batch, strategy.sequence_parallel, strategy.etp)
    held = strategy.in_flight(stage, strategy.microbatches(shape.global_batch))
    layers = chunk_layers(shape, strategy, stage)
    full = _held(shape, strategy, stage, units, layers, held)
    places = _backward(shape, strategy, units, layers, full)
    if stage == strategy.head_stage:
        more = {"prediction": shape.prediction_layers * (units.hidden * _mixture(shape) + units.routed + units.logits)}
        full = {**full, **(more if shape.prediction_layers else {})}
        places.append({**full, "logits": units.logits, "loss": units.hidden})
        places.append({**full, "gradient of logits": units.logits, "gradient of table": units.table})
    if stage == 0:
        fewer = (max(0.0, held[0] - 1), *held[1:])
        rest = _held(shape, strategy, stage, units, layers, fewer)
        places.append({**rest, "gradient of table": units.table, "embedding": units.hidden})
    places.append({"step constant": 1.0, "step mask": _largest_gradient(shape, strategy, stage) / _MB})
    common = _states(shape, strategy, stage)
    return tuple({**place, **common} for place in places)


def _backward(
    shape: ModelShape, strategy: Strategy, units: _Units, layers: Sequence[ChunkLayers], full: Features
) -> list[dict[str, float]]:
    """In the last layer's backward pass, or in that of a layer that is recomputed: dense, or a mixture."""
    places = []
    if any(chunk.dense for chunk in layers) or not any(chunk.mixtures for chunk in layers):
        # Without a plain layer to go back through first, all that a layer keeps is there again beside its gradients.
        again = any(chunk.again and chunk.again == chunk.dense + chunk.mixtures and chunk.dense for chunk in layers)
        whole = {"layer recomputed whole": units.hidden * _layer(shape)} if again else {}
        places.append({**full, "work": units.hidden * _work(shape), **whole})
    if any(chunk.mixtures for chunk in layers):
        again = any(chunk.again and chunk.again == chunk.dense + chunk.mixtures and chunk.mixtures for chunk in layers)
        whole = {"mixture recomputed whole": units.hidden * _mixture(shape) + units.routed} if again else {}
        work = {"mixture work": units.routed_work, "mixture constant": units.hidden}
        # In 16 bits, before they are added to those in 32 bits; none where the product adds them up itself.
        work["gradient of experts"] = 2.0 * local_experts(shape, strategy) / _MB
        places.append({**full, **work, **whole})
    if strategy.cp > 1:
        for place in places:
            place[f"context work {strategy.cp_algorithm}"] = units.hidden
    return places


def _largest_gradient(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Numbers of the largest parameter that a rank's optimizer steps."""
    dense = shape.hidden * shape.ffn * (2 if shape.gated else 1)
    if stage in (0, strategy.head_stage):
        dense = max(dense, shape.vocabulary_parameters)
    shared = strategy.distributed_optimizer
    largest = dense / strategy.tp / (strategy.replicas if shared else 1)
    if shape.experts:
        each = shape.hidden * shape.experts.ffn * (2 if shape.gated else 1) * shape.experts.number
        local = each / (strategy.ep * max(1, strategy.etp)) / (strategy.expert_replicas if shared else 1)
        largest = max(largest, local)
    return largest


def _states(shape: ModelShape, strategy: Strategy, stage: int) -> dict[str, float]:
    states = state_mb(shape, strategy, stage)
    common = {"states": states}
    if strategy.options:
        common[f"states with {' '.join(strategy.options)}"] = states
    if strategy.distributed_optimizer:
        common["distributed"] = 2.0 * stage_parameters(shape, strategy, stage) / _MB
        if shape.experts:
            common["distributed experts"] = 2.0 * expert_parameters(shape, strategy, stage) / _MB
    if strategy.tp > 1 and (shape.experts or shape.latent):
        common["replicated"] = 6.0 * replicated_parameters(shape, strategy, stage) * (1 - 1 / strategy.tp) / _MB
    return common


def _held(
    shape: ModelShape, strategy: Strategy, stage: int, units: _Units, layers: Sequence[ChunkLayers], held: Sequence[float]
) -> dict[str, float]:
    """Activations of the given microbatches of each chunk, and what comes with them."""
    kind = "selective" if strategy.recompute.kind == "selective" else "whole"
    if strategy.options:
        kind += f" with {' '.join(strategy.options)}"
    dense = mixtures = again = passes = 0.0
    empty, unit = strategy.recomputed_noop(stage), units.hidden
    for chunk, microbatches in enumerate(held):
        dense += microbatches * (layers[chunk].dense - layers[chunk].dense_again)
        mixtures += microbatches * (layers[chunk].mixtures - layers[chunk].mixtures_again)
        again += microbatches * (layers[chunk].again + empty[chunk])
        passes += microbatches
    plain = dense + mixtures
    found = {"constant": 1.0, "layer recomputed": again * unit}
    if dense:
        found |= {f"layer {kind}": dense * unit, f"layer {kind} tp{strategy.tp}": dense * unit}
    if mixtures:
        found |= {f"mixture {kind}": mixtures * unit, f"mixture {kind} tp{strategy.tp}": mixtures * unit}
        found |= {f"routed {kind}": mixtures * units.routed, "router": mixtures * units.router}
        found[f"routed {kind} {strategy.dispatcher} etp{strategy.etp > 1}"] = mixtures * units.routed
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


def _attention(shape: ModelShape) -> float:
    """What attention and the norms of a layer keep, in hidden-sized tensors: inputs and outputs of two norms; queries, keys,
    values and the result of attention with its sums in 32 bits."""
    sums = 32.0 * shape.heads / shape.hidden
    latent = shape.latent
    if latent:
        ranks = 2 * (latent.query_rank + latent.key_rank) + latent.rope
        heads = shape.heads * (2 * (latent.nope + latent.rope) + latent.nope + 3 * latent.value)
        return 4 + sums + (ranks + heads) / shape.hidden
    width = shape.head_dim * shape.heads / shape.hidden
    grouped = 2 * width * shape.query_groups / shape.heads
    norms = 4 + (2 * width + grouped if shape.qk_norm else 0)
    return norms + 2 * width + grouped + sums


def _layer(shape: ModelShape) -> float:
    """What a dense layer keeps: attention, and input and output of the activation function."""
    return _attention(shape) + (3 if shape.gated else 2) * shape.ffn / shape.hidden


def _mixture(shape: ModelShape) -> float:
    """What a mixture keeps beside its routed experts."""
    shared = shape.experts.shared_ffn if shape.experts else 0
    return _attention(shape) + (3 if shape.gated else 2) * shared / shape.hidden


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
        "distributed experts": Prior(0.0, 0.03),
        "replicated": Prior(1.0, 0.5),
        "layer recomputed": Prior(1.0, 0.2),
        "layer recomputed whole": Prior(1.0, 0.2),
        "mixture recomputed whole": Prior(1.0, 0.3),
        "router": Prior(3.0, 3.0),
        "work": Prior(1.0, 0.4),
        "mixture work": Prior(1.0, 0.5),
        "mixture constant": Prior(1.0, 2.0),
        "gradient of experts": Prior(0.5, 0.5),
        "prediction": Prior(1.0, 0.5),
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
    return fixed.get(name) or _prior_by_kind(name, shape)


def _prior_by_kind(name: str, shape: ModelShape) -> Prior:
    """Coefficients that come in kinds: of a layer, a mixture, a way of context parallelism, an option."""
    # An option may save most of what a layer keeps; flash attention keeps no scores: selective saves its inputs once more.
    doubt, more = (0.5 if " with " in name else 1.0), (0.9 if "selective" in name else 0.0)
    part, *rest = name.split(" ", 1)
    sizes = {"layer": _layer(shape), "mixture": _mixture(shape), "routed": 1.0}
    if name.startswith("context layer"):  # Ulysses keeps what it has exchanged, a ring nothing more
        return Prior(1.2 if "ulysses" in name else 0.2, 1.5)
    if name.startswith("context work"):
        return Prior(0.0, 10.0)
    if part == "states":
        return Prior(0.0, 0.3)
    size = sizes[part]
    special = any(" tp" in item or " etp" in item for item in rest)  # beside what all of a kind have in common
    if special:
        return Prior(0.0, (0.1 if part == "routed" else 0.03) * size)
    spread = {"layer": 0.1, "mixture": 0.2, "routed": 0.25}[part]
    return Prior(size + (more if part != "routed" else 0.0), spread * size if doubt == 1.0 else 0.4 * size)


def _fragment_ratio(seen: Sequence[Observation], used_mb: float) -> tuple[float, float]:
    """Mean and spread of actual over used at this size, the prior counted as four observations. A smaller run tells less:
    a fragment that is a tenth of a small peak is none of a large one."""
    mean, spread = _FRAGMENTS
    weighed = [(min(1.0, item.used_mb / used_mb) ** 2, item.actual_mb / item.used_mb - 1) for item in seen]
    count = sum(weight for weight, _ in weighed) + 4
    centre = (4 * mean + sum(weight * ratio for weight, ratio in weighed)) / count
    variance = (4 * spread**2 + sum(weight * (ratio - centre) ** 2 for weight, ratio in weighed)) / count
    return centre, math.sqrt(variance)


def _layout_ratios(seen: Sequence[Observation]) -> dict[tuple[Strategy, int], tuple[float, float]]:
    """Mean and spread of actual over used of each stage of a layout that was seen, whatever it recomputed."""
    groups: dict[tuple[Strategy, int], list[float]] = {}
    for item in seen:
        groups.setdefault((item.strategy.layout, item.stage), []).append(item.actual_mb / item.used_mb - 1)
    means = {key: sum(ratios) / len(ratios) for key, ratios in groups.items()}
    squares = sum((ratio - means[key]) ** 2 for key, ratios in groups.items() for ratio in ratios)
    freedom = sum(len(ratios) - 1 for ratios in groups.values())
    variance = (4 * _FRAGMENTS_WITHIN**2 + squares) / (4 + freedom)
    return {key: (means[key], math.sqrt(variance * (1 + 1 / len(ratios)))) for key, ratios in groups.items()}
