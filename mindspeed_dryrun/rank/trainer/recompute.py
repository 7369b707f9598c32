"""Recomputation beyond megatron-core's own: MindSpeed's choice of layers, activation functions and norms."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch.utils.checkpoint import detach_variable

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank import collector
from mindspeed_dryrun.rank.trainer import zero_memory

_PLAIN_MLP = MLP.forward


def prepare(block: Any, settings: Settings) -> None:
    """Gives the layers of a block the forward pass that the flags ask for."""
    if settings.swap_attention:
        _recompute_mlps(block, settings)
        return
    if settings.recompute_activation_function or settings.moe_zero_memory != "disable":
        MLP.forward = _mlp_forward
    if settings.moe_zero_memory != "disable":
        zero_memory.prepare(block, settings)
    if settings.recompute_method == "block":
        block._checkpointed_forward = types.MethodType(_checkpoint_some_layers, block)
        block.recompute_settings = settings
    for number, layer in enumerate(block.layers):
        if not isinstance(layer, TransformerLayer):
            continue
        if settings.recompute_activation_function and _wanted(
            settings, number, settings.recompute_activation_function_num_layers
        ):
            for mlp in _mlps(getattr(layer.mlp, "module", layer.mlp), settings):
                mlp.recomputes_activation = True
        if settings.recompute_norm and _wanted(settings, number, settings.recompute_norm_num_layers):
            layer.forward = types.MethodType(_layer_without_norms, layer)


def _mlps(mlp: Any, settings: Settings) -> list[Any]:
    """What recomputes its activation: a dense layer's MLP, or experts, in groups or one by one, and shared ones."""
    # `parallel_transformer_layer_init_wrapper`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/transformer/transformer.py#L25
    if not isinstance(mlp, MoELayer):
        return [mlp]
    overlapped = [mlp] if hasattr(mlp, "recomputes_activation") else []
    experts = getattr(mlp.experts, "local_experts", [mlp.experts])
    return [*overlapped, *experts, *([mlp.shared_experts] if settings.n_shared_experts else [])]


def keep_until_collected() -> None:
    """What a recomputed layer saves stays until Python's garbage collector runs, as in a MindSpeed-LLM whose checkpoints hold
    a function that holds them. Where the collector stands decides when that is, so it starts as in a script's own trainer."""
    # `checkpoint_forward_wrapper`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/core/tensor_parallel/layers.py#L215
    forward = CheckpointFunction.forward

    def with_cycle(ctx: Any, function: Any, distribute: Any, *args: Any) -> Any:
        ctx.kinds = [("item", 1, None) for _ in args]

        def run(*again: Any) -> Any:
            return function(*(arg for _, arg in zip(ctx.kinds, again, strict=True)))

        return forward(ctx, run, distribute, *args)

    CheckpointFunction.forward = staticmethod(with_cycle)
    collector.collect()


def _place(settings: Settings, number: int) -> int:
    """Where a layer stands in the queue for recomputation: chunks take turns if the count is per pipeline stage."""
    # `should_recompute`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/memory/recompute/recompute_common.py#L108
    chunk, chunks = parallel_state.get_virtual_pipeline_model_parallel_rank(), settings.virtual_stages
    if chunk is None or chunks is None or not settings.enable_recompute_layers_per_pp_rank:
        chunk, chunks = 0, 1
    return int(number * chunks + chunk)


def _wanted(settings: Settings, number: int, count: int | None) -> bool:
    """Layers that are recomputed whole come first; then `count` more, or all."""
    place, whole = _place(settings, number), settings.recompute_num_layers or 0
    if place < whole:
        return False
    return count is None or place < whole + count


