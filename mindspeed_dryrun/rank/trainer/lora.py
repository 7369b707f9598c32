"""LoRA: frozen weights with small trained ones beside them, as MindSpeed-LLM and PEFT set them up.

With `--lora-fusion` a layer and its adapter are one autograd function (tasks/posttrain/lora/cc_lora_forward.py); else the
adapter runs after the layer (tasks/posttrain/lora/lora_moe.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch_npu
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from mindspeed_dryrun.megatron.settings import Settings
from mindspeed_dryrun.rank import activation
from mindspeed_dryrun.rank.trainer.latent_attention import WholeLinear


def add_adapters(model: Any, settings: Settings) -> None:
    """Freezes the model, and puts adapters around the layers that `--lora-target-modules` names."""
    # `model_provider_func_wrapper`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/training.py#L93
    for parameter in model.parameters():
        parameter.requires_grad = getattr(parameter, "adapter", False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in settings.lora_modules and isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                setattr(module, name, Adapted(layer, settings))
            elif name in settings.lora_modules and isinstance(layer, WholeLinear):
                setattr(module, name, AdaptedWhole(layer, settings))
    for parameter in model.parameters():
        if not parameter.requires_grad and hasattr(parameter, "sequence_parallel"):
            del parameter.sequence_parallel
    hooked = settings.recompute_method == "block" or not activation.current().hooks_blocks_only
    if settings.recompute_granularity == "full" and hooked and model.pre_process:
        # Layers that are recomputed need an input that asks for a gradient.
        model.embedding.word_embeddings.register_forward_hook(lambda _, __, output: output.requires_grad_(True))


def keep_frozen_embeddings() -> None:
    """A shared embedding that is frozen has no gradient to sum over the first and the last stage."""
    # The package has a function of the module's name, so the module is not to be had from it.
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    reduce = module._allreduce_word_embedding_grads

    def reduce_if_trained(model: Any, config: Any) -> None:
        if any(parameter.requires_grad for chunk in model for parameter in _shared(chunk)):
            reduce(model, config)

    module._allreduce_word_embedding_grads = reduce_if_trained  # type: ignore[attr-defined]


def _shared(chunk: Any) -> list[Any]:
    return [parameter for parameter in chunk.parameters() if getattr(parameter, "shared_embedding", False)]


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """A parallel linear layer with its adapter: A of one rank's input or the whole, B of the whole output or one rank's."""

    def __init__(self, layer: Any, settings: Settings) -> None:
        super().__init__()
        self.layer = layer
        self.fused = settings.lora_fusion
        self.scaling = settings.lora_alpha / settings.lora_r
        self.by_row = isinstance(layer, RowParallelLinear)
        kind, config, rank = layer.weight.dtype, layer.config, settings.lora_r
        options = {"bias": False, "config": config, "init_method": config.init_method, "is_expert": layer.is_expert}
        if self.by_row:
            self.lora_a = RowParallelLinear(layer.input_size, rank, input_is_parallel=True, skip_bias_add=True, **options)
            self.lora_b = _whole(rank, layer.output_size, kind)
        else:
            self.lora_a = _whole(layer.input_size, rank, kind)
            self.lora_b = ColumnParallelLinear(rank, layer.output_size, gather_output=False, **options)
        whole = self.lora_b if self.by_row else self.lora_a
        whole.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # A cast that changes nothing, as upstream's: what is kept of it does not keep the tensor that `x` is a part of.
        adapted = x.to(self.lora_a.weight.dtype)
        if self.fused:
            return self._fused(adapted)
        result, bias = self.layer(x, *args, **kwargs)
        added = adapted
        del adapted
        for part in (self.lora_a, self.lora_b):
            added = part(added)
            added = added[0] if isinstance(added, tuple) else added
        added = added * self.scaling  # the same name: what it replaces is freed before the sum is made
        return result + added, bias

    def _fused(self, x: Any) -> tuple[Any, Any]:
        layer = self.layer
        function: Any = WholeProduct
        if parallel_state.get_tensor_model_parallel_world_size() > 1 and not layer.is_expert:
            by_sequence = {True: (ColumnProduct, RowProduct), False: (ColumnProductOfAll, RowProductOfAll)}
            function = by_sequence[bool(layer.sequence_parallel)][self.by_row]
        output = function.apply(x, layer.weight, self.lora_a.weight, self.lora_b.weight, self.scaling)
        if layer.skip_bias_add or layer.bias is None:
            return output, layer.bias if layer.skip_bias_add else None
        return output + layer.bias, None


class AdaptedWhole(torch.nn.Module):  # type: ignore[misc]
    """A linear layer that every tensor-parallel rank has in full, with PEFT's own adapter, which is never fused."""

    def __init__(self, layer: WholeLinear, settings: Settings) -> None:
        super().__init__()
        self.layer = layer
        self.scaling = settings.lora_alpha / settings.lora_r
        output_size, input_size = layer.weight.shape
        self.lora_a = _whole(input_size, settings.lora_r, layer.weight.dtype)
        self.lora_b = _whole(settings.lora_r, output_size, layer.weight.dtype)
        for part in (self.lora_a, self.lora_b):
            part.weight.sequence_parallel = settings.sequence_parallel

    def forward(self, x: Any) -> Any:
        result = self.layer(x)
        result += self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype))) * self.scaling
        return result


