"""How long one iteration takes: computation, communication, pipeline bubble, recomputation, optimizer.

Everything is counted from the model's shape and the strategy, and divided by the hardware's figures; nothing here is
fitted. `calibrate` scales the hardware's figures, not this model.

* A matrix product takes the longer of its arithmetic (with whole waves of output tiles over the cores: the per-shape
  efficiency) and its memory traffic. Everything else of a layer is memory traffic.
* On a full mesh every pair of cards of a node has its own link, so an all-gather of V bytes in a group of n takes
  V/n per link: a larger group is faster. Groups that span nodes share each card's network port.
* Megatron overlaps the all-gather and the reduce-scatter in the backward pass of a column-parallel layer with its
  products; the rest of tensor parallelism's communication is waited for.
* 1F1B with stages of time t: every microbatch passes the slowest stage, the others are passed once:
  `m·max(t) + Σ others`. With v chunks a stage the fill shrinks to `Σ others / v`, and sends are overlapped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from mindspeed_dryrun.estimate import volumes
from mindspeed_dryrun.estimate.hardware import Hardware
from mindspeed_dryrun.estimate.lower_bound import stage_parameters
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape

# Memory traffic of a layer's element-wise work in the forward pass, in times hidden × tokens: two norms (read, write),
# two residual additions (two reads, a write). The backward pass does about twice as much.
_ELEMENTWISE = 10.0
# Kernels of one layer's forward pass that are not matrix products: norms, rotary embedding, attention, activation,
# additions, copies.
_SMALL_KERNELS = 16
# Traffic of the optimizer step per parameter: gradient twice (norm, step), master weight and both moments read and
# written, bf16 weight written, gradient cleared; bytes.
_STEP_BYTES = 4 + 4 + 8 + 8 + 8 + 2 + 4
# Traffic of the loss over fp32 logits, per logit and pass: cast, maximum, exponential, sum, division, gradient; bytes.
_LOSS_BYTES = 4 * 10

# A release of MindSpeed-LLM. Before 2.2 its throughput line counted no-op layers, and attention in full.
Release = tuple[int, int]
NEWEST: Release = (2, 2)


@dataclass(frozen=True)
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

    @property
    def bubble_share(self) -> float:
        return self.bubble_s / self.iteration_s

    @property
    def communication_share(self) -> float:
        return self.communication_s / self.iteration_s


@dataclass(frozen=True)
class _Pass:
    """One microbatch through some layers: arithmetic and waiting, seconds."""

    compute: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.waiting

    def __add__(self, other: _Pass) -> _Pass:
        return _Pass(self.compute + other.compute, self.waiting + other.waiting)

    def times(self, factor: float) -> _Pass:
        return _Pass(self.compute * factor, self.waiting * factor)


def estimate(shape: ModelShape, strategy: Strategy, hardware: Hardware, release: Release = NEWEST) -> Estimate:
    """The time of one iteration with its error band: the fit's error when calibrated, else both ends of every figure.
    `release` is that of the trainer whose throughput line is meant."""
    seconds, compute, waiting, bubble, step = _iteration(shape, strategy, hardware)
    if hardware.error is not None:
        low, high = seconds / (1 + hardware.error), seconds * (1 + hardware.error)
    else:
        low = _iteration(shape, strategy, hardware.at("high"))[0]
        high = _iteration(shape, strategy, hardware.at("low"))[0]
    return Estimate(
        iteration_s=seconds,
        low_s=low,
        high_s=high,
        compute_s=compute,
        communication_s=waiting,
        bubble_s=bubble,
        optimizer_s=step,
        tokens_per_s=shape.global_batch * shape.seq / seconds,
        tflops_per_card=logged_flops(shape, strategy, release) / seconds / strategy.world / 1e12,
    )


def logged_flops(shape: ModelShape, strategy: Strategy, release: Release) -> float:
    """Operations of one iteration, as this release of MindSpeed-LLM counts them for its throughput line."""
    if release >= NEWEST:
        return shape.iteration_flops()
    return shape.iteration_flops(len(strategy.noop_layers), causal=False)


def iteration_seconds(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> float:
    """The typical time alone, without the band."""
    return _iteration(shape, strategy, hardware)[0]


def _iteration(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> tuple[float, float, float, float, float]:
    microbatches = strategy.microbatches(shape.global_batch)
    forward, backward = layer_passes(shape, strategy, hardware)
    again = forward + backward + forward
    plain = forward + backward
    if strategy.recompute.kind == "selective":
        plain = plain + _attention(shape, strategy, hardware)[0]
    stages = []
    for index, chunks in enumerate(strategy.stages):
        time = _Pass()
        for layers, recomputed in zip(chunks, strategy.recomputed(index), strict=True):
            time = time + again.times(recomputed) + plain.times(layers - recomputed)
        time = time + stage_extras(shape, strategy, hardware, index)
        stages.append(time)
    busiest = max(stages, key=lambda stage: stage.total)
    fill = (sum(stage.total for stage in stages) - busiest.total) / strategy.chunks
    gradients, step = _end_of_iteration(shape, strategy, hardware)
    compute = microbatches * busiest.compute
    waiting = microbatches * busiest.waiting + gradients
    return compute + waiting + fill + step, compute, waiting, fill, step


def end_of_iteration_seconds(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> float:
    """What comes after the last microbatch: the replicas' gradients and the optimizer step."""
    return sum(_end_of_iteration(shape, strategy, hardware))


