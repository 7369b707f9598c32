"""Shapes of public models for the tests of sweep and search (hyper-parameters as published)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mindspeed_dryrun.devices.hardware import Hardware, read_hardware
from mindspeed_dryrun.megatron.model_shape import ModelShape

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def shape(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, tied: bool = False, seq: int = 4096,
    batch: int = 64,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        layers, hidden, ffn, heads, groups, hidden // heads, vocab, True, tied, seq, batch, True, False
    )


MODELS = {
    "qwen2.5-7b": shape(28, 3584, 18944, 28, 4, 152064),
    "llama3.1-8b": shape(32, 4096, 14336, 32, 8, 128256, seq=8192, batch=128),
    "qwen2.5-0.5b": shape(24, 896, 4864, 14, 2, 151936, tied=True, batch=32),
    "llama2-13b": shape(40, 5120, 13824, 40, 40, 32000),
    "llama3-70b": shape(80, 8192, 28672, 64, 8, 128256, batch=256),
    "small": dataclasses.replace(shape(8, 1024, 2816, 16, 4, 32000), seq=2048, global_batch=16),
}


def hardware() -> Hardware:
    return read_hardware("ascend910b-64g")
