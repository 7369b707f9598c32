"""What later releases of MindSpeed-LLM expect of MSAdapter and the published one (0.5.0b1) does not do yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def convert_float32_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `fp32_to_float16(value, convertor)`: converts tensors of 32 bits and leaves token ids and masks alone.

    Megatron asks `isinstance(value, torch.cuda.FloatTensor)`, which PyTorch answers by the type of the elements. In
    MSAdapter `torch.cuda.FloatTensor` is every tensor. Up to 2.2.0 MindSpeed replaced the function for that reason.
    """

    @functools.wraps(original)
    def call(value: Any, float16_convertor: Callable[[Any], Any]) -> Any:
        import torch

        return original(value, lambda tensor: float16_convertor(tensor) if tensor.dtype == torch.float32 else tensor)

    return call


def name_of_this_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """The name of the chip as CANN's Python module says it; MindSpore counts no devices in simulation and refuses to answer."""

    @functools.wraps(original)
    def call(device: Any = None) -> Any:
        import acl

        return acl.get_soc_name()

    return call


def all_attention_results(original: Callable[..., Any]) -> Callable[..., Any]:
    """Fused attention has seven results in PyTorch and three in MSAdapter; the rest are the state of dropout, numbers only."""

    @functools.wraps(original)
    def call(q_block_id: int, kv_block_id: int, cur_attn_outs: Any, global_attn_outs: Any) -> Any:
        results = (*cur_attn_outs, *[0] * (7 - len(cur_attn_outs)))
        return original(q_block_id, kv_block_id, results, global_attn_outs)

    return call