def _checkpoint_some_layers(
    block: Any, hidden_states: Any, attention_mask: Any, context: Any, context_mask: Any, rotary_pos_emb: Any, **_: Any
) -> Any:
    """`--recompute-method block`: the first layers keep their input only, the others everything."""
    # `_block_method_checkpointed_forward_func`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/transformer_block.py#L336
    settings = block.recompute_settings

    def run(number: int) -> Any:
        def forward(hidden: Any, mask: Any, context: Any, context_mask: Any, rotary: Any) -> Any:
            return block.layers[number](
                hidden_states=hidden, attention_mask=mask, context=context, context_mask=context_mask, rotary_pos_emb=rotary
            )

        return forward

    for number in range(len(block.layers)):
        inputs = (hidden_states, attention_mask, context, context_mask, rotary_pos_emb)
        if _place(settings, number) < settings.recompute_num_layers:
            distribute = block.config.distribute_saved_activations
            hidden_states, context = tensor_parallel.checkpoint(run(number), distribute, *inputs)
        else:
            hidden_states, context = run(number)(*inputs)
    return hidden_states


def _recompute_mlps(block: Any, settings: Settings) -> None:
    """`--swap-attention`: where layers would be recomputed, only their MLPs are; no other activation is recomputed or moved.

    MindSpeed's hooks for tensors that are saved (core/memory/swap_attention/prefetch.py) are never called on MSAdapter, whose
    `saved_tensors_hooks` does nothing.
    """
    block._checkpointed_forward = types.MethodType(_run_all_layers, block)
    for layer in block.layers[: _recomputed_mlps(settings)]:
        if isinstance(layer, TransformerLayer):
            mlp = getattr(layer.mlp, "module", layer.mlp)
            mlp.forward = functools.partial(tensor_parallel.checkpoint, mlp.forward, None)