def _whole(input_size: int, output_size: int, kind: Any) -> Any:
    """A linear layer that every tensor-parallel rank has in full."""
    layer = torch.nn.Linear(1, 1, bias=False)
    device = torch.cuda.current_device()
    layer.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=kind, device=device))
    return layer


def _flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def _gradients(gradient: Any, compressed: Any, compressed_gradient: Any, x: Any, scaling: float) -> tuple[Any, Any]:
    """Of B and A."""
    b_gradient = gradient.t().matmul(compressed)
    return compressed_gradient.t().matmul(x) * scaling, b_gradient


class WholeProduct(torch.autograd.Function):  # type: ignore[misc]
    """One rank has all: both products, or one with the sum of the weights where that is cheaper."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, a: Any, b: Any, scaling: float) -> Any:
        scaled = a * scaling
        compressed = torch.matmul(x, scaled.t())
        ctx.combine = x.numel() // x.shape[-1] >= x.shape[-1]
        if ctx.combine:
            output = torch.matmul(x, (weight + b @ scaled).t())
        else:
            output = torch.matmul(x, weight.t())
            output += torch.matmul(compressed, b.t())
        ctx.save_for_backward(x, compressed, scaled, b, weight)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, compressed, scaled, b, weight = ctx.saved_tensors
        flat = _flat(gradient)
        compressed_gradient = flat.matmul(b)
        a_gradient, b_gradient = _gradients(flat, _flat(compressed), compressed_gradient, _flat(x), ctx.scaling)
        if ctx.combine:
            x_gradient = gradient.matmul(weight + b @ scaled)
        else:
            x_gradient = gradient.matmul(weight)
            x_gradient += compressed_gradient.matmul(scaled).view_as(x_gradient)
        return x_gradient, None, a_gradient, b_gradient, None


class ColumnProduct(torch.autograd.Function):  # type: ignore[misc]
    """A column-parallel layer with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, a: Any, b: Any, scaling: float) -> Any:
        whole, gathering = _gather(x)
        scaled = a * scaling
        compressed = torch.matmul(x, scaled.t())
        combined = weight + b @ scaled
        gathering.wait()
        output = torch.matmul(whole, combined.t())
        ctx.save_for_backward(x, compressed, weight, scaled, b)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, compressed, weight, scaled, b = ctx.saved_tensors
        whole, gathering = _gather(compressed)
        flat = _flat(gradient)
        # Under names of their own, as upstream has them: they stay until the function is left.
        whole_compressed_gradient = flat.matmul(b)
        gathering.wait()
        compressed_gradient, scattering = _scatter(whole_compressed_gradient)
        added = b @ scaled
        x_gradient = gradient.matmul(weight + added)
        scattering.wait()
        part, scattering = _scatter(x_gradient)
        a_gradient, b_gradient = _gradients(flat, _flat(whole), compressed_gradient, _flat(x), ctx.scaling)
        scattering.wait()
        return part, None, a_gradient, b_gradient, None


