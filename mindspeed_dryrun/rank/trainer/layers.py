"""The layers as MindSpeed-LLM computes them on an NPU: the same operators in the same order, so the same tensors.

megatron-core's modules do the rest; these are handed to it through layer specs. What is replaced in place, because
megatron-core offers no seam, is replaced in `install`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank.trainer import experts, fused_linear, multi_token, rotary, router

COMPRESSED_MASK = 2048
"""Side of the causal mask that the fused attention operator expects, whatever the sequence (its sparse mode 2)."""
# `generate_attention_mask`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/transformer/flash_attention/generate_mask/generate_mask.py#L16
ANY_TOKENS_BEFORE = 1048576
"""How far back a token looks: Megatron's default for `--pre-tockens`, further than any sequence."""


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """Root mean square norm; fused where the script asks for it."""

    def __init__(self, settings: Settings, size: int, eps: float, sequence_parallel: bool) -> None:
        super().__init__()
        self.settings = settings
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: Any) -> Any:
        weight = self.weight
        if self.settings.add_rmsnorm_offset:
            weight = 1.0 + (weight.float() if self.settings.rmsnorm_weight_in_fp32 else weight)
        if self.settings.use_fused_rmsnorm:
            return torch_npu.npu_rms_norm(x, weight, epsilon=self.eps)[0]
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.settings.rmsnorm_weight_in_fp32:
            return (wide * weight).type_as(x)
        return wide.type_as(x) * weight


class LinearsRMSNorm(RMSNorm):
    """The norm that a linear layer of Transformer Engine starts with, as MindSpeed writes it: in the precision of its input."""

    # `_rmsnorm`: https://gitcode.com/Ascend/MindSpeed/blob/v26.0.0_core_r0.12.1/mindspeed/te/pytorch/module/layernorm_column_parallel_linear.py#L226

    def forward(self, x: Any) -> Any:
        if self.settings.use_fused_rmsnorm:
            return torch_npu.npu_rms_norm(x, self.weight, epsilon=self.eps)[0]
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * self.weight


class Norm:
    """What a layer spec builds where it says "a norm"."""

    def __new__(cls, config: Any, hidden_size: int, settings: Settings, eps: float = 1e-5, in_linear: bool = False) -> Any:
        if config.normalization == "LayerNorm":
            return torch.nn.LayerNorm(hidden_size, eps=eps)
        kind = LinearsRMSNorm if in_linear else RMSNorm
        return kind(settings, hidden_size, eps, config.sequence_parallel)


@functools.cache
def causal_mask() -> Any:
    """The one mask of a process, shared by all layers of all chunks; made when the first layer needs it."""
    ones = torch.ones((COMPRESSED_MASK, COMPRESSED_MASK), device="npu", dtype=torch.bool)
    return torch.triu(ones, diagonal=1)


class FusedAttention(MegatronModule):  # type: ignore[misc]
    """Attention of one rank's heads over the tokens it has, as one operator."""

    # `flash_attention_forward`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/dot_product_attention.py#L400

    def __init__(self, config: Any, settings: Settings, **_: Any) -> None:
        super().__init__(config=config)
        self.settings = settings
        self.scale = 1.0 / math.sqrt(settings.query_pre_attn_scalar or config.kv_channels)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
        # MindSpeed-LLM's module keeps the mask until its next forward pass brings another one.
        self.attention_mask = mask = causal_mask() if attention_mask is None else attention_mask
        length, batch, heads, _ = query.shape
        # A mask of the samples is taken as it is (mode 0); without one the operator knows that attention is causal (mode 2).
        layout, sparse_mode, ends = self.settings.shape_order, 2 if attention_mask is None else 0, None
        before, window = ANY_TOKENS_BEFORE, self.settings.sliding_window
        if window is not None and length > window:
            before, sparse_mode = window, 4
        if self.settings.packed:
            # Packed samples; in a dry run each row of the batch is one document.
            layout, sparse_mode, ends = "TND", 4, tuple(length * (row + 1) for row in range(batch))
        query, key, value = (to_layout(x, layout) for x in (query, key, value))
        output = torch_npu.npu_fusion_attention(
            query, key, value, heads, layout, pse=None, padding_mask=None, atten_mask=mask, scale=self.scale,
            pre_tockens=before, next_tockens=0, keep_prob=1 - self.config.attention_dropout,
            inner_precise=0, sparse_mode=sparse_mode, actual_seq_qlen=ends, actual_seq_kvlen=ends,
        )[0]  # fmt: skip
        if layout == "BNSD":
            return output.permute(2, 0, 1, 3).reshape(length, batch, -1)
        if layout == "TND":
            return output.view(batch, length, heads, -1).permute(1, 0, 2, 3).reshape(length, batch, -1)
        return output


