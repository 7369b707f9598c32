"""Products fused with a collective (MC2): the simulated communicator has none, and only what comes out takes memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def gather_then_product(original: Callable[..., Any]) -> Callable[..., Any]:
    """`x` gathered along its first dimension, times `y`: the product, and the gathered `x` if it is asked for."""

    @functools.wraps(original)
    def call(
        x: Any, y: Any, group: Any, world_size: int, *args: Any, gather_output: bool = True, **kwargs: Any
    ) -> tuple[Any, Any]:
        import torch

        rows = x.shape[0] * world_size
        product = torch.empty((rows, y.shape[1]), dtype=x.dtype, device=x.device)
        gathered = (rows, x.shape[1]) if gather_output else (0,)
        return product, torch.empty(gathered, dtype=x.dtype, device=x.device)

    return call


def product_then_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """`x` times `y`, summed over the group and scattered along the first dimension."""

    @functools.wraps(original)
    def call(x: Any, y: Any, group: Any, world_size: int, *args: Any, **kwargs: Any) -> Any:
        import torch

        return torch.empty((x.shape[0] // world_size, y.shape[1]), dtype=x.dtype, device=x.device)

    return call
