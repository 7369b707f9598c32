"""Parallel linear layers whose product and collective are one kernel (`--use-ascend-coc --coc-fused-kernel`).

The kernel gathers and scatters in buffers of its own library, which no engine counts; what MindSpeed-LLM itself allocates
around it is allocated here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

_ALIGNED = 512
"""Bytes of which the kernel expects the inner dimension to be a multiple."""


class GatheredProduct(torch.autograd.Function):  # type: ignore[misc]
    """A column-parallel layer: the sequence gathered, times the weight."""

    # `all_gather_matmul`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/ops/lcal_functional.py#L39

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        size = parallel_state.get_tensor_model_parallel_world_size()
        output = _empty(x, _rows(x) * size, weight.shape[0])
        return output.reshape(x.shape[0] * size, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        group = parallel_state.get_tensor_model_parallel_group()
        size = parallel_state.get_tensor_model_parallel_world_size()
        flat = _flat(gradient)
        if flat.is_contiguous() and flat.shape[-1] * flat.element_size() % _ALIGNED:
            flat = flat.t().contiguous().t()
        scattered = _empty(x, *_flat(x).shape)
        whole = _empty(x, x.shape[0] * size, *x.shape[1:])
        gathering = torch.distributed._all_gather_base(whole, x.contiguous(), group=group, async_op=True)
        whole = _flat(whole)
        x_gradient = flat.matmul(weight)
        scattering = torch.distributed._reduce_scatter_base(scattered, x_gradient, group=group, async_op=True)
        gathering.wait()
        weight_gradient = flat.t().matmul(whole)
        bias_gradient = flat.sum(dim=0) if ctx.has_bias else None
        scattering.wait()
        return scattered.reshape(x.shape), weight_gradient, bias_gradient


class ScatteredProduct(torch.autograd.Function):  # type: ignore[misc]
    """A row-parallel layer: the product, summed and scattered along the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        size = parallel_state.get_tensor_model_parallel_world_size()
        output = _empty(x, _rows(x) // size, weight.shape[0])
        return output.reshape(x.shape[0] // size, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, _ = ctx.saved_tensors
        flat, whole = _flat(gradient), _flat(x)
        x_gradient = _empty(x, *whole.shape)
        gathered = _empty(x, whole.shape[0], flat.shape[1])
        weight_gradient = gathered.t().matmul(whole)
        return x_gradient.reshape(x.shape), weight_gradient


class SummedProduct(torch.autograd.Function):  # type: ignore[misc]
    """Either kind of layer without sequence parallelism: what is summed over the ranks is summed in place."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        x_gradient = gradient.matmul(weight)
        flat = _flat(gradient)
        return x_gradient, flat.t().matmul(_flat(x)), flat.sum(dim=0) if ctx.has_bias else None


def column_forward(self: Any, x: Any, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Any, Any]:
    """Takes the place of `ColumnParallelLinear.forward`."""
    function = GatheredProduct if self.sequence_parallel else SummedProduct
    output = function.apply(x, self.weight if weight is None else weight, None if self.skip_bias_add else self.bias)
    return output, self.bias if self.skip_bias_add else None


def row_forward(self: Any, x: Any) -> tuple[Any, Any]:
    """Takes the place of `RowParallelLinear.forward`."""
    output = ScatteredProduct.apply(x, self.weight) if self.sequence_parallel else SummedProduct.apply(x, self.weight)
    if self.skip_bias_add:
        return output, self.bias
    return (output + self.bias if self.bias is not None else output), None


def _rows(x: Any) -> int:
    return int(x.shape[0] * x.shape[1])


def _flat(x: Any) -> Any:
    return x.reshape(_rows(x), x.shape[-1])


def _empty(like: Any, *shape: int) -> Any:
    return torch.empty(shape, dtype=like.dtype, device="npu")