class RowProduct(torch.autograd.Function):  # type: ignore[misc]
    """A row-parallel layer with sequence parallelism; the collective is part of the product's operator."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, a: Any, b: Any, scaling: float) -> Any:
        scaled = a * scaling
        whole_compressed = torch.matmul(x, scaled.t())
        compressed, scattering = _scatter(whole_compressed)
        combined = weight + b @ scaled
        length, batch, _ = x.shape
        x = x.view(length * batch, -1)
        size = parallel_state.get_tensor_model_parallel_world_size()
        scattering.wait()
        output = torch_npu.npu_mm_reduce_scatter_base(x, combined.t(), "tensor", size, reduce_op="sum", bias=None)
        output = output.view(length // size, batch, -1)
        ctx.save_for_backward(x, compressed, weight, scaled, b)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, compressed, weight, scaled, b = ctx.saved_tensors
        flat = _flat(gradient)
        size = parallel_state.get_tensor_model_parallel_world_size()
        x_gradient, whole = torch_npu.npu_all_gather_base_mm(
            flat, weight, "tensor", size, bias=None, gather_index=0, gather_output=True
        )
        compressed_gradient = whole.matmul(b)
        a_gradient, b_gradient = _gradients(flat, _flat(compressed), compressed_gradient, x, ctx.scaling)
        x_gradient += compressed_gradient.matmul(scaled)
        return x_gradient.view(-1, gradient.shape[1], x.shape[-1]), None, a_gradient, b_gradient, None


class ColumnProductOfAll(torch.autograd.Function):  # type: ignore[misc]
    """A column-parallel layer whose ranks all have the whole sequence."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, a: Any, b: Any, scaling: float) -> Any:
        scaled = a * scaling
        output = torch.matmul(x, weight.t())
        compressed = torch.matmul(x, scaled.t())
        added = torch.matmul(compressed, b.t())
        output += added
        ctx.save_for_backward(x, compressed, weight, scaled, b)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, compressed, weight, scaled, b = ctx.saved_tensors
        flat = _flat(gradient)
        compressed_gradient = flat.matmul(b)
        summing = _sum(compressed_gradient)
        x_gradient = gradient.matmul(weight + b @ scaled)
        summing.wait()
        summing = _sum(x_gradient)
        a_gradient, b_gradient = _gradients(flat, _flat(compressed), compressed_gradient, _flat(x), ctx.scaling)
        summing.wait()
        return x_gradient, None, a_gradient, b_gradient, None


class RowProductOfAll(torch.autograd.Function):  # type: ignore[misc]
    """A row-parallel layer whose ranks all have the whole sequence."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, a: Any, b: Any, scaling: float) -> Any:
        scaled = a * scaling
        compressed = torch.matmul(x, scaled.t())
        summing = _sum(compressed)
        output = torch.matmul(x, weight.t())
        summing.wait()
        summing = _sum(output)
        added = torch.matmul(compressed, b.t())
        summing.wait()
        output += added
        ctx.save_for_backward(x, compressed, weight, scaled, b)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, compressed, weight, scaled, b = ctx.saved_tensors
        flat = _flat(gradient)
        compressed_gradient = flat.matmul(b)
        a_gradient, b_gradient = _gradients(flat, _flat(compressed), compressed_gradient, _flat(x), ctx.scaling)
        x_gradient = gradient.matmul(weight)
        x_gradient += compressed_gradient.matmul(scaled).view_as(x_gradient)
        return x_gradient, None, a_gradient, b_gradient, None


def _sum(x: Any) -> Any:
    """Over the tensor-parallel ranks, in place."""
    return torch.distributed.all_reduce(x, group=parallel_state.get_tensor_model_parallel_group(), async_op=True)


def _gather(x: Any) -> tuple[Any, Any]:
    size = parallel_state.get_tensor_model_parallel_world_size()
    output = torch.empty((x.shape[0] * size, *x.shape[1:]), dtype=x.dtype, device=torch.cuda.current_device())
    group = parallel_state.get_tensor_model_parallel_group()
    return output, torch.distributed._all_gather_base(output, x.contiguous(), group=group, async_op=True)


def _scatter(x: Any) -> tuple[Any, Any]:
    size = parallel_state.get_tensor_model_parallel_world_size()
    output = torch.empty((x.shape[0] // size, *x.shape[1:]), dtype=x.dtype, device=torch.cuda.current_device())
    group = parallel_state.get_tensor_model_parallel_group()
    return output, torch.distributed._reduce_scatter_base(output, x.contiguous(), group=group, async_op=True)
