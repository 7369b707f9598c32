"""Direct preference optimization: a trained and a frozen model side by side, as MindSpeed-LLM runs them.

Upstream: mindspeed_llm/tasks/posttrain/dpo/dpo_model.py and dpo_trainer.py. A microbatch holds the chosen and the rejected
answers twice: the first half of its rows is for the trained model, the second for the frozen one.
"""
# `DPOModel`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/posttrain/dpo/dpo_model.py#L46

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_attr_wrapped_model

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer.tuning import IGNORED


class Policies:
    """Both models behind one forward pass. The schedule sees the trained one only."""

    def __init__(self, trained: list[Any], frozen: list[Any]) -> None:
        self.trained = trained
        self.frozen = frozen
        self.inputs: Any = None  # upstream holds them until the next microbatch

    def __call__(self, tokens: Any, position_ids: Any, attention_mask: Any) -> Any:
        chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
        trained, frozen = self.trained[chunk], self.frozen[chunk]
        received = get_attr_wrapped_model(trained, "decoder").input_tensor
        if received is not None:
            self.inputs = torch.chunk(received, 2, dim=1)
            for model, part in zip((trained, frozen), self.inputs, strict=True):
                get_attr_wrapped_model(model, "set_input_tensor")(part)
        halves = [_halves(value) for value in (tokens, position_ids, attention_mask)]
        with torch.no_grad():
            frozen_output = frozen(*(half[1] for half in halves))
        trained_output = trained(*(half[0] for half in halves))
        rows = 0 if parallel_state.is_pipeline_last_stage() else 1
        return torch.cat((trained_output, frozen_output), dim=rows)


def _halves(value: Any) -> tuple[Any, Any]:
    return (None, None) if value is None else tuple(torch.chunk(value, 2, dim=0))


def loss(settings: Settings, labels: Any, output: Any) -> tuple[Any, dict[str, Any]]:
    """How much more the trained model prefers the chosen answer than the frozen one does."""
    labels = labels[: 2 * settings.micro_batch_size, ...]
    trained, frozen = torch.chunk(output, 2, dim=0)
    frozen = frozen.detach()
    chosen, rejected, mean = _log_probabilities(settings, trained, labels)
    frozen_chosen, frozen_rejected, _ = _log_probabilities(settings, frozen, labels)
    losses = _preference(settings, (chosen - rejected) - (frozen_chosen - frozen_rejected))
    chosen_rewards = settings.dpo_beta * (chosen - frozen_chosen).detach()
    rejected_rewards = settings.dpo_beta * (rejected - frozen_rejected).detach()
    if settings.pref_ftx > 1e-6:
        losses += settings.pref_ftx * -mean
    accuracy = (chosen_rewards > rejected_rewards).float().detach().mean()
    average = losses.mean()
    metrics = {"rewards/accuracies": _averaged(accuracy), "lm loss": _averaged(average)}
    return average / settings.context_parallel_size, metrics


def _averaged(value: Any) -> Any:
    values = torch.cat([value.clone().detach().view(1)])
    torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values[0]


def _preference(settings: Settings, logits: Any) -> Any:
    beta, smoothing = settings.dpo_beta, settings.dpo_label_smoothing
    if settings.dpo_loss_type == "hinge":
        return torch.relu(1 - beta * logits)
    if settings.dpo_loss_type == "ipo":
        return (logits - 1 / (2 * beta)) ** 2
    return -functional.logsigmoid(beta * logits) * (1 - smoothing) - functional.logsigmoid(-beta * logits) * smoothing


def _log_probabilities(settings: Settings, logits: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Of the chosen answers, the rejected ones, and the mean over the tokens of the chosen."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    rows = logits.size(0) // 2
    together = _of_a_part if settings.tensor_model_parallel_size > 1 else _of_all
    sums, lengths = together(logits, labels)
    if settings.context_parallel_size > 1:
        for value in (lengths, sums):
            torch.distributed.all_reduce(value, group=parallel_state.get_context_parallel_group())
    if settings.dpo_loss_type == "ipo":
        sums = sums / torch.clamp(lengths, min=1)
    chosen, rejected = sums.split(rows, dim=0)
    chosen_length, _ = lengths.split(rows, dim=0)
    return chosen, rejected, chosen / chosen_length


def _of_all(logits: Any, labels: Any) -> tuple[Any, Any]:
    """The whole vocabulary is here."""
    answers = labels != IGNORED
    labels[labels == IGNORED] = 0
    each = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    each = each * answers
    return each.sum(-1), answers.sum(-1)


def _of_a_part(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Each tensor-parallel rank has a part of the vocabulary."""
    size = logits.size(2)
    labels -= parallel_state.get_tensor_model_parallel_rank() * size
    labels = labels.masked_fill(torch.logical_or(labels < 0, labels >= size), 0)
    answers = labels != 0
    each = torch.gather(_log_softmax(logits), dim=2, index=labels.unsqueeze(2)).squeeze(2) * answers
    sums, lengths = each.sum(-1), answers.sum(-1)
    for value in (sums, lengths):
        torch.distributed.all_reduce(value, group=parallel_state.get_tensor_model_parallel_group())
    return sums, lengths


def _log_softmax(logits: Any) -> Any:
    group = parallel_state.get_tensor_model_parallel_group()
    highest = logits.max(dim=-1, keepdim=True).values
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    exponentials = torch.exp(logits - highest)
    total = exponentials.sum(dim=-1, keepdim=True)
    torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, group=group)
    logarithm = total.log()
    return logits - highest - logarithm
