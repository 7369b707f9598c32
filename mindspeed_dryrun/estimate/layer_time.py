"""How long one microbatch takes in one layer on one rank, operator by operator.

* A matrix product takes the longer of its arithmetic (with whole waves of output tiles over the cores: the per-shape
  efficiency) and its memory traffic.
* Fused attention takes the longer of its products and its scores: the softmax runs on the vector units, one score at a
  time whatever the size of a head, so that heads of 64 get half the arithmetic of heads of 128.
* Everything else is memory traffic, counted kernel by kernel from what the trainer runs (`Operators`).
* On a full mesh every pair of cards of a node has its own link, so an all-gather of V bytes in a group of n takes
  V/n per link: a larger group is faster. Groups that span nodes share each card's network port.
* Megatron overlaps the all-gather and the reduce-scatter in the backward pass of a column-parallel layer with its
  products; the rest is waited for, unless MC2 fuses it with the product beside it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.estimate.operators import Operators
from mindspeed_dryrun.estimate.stage_parts import routed_rows
from mindspeed_dryrun.estimate.strategy import DEFAULT_DISPATCHER, OLD_DISPATCHER, Strategy
from mindspeed_dryrun.megatron.model_shape import LatentShape, ModelShape

# Numbers read and written by the kernels of an activation, forward and backward, per output number. `fused`: one kernel
# each way. `gated`: silu or gelu, the product, and backward their gradients and the two halves joined. `tanh`: the
# formula of gelu written out in eight kernels (MindSpeed-LLM, core/transformer/mlp.py, gelu_tanh_approximation).
# `gelu_tanh_approximation`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/mlp.py#L91
_ACTIVATION = {"fused": (3.0, 5.0), "gated": (5.0, 13.0), "tanh": (21.0, 49.0), "plain": (2.0, 3.0)}
# Numbers of a norm and of a residual addition, per hidden number. An unfused RMSNorm casts, squares, averages, scales.
_NORM, _NORM_BACKWARD = {True: 2.0, False: 12.0}, {True: 3.0, False: 24.0}
_RESIDUAL = 3.0
_SCALED = 2.0  # a branch times a constant
# Queries and keys turned: one kernel, or rotate_half written out (negate, join, two products, a sum).
_ROTARY, _ROTARY_BACKWARD = {True: 2.0, False: 9.5}, {True: 2.0, False: 12.0}
_SPLIT = 2.0  # the joint product cut into queries, keys, values
# Bytes of a score when attention is not fused: scaled, masked, softmax in fp32, cast, and the same backward.
_UNFUSED_FORWARD, _UNFUSED_BACKWARD = 30.0, 30.0
# The same with scale, mask and softmax in one kernel: the products write and read scores (2 + 2; 2, 2, 2 + 2 backward), the
# kernel reads and writes them (2, a mask of 1, 2; 2, 2, 2 backward).
_FUSED_SOFTMAX_FORWARD, _FUSED_SOFTMAX_BACKWARD = 9.0, 14.0
_MASK_BYTES = 12.0  # of a window's mask per pair of tokens: ones, lower triangle, where, cast
# Kernels of one layer that are not matrix products, forward and backward.
_SMALL_KERNELS, _SMALL_KERNELS_BACKWARD = 16, 28
# A weight's gradient added to the fp32 buffer, bytes: the bf16 gradient read, the buffer read and written.
_ACCUMULATE, _ACCUMULATE_FUSED = 10.0, 8.0
# Merging a ring step's result into the output, bytes per number forward (fp32) and backward, and of key gradients.
_RING_MERGE, _RING_MERGE_BACKWARD, _RING_KEYS_BACKWARD = 18.0, 6.0, 6.0
# Numbers (16 bits) per hidden number of a routed token, permuted and brought back, forward and backward: in one kernel
# each way, or selected by index, times the fp32 weights of the router, and added up in fp32 (Megatron-LM,
# core/transformer/moe/moe_utils.py, permute and unpermute).
# `permute`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/moe/moe_utils.py#L230
_PERMUTED = {True: (4.0, 4.0), False: (11.0, 14.0)}
_SORTED = 4.0  # what has come from other ranks, sorted by expert, and back
# Ranks that share an expert gather what they have of each token: the older dispatcher joins the pieces of a row, and cuts them
# before the scatter (Megatron-LM, core/tensor_parallel/mappings.py, _gather_along_last_dim).
_JOINED = 4.0
# Experts one by one, numbers per hidden number of a routed token: their results joined; backward the gradients of their
# inputs (Megatron-LM core_v0.12.1, core/transformer/moe/experts.py, SequentialMLP).
_ONE_BY_ONE, _ONE_BY_ONE_BACKWARD = 2.0, 2.0
# Up to core_r0.8.0 every expert read a slice and wrote into a slice of one tensor: zeros and the copies; backward, for every
# expert, PyTorch copies the whole gradient, makes a whole tensor of zeros for its slice and adds it to the others'.
_IN_PLACE, _IN_PLACE_BACKWARD, _IN_PLACE_EACH = 3.0, 2.0, 6.0


@dataclass(frozen=True)
class Pass:
    """One microbatch through some layers: arithmetic and waiting, seconds."""

    compute: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.waiting

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.compute + other.compute, self.waiting + other.waiting)

    def times(self, factor: float) -> Pass:
        return Pass(self.compute * factor, self.waiting * factor)


@dataclass(frozen=True)
class Case:
    """What a time depends on."""

    shape: ModelShape
    strategy: Strategy
    hardware: Hardware
    operators: Operators

    @property
    def tokens(self) -> float:
        """Of a microbatch on a rank of the context-parallel group."""
        return self.strategy.tokens(self.shape.seq)

    def traffic(self, size: float) -> float:
        """Seconds to read and write `size` bytes."""
        return size / (self.hardware.memory_gb_s.typical * 1e9)

    @property
    def gather(self) -> float:
        """Seconds to gather (or scatter) the hidden states over the tensor-parallel group."""
        return self.gathered(self.shape.hidden)

    def gathered(self, numbers: float) -> float:
        """The same for a count of numbers (16 bits) of each token."""
        return gather_seconds(2.0 * self.tokens * numbers, self.strategy.tp, 1, self.hardware)

    @property
    def own_tokens(self) -> float:
        """Those that sequence parallelism leaves to a rank."""
        return self.tokens / (self.strategy.tp if self.strategy.sequence_parallel else 1)


@dataclass(frozen=True)
class LayerTime:
    """Both passes of a layer, and the parts of the forward pass that recomputation may repeat alone."""

    forward: Pass
    backward: Pass
    attention: Pass = Pass()
    activation: Pass = Pass()


def matmul_seconds(rows: float, columns: float, inner: float, hardware: Hardware) -> float:
    """One bf16 product. Output tiles are worked off in whole waves over the cores."""
    tiles = math.ceil(rows / hardware.tile[0]) * math.ceil(columns / hardware.tile[1])
    waves = math.ceil(tiles / hardware.cores)
    padded = waves * hardware.cores * hardware.tile[0] * hardware.tile[1] * inner
    # Few tiles can be cut along the inner dimension as well, so a product is never slower than one full wave for them.
    arithmetic = 2.0 * max(rows * columns * inner, min(padded, 1.25 * rows * columns * inner))
    seconds = arithmetic / (hardware.matmul_tflops.typical * 1e12)
    traffic = 2.0 * (rows * inner + inner * columns + rows * columns) / (hardware.hbm_gb_s.typical * 1e9)
    return max(seconds, traffic) + hardware.kernel_overhead_us.typical * 1e-6


def gather_seconds(volume: float, size: int, stride: int, hardware: Hardware) -> float:
    """All-gather (or reduce-scatter) of `volume` bytes in total in a group of `size` ranks, `stride` apart.

    Across nodes HCCL's Pipeline algorithm sends each card's piece around a ring of the cards that hold the same place in
    their nodes, and hands what has come on inside the node meanwhile (HCCL user guide, CANN 9.0, "Pipeline").
    """
    if size == 1:
        return 0.0
    start, piece = hardware.latency_us.typical * 1e-6, volume / size
    local = _of_a_node(size, stride, hardware)
    hand_on = piece * (local - 1) / _links(local, hardware) / (hardware.link_gb_s.typical * 1e9)
    if local == size:
        return start + hand_on
    nodes = size / local
    send = piece / (hardware.network_gb_s.typical * 1e9)
    return start * math.log2(2 * size) + (nodes - 1) * max(send, hand_on) + hand_on


def exchange_seconds(volume: float, size: int, stride: int, hardware: Hardware) -> float:
    """All-to-all of the `volume` bytes that each of `size` ranks has for all of them: inside nodes, then between them (HCCL
    user guide, "AlltoAllV")."""
    if size == 1:
        return 0.0
    start, local = hardware.latency_us.typical * 1e-6, _of_a_node(size, stride, hardware)
    inside = volume * (local - 1) / size / _links(local, hardware) / (hardware.link_gb_s.typical * 1e9)
    if local == size:
        return start + inside
    return start * math.log2(2 * size) + inside + volume * (size - local) / size / (hardware.network_gb_s.typical * 1e9)


def _of_a_node(size: int, stride: int, hardware: Hardware) -> int:
    """Ranks of a group that the fast links join."""
    return min(size, max(1, hardware.link_cards // stride))


def _links(local: int, hardware: Hardware) -> int:
    """Links that a card sends on at once to the others of its node."""
    return max(1, local - 1) if hardware.topology == "full_mesh" else 1


def link_rate(stride: int, size: int, hardware: Hardware) -> float:
    """Bytes a second between neighbours of a group whose ranks are `stride` apart."""
    inside = (size - 1) * stride < hardware.link_cards
    return (hardware.link_gb_s.typical if inside else hardware.network_gb_s.typical) * 1e9


@functools.lru_cache(maxsize=2048)
def layer_time(case: Case, mixture: bool = False) -> LayerTime:
    """One layer: attention, then a dense block or a mixture of experts."""
    attention = _attention_block(case)
    block = _mixture(case) if mixture else _dense_block(case, case.shape.ffn)
    small = _hidden_work(case)
    again = block.forward if case.operators.recomputed_mlp else Pass()
    return LayerTime(
        attention.forward + block.forward + small.forward,
        attention.backward + block.backward + again + small.backward,
        attention.attention,
        block.activation,
    )


def _column(case: Case, columns: float, inner: int | None = None) -> LayerTime:
    """A column-parallel product: its input (the hidden states, or `inner` numbers a token) is gathered, and backward its
    gradient scattered."""
    inner = inner or case.shape.hidden
    tokens, wait = case.tokens, case.gathered(inner)
    forward = matmul_seconds(tokens, columns, inner, case.hardware)
    data = matmul_seconds(tokens, inner, columns, case.hardware)
    weight = matmul_seconds(inner, columns, tokens, case.hardware)
    compute = data + weight + _accumulate(case, columns * inner)
    if case.strategy.tp == 1:
        return LayerTime(Pass(forward), Pass(compute))
    if not case.strategy.sequence_parallel:
        return LayerTime(Pass(forward), Pass(compute, max(0.0, 2 * wait - weight)))
    scatter = _exposed(case, wait, data) if case.operators.fused_collectives else max(0.0, wait - data)
    return LayerTime(Pass(forward, _exposed(case, wait, forward)), Pass(compute, scatter + max(0.0, wait - weight)))


def _row(case: Case, inner: float) -> LayerTime:
    """A row-parallel product: its output is scattered, and backward its gradient gathered."""
    tokens, hidden, wait = case.tokens, case.shape.hidden, case.gather
    forward = matmul_seconds(tokens, hidden, inner, case.hardware)
    data = matmul_seconds(tokens, inner, hidden, case.hardware)
    weight = matmul_seconds(inner, hidden, tokens, case.hardware)
    compute = data + weight + _accumulate(case, inner * hidden)
    if case.strategy.tp == 1:
        return LayerTime(Pass(forward), Pass(compute))
    if not case.strategy.sequence_parallel:
        return LayerTime(Pass(forward, 2 * wait), Pass(compute))
    return LayerTime(Pass(forward, _exposed(case, wait, forward)), Pass(compute, _exposed(case, wait, data)))


def _exposed(case: Case, wait: float, product: float) -> float:
    """What is left to wait for of a collective beside its product: MC2 cuts both and interleaves the pieces."""
    if not case.operators.fused_collectives:
        return wait
    return wait - case.hardware.overlap.typical * min(wait, product)


def _accumulate(case: Case, parameters: float) -> float:
    return case.traffic((_ACCUMULATE_FUSED if case.operators.fused_accumulation else _ACCUMULATE) * parameters)


def _sum(*parts: LayerTime) -> LayerTime:
    forward = backward = Pass()
    for part in parts:
        forward, backward = forward + part.forward, backward + part.backward
    return LayerTime(forward, backward)


def _hidden_work(case: Case) -> LayerTime:
    """Norms, residual additions, and the start of every small kernel."""
    operators, hidden = case.operators, case.tokens * case.shape.hidden
    if case.strategy.sequence_parallel:
        hidden /= case.strategy.tp
    start = case.hardware.kernel_overhead_us.typical * 1e-6 * operators.sequence_pieces
    extra = 2 * _SCALED if operators.scaled_branches else 0.0
    forward = operators.norms * _NORM[operators.fused_norm] + 2 * _RESIDUAL + extra
    backward = operators.norms * _NORM_BACKWARD[operators.fused_norm] + 2 * _RESIDUAL + extra
    return LayerTime(
        Pass(case.traffic(2 * hidden * forward) + _SMALL_KERNELS * start),
        Pass(case.traffic(2 * hidden * backward) + _SMALL_KERNELS_BACKWARD * start),
    )


def _dense_block(case: Case, ffn: int) -> LayerTime:
    inner = ffn / case.strategy.tp
    up, down = _column(case, inner * (2 if case.shape.gated else 1)), _row(case, inner)
    forward, backward = (case.traffic(2 * case.tokens * inner * n) for n in _ACTIVATION[_kind(case)])
    both = _sum(up, down, LayerTime(Pass(forward), Pass(backward)))
    return LayerTime(both.forward, both.backward, activation=Pass(forward))


def _kind(case: Case) -> str:
    """The activation, where the shape says whether it is gated."""
    kind = case.operators.activation
    return kind if case.shape.gated or kind == "plain" else "plain"


def _attention_block(case: Case) -> LayerTime:
    shape, operators, tp = case.shape, case.operators, case.strategy.tp
    core = _attention(case)
    if shape.latent:
        projections = _latent_block(case, shape.latent)
        width = shape.heads * (shape.latent.nope + shape.latent.rope) / tp
        turned = shape.heads * shape.latent.rope / tp * 2
        split = 2 * width
    else:
        query, key = shape.head_dim * shape.heads / tp, shape.head_dim * shape.query_groups / tp
        projections = _sum(_column(case, query + 2 * key), _row(case, query))
        turned, split = query + key, query + 2 * key
    share, fused = operators.rotary_share, operators.fused_rotary
    joined = 2.0 if share < 1 and not fused else 0.0  # the part that is not turned is joined again
    forward = _SPLIT * split + (_ROTARY[fused] * share + joined) * turned
    backward = _SPLIT * split + (_ROTARY_BACKWARD[fused] * share + joined) * turned
    small = LayerTime(Pass(case.traffic(2 * case.tokens * forward)), Pass(case.traffic(2 * case.tokens * backward)))
    both = _sum(projections, core, small)
    return LayerTime(both.forward, both.backward, attention=core.forward)


def _attention(case: Case) -> LayerTime:
    """Scores of a microbatch, forward, and two and a half times as much backward; and context parallelism."""
    shape, strategy, operators = case.shape, case.strategy, case.operators
    window = operators.window
    pairs = shape.seq**2 / 2 if not 0 < window < shape.seq else shape.seq * window - window**2 / 2
    scores = strategy.micro_batch * pairs * shape.heads / strategy.tp / strategy.cp
    product = 2.0 * scores * sum(_head_sizes(case)) / (case.hardware.matmul_tflops.typical * 1e12)
    if operators.fused_attention:
        each = scores / (case.hardware.attention_gscores_s.typical * 1e9)
        forward, backward = max(product, each), 2.5 * max(product, each)
    else:  # the whole square, and every score through memory again and again
        whole = strategy.micro_batch * shape.seq**2 * shape.heads / strategy.tp / strategy.cp
        there, back = _UNFUSED_FORWARD, _UNFUSED_BACKWARD
        if operators.fused_softmax:
            there, back = _FUSED_SOFTMAX_FORWARD, _FUSED_SOFTMAX_BACKWARD
        forward = 2 * product + case.traffic(there * whole)
        backward = 4 * product + case.traffic(back * whole)
    if operators.window_masks:  # every other layer
        forward += case.traffic(_MASK_BYTES * strategy.micro_batch * shape.seq**2) / 2
    core = LayerTime(Pass(forward), Pass(backward))
    return _in_context(case, core) if strategy.cp > 1 else core


def _in_context(case: Case, core: LayerTime) -> LayerTime:
    """Heads exchanged (Ulysses) or blocks of keys and values sent around a ring behind the products, or both."""
    shape, strategy, operators = case.shape, case.strategy, case.operators
    ulysses = min(strategy.cp, strategy.heads_exchanged)
    ring = strategy.cp // ulysses
    groups = shape.heads if operators.repeated_keys or shape.latent else shape.query_groups
    query, value = _head_sizes(case)
    parts = [core]
    if ulysses > 1:
        size = case.tokens * 2 * (query + value) * (shape.heads + groups) / strategy.tp
        exchange = Pass(waiting=exchange_seconds(size, ulysses, strategy.tp, case.hardware))
        parts.append(LayerTime(exchange, exchange))
    if ring > 1:
        keys = case.tokens * (query + value) * groups / strategy.tp
        around = 2 * keys * (ring - 1) / link_rate(strategy.tp, strategy.cp, case.hardware)
        merged = case.tokens * value * shape.heads / strategy.tp * (ring - 1)
        parts.append(
            LayerTime(
                Pass(case.traffic(_RING_MERGE * merged), max(0.0, around - core.forward.compute)),
                Pass(
                    case.traffic(_RING_MERGE_BACKWARD * merged + _RING_KEYS_BACKWARD * keys * (ring - 1)),
                    max(0.0, 2 * around - core.backward.compute),
                ),
            )
        )
    return _sum(*parts)


def _latent_block(case: Case, latent: LatentShape) -> LayerTime:
    """Multi-latent attention: every rank compresses its own tokens with whole matrices, what is gathered is compressed
    (MindSpeed-LLM, tasks/models/transformer/multi_latent_attention.py)."""
    heads = case.shape.heads / case.strategy.tp
    wide, ranks = heads * (latent.nope + latent.rope), latent.query_rank + latent.key_rank + latent.rope
    down = _product(case, case.own_tokens, float(ranks if latent.query_rank else ranks + wide), float(case.shape.hidden))
    parts = [down, _column(case, heads * (latent.nope + latent.value), latent.key_rank), _row(case, heads * latent.value)]
    if latent.query_rank:
        parts.append(_column(case, wide, latent.query_rank))
    if case.strategy.tp > 1 and case.strategy.sequence_parallel:
        turned = Pass(waiting=case.gathered(latent.rope))
        parts.append(LayerTime(turned, turned))
    query, value = _head_sizes(case)
    padded = case.operators.latent_multiple and 2 * (query + latent.nope + latent.rope) + value + 3 * latent.value
    copies = Pass(case.traffic(2 * case.tokens * heads * padded))
    return _sum(*parts, LayerTime(copies, copies))


def _head_sizes(case: Case) -> tuple[int, int]:
    """Numbers of a head's query (or key) and of its value as fused attention gets them."""
    latent, multiple = case.shape.latent, case.operators.latent_multiple
    if latent is None:
        return case.shape.head_dim, case.shape.head_dim
    query = latent.nope + latent.rope
    if not multiple or not case.operators.fused_attention or query == latent.value:
        return query, latent.value
    padded = multiple * math.ceil(max(query, latent.value) / multiple)
    return (padded, padded) if multiple > 1 else (query, query)


