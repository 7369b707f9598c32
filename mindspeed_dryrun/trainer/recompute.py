"""Recomputation beyond megatron-core's own: MindSpeed's choice of layers, activation functions and norms."""

from __future__ import annotations

from typing import Any

from mindspeed_dryrun.trainer.settings import Settings


def prepare(block: Any, settings: Settings) -> None:
    return None