def _recomputed_mlps(settings: Settings) -> int:
    """How many layers of this chunk, from its first on (`AdaptiveRecomputeSwap.solve_prefetch_policy`)."""
    if "mlp" in (settings.swap_modules or ""):  # swapped instead, which is to say kept
        return 0
    chunk, chunks = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0, settings.virtual_stages or 1
    layers = settings.num_layers // settings.pipeline_model_parallel_size
    count = settings.recompute_num_layers or 0
    if settings.recompute_method == "uniform":
        count = layers
    elif not settings.enable_recompute_layers_per_pp_rank:
        count *= chunks
    count = min(count, layers)
    here = len(range(chunk, count, chunks))
    last = chunks > 1 and chunk == chunks - 1 and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if settings.reduce_recompute_for_last_chunk and last and (count <= chunks or here == layers // chunks):
        here -= 1
    return max(here, 0)


def _run_all_layers(
    block: Any, hidden_states: Any, attention_mask: Any, context: Any, context_mask: Any, rotary_pos_emb: Any, **_: Any
) -> Any:
    for layer in block.layers:
        hidden_states, context = layer(
            hidden_states=hidden_states, attention_mask=attention_mask, context=context, context_mask=context_mask,
            rotary_pos_emb=rotary_pos_emb,
        )  # fmt: skip
    return hidden_states


class _Recomputed(torch.autograd.Function):  # type: ignore[misc]
    """Runs a function without a graph; `WithoutOutput` runs it again, with one, before its gradient is wanted."""

    @staticmethod
    def forward(ctx: Any, function: Any, holder: WithoutOutput, *args: Any) -> Any:
        with torch.no_grad():
            output = function(*args)
        ctx.save_for_backward(*detach_variable(args))
        holder.ctx = ctx
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        inputs, outputs = ctx.saved_tensors, ctx.outputs
        torch.autograd.backward(outputs, gradients)
        ctx.outputs = None
        return (None, None, *(x.grad if isinstance(x, torch.Tensor) else x for x in inputs))


class WithoutOutput:
    """Recomputation of a function whose output is needed by the operator after it: freed, and restored in time."""

    # `CheckpointWithoutOutput`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/memory/recompute/recompute_common.py#L31

    def __init__(self) -> None:
        self.function: Any = None
        self.output: Any = None
        self.ctx: Any = None

    def run(self, function: Any, *args: Any) -> Any:
        self.function = function
        self.output = _Recomputed.apply(function, self, *args)
        return self.output

    def free(self) -> None:
        self.output.untyped_storage().resize_(0)

    def restore(self, _: Any) -> None:
        with torch.enable_grad():
            again = self.function(*self.ctx.saved_tensors)
        self.function = None
        storage = again.untyped_storage()
        self.output.untyped_storage().resize_(storage.size())
        with torch.no_grad():
            self.output.untyped_storage().copy_(storage)
        self.ctx.outputs = (again,)
        self.output = self.ctx = None


def _mlp_forward(mlp: Any, hidden_states: Any, per_token_scale: Any = None) -> tuple[Any, Any]:
    forward = _mlp_without_activation if getattr(mlp, "recomputes_activation", False) else _PLAIN_MLP
    return forward(mlp, hidden_states, per_token_scale)


def _mlp_without_activation(mlp: Any, hidden_states: Any, per_token_scale: Any = None) -> tuple[Any, Any]:
    """`--recompute-activation-function`: the output of the activation is not kept."""
    # `should_recompute_activation`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/mlp.py#L32
    from megatron.core.transformer import mlp as megatron_mlp

    intermediate, bias = mlp.linear_fc1(hidden_states)

    def activation(x: Any, bias: Any, scale: Any) -> Any:
        if scale is None:
            return unscaled(x, bias)
        if mlp.config.bias_activation_fusion:
            return fused_bias_swiglu.weighted_bias_swiglu_impl(x, bias, scale.unsqueeze(-1))
        x = unscaled(x, bias)
        return (x * scale.unsqueeze(-1)).to(x.dtype)

    def unscaled(x: Any, bias: Any) -> Any:
        if mlp.config.bias_activation_fusion and mlp.config.gated_linear_unit:
            import torch_npu

            return torch_npu.npu_swiglu(x if bias is None else x + bias, dim=-1)
        if mlp.config.bias_activation_fusion:
            return megatron_mlp.bias_gelu_impl(x, bias)
        x = x if bias is None else x + bias
        if mlp.config.gated_linear_unit:
            gate, up = torch.chunk(x, 2, dim=-1)
            return mlp.config.activation_func(gate) * up
        return mlp.activation_func(x)

    held = WithoutOutput()
    intermediate = held.run(activation, intermediate, bias, per_token_scale)
    output, output_bias = mlp.linear_fc2(intermediate)
    held.free()
    if output.requires_grad:
        output.register_hook(held.restore)
    return output, output_bias


def _layer_without_norms(layer: Any, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """`--recompute-norm`: the outputs of a layer's two norms are not kept."""
    # `norm_recompute_forward_impl`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/memory/recompute/norm/norm_recompute_forward.py#L13
    residual = hidden_states
    before_attention = WithoutOutput()
    normed = before_attention.run(layer.input_layernorm, hidden_states)
    attended = layer.self_attention(normed, attention_mask=attention_mask, rotary_pos_emb=kwargs.get("rotary_pos_emb"))
    before_attention.free()
    attended[0].register_hook(before_attention.restore)
    add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
    with layer.bias_dropout_add_exec_handler():
        hidden_states = add(attended, residual, layer.hidden_dropout)
    residual = hidden_states
    before_mlp = WithoutOutput()
    normed = before_mlp.run(layer.pre_mlp_layernorm, hidden_states)
    transformed = layer.mlp(normed)
    before_mlp.free()
    transformed[0].register_hook(before_mlp.restore)
    add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
    with layer.bias_dropout_add_exec_handler():
        hidden_states = add(transformed, residual, layer.hidden_dropout)
    output = make_viewless_tensor(inp=hidden_states, requires_grad=hidden_states.requires_grad, keep_graph=True)
    return output, kwargs.get("context")
