"""Attention when the sequence is split over ranks: ring, Ulysses, and both at once.

A ring keeps queries and passes keys and values on, in two buffers that change places; Ulysses trades the split of the
sequence for a split of the heads before attention and back after it. What differs between ranks of a ring is which
half of a block is masked away, and so the size of what is computed: every rank is allocated as itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer.layers import FusedAttention, causal_mask


@dataclass(frozen=True, kw_only=True)
class Split:
    """How this rank's part of the sequence came about: a ring of ranks, each rank of it a group of `heads` ranks."""

    ring: tuple[int, ...]
    heads: tuple[int, ...]
    ring_group: Any
    heads_group: Any
    ring_index: int
    heads_index: int
    window: int


@functools.cache
def split_of(settings: Settings) -> Split:
    """The two groups of this rank, each of one rank where the algorithm does not use it."""
    group = parallel_state.get_context_parallel_group()
    ranks = parallel_state.get_context_parallel_global_ranks()
    here = parallel_state.get_context_parallel_rank()
    alone = (ranks[here],)
    window = settings.cp_window_size
    if settings.context_parallel_algo == "ulysses_cp_algo":
        return Split(
            ring=alone, heads=tuple(ranks), ring_group=None, heads_group=group, ring_index=0, heads_index=here, window=window
        )
    if settings.context_parallel_algo == "megatron_cp_algo":
        return Split(
            ring=tuple(ranks), heads=alone, ring_group=group, heads_group=None, ring_index=here, heads_index=0, window=window
        )
    degree = settings.ulysses_degree_in_cp
    ring = tuple(ranks[here % degree :: degree])
    heads = tuple(ranks[here // degree * degree :][:degree])
    return Split(
        ring=ring,
        heads=heads,
        ring_group=dist.new_group(ring),
        heads_group=dist.new_group(heads),
        ring_index=here // degree,
        heads_index=here % degree,
        window=window,
    )


def sequence_slicer(settings: Settings) -> Callable[[Any], Any]:
    """Takes this rank's part of a table over the whole sequence (its first dimension)."""
    if settings.context_parallel_size == 1:
        return lambda table: table
    split = split_of(settings)
    if settings.masked_by_documents:
        return lambda table: table.chunk(len(split.ring), dim=0)[split.ring_index]
    rings, heads = len(split.ring), len(split.heads)

    def part(table: Any) -> Any:
        if rings > 1:
            chunks = torch.tensor([split.ring_index, 2 * rings - split.ring_index - 1]).cuda()
            table = table.view(2 * rings, -1, *table.shape[1:]).index_select(0, chunks)
            table = table.view(-1, *table.shape[2:])
        return table.chunk(heads, dim=0)[split.heads_index] if heads > 1 else table

    return part


def attention_spec(settings: Settings) -> ModuleSpec:
    """The attention of every layer."""
    if settings.context_parallel_size == 1:
        return ModuleSpec(module=FusedAttention, params={"settings": settings})
    return ModuleSpec(module=SplitAttention, params={"settings": settings, "split": split_of(settings)})


class SplitAttention(MegatronModule):  # type: ignore[misc]
    """Attention over a sequence that lies on several ranks."""

    # `AttentionWithCp`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/context_parallel/ring_context_parallel/ring_context_parallel.py#L918

    def __init__(self, config: Any, settings: Settings, split: Split, **_: Any) -> None:
        super().__init__(config=config)
        self.settings = settings
        self.split = split
        self.local = FusedAttention(config, settings)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        size = len(self.split.heads)
        if size == 1:
            return self._attend(query, key, value, attention_mask)
        if size > key.shape[2] and query.shape[2] % key.shape[2] == 0:
            repeats = query.shape[2] // key.shape[2]
            key = key.repeat_interleave(repeats, dim=2)
            value = value.repeat_interleave(repeats, dim=2)
        group = self.split.heads_group
        # Named as they are held: the split tensors stay alive until attention is over.
        query_by_heads = _AllToAll.apply(query, group, 2, 0)
        key_by_heads = _AllToAll.apply(key, group, 2, 0)
        value_by_heads = _AllToAll.apply(value, group, 2, 0)
        output = self._attend(query_by_heads, key_by_heads, value_by_heads, attention_mask)
        return _AllToAll.apply(output, group, 0, 2)

    def _attend(self, query: Any, key: Any, value: Any, attention_mask: Any) -> Any:
        if len(self.split.ring) == 1:
            return self.local(query, key, value, attention_mask)
        heads = query.shape[2]
        query, key, value = (x.reshape(x.shape[0], x.shape[1], -1) for x in (query, key, value))
        mask = attention_mask
        if mask is None and not self.settings.masked_by_documents:
            mask = causal_mask()
        how = Ring(
            split=self.split, heads=heads, scale=self.local.scale, keep_prob=1.0 - self.config.attention_dropout,
            fused_update=self.settings.use_fused_ring_attention_update, by_documents=self.settings.masked_by_documents,
        )  # fmt: skip
        return RingAttention.apply(query, key, value, how, mask)


def _all_to_all(x: Any, group: Any, scatter: int, gather: int) -> Any:
    """Splits dimension `scatter` over the group and joins dimension `gather` from it (one of them 0, the other 2)."""
    # `single_all_to_all`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/context_parallel/ulysses_context_parallel/ulysses_context_parallel.py#L83
    size = dist.get_world_size(group)
    shape = list(x.shape)
    shape[scatter] //= size
    if scatter == 0:
        parts = x.reshape([size, *shape]).contiguous()
    else:
        parts = x.reshape([-1, size, *shape[scatter:]]).transpose(0, 1).contiguous()
    output = torch.empty_like(parts)
    dist.all_to_all_single(output, parts, group=group)
    output = output.view([size, *shape]).contiguous()
    if gather == 2:
        order = (1, 2, 0, *range(3, output.dim()))
        output = output.permute(*order).contiguous()
    shape[gather] *= size
    return output.view(shape).contiguous()


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, scatter: int, gather: int) -> Any:
        ctx.back = (group, gather, scatter)
        return _all_to_all(x, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return _all_to_all(gradient, *ctx.back), None, None, None


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What every step of a ring needs to know."""

    split: Split
    heads: int
    scale: float
    keep_prob: float
    fused_update: bool
    by_documents: bool
    """`--attention-mask-type general`: blocks follow each other, and each pair of them gets a mask made from its documents."""

    def parts(self, x: Any) -> Any:
        """The two chunks of this rank, which lie far from each other in the sequence; the one block where blocks are whole."""
        return x if self.by_documents else _halves(x)

    def whole(self, x: Any) -> Any:
        """The way back from `parts`."""
        return x if self.by_documents else _flat(x)

    def stat_parts(self, x: Any) -> Any:
        """`parts` of softmax statistics."""
        return x if self.by_documents else _stat_halves(x)

    @property
    def size(self) -> int:
        return len(self.split.ring)

    @property
    def rank(self) -> int:
        return self.split.ring_index

    @property
    def inner(self) -> int:
        """Ranks of a window; with windows of one rank there is only the outer ring."""
        return self.split.window

    @property
    def outer(self) -> int:
        return self.size // self.split.window


class RingExchange:
    """Sends one tensor along a ring of ranks while another is received."""

    def __init__(self, ranks: Sequence[int], group: Any, back: bool = False) -> None:
        here = ranks.index(dist.get_rank())
        self.even = here % 2 == 0
        self.group = group
        self.to, self.come_from = ranks[(here + 1) % len(ranks)], ranks[here - 1]
        if back:
            self.to, self.come_from = self.come_from, self.to
        self.under_way: list[Any] = []

    def start(self, out: Any, into: Any) -> None:
        send = (dist.isend, out, self.to)
        receive = (dist.irecv, into, self.come_from)
        for operation, tensor, peer in (send, receive) if self.even else (receive, send):
            self.under_way.append(operation(tensor, peer, self.group))

    def wait(self) -> bool:
        """Whether something was under way."""
        for operation in self.under_way:
            operation.wait()
        waited, self.under_way = bool(self.under_way), []
        return waited


def _rings(ring: Ring, back: bool = False) -> tuple[RingExchange, RingExchange]:
    """The rings of this rank: inside its window, and between windows."""
    # `initialize_context_parallel_group_for_double_ring`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/parallel_state.py#L595
    ranks, window, here = ring.split.ring, ring.inner, ring.rank
    first = here // window * window
    inner = RingExchange(ranks[first : first + window], ring.split.ring_group, back)
    outer = RingExchange(ranks[here % window :: window], ring.split.ring_group, back)
    return inner, outer


def _flat(x: Any) -> Any:
    """[2, s, …] → [2s, …]: the two chunks of this rank, one after the other."""
    return x.view(-1, *x.shape[2:])


def _halves(x: Any) -> Any:
    return x.view(2, x.shape[0] // 2, *x.shape[1:])


def _stat_halves(x: Any) -> Any:
    """Softmax statistics [b, n, 2s, 8] → [b, n, 2, s, 8]."""
    return x.view(x.shape[0], x.shape[1], 2, x.shape[2] // 2, x.shape[-1])


def _stat_flat(x: Any) -> Any:
    return x.view(x.shape[0], x.shape[1], -1, x.shape[-1])


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Causal attention with the sequence in 2 × ring chunks, first and last ones paired to balance the work."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, ring: Ring, mask: Any) -> Any:
        inner_ring, outer_ring = _rings(ring)
        q, k, v = (ring.parts(x) for x in (q, k, v))
        held = torch.cat((k.unsqueeze(0), v.unsqueeze(0)), dim=0)
        inner_next = torch.empty_like(held)
        outer_next = torch.empty_like(held)
        result: tuple[Any, Any, Any] | None = None
        outer_block = ring.rank
        for j in range(ring.outer):
            block = outer_block
            first = block // ring.inner * ring.inner
            if j < ring.outer - 1:
                outer_ring.start(held, outer_next)
            for i in range(ring.inner):
                if i < ring.inner - 1:
                    inner_ring.start(held, inner_next)
                step = _attend_block(ring, block, q, held[0], held[1], mask)
                result = _merge(ring, block, step, result)
                if inner_ring.wait():
                    held, inner_next = inner_next, held
                    block = (block + ring.inner - 1) % ring.inner + first
            if outer_ring.wait():
                held, outer_next = outer_next, held
                outer_block = (outer_block + ring.size - ring.inner) % ring.size
        assert result is not None
        output, largest, total = result
        q = ring.whole(q)
        keys, values = [held[0].clone()], [held[1].clone()]
        k_saved = torch.stack([ring.whole(x) for x in keys])
        v_saved = torch.stack([ring.whole(x) for x in values])
        ctx.save_for_backward(q, k_saved, v_saved, mask, output, largest, total)
        ctx.ring = ring
        ctx.block = block
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        ring: Ring = ctx.ring
        q, k_saved, v_saved, mask, output, largest, total = ctx.saved_tensors
        inner_ring, outer_ring = _rings(ring, back=True)
        inner_gradients, outer_gradients = _rings(ring, back=True)
        q, output, gradient = (ring.parts(x) for x in (q, output, gradient))
        k_saved, v_saved = [ring.parts(x) for x in k_saved], [ring.parts(x) for x in v_saved]
        largest, total = ring.stat_parts(largest), ring.stat_parts(total)
        dkv = torch.zeros((2, *k_saved[-1].shape), dtype=k_saved[-1].dtype, device=k_saved[-1].device)
        inner_next, outer_next = dkv.clone(), dkv.clone()
        keys = _KeysBack(ring, inner_ring, outer_ring, k_saved, v_saved)
        dq = torch.zeros_like(q)
        block = outer_block = ctx.block
        for j in range(ring.outer):
            block = outer_block
            first = block // ring.inner * ring.inner
            keys.next_window(j)
            for i in range(ring.inner):
                k, v = keys.next_block(i)
                dq_step, dk_step, dv_step = _attend_block_back(ring, block, q, k, v, output, gradient, largest, total, mask)
                if i == 0 and j > 0:
                    outer_gradients.wait()
                    dkv, outer_next = outer_next, dkv
                elif i > 0:
                    inner_gradients.wait()
                    dkv, inner_next = inner_next, dkv
                _add_gradients(ring, block, dq_step, dk_step, dv_step, dq, dkv[0], dkv[1])
                if i + 1 != ring.inner:
                    inner_gradients.start(dkv, inner_next)
                block = (block + 1) % ring.inner + first
            if inner_gradients.wait():
                dkv, inner_next = inner_next, dkv
            if j + 1 != ring.outer:
                outer_gradients.start(dkv, outer_next)
            outer_block = (outer_block + ring.inner) % ring.size
        if outer_gradients.wait():
            dkv, outer_next = outer_next, dkv
        return ring.whole(dq), ring.whole(dkv[0]), ring.whole(dkv[1]), None, None


class _KeysBack:
    """Keys and values on their way back through the ring, starting from the last block of the forward pass."""

    def __init__(self, ring: Ring, inner_ring: RingExchange, outer_ring: RingExchange, k: list[Any], v: list[Any]) -> None:
        self.ring = ring
        self.inner_ring = inner_ring
        self.outer_ring = outer_ring
        self.held = torch.zeros((2, *k[-1].shape), dtype=k[-1].dtype, device=k[-1].device)
        self.held.copy_(torch.cat((k[-1].unsqueeze(0), v[-1].unsqueeze(0)), dim=0))
        self.outer_next = self.held.clone()
        self.inner_next = self.held.clone()

    def next_window(self, j: int) -> None:
        if j > 0:
            self.outer_ring.wait()
            self.held, self.outer_next = self.outer_next, self.held
        if j + 1 != self.ring.outer:
            self.outer_ring.start(self.held.clone(), self.outer_next)

    def next_block(self, i: int) -> tuple[Any, Any]:
        if i > 0:
            self.inner_ring.wait()
            self.held, self.inner_next = self.inner_next, self.held
        if i + 1 != self.ring.inner:
            self.inner_ring.start(self.held, self.inner_next)
        return self.held[0], self.held[1]


def _attend_block(ring: Ring, block: int, q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Attention of this rank's queries to one block: all of it if it is ours, else the half that is not in the future."""
    own = block == ring.rank
    if ring.by_documents:
        tokens = k.shape[0]
        results = torch_npu.npu_fusion_attention(
            q, k, v, ring.heads, "SBH", pse=None, padding_mask=None, atten_mask=_mask_of_documents(ring, block, tokens),
            scale=ring.scale, pre_tockens=tokens, next_tockens=tokens, keep_prob=ring.keep_prob, sparse_mode=1,
        )  # fmt: skip
        return results[0], results[1], results[2]
    if own:
        q, k, v = _flat(q), _flat(k), _flat(v)
    elif block < ring.rank:
        q, k, v = _flat(q), k[0], v[0]
    else:
        q, k, v = q[1], _flat(k), _flat(v)
    tokens = k.shape[0]
    outputs = torch_npu.npu_fusion_attention(
        q, k, v, ring.heads, "SBH", pse=None, padding_mask=None, atten_mask=mask if own else None, scale=ring.scale,
        pre_tockens=tokens, next_tockens=0 if own else tokens, keep_prob=ring.keep_prob, sparse_mode=3 if own else 0,
    )  # fmt: skip
    return outputs[0], outputs[1], outputs[2]


def _mask_of_documents(ring: Ring, block: int, tokens: int) -> Any:
    """What tokens of this rank may not look at in a block: other documents, and what is later in their own."""
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="npu")
    mask = ids.unsqueeze(dim=2) == ids.unsqueeze(dim=1)
    if block > ring.rank:
        mask = torch.zeros_like(mask)
    elif block == ring.rank:
        mask = torch.tril(mask)
    return torch.logical_not(mask).unsqueeze(dim=1)


def _merge(ring: Ring, block: int, step: tuple[Any, Any, Any], so_far: tuple[Any, Any, Any] | None) -> tuple[Any, Any, Any]:
    """Adds one block's attention to that of the blocks before it."""
    if block == ring.rank or so_far is None:
        return step
    if block < ring.rank or ring.by_documents:
        return _update(ring, so_far, step)
    output, largest, total = _halves(so_far[0]), _stat_halves(so_far[1]), _stat_halves(so_far[2])
    new_output, new_largest, new_total = _update(ring, (output[1], largest[:, :, 1, :, :], total[:, :, 1, :, :]), step)
    output[1].copy_(new_output)
    largest[:, :, 1, :, :].copy_(new_largest)
    total[:, :, 1, :, :].copy_(new_total)
    return _flat(output), _stat_flat(largest), _stat_flat(total)


def _update(ring: Ring, before: tuple[Any, Any, Any], now: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Joint softmax of two parts, from each part's output, maximum and sum."""
    if ring.fused_update:
        from mindspore import ops

        joined = ops.ring_attention_update(*before, *now, None, "SBH")
        return joined[0], joined[1], joined[2]
    output, largest_before, total_before = before
    output_now, largest_now, total_now = now
    dtype = output.dtype
    largest = torch.maximum(largest_before, largest_now)
    scale_before = torch.exp(largest_before - largest)
    scale_now = torch.exp(largest_now - largest)
    scaled_before = total_before * scale_before
    scaled_now = total_now * scale_now
    total = scaled_before + scaled_now
    weight_before = scaled_before / total
    weight_now = scaled_now / total
    size = output.shape[-1] // weight_before.shape[1]
    weight_before = _per_channel(weight_before, size)
    weight_now = _per_channel(weight_now, size)
    output = output * weight_before + output_now * weight_now
    output = output.to(dtype)
    return output, largest, total


def _per_channel(weight: Any, size: int) -> Any:
    """[b, n, s, 8] → [s, b, n × size]."""
    wide = weight[..., 0].unsqueeze(3).repeat(1, 1, 1, size)
    return wide.permute(2, 0, 1, 3).reshape(wide.shape[2], wide.shape[0], -1).contiguous()


def _attend_block_back(
    ring: Ring, block: int, q: Any, k: Any, v: Any, output: Any, gradient: Any, largest: Any, total: Any, mask: Any
) -> tuple[Any, Any, Any]:
    own = block == ring.rank
    if ring.by_documents:
        tokens = k.shape[0]
        by_documents: tuple[Any, Any, Any] = torch_npu.npu_fusion_attention_grad(
            q, k, v, gradient, ring.heads, "SBH", pse=None, padding_mask=None, atten_mask=_mask_of_documents(ring, block, tokens),
            softmax_max=largest, softmax_sum=total, attention_in=output, scale_value=ring.scale, pre_tockens=tokens,
            next_tockens=tokens, sparse_mode=1, keep_prob=ring.keep_prob, seed=0, offset=0, numels=0,
        )  # fmt: skip
        return by_documents
    if ring.rank >= block:
        largest, total = _stat_flat(largest), _stat_flat(total)
        q, output, gradient = _flat(q), _flat(output), _flat(gradient)
        k, v = (_flat(k), _flat(v)) if own else (k[0], v[0])
    else:
        k, v = _flat(k), _flat(v)
        q, output, gradient = q[1], output[1], gradient[1]
        largest, total = largest[:, :, 1, :, :], total[:, :, 1, :, :]
    tokens = k.shape[0]
    gradients: tuple[Any, Any, Any] = torch_npu.npu_fusion_attention_grad(
        q, k, v, gradient, ring.heads, "SBH", pse=None, padding_mask=None, atten_mask=mask if own else None,
        softmax_max=largest, softmax_sum=total, attention_in=output, scale_value=ring.scale, pre_tockens=tokens,
        next_tockens=0 if own else tokens, sparse_mode=3 if own else 0, keep_prob=ring.keep_prob, seed=0, offset=0,
        numels=0,
    )  # fmt: skip
    return gradients


def _add_gradients(ring: Ring, block: int, dq_step: Any, dk_step: Any, dv_step: Any, dq: Any, dk: Any, dv: Any) -> None:
    if ring.by_documents:
        for total, step in ((dq, dq_step), (dk, dk_step), (dv, dv_step)):
            total.add_(step)
        return
    if block > ring.rank:
        dq[1].add_(dq_step)
    else:
        dq.add_(dq_step.view(dq.shape))
    if block < ring.rank:
        dk[0].add_(dk_step)
        dv[0].add_(dv_step)
    else:
        dk.add_(dk_step.view(dk.shape))
        dv.add_(dv_step.view(dv.shape))
