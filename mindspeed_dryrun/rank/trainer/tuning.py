"""Fine-tuning: the batches of MindSpeed-LLM's instruction data sets, and its loss (tasks/posttrain/sft/sft_trainer.py).

Every sample has the full sequence length, the longest that the job can meet, or the length that is told.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state

from mindspeed_dryrun.megatron.flags import FLAGS
from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank import activation, installed
from mindspeed_dryrun.rank.trainer import context_parallel

IGNORED = -100
"""The label of a token that is no answer."""


def unpadded(settings: Settings, release: str) -> bool:
    """Whether samples keep the length that they have, by the flag of the release."""
    return any(getattr(settings, FLAGS[flag].key) for flag in installed.unpadding_flags(release))


def of_told_length(settings: Settings) -> Settings:
    """With sequences as long as the samples (`launch --sample-length`), where those are neither padded nor packed."""
    told, multiple = activation.current().sample_length, settings.pad_to_multiple_of or 1
    if not (told and settings.stage and unpadded(settings, activation.current().release)) or settings.packed:
        return settings
    # `pad_to_multiple_of`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/legacy/data/data_samplers.py#L62
    length = min(-(-told // multiple) * multiple, settings.seq_length)
    return dataclasses.replace(
        settings, seq_length=length, max_position_embeddings=settings.max_position_embeddings or settings.seq_length
    )


class TuningData:
    """Microbatches of this stage. All stages get the mask, which is as wide as the sequence is long."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.part = context_parallel.sequence_slicer(settings)
        self.pairs = settings.stage == "dpo"
        # Chosen and rejected answers, for two models each.
        self.shape = (settings.micro_batch_size * (4 if self.pairs else 1), settings.seq_length)

    def __next__(self) -> dict[str, Any]:
        settings = self.settings
        ends = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
        data: dict[str, Any] = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
        if not ends and settings.any_length and settings.pipeline_model_parallel_size > 2:
            data["tokens"], rows = (self._zeros() for _ in range(2))
            data["attention_mask"] = self._mask(rows)
            return data
        names = ["input_ids", "attention_mask", "labels"] + ["position_ids"] * settings.packed
        names += ["actual_seq_len"] * settings.reset_attention_mask
        batch = self._broadcast(names)
        if not settings.packed:
            data["attention_mask"] = self._mask(batch["attention_mask"])
        if ends:
            data["tokens"], data["labels"] = batch["input_ids"], batch["labels"]
            data["loss_mask"] = None if self.pairs else torch.where(batch["labels"] == IGNORED, 0, 1)
            data["position_ids"] = batch.get("position_ids")
        return {name: self._own_part(name, value) for name, value in data.items()}

    def _mask(self, rows: Any) -> Any:
        """Of all samples; of pairs, the trained model's half is made and copied for the frozen one."""
        if not self.pairs:
            return attention_mask(rows)
        half = attention_mask(rows[: self.shape[0] // 2])
        return torch.cat((half, half), dim=0)

    def _zeros(self) -> Any:
        return torch.zeros(self.shape, dtype=torch.int64, device="npu")

    def _broadcast(self, names: list[str]) -> dict[str, Any]:
        """What a tensor group sends itself: one tensor, and its parts as views (Megatron's `broadcast_data`)."""
        # `broadcast_data`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/tensor_parallel/data.py#L68
        together = torch.cat([self._zeros().view(-1) for _ in names], dim=0)
        shape = self.shape
        length = shape[0] * shape[1]
        return {name: together.narrow(0, index * length, length).view(shape) for index, name in enumerate(names)}

    def _own_part(self, name: str, value: Any) -> Any:
        """This rank's part of the sequence, of what has one."""
        if self.settings.context_parallel_size == 1 or value is None or name in ("attention_mask", "position_ids"):
            return value
        return self.part(value.transpose(0, 1)).transpose(0, 1).contiguous()


def attention_mask(rows: Any) -> Any:
    """Of [batch, sequence] ones where there are tokens: what each token may not look at."""
    # `get_tune_attention_mask`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/utils.py#L184
    batch, length = rows.size()
    mask = torch.ones((batch, length, length), device=rows.device, dtype=torch.bool).tril_().view(batch, 1, length, length)
    mask = mask.masked_fill_(rows.bool().bitwise_not_().view(-1, 1, 1, length), value=0)
    mask.bitwise_not_()
    return mask


def loss(settings: Settings, loss_mask: Any, output: Any) -> tuple[Any, dict[str, Any]]:
    """The mean over the tokens of the answers."""
    # `loss_func`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/posttrain/sft/sft_trainer.py#L116
    losses = output.float()
    loss_mask = loss_mask[..., 1:].view(-1).float()
    if settings.context_parallel_size > 1:
        sums = torch.cat([torch.sum(losses.view(-1) * loss_mask).view(1), loss_mask.sum().view(1)])
        torch.distributed.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        mean = sums[0] / sums[1]
    else:
        mean = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
    averaged = torch.cat([mean.clone().detach().view(1)])
    torch.distributed.all_reduce(averaged, group=parallel_state.get_data_parallel_group())
    return mean, {"lm loss": averaged[0]}
