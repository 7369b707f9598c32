"""Small stand-ins for a kind of strategy, whose dry runs teach the memory model: the same sharing out, few layers, two
stages."""

from __future__ import annotations

import dataclasses

from mindspeed_dryrun.estimate.strategy import Recompute, Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape

LAYERS = (1, 2, 4)  # of a stage
ProbeKey = tuple[object, ...]
Probe = tuple[Strategy, ModelShape]


def probes_for(shape: ModelShape, strategy: Strategy) -> dict[ProbeKey, Probe]:
    """Probes that tell something about a strategy. Strategies of one kind share them, by key."""
    return {key: _probe(shape, strategy, str(key[-2]), int(str(key[-1]))) for key in _keys(shape, strategy)}


def _keys(shape: ModelShape, strategy: Strategy) -> list[ProbeKey]:
    # Some recomputed layers: made of recomputed ones and plain ones.
    kinds = ["none", "full"] if strategy.recompute.kind in ("block", "stage") else [strategy.recompute.kind]
    chunks = strategy.chunks
    if chunks > 1 and strategy.microbatches(shape.global_batch) % 2:
        return []  # the interleaved schedule of two stages needs pairs
    # MindSpeed-LLM refuses a first stage of dense layers alone (2.2, features_manager/transformer/transformer_block.py:19).
    least = shape.experts.dense_in_front if shape.experts else 0
    return [
        (
            strategy.tp, min(strategy.pp, 2), strategy.dp, strategy.cp, strategy.cp_algorithm, strategy.micro_batch,
            strategy.sequence_parallel, strategy.distributed_optimizer, chunks, strategy.ulysses, strategy.ep, strategy.etp,
            strategy.dispatcher, strategy.options, strategy.dualpipe, name, layers,
        )
        for name in kinds
        for layers in LAYERS
        if least < layers * chunks <= max(LAYERS) and layers * chunks * min(strategy.pp, 2) <= shape.layers
    ]  # fmt: skip


def _probe(shape: ModelShape, strategy: Strategy, kind: str, layers: int) -> Probe:
    pp = min(strategy.pp, 2)
    probe = dataclasses.replace(
        strategy,
        pp=pp,
        stages=((layers,) * strategy.chunks,) * pp,
        recompute=Recompute(kind, 1 if kind == "full" else 0),
        noop=None,
    )
    return probe, dataclasses.replace(shape, layers=probe.layers)
