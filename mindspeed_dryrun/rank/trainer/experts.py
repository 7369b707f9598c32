"""The experts of one rank as MindSpeed computes them on an NPU: grouped products, fused SwiGLU, probabilities applied inside.

megatron-core's layer, dispatchers and router do the rest. Where a token goes is not known without a device; the handlers of
`rank/handlers/moe.py`, which both trainers run with, put counts in place of what would be read back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from mindspore.ops.function import math_func

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import (
    extended_experts,
    group_limited,
    overlapped_alltoall,
    overlapped_experts,
    recompute,
    releases,
)
from mindspeed_dryrun.rank.trainer.grouped import exchange, weights_gradient_in_place


class GroupedProduct(torch.autograd.Function):  # type: ignore[misc]
    """The tokens of each expert times its weights, in one operator (MindSpeed's `GMMFunction`, mindspeed/ops/gmm.py).

    Where experts' tokens end is a list of numbers, or a tensor, which MindSpore has another operator for.
    """

    # `GMMFunction`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/gmm.py#L20

    @staticmethod
    def forward(ctx: Any, original_weight: Any, x: Any, weight: Any, group_list: Any, fused: bool) -> Any:
        ctx.save_for_backward(x, weight, original_weight)
        ctx.group_list, ctx.fused = group_list, fused
        return math_func.gmm([x], [weight], [], group_list, 0, 0)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, weight, original_weight = ctx.saved_tensors
        if not ctx.fused:
            x_gradient, weight_gradient, _ = math_func.gmm_backward([gradient], [x], [weight], ctx.group_list, 0)
            return None, x_gradient[0], weight_gradient[0], None, None
        x_gradient, _, _ = math_func.gmm_backward_fusion([gradient], [weight], ctx.group_list, 0)
        return None, x_gradient[0], weights_gradient_in_place(original_weight, weight, x.dtype), None, None


class GroupedExperts(GroupedMLP):  # type: ignore[misc]
    """megatron-core's weights, MindSpeed's operators (core/transformer/moe/moe_feature/gmm/experts.py)."""

    # `GmmExpertsImpl`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/transformer/moe/moe_feature/gmm/experts.py#L11

    recomputes_activation = False

    def __init__(self, num_local_experts: int, config: Any, settings: Settings) -> None:
        super().__init__(num_local_experts, config)
        self.fused = settings.gemm_gradient_accumulation_fusion
        if config.gated_linear_unit:
            self.activation_func = _swiglu

    def forward(self, tokens: Any, tokens_per_expert: Any, probabilities: Any, handover: Any = None) -> tuple[Any, None]:
        """With a handover, both products are one function (`--moe-alltoall-overlap-comm`)."""
        if handover is not None:
            return self._overlapped(tokens, tokens_per_expert, probabilities, handover), None
        first = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        second = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        hidden = self._product(tokens, first, tokens_per_expert, self.weight1)
        if not self.recomputes_activation:
            activated = self.activation_func_with_probs(hidden, probabilities.unsqueeze(-1))
            return self._product(activated, second, tokens_per_expert, self.weight2), None
        held = recompute.WithoutOutput()
        activated = held.run(self.activation_func_with_probs, hidden, probabilities.unsqueeze(-1))
        output = self._product(activated, second, tokens_per_expert, self.weight2)
        held.free()
        if output.requires_grad:
            output.register_hook(held.restore)
        return output, None

    def _overlapped(self, tokens: Any, tokens_per_expert: Any, probabilities: Any, handover: Any) -> Any:
        first = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        second = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        groups = torch.cumsum(tokens_per_expert, dim=0)
        originals = (self.weight1, self.weight2)
        how = overlapped_experts.How(groups, self.activation_func, originals, self.fused, handover)
        return overlapped_experts.Products.apply(tokens, first, second, how, probabilities)

    def _product(self, x: Any, weight: Any, tokens_per_expert: Any, original_weight: Any) -> Any:
        # Up to 2.2.0 they are read back on MindSpore.
        # `npu_gmm`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/mindspore/ops/gmm.py#L79
        ends = torch.cumsum(tokens_per_expert, dim=0)
        group_list = ends if releases.since("2.3.0") else ends.tolist()
        return GroupedProduct.apply(original_weight, x, weight, group_list, self.fused)


class AdaptedExperts(GroupedExperts):
    """Frozen weights with small trained ones beside them, whatever layers `--lora-target-modules` names."""

    # `LoraParallelGroupedMLP`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/posttrain/lora/moe/experts.py#L364

    def __init__(self, num_local_experts: int, config: Any, settings: Settings) -> None:
        super().__init__(num_local_experts, config, settings)
        if config.gated_linear_unit and not releases.since("2.3.0"):
            self.activation_func = _swiglu_in_steps
        rank = settings.lora_r
        self.scaling = settings.lora_alpha / rank
        width, (narrow, _) = self.weight1.shape[1], self.weight2.shape
        self.first_a = self._adapter(config.hidden_size, rank * num_local_experts)
        self.first_b = self._adapter(rank, width, spread=True)
        self.second_a = self._adapter(narrow, rank, spread=True)
        self.second_b = self._adapter(rank * num_local_experts, config.hidden_size)

    def _adapter(self, rows: int, columns: int, spread: bool = False) -> Any:
        """Two of the four count as parameters that every rank has."""
        device = torch.cuda.current_device()
        weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=self.config.params_dtype, device=device))
        weight.adapter = True
        weight.allreduce = not (spread and self.config.expert_model_parallel_size > 1)
        return weight

    def forward(self, tokens: Any, tokens_per_expert: Any, probabilities: Any, handover: Any = None) -> tuple[Any, None]:
        count, hidden_size = self.num_local_experts, self.config.hidden_size
        first, second = self.weight1.view(count, hidden_size, -1), self.weight2.view(count, -1, hidden_size)
        rank = self.first_b.shape[0]
        first_a, second_a = (weight.view(count, -1, rank) for weight in (self.first_a, self.second_a))
        first_b, second_b = (weight.view(count, rank, -1) for weight in (self.first_b, self.second_b))
        hidden = self._product(tokens, first, tokens_per_expert, None)
        compressed = self._product(tokens, first_a, tokens_per_expert, None)
        added = self._product(compressed, first_b, tokens_per_expert, None) * self.scaling
        activated = self.activation_func_with_probs(hidden + added, probabilities.unsqueeze(-1))
        compressed_again = self._product(activated, second_a, tokens_per_expert, None)
        added_again = self._product(compressed_again, second_b, tokens_per_expert, None) * self.scaling
        output = self._product(activated, second, tokens_per_expert, None)
        output += added_again
        return output, None


class BalancedLayer(MoELayer):  # type: ignore[misc]
    """A layer whose router leaves losses behind that are attached to its output (`group_limited_greedy`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unpermute = self.token_dispatcher.token_unpermutation

        def with_losses(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, bias = unpermute(*args, **kwargs)
            return group_limited.attach_losses(self.router, output), bias

        self.token_dispatcher.token_unpermutation = with_losses


class NormedColumn(ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer with the norm of its input inside."""

    def __init__(self, input_size: int, *args: Any, norm: ModuleSpec, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, config=config, **kwargs)
        self.norm = build_module(norm, config=config, hidden_size=input_size)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.norm(x), *args, **kwargs)


def _swiglu(x: Any) -> Any:
    return torch_npu.npu_swiglu(x, dim=-1)


def _swiglu_in_steps(x: Any) -> Any:
    gate, up = torch.chunk(x, 2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def expert_layer(settings: Settings) -> ModuleSpec:
    """The module that stands where a dense layer has its MLP."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if settings.moe_grouped_gemm:
        experts = ModuleSpec(module=AdaptedExperts if settings.lora_modules else GroupedExperts, params={"settings": settings})
    else:
        experts = ModuleSpec(module=SequentialMLP, submodules=linear)
    shared = ModuleSpec(module=SharedExpertMLP, params={"gate": settings.gated_shared_experts}, submodules=linear)
    layer: Any = MoELayer
    params = {}
    if settings.moe_alltoall_overlap_comm and settings.moe_token_dispatcher_type == "alltoall":
        layer = overlapped_alltoall.OverlappedAllToAllLayer
    elif settings.moe_alltoall_overlap_comm:
        layer, params = overlapped_experts.OverlappedLayer, {"extends": settings.moe_tp_extend_ep}
    elif settings.moe_tp_extend_ep:
        layer = extended_experts.ExtendedLayer
    elif settings.moe_router_load_balancing_type == "group_limited_greedy":
        layer = BalancedLayer
    return ModuleSpec(module=layer, params=params, submodules=MoESubmodules(experts=experts, shared_experts=shared))


def dense_layer(settings: Settings, norm: ModuleSpec) -> ModuleSpec:
    """A plain MLP.

    From 26.0.0 on Transformer Engine's layers are the default, and their MLP starts with a norm. A layer without experts among
    layers with them has that norm and the one of the others, which stands before the experts
    (MindSpeed-LLM, core/transformer/transformer_block.py, `_transformer_block_build_layers`).
    """
    first: Any = ColumnParallelLinear
    if settings.mixes_layers and settings.transformer_impl == "transformer_engine" and releases.since("26.0.0"):
        first = ModuleSpec(module=NormedColumn, params={"norm": norm})
    return ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=first, linear_fc2=RowParallelLinear))


def config_fields(settings: Settings) -> dict[str, Any]:
    """What megatron-core's configuration says of experts."""
    return {
        "num_moe_experts": settings.num_experts,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "expert_tensor_parallel_size": settings.expert_tensor_size,
        "moe_ffn_hidden_size": settings.expert_ffn_size,
        "moe_grouped_gemm": settings.moe_grouped_gemm,
        "moe_shared_expert_intermediate_size": settings.shared_expert_size,
        "moe_token_dispatcher_type": settings.moe_token_dispatcher_type,
        "moe_router_topk": settings.moe_router_topk,
        "moe_router_load_balancing_type": settings.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": settings.moe_aux_loss_coeff,
        "moe_z_loss_coeff": settings.moe_z_loss_coeff,
        "moe_router_pre_softmax": settings.moe_router_pre_softmax,
        "moe_router_score_function": settings.moe_router_score_function,
        "moe_router_topk_scaling_factor": settings.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": settings.moe_router_enable_expert_bias,
        "moe_router_num_groups": settings.moe_router_num_groups,
        "moe_router_group_topk": settings.moe_router_group_topk,
        "moe_router_dtype": settings.moe_router_dtype,
        "moe_expert_capacity_factor": settings.capacity_factor,
        "moe_pad_expert_input_to_capacity": settings.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": settings.moe_token_drop_policy,
    }


def hidden_fields(settings: Settings) -> dict[str, Any]:
    """What megatron-core is told while it checks its configuration, which MindSpeed-LLM takes as it is all the same."""
    # `transformer_config_post_init_wrapper`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/core/transformer/transformer_config.py#L10
    hidden: dict[str, Any] = {"add_bias_linear": False}
    if settings.moe_router_topk == 1:
        hidden["moe_router_pre_softmax"] = True
    if settings.moe_router_enable_expert_bias and releases.since("26.0.0"):
        hidden["moe_router_score_function"] = "sigmoid"
    return hidden


def all_to_all(ctx: Any, group: Any, x: Any, output_split_sizes: Any, input_split_sizes: Any) -> Any:
    """`_AllToAll.forward`."""
    # `_AllToAll`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/tensor_parallel/mappings.py#L418
    ctx.group, ctx.output_split_sizes, ctx.input_split_sizes = group, output_split_sizes, input_split_sizes
    return exchange(group, x, output_split_sizes, input_split_sizes)


def install(mark_split: Any) -> None:
    """Replaces what megatron-core leaves no seam for."""
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    megatron_experts._initialize_affine_weight_gpu = mark_split
    mappings._AllToAll.forward = staticmethod(all_to_all)