def _end_of_iteration(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> tuple[float, float]:
    gradients = max(_gradient_seconds(shape, strategy, hardware, stage) for stage in range(strategy.pp))
    return gradients, max(_step_seconds(shape, strategy, hardware, stage) for stage in range(strategy.pp))


def stage_extras(shape: ModelShape, strategy: Strategy, hardware: Hardware, stage: int) -> _Pass:
    """What a microbatch costs a stage beside its layers: embedding, output layer, exchanges with its neighbours."""
    time = _Pass()
    if stage == 0:
        time = time + _embedding(shape, strategy, hardware)
    if stage == strategy.pp - 1:
        time = time + _head(shape, strategy, hardware)
    if strategy.pp > 1:
        # The first and the last stage have one neighbour. Interleaved stages overlap the transfer, not its start.
        exchanges = 1 if stage in (0, strategy.pp - 1) else 2
        start = 2 * hardware.latency_us.typical * 1e-6 * strategy.chunks
        # Without chunks Megatron waits for the card at every exchange and has to fill its queue again.
        waited = _send_seconds(shape, strategy, hardware) + hardware.exchange_ms.typical * 1e-3
        time = time + _Pass(waiting=exchanges * (waited if strategy.chunks == 1 else start))
    return time


def matmul_seconds(rows: float, columns: float, inner: float, hardware: Hardware) -> float:
    """One bf16 product. Output tiles are worked off in whole waves over the cores."""
    tiles = math.ceil(rows / hardware.tile[0]) * math.ceil(columns / hardware.tile[1])
    waves = math.ceil(tiles / hardware.cores)
    padded = waves * hardware.cores * hardware.tile[0] * hardware.tile[1] * inner
    # Few tiles can be cut along the inner dimension as well, so a product is never slower than one full wave for them.
    arithmetic = 2.0 * max(rows * columns * inner, min(padded, 1.25 * rows * columns * inner))
    seconds = arithmetic / (hardware.matmul_tflops.typical * 1e12)
    traffic = 2.0 * (rows * inner + inner * columns + rows * columns) / (hardware.memory_gb_s.typical * 1e9)
    return max(seconds, traffic) + hardware.kernel_overhead_us.typical * 1e-6


def gather_seconds(volume: float, size: int, stride: int, hardware: Hardware) -> float:
    """All-gather (or reduce-scatter) of `volume` bytes in total in a group of `size` ranks, `stride` apart."""
    if size == 1:
        return 0.0
    start = hardware.latency_us.typical * 1e-6
    if (size - 1) * stride < hardware.cards_per_node:
        links = size - 1 if hardware.topology == "full_mesh" else 1
        return start + volume * (size - 1) / size / links / (hardware.link_gb_s.typical * 1e9)
    return start * math.log2(2 * size) + volume * (size - 1) / size / (hardware.network_gb_s.typical * 1e9)


def layer_passes(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> tuple[_Pass, _Pass]:
    """Forward and backward pass of one microbatch through one layer on one rank."""
    # Most strategies of a search share their layer's time with hundreds of others.
    sharing = dataclasses.replace(
        strategy, pp=1, dp=1, stages=((1,),), recompute=Recompute(), distributed_optimizer=False, noop=None
    )
    return _layer_passes(shape, sharing, hardware)


@functools.lru_cache(maxsize=1024)
def _layer_passes(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> tuple[_Pass, _Pass]:
    tokens = strategy.micro_batch * shape.seq / strategy.cp
    tp = strategy.tp
    width = shape.head_dim * shape.heads / tp
    grouped = shape.head_dim * (shape.heads + 2 * shape.query_groups) / tp
    inner = shape.ffn / tp
    up = inner * (2 if shape.gated else 1)
    # (rows, columns, inner): column-parallel products first, then row-parallel ones.
    column: list[tuple[float, float, float]] = [(tokens, grouped, shape.hidden), (tokens, up, shape.hidden)]
    row: list[tuple[float, float, float]] = [(tokens, shape.hidden, width), (tokens, shape.hidden, inner)]

    def product(dims: tuple[float, float, float]) -> float:
        return matmul_seconds(*dims, hardware)

    def gradients(dims: tuple[float, float, float]) -> tuple[float, float]:
        rows, columns, depth = dims
        return matmul_seconds(rows, depth, columns, hardware), matmul_seconds(depth, columns, rows, hardware)

    attention_forward, attention_backward = _attention(shape, strategy, hardware)
    elementwise = _elementwise_seconds(shape, strategy, hardware, tokens)
    forward = sum(map(product, column + row)) + elementwise
    backward = sum(sum(gradients(dims)) for dims in column + row) + 2 * elementwise
    gather = gather_seconds(volumes.hidden_bytes(shape, strategy), tp, 1, hardware)
    forward_wait = backward_wait = 0.0
    if tp > 1 and strategy.sequence_parallel:
        forward_wait = volumes.LAYER_FORWARD * gather
        backward_wait = volumes.LAYER_BACKWARD_WAITED * gather
        for dims in column:
            first, second = gradients(dims)
            backward_wait += max(0.0, gather - first) + max(0.0, gather - second)
    elif tp > 1:
        forward_wait = volumes.LAYER_FORWARD * gather
        backward_wait = sum(max(0.0, 2 * gather - gradients(dims)[1]) for dims in column)
    return (
        _Pass(forward, forward_wait) + attention_forward,
        _Pass(backward, backward_wait) + attention_backward,
    )


def _attention(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> tuple[_Pass, _Pass]:
    """Fused causal attention: its products forward, two and a half times as many backward; and what context
    parallelism sends: key and value blocks around a ring, overlapped with the products, or four all-to-alls."""
    heads = shape.heads / strategy.tp
    flops = 4.0 * strategy.micro_batch * shape.seq**2 * heads * shape.head_dim / 2 / strategy.cp
    rate = hardware.matmul_tflops.typical * hardware.attention_efficiency.typical * 1e12
    forward, backward = _Pass(flops / rate), _Pass(2.5 * flops / rate)
    if strategy.cp == 1:
        return forward, backward
    if strategy.cp_algorithm == "megatron_cp_algo":
        around = volumes.ring_bytes(shape, strategy) * (strategy.cp - 1) / _link_rate(strategy.tp, strategy.cp, hardware)
        return (
            forward + _Pass(waiting=max(0.0, around - forward.compute)),
            backward + _Pass(waiting=max(0.0, 2 * around - backward.compute)),
        )
    volume = volumes.all_to_all_bytes(shape, strategy)
    exchange = _Pass(waiting=gather_seconds(volume, strategy.cp, strategy.tp, hardware))
    return forward + exchange, backward + exchange


def _elementwise_seconds(shape: ModelShape, strategy: Strategy, hardware: Hardware, tokens: float) -> float:
    shared = strategy.tp if strategy.sequence_parallel else 1
    numbers = _ELEMENTWISE * tokens * shape.hidden / shared
    numbers += 3.0 * tokens * shape.ffn / strategy.tp  # activation: read twice (gated), written once
    numbers += 2.0 * tokens * shape.head_dim * (shape.heads + shape.query_groups) / strategy.tp  # rotary embedding
    overhead = _SMALL_KERNELS * hardware.kernel_overhead_us.typical * 1e-6
    return 2.0 * numbers / (hardware.memory_gb_s.typical * 1e9) + overhead


def _embedding(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> _Pass:
    volume = volumes.hidden_bytes(shape, strategy)
    wait = volumes.EMBEDDING * gather_seconds(volume, strategy.tp, 1, hardware)
    return _Pass(6 * volume / (hardware.memory_gb_s.typical * 1e9), wait)


def _head(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> _Pass:
    """Output layer and loss: three products over the vocabulary, and the fp32 logits read and written again and again."""
    tokens = strategy.micro_batch * shape.seq / strategy.cp
    columns = shape.vocab / strategy.tp
    products = (
        matmul_seconds(tokens, columns, shape.hidden, hardware)
        + matmul_seconds(tokens, shape.hidden, columns, hardware)
        + matmul_seconds(shape.hidden, columns, tokens, hardware)
    )
    loss = tokens * columns * _LOSS_BYTES / (hardware.memory_gb_s.typical * 1e9)
    gather = gather_seconds(volumes.hidden_bytes(shape, strategy), strategy.tp, 1, hardware)
    return _Pass(products + loss, volumes.head_times(strategy) * gather)


def _link_rate(stride: int, size: int, hardware: Hardware) -> float:
    """Bytes a second between neighbours of a group whose ranks are `stride` apart."""
    inside = (size - 1) * stride < hardware.cards_per_node
    return (hardware.link_gb_s.typical if inside else hardware.network_gb_s.typical) * 1e9


def _send_seconds(shape: ModelShape, strategy: Strategy, hardware: Hardware) -> float:
    """One exchange with a neighbouring stage: activations one way, gradients the other, at the same time; twice a
    microbatch."""
    volume = volumes.hidden_bytes(shape, strategy) / (strategy.tp if strategy.sequence_parallel else 1)
    # Ranks of neighbouring stages are a whole stage apart.
    rate = _link_rate(strategy.tp * strategy.cp * strategy.dp, strategy.pp, hardware)
    return 2 * (hardware.latency_us.typical * 1e-6 + volume / rate)


def _gradient_seconds(shape: ModelShape, strategy: Strategy, hardware: Hardware, stage: int) -> float:
    """Reduction of the fp32 gradients over the replicas, after the last microbatch."""
    replicas = strategy.dp * strategy.cp
    if replicas == 1:
        return 0.0
    parameters = stage_parameters(shape, strategy, stage)
    reduce = gather_seconds(4.0 * parameters, replicas, strategy.tp, hardware)
    if strategy.distributed_optimizer:
        return reduce + gather_seconds(2.0 * parameters, replicas, strategy.tp, hardware)
    return 2 * reduce


def _step_seconds(shape: ModelShape, strategy: Strategy, hardware: Hardware, stage: int) -> float:
    parameters = stage_parameters(shape, strategy, stage)
    if strategy.distributed_optimizer:
        parameters /= strategy.dp * strategy.cp
    return _STEP_BYTES * parameters / (hardware.memory_gb_s.typical * 1e9)
