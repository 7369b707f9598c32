"""How long one iteration takes: computation, communication, pipeline bubble, recomputation, optimizer.

Everything is counted from the model's shape, the operators that the trainer runs and the strategy, and divided by the
hardware's figures. What is fitted is named in the hardware file (`fitted`), nothing here is; docs/time_model.md shows
the errors. `calibrate` scales the hardware's figures, not this model.

1F1B with stages of time t: every microbatch passes the slowest stage, the others are passed once:
`m·max(t) + Σ others`. With v chunks a stage the fill shrinks to `Σ others / v`, and sends are overlapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.estimate import volumes
from mindspeed_dryrun.estimate.layer_time import (
    Case,
    LayerTime,
    Pass,
    gather_seconds,
    layer_time,
    link_rate,
    matmul_seconds,
)
from mindspeed_dryrun.estimate.operators import Operators, read_operators
from mindspeed_dryrun.estimate.stage_parts import (
    ChunkLayers,
    chunk_layers,
    expert_parameters,
    mixture_layers,
    replicated_parameters,
    telling_stages,
)
from mindspeed_dryrun.estimate.strategy import Strategy, read_strategy
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape

# Traffic of the optimizer step per parameter: gradient twice (norm, step), master weight and both moments read and
# written, bf16 weight written, gradient cleared; bytes.
_STEP_BYTES = 4 + 4 + 8 + 8 + 8 + 2 + 4
# Traffic of Megatron's vocabulary-parallel loss per logit, bytes: cast to fp32 (6), maximum (4), difference (8),
# exponential (8), sum (4), quotient (8); backward the product with the gradient (8) and the cast back (6).
# Megatron-LM, core/tensor_parallel/cross_entropy.py.
# `VocabParallelCrossEntropy`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/tensor_parallel/cross_entropy.py#L16
_LOSS_BYTES = 52
# Capped logits, bf16: quotient, tanh, product, and their gradients (MindSpeed-LLM, core/models/gpt/gpt_model.py).
# `output_logit_softcapping`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/models/gpt/gpt_model.py#L279
_CAP_BYTES = 26

# A release of MindSpeed-LLM. Before 2.2 its throughput line counted no-op layers, and attention in full.
# `num_floating_point_operations_wrapper`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/training.py#L832
Release = tuple[int, int]
NEWEST: Release = (2, 2)
USUAL = Operators()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One iteration, in seconds. `low_s` and `high_s` are the ends of the error band."""

    iteration_s: float
    low_s: float
    high_s: float
    compute_s: float  # of the busiest stage
    communication_s: float  # waited for, on the busiest stage, with gradients and sends
    bubble_s: float
    optimizer_s: float
    tokens_per_s: float
    tflops_per_card: float  # as the trainer's throughput line: model operations, recomputation not counted
    tokens_per_s_per_card: float = 0.0

    @property
    def bubble_share(self) -> float:
        return self.bubble_s / self.iteration_s

    @property
    def communication_share(self) -> float:
        return self.communication_s / self.iteration_s

    def figures(self) -> dict[str, float]:
        """All of it, rounded."""
        return {name: round(value, 4) for name, value in dataclasses.asdict(self).items()}

    def to_json(self) -> dict[str, float]:
        """`time` of a report and of a plan."""
        names = ("iteration_s", "low_s", "high_s", "tokens_per_s_per_card", "tflops_per_card")
        return {name: value for name, value in self.figures().items() if name in names}


@dataclass(frozen=True)
class _Iteration:
    """Seconds of one iteration: of the busiest stage, of the others' first microbatch, and of the end."""

    compute: float
    waiting: float
    bubble: float
    step: float

    @property
    def total(self) -> float:
        return self.compute + self.waiting + self.bubble + self.step


def predict_time(arguments: Sequence[str], world_size: int, hardware: Hardware, release: Release = NEWEST) -> Estimate:
    """One iteration of the job that a trainer's arguments spell out: dense, mixture of experts or multi-latent
    attention, either back end. Needs no dry run."""
    shape, strategy = read_shape(arguments), read_strategy(arguments, world_size)
    return estimate(shape, strategy, hardware, release, read_operators(arguments))