def to_layout(x: Any, layout: str) -> Any:
    """[sequence, batch, heads, size] → what the operator takes."""
    if layout == "BNSD":
        return x.permute(1, 2, 0, 3)
    if layout == "TND":
        return x.permute(1, 0, 2, 3).reshape(-1, *x.shape[2:])
    return x.reshape(x.shape[0], x.shape[1], -1)


class NoopLayer(MegatronModule):  # type: ignore[misc]
    """A layer that only fills a place in the pipeline's split."""

    # `NoopTransformerLayer`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/pipeline_parallel/noop_layers/adaptor.py#L32

    def __init__(self, config: Any, layer_number: int) -> None:
        super().__init__(config)
        self.layer_number = layer_number

    def forward(self, hidden_states: Any, *_: Any, context: Any = None, **__: Any) -> tuple[Any, Any]:
        return hidden_states.clone(), context


class ScaledOutput(MegatronModule):  # type: ignore[misc]
    """A module of a layer, and what some models do to its output before the residual is added."""

    # `_forward_attention`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/transformer_layer.py#L64

    def __init__(self, module: Any, scale: float | None, norm: Any, use_norm: bool) -> None:
        super().__init__(module.config)
        self.module = module
        self.scale = scale
        self.norm = norm
        self.use_norm = use_norm

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, bias = self.module(*args, **kwargs)
        if self.scale is not None:
            output = output * self.scale
        if self.use_norm:
            output = self.norm(output)
        return output, bias


_AS_IT_IS = torch.nn.Identity()


class HalvedLayer(TransformerLayer):  # type: ignore[misc]
    """The norm before the MLP belongs to the MLP's half, as in MindSpeed-LLM from 26.1.0 on: without gradients, what attention
    was made of is gone by then."""

    # `def _forward_mlp`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/core/transformer/transformer_layer.py#L264

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        norm: Any = self.pre_mlp_layernorm
        self.pre_mlp_layernorm: Any = _AS_IT_IS
        try:
            return super()._forward_attention(*args, **kwargs)
        finally:
            self.pre_mlp_layernorm = norm

    def _forward_mlp(self, attended: Any, residual: Any) -> Any:
        normed = self.pre_mlp_layernorm(attended)
        return super()._forward_mlp(normed, residual)


def finish_layer(layer: TransformerLayer, settings: Settings) -> None:
    """Adds MiniCPM's residual scale (`--scale-depth`) and Gemma2's norms behind attention and MLP, where asked for."""
    scale = settings.scale_depth / math.sqrt(settings.num_layers) if settings.scale_depth is not None else None
    if scale is None and not settings.post_norms:
        return
    for name in ("self_attention", "mlp"):
        after = Norm(layer.config, layer.config.hidden_size, settings) if settings.post_norms else None
        # Gemma2's layer spec always holds the norms, --post-norm uses them.
        setattr(layer, name, ScaledOutput(getattr(layer, name), scale, after, use_norm=bool(after and settings.post_norm)))


class VocabularyEmbedding:
    """`VocabParallelEmbedding.forward`: masks by multiplying, so that no mask as wide as the model is kept."""

    # `mindspeed_vocab_parallel_embedding_forward`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/tensor_parallel/vocab_parallel/adaptor.py#L13

    def __init__(self, settings: Settings) -> None:
        self.scale = settings.embedding_multiplier_scale

    def forward(self, module: Any, ids: Any) -> Any:
        split = module.tensor_model_parallel_size > 1
        if split:
            elsewhere = (ids < module.vocab_start_index) | (ids >= module.vocab_end_index)
            local = ids.clone() - module.vocab_start_index
            local *= ~elsewhere
        else:
            local = ids
        part = F.embedding(local, module.weight)
        if split:
            part *= ~elsewhere[..., None]
        if module.reduce_scatter_embeddings:
            part = part.transpose(0, 1).contiguous()
            output = tensor_parallel.reduce_scatter_to_sequence_parallel_region(part)
        else:
            output = tensor_parallel.reduce_from_tensor_model_parallel_region(part)
        return output * self.scale if self.scale else output


