"""Where the published MSAdapter (0.5.0b1) is behind: later releases of MindSpeed-LLM, and MindSpore from 2.8 on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def convert_float32_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `fp32_to_float16(value, convertor)`: converts tensors of 32 bits and leaves token ids and masks alone.

    Megatron asks `isinstance(value, torch.cuda.FloatTensor)`, which PyTorch answers by the type of the elements. In
    MSAdapter `torch.cuda.FloatTensor` is every tensor. Up to 2.2.0 MindSpeed replaced the function for that reason.
    """
    # `fp32_to_float16`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/module.py#L113

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


# -- later releases of MindSpore -------------------------------------------------------------------------------------


def generator_of_mindspore(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Generator()` on MindSpore 2.8, whose primitive takes seed and offset: the class below MSAdapter's knows how."""

    @functools.wraps(original)
    def call(self: Any, device: str = "cpu") -> None:
        import mindspore

        mindspore.Generator.__init__(self)

    return call


def no_context_of_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """MindSpore 2.10 asks by identity whether a Function has a `setup_context` of its own; MSAdapter's stub is none."""
    from mindspore.common import _grad_function

    return getattr(_grad_function._Function, "setup_context", original)


def set_by_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor[mask] = number` in place; MindSpore 2.10 asks first how many elements the mask selects."""

    @functools.wraps(original)
    def call(self: Any, index: Any, value: Any) -> Any:
        import mindspore

        mask = isinstance(index, mindspore.Tensor) and index.dtype == mindspore.bool_
        if not mask or isinstance(value, mindspore.Tensor):
            return original(self, index, value)
        self.masked_fill_(index, value)
        return None

    return call