def _product(case: Case, rows: float, columns: float, inner: float, times: float = 1.0) -> LayerTime:
    """A product without collectives, its two gradients, and the sum of the weight's."""
    forward = matmul_seconds(rows, columns, inner, case.hardware)
    data = matmul_seconds(rows, inner, columns, case.hardware)
    weight = matmul_seconds(inner, columns, rows, case.hardware)
    backward = data + weight + _accumulate(case, columns * inner)
    return LayerTime(Pass(times * forward), Pass(times * backward))


def _mixture(case: Case) -> LayerTime:
    """Router, exchange of tokens, the local experts' products, the exchange back, and shared experts."""
    experts, operators, strategy, hidden = case.shape.experts, case.operators, case.strategy, case.shape.hidden
    assert experts is not None
    shared = max(1, strategy.etp)
    local = max(1, experts.number // strategy.ep)
    tokens = case.own_tokens
    routed = tokens * experts.topk
    rows = routed_rows(case.shape, strategy) / local
    inner = experts.ffn / shared
    up = _product(case, rows, inner * (2 if case.shape.gated else 1), hidden, local)
    down = _product(case, rows, hidden, inner, local)
    spare = (local - 1) * case.hardware.kernel_overhead_us.typical * 1e-6 if operators.grouped_experts else 0.0
    forward, backward = (case.traffic(2 * rows * local * inner * n) for n in _ACTIVATION[_kind(case)])
    if operators.recomputed_experts:
        backward += up.forward.compute + forward
    work = LayerTime(Pass(forward - 2 * spare), Pass(backward - 4 * spare))
    there, back = (n * routed for n in _PERMUTED[operators.fused_permutation])
    there, back = (n + rows * local * more for n, more in zip((there, back), _rearranged(case, local), strict=True))
    moved = LayerTime(Pass(case.traffic(2 * there * hidden)), Pass(case.traffic(2 * back * hidden)))
    beside = up.forward.compute + down.forward.compute + forward
    wait = _dispatch_seconds(case, tokens, beside)
    # The host waits for the number of tokens of each expert, and has to fill the card's queue again.
    refill = case.hardware.exchange_ms.typical * 1e-3
    parts = [_product(case, tokens, experts.number, hidden), up, down, work, moved]
    parts.append(LayerTime(Pass(waiting=wait + refill), Pass(waiting=wait)))
    if experts.shared_ffn:
        parts.append(_dense_block(case, experts.shared_ffn))
    both = _sum(*parts)
    return LayerTime(both.forward, both.backward, activation=Pass(forward))


def _rearranged(case: Case, local: int) -> tuple[float, float]:
    """Numbers per hidden number of a token that has come to its expert, moved before and after the products, forward and
    backward."""
    strategy, operators = case.strategy, case.operators
    shared, older = max(1, strategy.etp), strategy.dispatcher == OLD_DISPATCHER or operators.older_release
    moved = _SORTED / (shared if older else 1) if local > 1 and strategy.ep * shared > 1 else 0.0
    if older and shared > 1 and strategy.dispatcher != DEFAULT_DISPATCHER:
        moved += _JOINED
    if operators.grouped_experts or local == 1:
        return moved, moved
    if operators.older_release:
        return moved + _IN_PLACE, moved + _IN_PLACE_BACKWARD + _IN_PLACE_EACH * local
    return moved + _ONE_BY_ONE, moved + _ONE_BY_ONE_BACKWARD


def _dispatch_seconds(case: Case, tokens: float, beside: float) -> float:
    """Tokens to the experts and back: twice an exchange, or a gather and a scatter of all tokens of the group."""
    strategy, hidden, experts = case.strategy, case.shape.hidden, case.shape.experts
    assert experts is not None
    shared = max(1, strategy.etp)
    volume = 2.0 * tokens * experts.topk * hidden
    seconds = 2 * gather_seconds(volume * shared, shared, 1, case.hardware)
    if strategy.dispatcher == DEFAULT_DISPATCHER:
        size = strategy.ep * shared
        return 2 * gather_seconds(2.0 * tokens * hidden * size, size, 1, case.hardware)
    stride = 1 if shared < strategy.tp else strategy.tp
    exchange = 2 * exchange_seconds(volume, strategy.ep, stride, case.hardware)
    if case.operators.overlapped_dispatch:
        exchange -= case.hardware.overlap.typical * min(exchange, beside)
    return seconds + exchange