def sliced_product(layer: Any, slices: int) -> Any:
    """The forward pass of an output layer that makes the logits in slices of the vocabulary (`--output-layer-slice-num`)."""

    def forward(x: Any, weight: Any = None, **_: Any) -> tuple[Any, None]:
        weight = layer.weight if weight is None else weight
        x = tensor_parallel.copy_to_tensor_model_parallel_region(x)
        parts = [
            tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(
                input=x, weight=part, bias=None, gradient_accumulation_fusion=False, allreduce_dgrad=False,
                sequence_parallel=False, grad_output_buffer=None,
            )
            for part in torch.split(weight, weight.shape[0] // slices, dim=0)
        ]  # fmt: skip
        return torch.cat(parts, dim=2), None

    return forward


def predicted_logits(logits: Any, target: Any, logits_max: Any, start: int, end: int) -> tuple[Any, ...]:
    """`VocabParallelCrossEntropy.calculate_predicted_logits`, in place and with masks that multiply."""
    # `calculate_predicted_logits`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/tensor_parallel/cross_entropy.py#L6
    logits -= logits_max.unsqueeze(dim=-1)
    elsewhere = (target < start) | (target >= end)
    local = target.clone() - start
    local *= ~elsewhere
    width = logits.size()[-1]
    flat, local = logits.view(-1, width), local.view(-1)
    rows = torch.arange(start=0, end=flat.size()[0], device=flat.device)
    predicted = flat[rows, local].clone().contiguous().view_as(target)
    predicted *= ~elsewhere
    exponents = logits
    torch.exp(logits, out=exponents)
    sums = exponents.sum(dim=-1)
    return elsewhere.float(), local, predicted, sums, exponents


def gradient_operands(softmax: Any, target_mask: Any) -> tuple[Any, ...]:
    """`VocabParallelCrossEntropy.prepare_gradient_calculation_operands`, for a mask of floats."""
    flat = softmax.view(-1, softmax.size()[-1])
    rows = torch.arange(start=0, end=flat.size()[0], device=flat.device)
    return flat, rows, 1.0 - target_mask.view(-1), softmax


class FusedSwiGLU:
    """Stands for megatron-core's autograd functions: the NPU has one operator for both directions."""

    @staticmethod
    def apply(x: Any, *_: Any) -> Any:
        return torch_npu.npu_swiglu(x, dim=-1)


class FusedBiasSwiGLU:
    """The same, after a bias."""

    @staticmethod
    def apply(x: Any, bias: Any, *_: Any) -> Any:
        return torch_npu.npu_swiglu(x + bias, dim=-1)


def gelu_tanh(x: Any) -> Any:
    """The tanh approximation, spelled out as MindSpeed-LLM's `--gelu-tanh` does."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def _mark_split(weight: Any, init_method: Any, partition_dim: int, stride: int = 1, is_expert: bool = False) -> None:
    """`_initialize_affine_weight_gpu` without the values: they do not matter in a dry run, and cost most of a start."""
    # `_initialize_affine_weight_gpu`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/tensor_parallel/layers.py#L110
    if not is_expert:
        tensor_parallel.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)


def install(settings: Settings) -> None:
    """Replaces the functions of megatron-core that no layer spec reaches."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.tensor_parallel import cross_entropy, layers
    from megatron.core.transformer import attention

    attention.apply_rotary_pos_emb = rotary.rotary_function(settings)
    layers._initialize_affine_weight_gpu = _mark_split
    embedding = VocabularyEmbedding(settings)
    layers.VocabParallelEmbedding.forward = lambda module, ids: embedding.forward(module, ids)
    cross_entropy.VocabParallelCrossEntropy.calculate_predicted_logits = staticmethod(predicted_logits)
    cross_entropy.VocabParallelCrossEntropy.prepare_gradient_calculation_operands = staticmethod(gradient_operands)
    if settings.mtp_mem_efficient_logits:
        cross_entropy.VocabParallelCrossEntropy.calculate_logits_max = staticmethod(multi_token.largest_logits)
    if settings.use_ascend_coc:
        layers.ColumnParallelLinear.forward = fused_linear.column_forward
        layers.RowParallelLinear.forward = fused_linear.row_forward
    fused_bias_swiglu.SwiGLUFunction = FusedSwiGLU
    fused_bias_swiglu.BiasSwiGLUFunction = FusedBiasSwiGLU
    if settings.num_experts:
        experts.install(_mark_split)
        router.install(settings)
