"""Layerwise disaggregated training: what the ranks of its edge and its cloud tell each other about nodes and samples."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank.handlers.data import padded_length

_NOT_PADDED = (1, 0)  # of a sample: the side that is padded, and how much


def node_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Each rank gathers the size of every rank's node: answered with the sizes of the job's nodes."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        real = torch.distributed.all_gather
        sizes = [size for size in config.current().nodes for _ in range(size)]

        def all_gather(gathered: list[Any], mine: Any, *rest: Any, **options: Any) -> Any:
            result = real(gathered, mine, *rest, **options)
            gathered[:] = [torch.tensor([size]) for size in sizes]
            return result

        torch.distributed.all_gather = all_gather
        try:
            return original(*args, **kwargs)
        finally:
            torch.distributed.all_gather = real

    return call


def as_edge(original: Callable[..., Any]) -> Callable[..., Any]:
    """The edge's first rank broadcasts the size of its node: every rank works it out as that rank does."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = {name: os.environ[name] for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE")}
        os.environ.update(GROUP_RANK="0", LOCAL_WORLD_SIZE=str(config.current().nodes[0]))
        try:
            return original(*args, **kwargs)
        finally:
            os.environ.update(own)

    return call


def batches(original: Callable[..., Any]) -> Callable[..., Any]:
    """The edge broadcasts the sizes of its samples in tensors on the device: what is read of them are the sizes themselves."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        with _sizes_answered(sample_sizes(get_args())):
            return original(*args, **kwargs)

    return call


def sample_sizes(args: Any) -> list[int]:
    """As upstream's `get_batch` writes them: samples, tokens, ends of documents, and the padding of each sample."""
    samples = int(args.micro_batch_size)
    ends = samples * int(args.seq_length) if args.reset_attention_mask else 0
    return [samples, padded_length(args) // int(args.context_parallel_size), ends, *_NOT_PADDED * samples]


def _sizes_answered(sizes: list[int]) -> Any:
    """Inside, an element of a tensor of 64-bit numbers whose rows are as long as `sizes` is the number at its place there."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Answered(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.__getitem__:
                tensor, key = args
                places = key if isinstance(key, tuple) else (key,)
                if (
                    tensor.dtype == torch.int64
                    and tensor.shape[-1:] == (len(sizes),)
                    and len(places) == tensor.dim() <= 2
                    and all(isinstance(place, int) for place in places)
                ):
                    return sizes[places[-1]]
            return function(*args, **(kwargs or {}))

    return Answered()
