"""`--reuse-fp32-param`: main parameters without memory of their own.

A 32-bit main parameter is its 16-bit model parameter and 16 bits of residual. MindSpeed keeps the two, and lays the
main parameter over them only while the optimizer steps; so here, where only the places matter, not the values.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.param_and_grad_buffer import BufferType
from mindspore.utils import _reuse_data_ptr as lay_over

BLOCK = 4096 * 4096
"""Elements that change between the two layouts at a time, in a workspace of two blocks."""


def pad_to_even() -> None:
    """Buffers and buckets begin and end at even multiples, so that two 16-bit halves make whole 32-bit numbers."""
    # `_pad_start_of_param_if_needed`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/distributed/param_and_grad_buffer.py#L521

    def even_ceil(x: float) -> int:
        return math.ceil(math.ceil(x) / 2) * 2

    param_and_grad_buffer.math = types.SimpleNamespace(**{**vars(math), "ceil": even_ceil})


def share(optimizer: Any) -> None:
    """Rearranges a fresh distributed optimizer, and makes its steps convert there and back."""
    # `reuse_fp32_param_distrib_optimizer_init_wrapper`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/memory/reuse_param/adaptor.py#L93
    size = dist.get_world_size(optimizer.data_parallel_group)
    rank = dist.get_rank(optimizer.data_parallel_group)
    parts = _share_alone(optimizer) if size == 1 else _share_split(optimizer, size, rank)
    convert = _convert_whole if size == 1 else _convert_in_blocks
    torch.cuda.empty_cache()
    prepare, step = optimizer.prepare_grads, optimizer.optimizer.step

    def prepare_grads() -> Any:
        convert(parts)
        return prepare()

    def step_and_convert(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        convert(parts)

    optimizer.prepare_grads = prepare_grads
    optimizer.optimizer.step = step_and_convert
    optimizer._copy_main_params_to_model_params = lambda: None
    optimizer._copy_model_params_to_main_params = lambda: None


def _share_alone(optimizer: Any) -> list[Any]:
    """One rank: parameters and residuals lie side by side in one buffer, 4 bytes a parameter in all."""
    shared = []
    for buffer in optimizer.buffers:
        size = buffer.param_data.numel()
        both = torch.zeros(size * 2, dtype=torch.bfloat16, device=buffer.param_data.device)
        as_integers = torch.empty(size, dtype=torch.int32, device=buffer.param_data.device)
        lay_over(as_integers, both, 0)
        shared.append(both)
    views = []
    for model_group, main_group in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
        for model_param, main_param in zip(model_group, main_group, strict=True):
            index = optimizer.model_param_gbuf_map[model_param][0]
            start, end, _ = optimizer.buffers[index].param_index_map[model_param]
            both = shared[index]
            lay_over(main_param, both, start)
            old = model_param.data
            model_param.data = both[start + end : 2 * end].view(old.shape)
            model_param.data.detach().copy_(old)
            del old
            views.append(both[2 * start : 2 * end])
    for buffer, both in zip(optimizer.buffers, shared, strict=True):
        lay_over(buffer.param_data, both, buffer.param_data.numel())
        for bucket, (start, end) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
            bucket.param_data.assign_value(buffer._get(torch.Size([end - start]), start, buffer_type=BufferType.PARAM))
    for model_group, shard_group in zip(optimizer.model_float16_groups, optimizer.shard_float16_groups, strict=True):
        for model_param, shard in zip(model_group, shard_group, strict=True):
            span = optimizer._get_model_param_range_map(model_param)["param"]
            shard.assign_value(model_param.detach().view(-1)[span.start : span.end])
    return views


def _share_split(optimizer: Any, size: int, rank: int) -> list[Any]:
    """Several ranks: a main shard lies over parameters of the neighbours, who send them anew after every step."""
    residuals = []
    for buffer in optimizer.buffers:
        residual = torch.zeros(buffer.numel // size, dtype=torch.bfloat16, device=buffer.param_data.device)
        done = 0
        for bucket in buffer.buckets:
            part = bucket.param_data.numel() // size
            as_integers = torch.empty(part, dtype=torch.int32, device=bucket.param_data.device)
            lay_over(as_integers, buffer.param_data, done * size // 2 + max(0, rank - 1) * part // 2)
            residuals.append(residual[done : done + part])
            done += part
    for model_group, main_group in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
        for model_param, main_param in zip(model_group, main_group, strict=True):
            index, _, bucket_id = optimizer.model_param_gbuf_map[model_param]
            buffer = optimizer.buffers[index]
            sizes = [bucket.param_data.numel() for bucket in buffer.buckets]
            start = optimizer._get_model_param_range_map(model_param)["gbuf_world_in_bucket"].start
            if rank:
                start -= sizes[bucket_id] // size * (1 + rank) // 2
            lay_over(main_param, buffer.param_data, sum(sizes[:bucket_id]) // 2 + start)
    return residuals


@torch.no_grad()  # type: ignore[untyped-decorator]
def _convert_whole(parts: list[Any]) -> None:
    """From one layout to the other where each parameter is whole: a transposed copy of it, 4 bytes for each of its numbers."""
    # `fp16_tensor_convert_to_fp32_tensor`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/optimizer/distrib_optimizer.py#L695
    for part in parts:
        part.copy_(part.view(2, -1).transpose(1, 0).reshape(-1).contiguous())


@torch.no_grad()  # type: ignore[untyped-decorator]
def _convert_in_blocks(parts: list[Any]) -> None:
    """From one layout to the other where it is split: a workspace, and a transposed copy of each block."""
    for part in parts:
        workspace = torch.zeros(BLOCK * 2, dtype=torch.bfloat16, device=part.device)
        for start in range(0, part.numel(), BLOCK):
            block = workspace[: 2 * min(BLOCK, part.numel() - start)]
            block.view(2, -1).transpose(1, 0).reshape(-1).contiguous()
