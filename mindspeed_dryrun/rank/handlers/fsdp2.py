"""`train_fsdp2.py` of MindSpeed-LLM: samples without a data set, no tokenizer, and finished iterations counted."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import progress
from mindspeed_dryrun.rank.handlers import moe
from mindspeed_dryrun.rank.handlers.tensor_methods import replaced_method

_MASKS, _LEFT_OUT = "transformers.masking_utils", "_ignore_causal_mask_sdpa"  # of 5.2.0
_PADDED_TO = 8  # by the collator of fine-tuning, without context parallelism (data/data_factory.py, LFDataManager)


class Samples:
    """As many samples as a short run can ask for, of the length that is assumed for all (data/collator.py, megatron_data)."""

    def __init__(self, data_args: Any, training_args: Any, parallel_args: Any) -> None:
        self.data, self.training = data_args, training_args
        self.pretraining = training_args.stage == "pt"
        given = config.current().sample_length
        length = int(data_args.cutoff_len)
        if given and not self.pretraining and not data_args.packing and not data_args.neat_packing:
            multiple = parallel_args.cp_size * 2 if parallel_args.cp_size > 1 else _PADDED_TO
            length = min(-(-given // multiple) * multiple, length)
        self.length = length

    def __len__(self) -> int:
        rounds = max(config.current().iterations, 1) * int(self.training.gradient_accumulation_steps)
        return rounds * int(self.training.per_device_train_batch_size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        if index >= len(self):
            raise IndexError(index)
        sample = {name: torch.ones(self.length, dtype=torch.int64) for name in ("input_ids", "labels")}
        square = (1, self.length, self.length)
        if self.pretraining:
            sample["loss_mask"] = torch.ones(self.length)
            sample["position_ids"] = torch.arange(self.length)
            if self.data.create_attention_mask_in_dataloader:
                sample["attention_mask"] = torch.ones(square, dtype=torch.bool)
        elif self.data.neat_packing:
            sample["attention_mask"] = torch.zeros(square, dtype=torch.bfloat16)
        else:
            sample["attention_mask"] = torch.ones(self.length, dtype=torch.int64)
        return sample


def data_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DataFactory.create`: a manager of samples that nobody has to have."""

    @functools.wraps(original)
    def call(*args: Any, data_args: Any, training_args: Any, parallel_args: Any, **options: Any) -> Any:
        progress.phase("building")
        if training_args.stage != "pt":
            _leave_out_causal_masks()
        return _Manager(Samples(data_args, training_args, parallel_args), int(training_args.per_device_train_batch_size))

    return call


class _Manager:
    def __init__(self, samples: Samples, batch: int) -> None:
        self.samples, self.batch = samples, batch

    def create_train_dataloader(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(self.samples, batch_size=self.batch)


def train(original: Callable[..., Any]) -> Callable[..., Any]:
    """Counts an iteration when the optimizer has stepped and the gradients are gone."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        clear, finished = self.optimizer.zero_grad, 0

        def zero_grad(*rest: Any, **named: Any) -> Any:
            nonlocal finished
            result = clear(*rest, **named)
            finished += 1
            progress.iteration(finished, config.current().iterations)
            return result

        self.optimizer.zero_grad = zero_grad
        return original(self, *args, **options)

    return call


def _leave_out_causal_masks() -> None:
    """In transformers, as it does itself where no token is padding. Only fine-tuning hands it a mask of tokens."""
    try:
        module = importlib.import_module(_MASKS)
        setattr(module, _LEFT_OUT, without_padding(getattr(module, _LEFT_OUT)))
    except (ImportError, AttributeError):
        raise DryRunError(
            f"This transformers has no {_MASKS}.{_LEFT_OUT}, so whether a real run makes a causal mask is not known. "
            "Install the version in MindSpeed-LLM's requirements.txt."
        ) from None


def without_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whether a causal mask is left out depends on whether any token is padding, read from the device: no sample has any."""

    @functools.wraps(original)
    def call(padding_mask: Any, *args: Any, **options: Any) -> Any:
        return original(None, *args, **options)

    return call


def even_dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where tokens go between the ranks of an expert group: upstream counts them on the device, which reads as zeros.

    Every expert gets the same number, and with `launch --moe-load` this rank's those of the busiest one (`moe.py`).
    """

    @functools.wraps(original)
    def call(ep_group: Any, top_k_index: Any, num_global_experts: int, expert_ids_per_ep_rank: Any) -> Any:
        import torch

        groups, total = torch.distributed.get_world_size(ep_group), int(top_k_index.numel())
        local = num_global_experts // groups
        first = torch.distributed.get_rank(ep_group) * local
        counts = moe.even_shares(total, num_global_experts)
        received = counts[first : first + local]
        if not moe.load().is_even:
            received = moe.load().busiest(total, num_global_experts, local)
        sent = [sum(counts[group * local : (group + 1) * local]) for group in range(groups)]
        device = top_k_index.device
        tokens = torch.tensor([count * groups for count in received], dtype=torch.int64, device=device)
        chosen = torch.zeros(sum(received) * groups, dtype=expert_ids_per_ep_rank.dtype, device=device)
        return (tokens, chosen), (torch.tensor(sent), torch.tensor([sum(received)] * groups))

    return call


def expert_biases(original: Callable[..., Any]) -> Callable[..., Any]:
    """GPT-OSS repeats the bias of each expert for its tokens, whose number is on the device: as many rows as there are tokens.

    Of `forward` and of `ep_forward`: the first argument after `self` has the tokens, and `router_indices`, where it is given,
    how often each goes to an expert.
    """

    @functools.wraps(original)
    def call(self: Any, tokens: Any, chosen: Any, *args: Any, **options: Any) -> Any:
        permuted = len(tokens.shape) == 2  # `ep_forward` gets them in the order of the experts
        rows = int(tokens.shape[0] if permuted else chosen.numel())

        def make(method: Any) -> Callable[..., Any]:
            def repeat(values: Any, repeats: Any, dim: int | None = None, **rest: Any) -> Any:
                known = {"output_size": rows} if hasattr(repeats, "device") else {}
                return method(values, repeats, dim=dim, **{**known, **rest})

            return repeat

        with replaced_method(type(tokens), "repeat_interleave", make):
            return original(self, tokens, chosen, *args, **options)

    return call
