"""A memory counter for tests of the search: fast, exhaustive, and deliberately not the search's own memory model.

It adds up what a stage holds the way an allocator would see it (block rounding, a quirk for one tensor-parallel size, a
second peak in the optimizer step, fragments that jump), so a search that is right here is not right by construction.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.search.measure import Measurement, StagePeak

_MB = 1024 * 1024


def _block(size: float) -> float:
    return -(-int(size) // 512) * 512


class Oracle:
    """Remembers what it was asked."""

    def __init__(self, shape: ModelShape, fragments: float = 0.06):
        self.shape, self.fragments, self.ranks = shape, fragments, 0
        self.asked: set[Strategy] = set()

    def __call__(self, strategy: Strategy, stages: Collection[int] | None = None) -> Measurement:
        self.asked.add(strategy)
        found = {stage: self._stage(strategy, stage) for stage in (range(strategy.pp) if stages is None else stages)}
        self.ranks += len(found)
        return Measurement(stages=found, seconds=1.0, ranks=len(found))

    def _stage(self, strategy: Strategy, stage: int) -> StagePeak:
        shape, tp = self.shape, strategy.tp
        norms = 2 * shape.hidden
        parameters = sum(strategy.stages[stage]) * (shape.layer_parameters / tp + norms)
        last = stage == strategy.pp - 1
        tables = (stage == 0) + last - (shape.tied and stage == 0 and last)
        parameters += tables * shape.vocabulary_parameters / tp
        replicas = strategy.dp * strategy.cp if strategy.distributed_optimizer else 1
        states = _block(parameters * 2) + _block(parameters * 4) + _block(parameters * 12 / replicas)
        tokens = strategy.micro_batch * shape.seq / strategy.cp
        whole = tokens * shape.hidden * 2
        shared = whole / tp if strategy.sequence_parallel else whole
        inside = tokens * 2 / tp * (shape.head_dim * (2 * shape.heads + 2 * shape.query_groups))
        inside += tokens * 2 / tp * shape.ffn * (3 if shape.gated else 2)
        if tp >= shape.query_groups > 1:
            inside *= 1.04
        layer = 4 * shared + inside - (strategy.recompute.kind == "selective") * tokens * 16 * shape.heads / tp
        if strategy.cp > 1:
            layer += 2 * tokens * shape.head_dim * shape.query_groups / tp * 2
        held = strategy.in_flight(stage, strategy.microbatches(shape.global_batch))
        activations = 0.0
        recomputed = strategy.recomputed(stage)
        again = sum(recomputed)
        empty = strategy.recomputed_noop(stage)
        for layers, microbatches, dropped, noop in zip(strategy.stages[stage], held, recomputed, empty, strict=True):
            activations += microbatches * (_block((layers - dropped) * layer) + (dropped + noop) * shared)
        work = layer * 1.2 if again else 3 * shared
        if last:
            work = max(work, tokens * shape.vocab / tp * 6.5)
        largest = max(shape.hidden * shape.ffn * 2, shape.vocabulary_parameters * (tables > 0))
        used = max(states + activations + work, states + 4.0 * largest / tp) / _MB + 37
        jump = zlib.crc32(f"{strategy.name}{stage}".encode()) % 1000 / 1000
        return StagePeak(int(used), int(used * (1 + self.fragments * jump)))
