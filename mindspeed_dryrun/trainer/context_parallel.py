"""Attention when the sequence is split over ranks: ring, Ulysses, and both at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed_dryrun.trainer.layers import CausalMask, FusedAttention
from mindspeed_dryrun.trainer.settings import Settings


def sequence_slicer(settings: Settings) -> Callable[[Any], Any]:
    return lambda table: table


def attention_spec(settings: Settings) -> ModuleSpec:
    """The attention of every layer; they share one mask."""
    return ModuleSpec(module=FusedAttention, params={"settings": settings, "mask": CausalMask()})
