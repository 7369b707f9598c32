"""A memory counter for searches over experts. It goes by the layers that Megatron would build from the strategy's own flags,
no-op layers counted as Megatron counts them, and not by what the search believes of a stage."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from strategy_oracle import Oracle

from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.layout import read_layout
from mindspeed_dryrun.record.model import StagePeak

_MB = 1024 * 1024


class MixtureOracle(Oracle):
    """Counts layer by layer."""

    def _layers(self, strategy: Strategy, stage: int) -> Iterator[tuple[int, bool, bool, bool]]:
        """(chunk, no-op, mixture, recomputed) of each layer of a stage."""
        experts = self.shape.experts
        assert experts is not None
        layout = read_layout(Arguments(strategy.arguments()), strategy.world)
        kind, number = strategy.recompute.kind, strategy.recompute.layers
        for chunk, layers in enumerate(layout.stages[stage]):
            some = {"full": len(layers), "block": number, "stage": (number - chunk + strategy.chunks - 1) // strategy.chunks}
            for place, layer in enumerate(layers):
                mixed = layer >= experts.dense_in_front and layer % experts.every == 0
                yield chunk, layer in layout.noop, mixed, place < some.get(kind, 0)

    def _stage(self, strategy: Strategy, stage: int) -> StagePeak:
        shape, tp, experts, etp = self.shape, strategy.tp, self.shape.experts, max(1, strategy.etp)
        assert experts is not None
        last = stage == strategy.pp - 1
        tokens = strategy.micro_batch * shape.seq / strategy.cp
        whole = tokens * shape.hidden * 2
        shared = whole / tp if strategy.sequence_parallel else whole
        rows = tokens * experts.topk * (etp / tp if strategy.sequence_parallel else 1)
        attention = 4 * shared + tokens * 2 / tp * shape.attention_parameters / shape.hidden
        attention -= (strategy.recompute.kind == "selective") * tokens * 16 * shape.heads / tp
        dense = attention + tokens * 2 / tp * shape.ffn * 3
        router = tokens / tp * experts.number * 4 * 2.6
        mixture = (
            attention
            + tokens * 2 / tp * experts.shared_ffn * 3
            + rows * 2.14 * (2 * shape.hidden + 3 * experts.ffn / etp)
            + router
        )
        held = strategy.in_flight(stage, strategy.microbatches(shape.global_batch))
        weights = routed = activations = 0.0
        work = 3 * shared
        for chunk, empty, mixed, again in self._layers(strategy, stage):
            if not empty:
                weights += (
                    shape.attention_parameters + (shape.shared_parameters if mixed else shape.mlp_parameters(shape.ffn))
                ) / tp
                routed += mixed * shape.routed_parameters / strategy.ep / etp
            kept = shared if again else 0.0 if empty else mixture if mixed else dense
            activations += held[chunk] * kept
            if again and not empty:
                work = max(work, 1.15 * (mixture if mixed else dense))
            elif mixed:
                work = max(work, rows * 2 * (shape.hidden + 2 * experts.ffn / etp))
        tables = (stage == 0) + last - (shape.tied and stage == 0 and last)
        if last and shape.prediction_layers:
            weights += shape.prediction_layers * (2 * shape.hidden**2 + shape.attention_parameters + shape.shared_parameters) / tp
            routed += shape.prediction_layers * shape.routed_parameters / strategy.ep / etp
            activations += shape.prediction_layers * (mixture + tokens * shape.vocab / tp * 4)
            tables += strategy.pp > 1
        weights += tables * shape.vocabulary_parameters / tp
        if last:
            work = max(work, tokens * shape.vocab / tp * 6.5)
        owned = 12 * weights / (strategy.dp * strategy.cp), 12 * routed / strategy.expert_replicas
        states = 6 * (weights + routed) + (sum(owned) if strategy.distributed_optimizer else 12 * (weights + routed))
        used = (states + activations + work) / _MB + 41
        jump = zlib.crc32(f"{strategy.name}{stage}".encode()) % 1000 / 1000
        return StagePeak(int(used), int(used * (1 + self.fragments * jump)))
