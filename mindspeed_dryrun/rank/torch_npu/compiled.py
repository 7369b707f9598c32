"""The operators that MindSpeed compiles in C++ when a rank starts (mindspeed/op_builder, mindspeed/ops/csrc/cann).

Compiling takes minutes and needs a compiler. What counts here is what their C++ code allocates: outputs, what is saved for the
backward pass, and nothing else. Each says which file of mindspeed/ops/csrc/cann it follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from mindspeed_dryrun.rank.torch_npu import slots, workspace

Tensors = list[torch.Tensor]


def load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`MindSpeedOpBuilder.load`: the operators below, where they are those of this builder; else they are compiled as ever."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.name == "algorithm" and hasattr(torch.UntypedStorage, "_swap_data_ptr_"):  # torch 2.7 has no such method
            return _Operators(reuse_data_ptr=reuse_data_ptr)
        return _BUILDERS[self.name] if self.name in _BUILDERS else original(self, *args, **options)

    return call


def launched(operator: str, like: torch.Tensor, size: int | None = None) -> None:
    """Takes the operator's workspace from the caching allocator in any mode, as ACLNN_CMD does (inc/aclnn_common.h:622)."""
    # `ACLNN_CMD`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/csrc/cann/inc/aclnn_common.h#L587
    size = workspace.constants.get(operator) if size is None else size
    if size is None:
        slots.note_unknown(operator)
    else:
        workspace.note(operator, size)
        torch.empty(size, dtype=torch.uint8, device=like.device)


class RotaryPositionEmbedding(torch.autograd.Function):  # type: ignore[misc]
    """npu_rotary_position_embedding.cpp."""

    # `npu_rotary_position_embedding`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/csrc/cann/npu_rotary_position_embedding.cpp#L149

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
        ctx.learnt = cos.requires_grad and sin.requires_grad
        ctx.save_for_backward(x if ctx.learnt else None, cos, sin)
        result = _like(x)
        launched("aclnnRotaryPositionEmbedding", x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, cos, sin = ctx.saved_tensors
        result = _like(grad)
        launched("aclnnRotaryPositionEmbeddingGrad", grad)
        return (result, _like(cos), _like(sin), None) if ctx.learnt else (result, None, None, None)


class MoeTokenPermute(torch.autograd.Function):  # type: ignore[misc]
    """npu_moe_token_permute.cpp."""

    # `npu_moe_token_permute`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/csrc/cann/npu_moe_token_permute.cpp#L122

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, indices: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat = indices.numel()
        order = torch.empty(flat, dtype=torch.int32, device=indices.device)
        permuted = tokens.new_empty(min(wanted, flat) if wanted > 0 else wanted + flat, tokens.size(1))
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order)
        ctx.tokens = tokens.size(0)
        launched("aclnnMoeTokenPermute", tokens, workspace.token_permute_size(flat))
        return permuted, order

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *rest: Any) -> tuple[torch.Tensor | None, ...]:
        result = grad.new_empty(ctx.tokens, grad.size(1))
        launched("aclnnMoeTokenPermuteGrad", grad)
        return result, None, None