def estimate(
    shape: ModelShape,
    strategy: Strategy,
    hardware: Hardware,
    release: Release = NEWEST,
    operators: Operators = USUAL,
) -> Estimate:
    """The time of one iteration with its error band. `release` is that of the trainer whose throughput line is meant.

    The band is the hardware file's error where it was measured on jobs of this kind, else both ends of every figure.
    """
    case = Case(shape, strategy, hardware, operators)
    iteration = _iteration(case)
    seconds = iteration.total
    error = _error(shape, strategy, hardware)
    least = error or hardware.error or 0.0
    low, high = seconds / (1 + least), seconds * (1 + least)
    if error is None:
        low = min(low, _iteration(dataclasses.replace(case, hardware=hardware.at("high"))).total)
        high = max(high, _iteration(dataclasses.replace(case, hardware=hardware.at("low"))).total)
    tokens = shape.global_batch * shape.seq / seconds
    return Estimate(
        iteration_s=seconds,
        low_s=low,
        high_s=high,
        compute_s=iteration.compute,
        communication_s=iteration.waiting,
        bubble_s=iteration.bubble,
        optimizer_s=iteration.step,
        tokens_per_s=tokens,
        tflops_per_card=logged_flops(shape, strategy, release, operators) / seconds / strategy.world / 1e12,
        tokens_per_s_per_card=tokens / strategy.world,
    )


