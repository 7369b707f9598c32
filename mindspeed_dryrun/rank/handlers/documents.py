"""Packed samples (`--reset-attention-mask`, `--neat-pack`) without values: each sample is one document of full length.

Upstream finds the ends of documents by values that lie on the device, where a dry run reads only zeros. One document of
full length is the longest attention that a sample can have.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed_dryrun.rank.handlers.tensor_methods import replaced_method


def ends(samples: int, length: int) -> list[int]:
    """Where the documents of a batch end, counted through all its samples."""
    return [length * (sample + 1) for sample in range(samples)]


def one_document(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ends of the documents in a batch of positions."""

    @functools.wraps(original)
    def call(origin_seq: Any) -> list[int]:
        length = int(origin_seq.shape[-1])
        return ends(int(origin_seq.numel()) // length, length)

    return call


def masks_of_one_document(original: Callable[..., Any]) -> Callable[..., Any]:
    """Masks and positions of a sample in which no token ends a document: upstream's own search finds none."""

    @functools.wraps(original)
    def call(data: Any, *args: Any, **options: Any) -> Any:
        with selecting(type(data), 0):
            return original(data, *args, **options)

    return call


def packed_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """A batch of packed samples: of the list of ends, filled up with -1, one is left for each sample."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        with selecting(torch.Tensor, 1):
            return original(*args, **kwargs)

    return call


def known_ends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the ends of documents on the host, where upstream reads them back to size what depends on them."""
    # `set_actual_seq_len`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/context_parallel/get_batch_utils.py#L30

    @functools.wraps(original)
    def call(actual_seq_len: Any) -> Any:
        import torch
        from megatron.training import get_args
        from mindspeed.core.context_parallel.get_batch_utils import get_ring_degree

        if isinstance(actual_seq_len, torch.Tensor):
            args = get_args()
            # Ring attention gives each rank its part of every document (`actual_seq_len /= get_ring_degree()` upstream).
            ring = args.attention_mask_type == "causal" and args.context_parallel_algo == "megatron_cp_algo"
            parts = get_ring_degree() if ring else 1
            known: Any = ends(args.micro_batch_size, args.seq_length // parts)
            if actual_seq_len.dim() > 1:  # a row for each depth of multi-token prediction: full documents end alike in all
                known = [known] * len(actual_seq_len)
            actual_seq_len = torch.tensor(known)
            # Sent to the next stage it lies on the device, too, and would read as zeros from then on.
            actual_seq_len.tolist = lambda: copy.deepcopy(known)
        return original(actual_seq_len)

    return call


def broadcast_ends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks that have no batch of their own size the buffer of ends by a length that was broadcast, which reads as 0."""

    @functools.wraps(original)
    def call(item: Any) -> Any:
        import torch
        from megatron.training import get_args

        if item is None:
            item = torch.tensor(ends(get_args().micro_batch_size, get_args().seq_length))
        return original(item)

    return call


def mask_of_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ring attention's mask of one block: which document a token belongs to has as many elements as the sample has tokens.

    Upstream repeats the number of each document as often as the document has tokens, a count that lies on the device.
    """

    @functools.wraps(original)
    def call(cls: Any, actual_seq_qlen: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        length = actual_seq_qlen[-1] // cls.batch_size if actual_seq_qlen else 0

        def repeated(numbers: Any, repeats: Any) -> Any:
            return torch.zeros(length, dtype=numbers.dtype)

        with replaced_method(torch.Tensor, "repeat_interleave", lambda method: repeated):
            return original(cls, actual_seq_qlen, *args, **kwargs)

    return call


def slices_of_one_document(original: Callable[..., Any]) -> Callable[..., Any]:
    """A rank's two slices of every document of a packed sample, by lengths that lie on the device: those of a full document."""

    @functools.wraps(original)
    def call(batch: Any, actual_seq_len: Any) -> Any:
        from megatron.training import get_args
        from mindspeed.core.context_parallel import get_batch_utils

        args, framework = get_args(), get_batch_utils.torch
        length = args.seq_length // (2 * args.context_parallel_size)
        get_batch_utils.torch = _SlicesOf(framework, length)
        try:
            return original(batch, actual_seq_len)
        finally:
            get_batch_utils.torch = framework

    return call


class _SlicesOf:
    """The framework, but for `arange(start, end)`: as many numbers as a slice has tokens."""

    def __init__(self, framework: Any, length: int) -> None:
        self._framework, self._length = framework, length

    def arange(self, start: Any, end: Any) -> Any:
        return self._framework.arange(self._length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._framework, name)


@contextmanager
def selecting(tensor_class: type, count: int) -> Iterator[None]:
    """`values[mask]` gives `count` elements and `values[mask] = x` none, whatever the mask says.

    How many a mask selects is known only after the kernel has run: MindSpore allocates the output for all of them.
    """

    def choose(get: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(values: Any, key: Any) -> Any:
            if not _is_mask(key):
                return get(values, key)
            import torch

            return get(torch.empty(int(key.numel()), dtype=values.dtype, device=values.device), slice(count))

        return chosen

    def change(put: Callable[..., Any]) -> Callable[..., Any]:
        return lambda values, key, value: None if _is_mask(key) else put(values, key, value)

    with replaced_method(tensor_class, "__getitem__", choose), replaced_method(tensor_class, "__setitem__", change):
        yield


def _is_mask(key: Any) -> bool:
    return str(getattr(key, "dtype", "")).lower().rpartition(".")[2] in ("bool", "bool_")