class MoeTokenUnpermute(torch.autograd.Function):  # type: ignore[misc]
    """npu_moe_token_unpermute.cpp."""

    @staticmethod
    def forward(ctx: Any, permuted: torch.Tensor, order: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(permuted, order, probs)
        choices = 1 if probs is None else probs.size(1)
        result = permuted.new_empty(order.size(0) // choices, permuted.size(-1))
        launched("aclnnMoeTokenUnpermute", permuted)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        permuted, _, probs = ctx.saved_tensors
        result = _like(permuted)
        grad_probs = None if probs is None else _like(probs)
        launched("aclnnMoeTokenUnpermuteGrad", grad)
        return result, None, grad_probs


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """`at::empty(sizes, options)`: contiguous, whatever the other one is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def grouped_product(
    x: Tensors, weight: Tensors, bias: Tensors, group_list: Any, group_type: int | None, group_list_type: int | None
) -> Tensors:
    """gmm.cpp, `npu_gmm`: of group type 2 the groups are the output's first dimension."""
    # `npu_gmm`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/csrc/cann/gmm.cpp#L77
    shape = [x[0].size(0), weight[0].size(-1)]
    if group_type == 2:
        shape.insert(0, len(group_list))
    version = "V4" if isinstance(group_list, torch.Tensor) else "V2"
    result = x[0].new_empty(shape)
    launched("aclnnGroupedMatmul" + version, x[0])
    return [result]


def grouped_product_backward(
    grad: Tensors, x: Tensors, weight: Tensors, group_list: Any, group_list_type: int | None
) -> tuple[Tensors, Tensors, Tensors]:
    """gmm.cpp, `npu_gmm_backward`: the gradient of a transposed weight is made transposed, from a contiguous gradient."""
    kind = group_list_type
    dx = grouped_product(grad, [item.transpose(-1, -2) for item in weight], [], group_list, 0, kind)
    first = weight[0]
    if isinstance(group_list, torch.Tensor) and first.stride(-2) == 1 and first.stride(-1) == first.size(-2):
        whole = grad[0].contiguous()
        dw = [item.transpose(-1, -2) for item in grouped_product([whole.transpose(-1, -2)], x, [], group_list, 2, kind)]
    else:
        dw = grouped_product([item.transpose(-1, -2) for item in x], grad, [], group_list, 2, kind)
    return dx, [part.reshape(whole.shape) for part, whole in zip(dw, weight, strict=True)], []


def grouped_product_backward_fusion(
    grad: Tensors, weight: Tensors, group_list: Any, group_list_type: int | None
) -> tuple[Tensors, Tensors, Tensors]:
    """gmm.cpp, `npu_gmm_backward_fusion`: the weight's gradient is added elsewhere."""
    transposed = [item.transpose(-1, -2) for item in weight]
    return grouped_product(grad, transposed, [], group_list, 0, group_list_type), [], []


def ring_attention_update(*tensors: torch.Tensor) -> Tensors:
    """npu_ring_attention_update.cpp: the three outputs, and a number where no lengths are given."""
    # `npu_ring_attention_update`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/csrc/cann/npu_ring_attention_update.cpp#L25
    attention, largest, total = tensors[:3]
    results = [_like(attention), _like(largest), _like(total)]
    launched("aclnnRingAttentionUpdate", attention)
    return results


def apply_adamw(param: torch.Tensor, *rest: Any) -> None:
    """npu_apply_fused_adamw_v2.cpp: in place, but for the step before this one."""
    state_step = rest[4]
    step = state_step.sub(1)
    launched("aclnnApplyAdamWV2", param)
    del step


def apply_ema_adamw(grad: torch.Tensor, *tensors: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """npu_apply_fused_ema_adamw.cpp: in place."""
    launched("aclnnApplyFusedEmaAdam", grad)
    return tuple(tensors[:4])


def fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any
) -> Any:
    """fusion_attention_v2.cpp: what torch_npu's own operator allocates."""
    names = ("pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tokens", "next_tokens", "inner_precise", "prefix",
             "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "pse_type", "q_start_idx",
             "kv_start_idx")  # fmt: skip
    options = dict(zip(names, rest, strict=True))
    return torch_npu.npu_fusion_attention_v2(query, key, value, head_num, input_layout, **options)


def fusion_attention_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str, *rest: Any
) -> Any:
    """fusion_attention_v2.cpp: what torch_npu's own operator allocates."""
    names = ("pse", "padding_mask", "atten_mask", "softmax_max", "softmax_sum", "softmax_in", "attention_in", "scale_value",
             "keep_prob", "pre_tokens", "next_tokens", "inner_precise", "seed", "offset", "numels", "prefix", "actual_seq_qlen",
             "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "pse_type", "q_start_idx",
             "kv_start_idx")  # fmt: skip
    options = dict(zip(names, rest, strict=True))
    return torch_npu.npu_fusion_attention_grad_v2(query, key, value, dy, head_num, input_layout, **options)[:4]


def reuse_data_ptr(target: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    """algorithm.cpp of mindspeed/ops/csrc: the storage looks into the other's memory from now on, and its own is freed."""
    # `reuse_data_ptr`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/csrc/algorithm/algorithm.cpp#L3
    own, size = target.untyped_storage(), target.element_size()
    if offset < 0 or (offset + target.numel()) * size > source.numel() * source.element_size():
        raise RuntimeError("Offsets overflow")  # as the original
    address = source.untyped_storage().data_ptr() + offset * size
    other = torch._C._construct_storage_from_data_pointer(address, target.device, own.nbytes())
    own._swap_data_ptr_(other)


class _Operators:
    """What a builder's `load` gives."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.__dict__.update(functions)


_GROUPED = _Operators(
    npu_gmm=grouped_product,
    npu_gmm_backward=grouped_product_backward,
    npu_gmm_backward_fusion=grouped_product_backward_fusion,
)
_BUILDERS = {
    "npu_rotary_position_embedding": _Operators(
        npu_rotary_position_embedding=lambda x, cos, sin, mode=0: RotaryPositionEmbedding.apply(x, cos, sin, mode)
    ),
    "npu_moe_token_permute": _Operators(
        npu_moe_token_permute=lambda tokens, indices, num_out_tokens=0, padded_mode=False: MoeTokenPermute.apply(
            tokens, indices, num_out_tokens or 0
        )
    ),
    "npu_moe_token_unpermute": _Operators(
        npu_moe_token_unpermute=lambda permuted, order, probs=None, padded_mode=False, restore_shape=None: (
            MoeTokenUnpermute.apply(permuted, order, probs)
        )
    ),
    "grouped_matmul": _GROUPED,
    "grouped_matmul_v2": _GROUPED,
    "npu_ring_attention_update": _Operators(npu_ring_attention_update=ring_attention_update),
    "npu_apply_fused_adamw_v2": _Operators(npu_apply_fused_adamw_v2=apply_adamw),
    "npu_apply_fused_ema_adamw": _Operators(npu_apply_fused_ema_adamw=apply_ema_adamw),
    "fusion_attention_v2": _Operators(
        npu_fusion_attention_v2=fusion_attention, npu_fusion_attention_grad_v2=fusion_attention_grad
    ),
}
