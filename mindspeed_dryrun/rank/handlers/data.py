"""Samples without a data set: their shapes are the script's, their values are nobody's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.rank import activation as config


def sample_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Indices of Megatron's mock data set in which each sample is one token and padding up to the sequence length.

    The real ones need helpers in C++ that Megatron compiles inside its own source tree.
    """

    @functools.wraps(original)
    def call(self: Any) -> Any:
        import numpy

        samples = max(self.num_samples or 1, 1)
        document_index = numpy.zeros(1, dtype=numpy.int32)
        sample_index = numpy.zeros((samples + 1, 2), dtype=numpy.int32)
        return document_index, sample_index, numpy.arange(samples, dtype=numpy.uint32)

    return call


def sample_length(args: Any) -> int:
    """Tokens of an instruction sample: the sequence length, the longest there can be, or what `launch --sample-length` says.

    Where samples are packed, or padded to the sequence length, their own length does not matter.
    """
    given = config.current().sample_length
    packed = getattr(args, "neat_pack", False) or args.reset_position_ids or args.reset_attention_mask
    variable = getattr(args, "no_pad_to_seq_lengths", args.variable_seq_lengths) and not packed  # its name since 2.3.0
    return min(given, int(args.seq_length)) if given and variable else int(args.seq_length)


def padded_length(args: Any) -> int:
    """Tokens of a batch: upstream's collator pads to a multiple (mindspeed_llm/legacy/data/data_samplers.py:62)."""
    # `pad_to_multiple_of`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/legacy/data/data_samplers.py#L62
    length, multiple = sample_length(args), int(getattr(args, "pad_to_multiple_of", None) or 1)
    return min(-(-length // multiple) * multiple, int(args.seq_length))


class InstructionSamples:
    """As many samples as are asked for, each of the length that is assumed for all."""

    def __init__(self, args: Any, samples: int) -> None:
        self.args = args
        self.samples = max(samples, 1)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy

        ones = numpy.ones(sample_length(self.args), dtype=numpy.int64)
        names = ("input_ids", "attention_mask", "labels")
        if self.args.is_pairwise_dataset:
            return {f"{side}_{name}": ones.copy() for side in ("chosen", "rejected") for name in names}
        sample = {name: ones.copy() for name in names}
        if self.args.reset_position_ids or self.args.reset_attention_mask:
            sample["position_ids"] = numpy.arange(self.args.seq_length, dtype=numpy.int64)
        if self.args.reset_attention_mask:  # ends of the documents, -1 where there is no more; read from 2.3.0 on
            sample["actual_seq_len"] = numpy.full(self.args.seq_length, -1, dtype=numpy.int64)
            sample["actual_seq_len"][0] = self.args.seq_length
        return sample


def instruction_datasets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Samples for training, none for validation and test."""

    @functools.wraps(original)
    def call(*args: Any, train_valid_test_num_samples: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        return InstructionSamples(get_args(), int(train_valid_test_num_samples[0])), None, None

    return call


def batch_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """The sizes of a batch as this rank's own loader has them, instead of as they come back from a broadcast."""

    @functools.wraps(original)
    def call(keys: Any, data: Any) -> Any:
        from megatron.training import get_args

        original(keys, data)
        args = get_args()
        usual = [args.micro_batch_size, padded_length(args)]
        sizes = {key: [int(n) for n in data[key].shape] if data else list(usual) for key in keys}
        counts = {key: math.prod(size) for key, size in sizes.items()}
        return sizes, counts, sum(counts.values())

    return call


def as_first_tensor_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a rank take its batch from its own loader, as the first rank of its tensor group does.

    The others size their buffers by a length that was broadcast, which reads as 0.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state

        real = parallel_state.get_tensor_model_parallel_rank
        parallel_state.get_tensor_model_parallel_rank = lambda: 0
        try:
            return original(*args, **kwargs)
        finally:
            parallel_state.get_tensor_model_parallel_rank = real

    return call


def received_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Shapes that the neighbouring stages announce: those of what this stage sends, else of a full batch."""
    last_sent: list[list[int]] = []

    @functools.wraps(original)
    def call(tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool, config: Any, **rest: Any) -> Any:
        original(tensor_send_next, tensor_send_prev, recv_prev, recv_next, config, **rest)
        for sent in (tensor_send_next, tensor_send_prev):
            if sent is not None:
                last_sent[:] = [[int(size) for size in sent.shape]]
        shape = last_sent[0] if last_sent else _hidden_shape(config)
        return (list(shape) if recv_prev else [0, 0, 0]), (list(shape) if recv_next else [0, 0, 0])

    return call


def _hidden_shape(config: Any) -> list[int]:
    from megatron.training import get_args

    args = get_args()
    length = padded_length(args) // args.context_parallel_size
    if config.sequence_parallel:
        length //= args.tensor_model_parallel_size
    return [length, getattr(args, "actual_micro_batch_size", None) or args.micro_batch_size, config.hidden_size]