def _error(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> float | None:
    """The hardware file's error for jobs of this kind; None where it was not measured on any."""
    if shape.experts is None:
        return hardware.error if shape.latent is None else None
    # The published mixtures exchange tokens inside a node.
    stride = 1 if strategy.etp < strategy.tp else strategy.tp
    return hardware.mixture_error if strategy.ep * stride <= hardware.link_cards else None


def trust(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> str:
    """How far a predicted time can be trusted, in a few words."""
    error = _error(shape, strategy, hardware)
    if hardware.error is None or (error is not None and shape.experts is None):
        return hardware.trust
    if error is not None:
        return message(f"not fitted to mixtures of experts, published ones are met within ±{100 * error:.0f}%")
    return message("not fitted to jobs like this one: both ends of every figure")


def logged_flops(shape: ModelShape, strategy: Strategy, release: Release, operators: Operators = USUAL) -> float:
    """Operations of one iteration, as this release of MindSpeed-LLM counts them for its throughput line."""
    if shape.experts or shape.latent:
        return _active_flops(shape, strategy)
    if release >= NEWEST:
        return shape.iteration_flops()
    return shape.iteration_flops(len(strategy.noop_layers), causal=False)


def _active_flops(shape: ModelShape, strategy: Strategy) -> float:
    """Six operations per token and parameter that it meets, causal attention at half."""
    head, experts = 2 * shape.head_dim, shape.experts
    if shape.latent:
        head = shape.latent.nope + shape.latent.rope + shape.latent.value
    mixtures = sum(mixture_layers(shape, strategy, stage) for stage in range(strategy.pp))
    met = shape.shared_parameters + (experts.topk * shape.mlp_parameters(experts.ffn) if experts else 0)
    scores = 3.0 * shape.seq * shape.heads * head
    layers = shape.layers * (6 * shape.attention_parameters + scores)
    layers += 6 * (mixtures * met + (shape.layers - mixtures) * shape.mlp_parameters(shape.ffn))
    return float(shape.global_batch * shape.seq) * (layers + 6.0 * shape.vocabulary_parameters)


def iteration_seconds(shape: ModelShape, strategy: Strategy, hardware: Hardware, operators: Operators = USUAL) -> float:
    """The typical time alone, without the band."""
    return _iteration(Case(shape, strategy, hardware, operators)).total


def chunk_passes(case: Case, stage: int) -> list[tuple[Pass, Pass]]:
    """Forward and backward pass (with what it computes again) of one microbatch through each chunk's layers."""
    layers = _layers(case)
    return [_chunk_pass(case, chunk, *layers) for chunk in chunk_layers(case.shape, case.strategy, stage)]


def _layers(case: Case) -> tuple[LayerTime, LayerTime]:
    """A dense layer and a mixture."""
    dense = _layer(case, mixture=False)
    return dense, _layer(case, mixture=True) if case.shape.experts else dense


def _chunk_pass(case: Case, chunk: ChunkLayers, dense: LayerTime, mixture: LayerTime) -> tuple[Pass, Pass]:
    forward, backward = Pass(), Pass()
    for layer, count, again in (
        (dense, chunk.dense, chunk.dense_again),
        (mixture, chunk.mixtures, chunk.mixtures_again),
    ):
        if not count:
            continue
        forward = forward + layer.forward.times(count)
        backward = backward + layer.backward.times(count) + layer.forward.times(again)
        if case.strategy.recompute.kind == "selective":
            backward = backward + layer.attention.times(count - again)
        if case.operators.recomputed_activation:
            backward = backward + layer.activation.times(count - again)
    return forward, backward


def _layer(case: Case, mixture: bool) -> LayerTime:
    # Most strategies of a search share their layer's time with hundreds of others.
    own = case.strategy
    sharing = Strategy(
        tp=own.tp, pp=1, dp=1, cp=own.cp, micro_batch=own.micro_batch, stages=((1,),), sequence_parallel=own.sequence_parallel,
        cp_algorithm=own.cp_algorithm, ulysses=own.ulysses, ep=own.ep, etp=own.etp, dispatcher=own.dispatcher,
    )  # fmt: skip
    return layer_time(Case(case.shape, sharing, case.hardware, case.operators), mixture)


def _iteration(case: Case) -> _Iteration:
    strategy = case.strategy
    layers = _layers(case)
    known: dict[ChunkLayers, Pass] = {}  # most stages are alike
    stages = []
    for index in range(strategy.pp):
        time = stage_extras(case, index)
        for chunk in chunk_layers(case.shape, strategy, index):
            if chunk not in known:
                forward, backward = _chunk_pass(case, chunk, *layers)
                known[chunk] = forward + backward
            time = time + known[chunk]
        stages.append(time)
    busiest = max(stages, key=lambda stage: stage.total)
    fill = (sum(stage.total for stage in stages) - busiest.total) / strategy.chunks / case.operators.sequence_pieces
    gradients, step = end_of_iteration(case, busiest.total)
    microbatches = strategy.microbatches(case.shape.global_batch)
    return _Iteration(microbatches * busiest.compute, microbatches * busiest.waiting + gradients, fill, step)


def end_of_iteration(case: Case, microbatch: float) -> tuple[float, float]:
    """Seconds of the gradients' reduction that nothing hides, and of the optimizer step. `microbatch` is the time of the
    last microbatch: its backward pass hides an overlapped reduction, the next forward pass an overlapped gather."""
    ends = [_stage_end(case, stage, microbatch) for stage in telling_stages(case.shape, case.strategy)]
    return max(gradients for gradients, _ in ends), max(step for _, step in ends)


def _stage_end(case: Case, stage: int, microbatch: float) -> tuple[float, float]:
    strategy, operators = case.strategy, case.operators
    gradients = step = 0.0
    whole = replicated_parameters(case.shape, strategy, stage) if strategy.tp > 1 else 0.0
    if strategy.sequence_parallel and whole:  # each tensor-parallel rank has seen its own tokens only
        gradients += 2 * gather_seconds(4.0 * whole, strategy.tp, 1, case.hardware)
    for parameters, size, stride in (
        (volumes.dense_parameters(case.shape, strategy, stage), strategy.replicas, strategy.tp),
        (expert_parameters(case.shape, strategy, stage), strategy.expert_replicas, strategy.ep * max(1, strategy.etp)),
    ):
        reduce = gather_seconds(4.0 * parameters, size, stride, case.hardware) if parameters else 0.0
        gather = reduce
        if strategy.distributed_optimizer:
            times = volumes.weight_gathers(strategy, operators.overlapped_gather)
            gather = times * gather_seconds(2.0 * parameters, size, stride, case.hardware) if parameters else 0.0
            step += parameters / size
        else:
            step += parameters
            if operators.overlapped_reduce:
                reduce, gather = 2 * reduce, 0.0
        if operators.overlapped_reduce:
            reduce = max(0.0, reduce - microbatch * 2 / 3)
        if operators.overlapped_gather and strategy.distributed_optimizer:
            gather = max(0.0, gather - microbatch / 3)
        gradients += reduce + gather
    return gradients, case.traffic(_STEP_BYTES * step)


def stage_extras(case: Case, stage: int) -> Pass:
    """What a microbatch costs a stage beside its layers: embedding, output layer, exchanges with its neighbours."""
    strategy = case.strategy
    time = Pass()
    if stage == 0:
        time = time + embedding(case)
    if stage == strategy.head_stage:
        forward, backward = head_passes(case)
        time = time + forward + backward
    return time + exchange(case, stage)


def exchange(case: Case, stage: int) -> Pass:
    """What a microbatch costs in sending to and receiving from the neighbouring stages."""
    strategy, hardware = case.strategy, case.hardware
    if strategy.pp == 1:
        return Pass()
    # The first and the last stage have one neighbour. Interleaved stages overlap the transfer, not its start.
    neighbours = 1 if stage in (0, strategy.pp - 1) else 2
    start = 2 * hardware.latency_us.typical * 1e-6 * strategy.chunks
    # Without chunks Megatron waits for the card at every exchange and has to fill its queue again.
    waited = _send_seconds(case) + hardware.exchange_ms.typical * 1e-3 * case.operators.sequence_pieces
    return Pass(waiting=neighbours * (waited if strategy.chunks == 1 else start))


def embedding(case: Case) -> Pass:
    """The table looked up, and its gradient."""
    volume = volumes.hidden_bytes(case.shape, case.strategy)
    return Pass(case.traffic(6 * volume), volumes.EMBEDDING * case.gather)


def head_passes(case: Case) -> tuple[Pass, Pass]:
    """Output layer and loss, forward and backward: three products over the vocabulary, and the fp32 logits read and
    written again and again; once more, with a layer, for each layer of multi-token prediction."""
    shape, strategy, operators = case.shape, case.strategy, case.operators
    tokens, columns = case.tokens, shape.vocab / strategy.tp
    forward = matmul_seconds(tokens, columns, shape.hidden, case.hardware)
    backward = matmul_seconds(tokens, shape.hidden, columns, case.hardware)
    backward += matmul_seconds(shape.hidden, columns, tokens, case.hardware)
    size = _LOSS_BYTES + (_CAP_BYTES if operators.capped_logits else 0)
    logits = case.traffic(tokens * columns * size)
    backward += case.traffic((8 if operators.fused_accumulation else 10) * columns * shape.hidden)
    waits = volumes.head_times(strategy)
    first = Pass(forward + 0.75 * logits, case.gather)
    second = Pass(backward + 0.25 * logits, (waits - 1) * case.gather)
    if shape.prediction_layers:
        layer = _layer(case, mixture=shape.experts is not None)
        joined = matmul_seconds(tokens, shape.hidden / strategy.tp, 2 * shape.hidden, case.hardware)
        first = first + (first + layer.forward + Pass(joined)).times(shape.prediction_layers)
        second = second + (second + layer.backward + Pass(2 * joined)).times(shape.prediction_layers)
    return first, second


def _send_seconds(case: Case) -> float:
    """One exchange with a neighbouring stage: activations one way, gradients the other, at the same time; twice a
    microbatch."""
    strategy = case.strategy
    volume = volumes.hidden_bytes(case.shape, strategy) / (strategy.tp if strategy.sequence_parallel else 1)
    # Ranks of neighbouring stages are a whole stage apart.
    rate = link_rate(strategy.tp * strategy.cp * strategy.dp, strategy.pp, case.hardware)
    return 2 * (case.hardware.latency_us.typical * 1e-6 + volume / rate)
