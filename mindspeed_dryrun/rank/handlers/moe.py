"""Mixture of experts without values: where tokens go is decided on the device, and a dry run reads only zeros from it.

So the load is assumed: every expert gets the same number of tokens. With `launch --moe-load` this rank's experts receive what
those of the busiest rank would.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.moe_load import MoeLoad, parse
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.rank.engine import TORCH_NPU
from mindspeed_dryrun.rank.handlers.tensor_methods import replaced_method


@functools.cache
def load() -> MoeLoad:
    """How tokens are spread over experts, as the command line says."""
    return parse(config.current().moe_load)


def even_shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` shares that differ by one at most."""
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]


def cumulated(shares: Sequence[int]) -> list[int]:
    """Running totals."""
    totals, total = [], 0
    for share in shares:
        total += share
        totals.append(total)
    return totals


# -- token permutation -----------------------------------------------------------------------------------------------


def permute(original: Callable[..., Any]) -> Callable[..., Any]:
    """Selects as many tokens as an even load would: tokens × top-k, or this rank's share of it."""

    @functools.wraps(original)
    def call(tokens: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("num_out_tokens", args[1] if len(args) > 1 else None)
        count = wanted if isinstance(wanted, int) else _received(routing_map)
        if wanted is not None and not isinstance(wanted, int):
            kwargs["num_out_tokens"] = count
            args = args[:1]
        with _selecting(tokens, count):
            return original(tokens, routing_map, *args, **kwargs)

    return call


def unpermute(original: Callable[..., Any]) -> Callable[..., Any]:
    """Selects one probability for each permuted token."""

    @functools.wraps(original)
    def call(permuted_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        with _selecting(permuted_tokens, int(permuted_tokens.shape[0])):
            return original(permuted_tokens, *args, **kwargs)

    return call


def sort_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Chunks of any sizes that make up the tokens: which ones has no bearing on memory."""

    @functools.wraps(original)
    def call(tokens: Any, split_sizes: Any, *args: Any, **kwargs: Any) -> Any:
        sizes, rows = split_sizes.tolist(), int(tokens.shape[0])
        if sum(sizes) != rows:
            import torch

            split_sizes = torch.tensor(even_shares(rows, len(sizes)), dtype=torch.int64)
        return original(tokens, split_sizes, *args, **kwargs)

    return call


def allgather_permutation(original: Callable[..., Any]) -> Callable[..., Any]:
    """The all-gather dispatchers: counts per expert on the host, and selections of this rank's share."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        routing_map = next(a for a in _tensors(args) if len(a.shape) == 2 and a.shape[1] == self.config.num_moe_experts)
        tokens = int(routing_map.shape[0])
        gathered = not isinstance(args[0], (tuple, list)) and (self.tp_size > 1 or self.ep_size > 1)
        tokens *= self.tp_size * self.ep_size if gathered else 1
        count = _share(tokens, self.config.moe_router_topk, self.num_local_experts, self.config.num_moe_experts)
        with _selecting(routing_map, count):
            result = list(original(self, *args, **kwargs))
        result[1] = torch.tensor(even_shares(count, self.num_local_experts), dtype=torch.int64)
        return tuple(result)

    return call


def allgather_unpermutation(original: Callable[..., Any]) -> Callable[..., Any]:
    """The way back of the overlapping all-gather dispatcher: one probability for each token that the experts got."""

    @functools.wraps(original)
    def call(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        with _selecting(hidden_states, int(hidden_states.shape[0])):
            return original(self, hidden_states, *args, **kwargs)

    return call


def _tensors(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif hasattr(value, "shape"):
            yield value


@functools.cache
def chosen_experts() -> tuple[int, int]:
    """How many experts a token goes to, and of how many, as this process was started."""
    arguments = Arguments(tuple(sys.argv[1:]))
    return arguments.positive("--moe-router-topk", 2), arguments.positive("--num-experts", 1)


def _received(routing_map: Any) -> int:
    top_k, experts = chosen_experts()
    tokens, local = (int(size) for size in routing_map.shape)
    return _share(tokens, top_k, local, experts)


def _share(tokens: int, top_k: int, local_experts: int, experts: int) -> int:
    if local_experts == experts or load().is_even:
        return min(round(tokens * top_k * local_experts / experts), tokens * local_experts)
    return min(sum(load().busiest(tokens * top_k, experts, local_experts)), tokens * local_experts)


@contextmanager
def _selecting(tensor: Any, count: int) -> Iterator[None]:
    """`masked_select` gives `count` elements, whatever the mask: which ones has no bearing on memory."""
    with replaced_method(type(tensor), "masked_select", lambda method: lambda values, mask: select(values, mask, count)):
        yield


def select(values: Any, mask: Any, count: int) -> Any:
    """`count` elements in a block that has room for all of them, as the engine's own operator leaves them.

    How many elements a mask selects is known only after the kernel has run, so MindSpore allocates the output for all of
    them and shortens its shape afterwards, never its memory: `MaskedSelectAscendCustomize` in masked_select.cc.
    """
    if not values.requires_grad:
        return _shortened(values, mask, count)
    return _selection().apply(values, mask, count)


def _shortened(values: Any, mask: Any, count: int) -> Any:
    import torch

    return torch.empty(mask.numel(), dtype=values.dtype, device=values.device)[:count]


@functools.cache
def _selection() -> Any:
    """The operator with its gradient: it keeps both inputs, and scatters into zeros (masked_select_grad.cc)."""
    import torch

    class Selection(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, values: Any, mask: Any, count: int) -> Any:
            ctx.save_for_backward(values, mask)
            return _shortened(values, mask, count)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
            values, mask = ctx.saved_tensors
            scattered = torch.zeros(values.shape, dtype=values.dtype, device=gradient.device)
            torch.zeros_like(mask)  # the engine makes a gradient for the mask too, and drops it
            return scattered, None, None

    return Selection


# -- token dispatchers -----------------------------------------------------------------------------------------------


def preprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the dispatcher's own preparation for what it allocates, then puts an even load where it read zeros."""
    # `preprocess`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/moe/token_dispatcher.py#L331

    @functools.wraps(original)
    def call(self: Any, routing_map: Any) -> Any:
        import numpy
        import torch

        original(self, routing_map)
        experts, local = int(self.num_experts), int(self.num_local_experts)
        total = int(routing_map.shape[0]) * int(self.config.moe_router_topk)
        counts = [_capped(self, count, total) for count in even_shares(total, experts)]
        self.num_out_tokens = sum(counts)
        groups = experts // local
        tensor_parts = int(self.tp_size) if hasattr(self, "output_splits_tp") else 1
        received = [counts[index] for index in self.local_expert_indices]
        if groups > 1 and not load().is_even:
            received = [_capped(self, count, total) for count in load().busiest(total, experts, local)]
        # Python integers in an array: MSAdapter refuses sizes made of numpy's.
        splits = {
            "input_splits": [sum(counts[group * local : (group + 1) * local]) for group in range(groups)],
            "output_splits": [sum(received)] * groups,
            "output_splits_tp": [sum(received) * groups] * tensor_parts,
        }
        for name, value in splits.items():
            if getattr(self, name, None) is not None:
                setattr(self, name, numpy.array(value, dtype=object))
        by_source = numpy.tile(numpy.array(received, dtype=numpy.int64), (groups * tensor_parts, 1))
        _put(self, by_source, "num_global_tokens_per_local_expert_cpu", "num_global_tokens_per_local_expert")
        fused = config.current().engine == TORCH_NPU and getattr(self.config, "moe_permute_fusion", False)
        if fused and not installed.has_package("triton"):
            # The overlapping dispatcher reads these back where Triton is missing (overlap/token_dispatcher.py:104).
            _put(self, by_source, "num_global_tokens_per_local_expert")
        if getattr(self, "send_count_matrix", None) is not None:
            self.send_count_matrix = self.send_count_matrix_T = [sum(received)] * (groups * groups)
        chunks = numpy.arange(experts * tensor_parts)
        for name, order in (
            ("sort_input_by_local_experts", chunks.reshape(-1, local)),
            ("restore_output_by_local_experts", chunks.reshape(local, -1)),
        ):
            if hasattr(self, name):
                setattr(self, name, order.T.ravel())
        if getattr(self, "global_input_tokens_local_experts_indices", None) is not None:
            # The expert of each token that comes in, which `repeat_interleave` made of zeros.
            tokens = sum(received) * groups * tensor_parts
            self.global_input_tokens_local_experts_indices = torch.empty(tokens, dtype=torch.int32, device=routing_map.device)
        return torch.tensor([count * groups * tensor_parts for count in received], dtype=torch.int64)

    return call


def _put(dispatcher: Any, counts: Any, *names: str) -> None:
    """In place of the first of these attributes that is set, and of the others where they are the same object.

    A tensor on torch, which saves nothing else for the backward pass; an array on MSAdapter, which reads tensors as zeros.
    """
    found = next((value for name in names if (value := getattr(dispatcher, name, None)) is not None), None)
    if config.current().engine == TORCH_NPU and hasattr(found, "device"):
        import torch

        counts = torch.tensor(counts)  # memory of its own: with --moe-fb-overlap MindSpeed shrinks it once it is used
    for name in names:
        if found is not None and getattr(dispatcher, name, None) is found:
            setattr(dispatcher, name, counts)


def _capped(dispatcher: Any, count: int, total: int) -> int:
    """What an expert keeps of `count` tokens: all, or its capacity; padded to it where the flags say so."""
    if dispatcher.drop_and_pad:
        return int(dispatcher.capacity)
    factor = dispatcher.config.moe_expert_capacity_factor
    return count if factor is None else min(count, math.ceil(total / int(dispatcher.num_experts) * factor))


# -- grouped matrix products -----------------------------------------------------------------------------------------


def grouped_matmul(original: Callable[..., Any]) -> Callable[..., Any]:
    """An even group list where the one read back from the device is all zeros. First argument: tensors of tokens."""

    @functools.wraps(original)
    def call(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        total = int(tokens[0].shape[0])
        if "group_list" in kwargs:
            kwargs["group_list"] = _filled(kwargs["group_list"], total)
        return original(tokens, *(_filled(arg, total) for arg in args), **kwargs)

    return call


def _filled(group_list: Any, total: int) -> Any:
    is_list = isinstance(group_list, (list, tuple)) and bool(group_list) and all(isinstance(n, int) for n in group_list)
    if not is_list or group_list[-1] == total:
        return group_list
    return cumulated(even_shares(total, len(group_list)))
