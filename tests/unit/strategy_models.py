"""Shapes of public models for the tests of sweep and search (hyper-parameters as published)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mindspeed_dryrun.devices.hardware import Hardware, read_hardware
from mindspeed_dryrun.megatron.model_shape import ExpertShape, LatentShape, ModelShape
from mindspeed_dryrun.schema import read_as
from mindspeed_dryrun.search.space import Space
from mindspeed_dryrun.search.space_file import LimitsSection, SpaceSection, build_space

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def shape(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, tied: bool = False, seq: int = 4096,
    batch: int = 64,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        query_groups=groups,
        head_dim=hidden // heads,
        vocab=vocab,
        gated=True,
        tied=tied,
        seq=seq,
        global_batch=batch,
        full_states=True,
        shared_master=False,
    )


MODELS = {
    "qwen2.5-7b": shape(28, 3584, 18944, 28, 4, 152064),
    "llama3.1-8b": shape(32, 4096, 14336, 32, 8, 128256, seq=8192, batch=128),
    "qwen2.5-0.5b": shape(24, 896, 4864, 14, 2, 151936, tied=True, batch=32),
    "llama2-13b": shape(40, 5120, 13824, 40, 40, 32000),
    "llama3-70b": shape(80, 8192, 28672, 64, 8, 128256, batch=256),
    "small": dataclasses.replace(shape(8, 1024, 2816, 16, 4, 32000), seq=2048, global_batch=16),
}


def mixture(
    dense: ModelShape, head_dim: int, experts: ExpertShape, latent: LatentShape | None = None, more: int = 0
) -> ModelShape:
    return dataclasses.replace(dense, head_dim=head_dim, experts=experts, latent=latent, prediction_layers=more)


_LATENT = LatentShape(query_rank=0, key_rank=512, nope=128, rope=64, value=128)
_FULL_LATENT = LatentShape(query_rank=1536, key_rank=512, nope=128, rope=64, value=128)
MIXTURES = {
    "qwen3-30b-a3b": mixture(shape(48, 2048, 6144, 32, 4, 151936, batch=256), 128, ExpertShape(number=128, topk=8, ffn=768)),
    "mixtral-8x7b": mixture(shape(32, 4096, 14336, 32, 8, 32000, batch=128), 128, ExpertShape(number=8, topk=2, ffn=14336)),
    "deepseek-v2-lite": mixture(
        shape(27, 2048, 10944, 16, 16, 102400),
        128,
        ExpertShape(number=64, topk=6, ffn=1408, shared_ffn=2816, dense_in_front=1),
        _LATENT,
    ),
    "qwen2-57b-a14b": mixture(
        shape(28, 3584, 18944, 28, 4, 151936), 128, ExpertShape(number=64, topk=8, ffn=2560, shared_ffn=20480)
    ),
    "small-with-prediction": mixture(
        shape(12, 2048, 8192, 16, 16, 128000, batch=128),
        128,
        ExpertShape(number=32, topk=4, ffn=1408, shared_ffn=1408, dense_in_front=3),
        _LATENT,
        more=1,
    ),
    "every-other": mixture(shape(16, 1024, 4096, 16, 16, 32000, batch=32), 64, ExpertShape(number=16, topk=2, ffn=4096, every=2)),
    "deepseek-v3": mixture(
        shape(61, 7168, 18432, 128, 128, 129280, batch=15360),
        128,
        ExpertShape(number=256, topk=8, ffn=2048, shared_ffn=2048, dense_in_front=3),
        _FULL_LATENT,
        more=1,
    ),
}


def hardware() -> Hardware:
    return read_hardware("ascend910b-64g")


def read_space(space: object, limits: object, cards_per_node: int, where: str) -> Space:
    """A space as a search file would have it."""
    sections = read_as(SpaceSection, space, where), read_as(LimitsSection, limits, where)
    return build_space(*sections, cards_per_node, where)
