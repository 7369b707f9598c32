"""The router of a mixture of experts, with what MindSpeed-LLM adds to megatron-core's (core/transformer/moe/router.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, mappings
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    switch_load_balancing_loss_func,
    topk_softmax_with_capacity,
)
from megatron.core.transformer.moe.router import TopKRouter

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import group_limited, releases


def install(settings: Settings) -> None:
    """Gives megatron-core's router MindSpeed-LLM's choice of experts."""
    # `topk_router_routing`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/moe/router.py#L455
    TopKRouter.routing = routing_function(settings)
    if releases.since("2.3.0"):
        TopKRouter.gating = _gating_with_a_copy


def _gating_with_a_copy(router: Any, x: Any) -> Any:
    """`TopKRouter.gating` from 2.3.0 on: what is kept for the gradient is a copy of the weight
    (MindSpeed-LLM, mindspore/core/transformer/moe/router.py)."""
    dtype = torch.float32 if router.config.moe_router_dtype == "fp32" else x.dtype
    return F.linear(x.to(dtype), router.weight.clone().to(dtype))


def routing_function(settings: Settings) -> Callable[..., tuple[Any, Any]]:
    """`TopKRouter.routing`: scores and map of [tokens, experts] from logits."""

    def routing(router: Any, logits: Any) -> tuple[Any, Any]:
        length, batch = logits.shape[:2]
        logits = router.apply_z_loss(logits.view(-1, router.config.num_moe_experts))
        if settings.tensor_model_parallel_size > 1 and settings.moe_token_dispatcher_type == "alltoall_seq":
            logits = gather_from_sequence_parallel_region(logits)
        kind = settings.moe_router_load_balancing_type
        if kind == "aux_loss":
            scores, chosen = router.aux_loss_load_balancing(logits)
            if settings.norm_topk_prob:
                scores = scores / scores.sum(dim=-1, keepdim=True)
        elif kind == "seq_aux_loss":
            scores, chosen = router.seq_aux_loss_load_balancing(logits, batch, length)
        elif kind == "softmax_topk":
            scores, chosen = _softmax_then_choose(settings, logits)
        elif kind == "group_limited_greedy":
            scores, chosen = group_limited.choose(settings, router, logits)
        elif kind == "pai_megatron_aux_loss":
            scores, chosen = _choose_with_loss(router, logits)
        else:
            scores, chosen = _choose(settings, router, logits)
        if settings.moe_tp_extend_ep:
            scores, chosen = (mappings._split_along_first_dim(x) for x in (scores, chosen))
        if router.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                router.local_tokens_per_expert += chosen.sum(dim=0)
        return scores, chosen

    return routing


def _softmax_then_choose(settings: Settings, logits: Any) -> tuple[Any, Any]:
    """`softmax_topk`: probabilities of all experts first, the best of them kept."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)
    scores, indices = torch.topk(probabilities, k=settings.moe_router_topk, dim=1)
    if settings.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    scores = torch.zeros_like(probabilities).scatter(1, indices, scores)
    return scores, torch.zeros_like(probabilities).int().scatter(1, indices, 1).bool()


def _choose_with_loss(router: Any, logits: Any) -> tuple[Any, Any]:
    """`pai_megatron_aux_loss`: probabilities first, and Megatron's balance loss (tasks/models/common/pai_megatron.py)."""
    # `pai_megatron_aux_loss`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/models/common/pai_megatron.py#L22
    scores, chosen, tokens_per_expert = topk_softmax_with_capacity(logits, router.topk, use_pre_softmax=True)
    if router.training and torch.is_grad_enabled():
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        loss = functools.partial(
            switch_load_balancing_loss_func, probs=probabilities, tokens_per_expert=tokens_per_expert, topk=router.topk
        )
        scores = router.apply_load_balancing_loss(activation=scores, load_balancing_loss_func=loss)
    return scores, chosen


def _choose(settings: Settings, router: Any, logits: Any) -> tuple[Any, Any]:
    """`none`: no balance but that of the experts' bias, and a loss for each sequence with `--seq-aux`."""
    config = router.config
    scores, chosen, _ = topk_softmax_with_capacity(
        logits,
        router.topk,
        capacity_factor=config.moe_expert_capacity_factor,
        pad_to_capacity=config.moe_pad_expert_input_to_capacity,
        drop_policy=config.moe_token_drop_policy,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        deterministic_mode=config.deterministic_mode,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
    )
    if router.training and settings.seq_aux:
        scores = _with_sequence_loss(settings, router, scores, logits, chosen)
    return scores, chosen


def _with_sequence_loss(settings: Settings, router: Any, activation: Any, logits: Any, chosen: Any) -> Any:
    """`apply_seq_aux_loss`: a loss for each sequence, attached to the scores."""
    coefficient = settings.moe_aux_loss_coeff / settings.tensor_model_parallel_size
    if coefficient == 0:
        return activation
    length = logits.shape[0] // settings.micro_batch_size
    if settings.moe_router_score_function == "softmax":
        scores = torch.softmax(logits, dim=-1)
    else:
        scores = torch.sigmoid(logits)
        if router.expert_bias is not None:
            scores = scores + router.expert_bias
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    rows = chosen.view(settings.micro_batch_size, -1)
    by_sequence = scores.view(settings.micro_batch_size, length, -1)
    experts = settings.num_experts
    counts = torch.stack([torch.histc(row.to(torch.int32), bins=experts, min=0, max=experts) for row in rows])
    group = parallel_state.get_context_parallel_group()
    parts = torch.distributed.get_world_size(group)
    coefficient /= parts
    torch.distributed.all_reduce(counts, group=group)
    frequency = counts.div(parts * length * parts * settings.moe_router_topk / experts)
    loss = (by_sequence.mean(dim=1) * frequency).sum(dim=1).mean() * coefficient
    save_to_aux_losses_tracker(
        "load_balancing_loss", loss / coefficient, router.layer_number, router.config.num_layers, reduce_group=group
    )
    return MoEAuxLossAutoScaler.apply(activation, loss)
