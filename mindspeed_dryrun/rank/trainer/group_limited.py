"""DeepSeek-V2's router: experts of a few groups, and losses that balance experts, devices and what is sent between them.

MindSpeed-LLM's `group_limited_greedy_topKgating` (core/transformer/moe/router.py), operator by operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker

from mindspeed_dryrun.megatron.settings import Settings


@dataclass(frozen=True)
class Groups:
    """Sizes of one call: groups of experts, groups that a token may choose from, tokens of a sequence."""

    count: int
    chosen: int
    length: int


def choose(settings: Settings, router: Any, logits: Any) -> tuple[Any, Any]:
    """Scores and map of [tokens, experts]; the losses stay with the router until its layer has an output to attach them to."""
    # `group_limited_greedy_topKgating`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/moe/router.py#L35
    groups = Groups(
        settings.moe_router_num_groups or settings.expert_model_parallel_size,
        settings.moe_router_group_topk or 1,
        int(logits.shape[0]),
    )
    scores = F.softmax(logits, dim=1)
    indices, weights = _best(settings, groups, scores)
    gates = torch.zeros_like(logits).scatter(1, indices, weights)
    chosen = torch.zeros_like(logits).int().scatter(1, indices, 1).bool()
    router.balance_losses = _losses(settings, groups, logits, scores, indices.view(settings.micro_batch_size, -1))
    return gates, chosen


def attach_losses(router: Any, output: Any) -> Any:
    """`moe_layer_forward`: the losses join the graph behind the experts."""
    # `moe_layer_forward`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/moe/moe_layer.py#L119
    losses = router.balance_losses
    for name, loss in losses.items():
        save_to_aux_losses_tracker(name, loss, router.layer_number, router.config.num_layers)
    return MoEAuxLossAutoScaler.apply(output, losses["load_balancing_loss"])


def _best(settings: Settings, groups: Groups, scores: Any) -> tuple[Any, Any]:
    rows = settings.micro_batch_size * groups.length
    group_scores = scores.view(rows, groups.count, -1).max(dim=-1).values
    group_indices = torch.topk(group_scores, k=groups.chosen, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, group_indices, 1)
    each = (settings.num_experts or 1) // groups.count
    mask = mask.unsqueeze(-1).expand(rows, groups.count, each).reshape(rows, -1)
    allowed = scores.masked_fill(~mask.bool(), 0.0)
    weights, indices = torch.topk(allowed, k=settings.moe_router_topk, dim=-1, sorted=False)
    if settings.moe_router_topk > 1 and settings.norm_topk_prob:
        return indices, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return indices, weights * (settings.moe_router_topk_scaling_factor or 1.0)


def _losses(settings: Settings, groups: Groups, logits: Any, scores: Any, indices: Any) -> dict[str, Any]:
    frequency, mean = _expert_balance(settings, groups, logits, scores, indices)
    total: Any = 0
    losses: dict[str, Any] = {}
    if settings.moe_aux_loss_coeff > 0:
        total = total + _mean(settings, mean * frequency) * settings.moe_aux_loss_coeff
        losses["load_balancing_expert_level_loss"] = total / settings.moe_aux_loss_coeff
    by_device = _by_group(settings, groups, mean).sum(-1)
    if settings.moe_device_level_aux_loss_coeff > 0:
        devices = _by_group(settings, groups, frequency).mean(-1)
        loss = _mean(settings, devices * by_device) * settings.moe_device_level_aux_loss_coeff
        losses["load_balancing_device_level_loss"] = loss / settings.moe_device_level_aux_loss_coeff
        total = total + loss
    if settings.moe_comm_aux_loss_coeff > 0:
        loss = _mean(settings, _sent(settings, groups, logits, indices) * by_device) * settings.moe_comm_aux_loss_coeff
        losses["load_balancing_comm_level_loss"] = loss / settings.moe_comm_aux_loss_coeff
        total = total + loss
    return {"load_balancing_loss": total, **losses}


def _expert_balance(settings: Settings, groups: Groups, logits: Any, scores: Any, indices: Any) -> tuple[Any, Any]:
    """How often each expert was chosen, and its mean score: by sequence (`--seq-aux`) or of all tokens."""
    batch, experts, top_k = settings.micro_batch_size, settings.num_experts or 1, settings.moe_router_topk
    if not settings.seq_aux:
        counts = F.one_hot(indices.view(-1), num_classes=experts).to(logits.dtype).mean(0)
        return counts * experts, scores.mean(0)
    by_sequence = scores.view(batch, groups.length, -1)
    counts = torch.zeros(batch, experts, device=logits.device)
    counts.scatter_add_(1, indices, torch.ones(batch, groups.length * top_k, device=logits.device))
    group = parallel_state.get_context_parallel_group()
    parts = torch.distributed.get_world_size(group)
    torch.distributed.all_reduce(counts, group=group)
    return counts.div(parts * groups.length * parts * top_k / experts), by_sequence.mean(dim=1)


def _sent(settings: Settings, groups: Groups, logits: Any, indices: Any) -> Any:
    """How many tokens each group of experts is sent: a map of [sequence, experts] in 32 bits."""
    batch, top_k = settings.micro_batch_size, settings.moe_router_topk
    sent = torch.zeros(batch, groups.length, settings.num_experts, device=logits.device)
    ones = torch.ones(batch, groups.length, top_k, device=logits.device)
    sent.scatter_add_(2, indices.view(batch, groups.length, -1), ones)
    if settings.seq_aux:
        sent = (sent.view(batch, groups.length, groups.count, -1).sum(-1) > 0).to(logits.dtype).sum(dim=1)
        return sent.div_(groups.length * groups.chosen / groups.count)
    sent = sent.view(batch * groups.length, groups.count, -1)
    return (sent.sum(dim=-1) > 0).to(logits.dtype).mean(0).div(groups.chosen / groups.count)


def _by_group(settings: Settings, groups: Groups, values: Any) -> Any:
    return values.view(settings.micro_batch_size, groups.count, -1) if settings.seq_aux else values.view(groups.count, -1)


def _mean(settings: Settings, values: Any) -> Any:
    return values.sum(dim=1).mean() if settings.seq_aux else values.sum()
