"""What a stage is made of: its dense layers and its mixtures of experts, how many of each are recomputed, its parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.megatron.model_shape import ExpertShape, ModelShape


@dataclass(frozen=True)
class ChunkLayers:
    """The layers of one chunk: dense ones and mixtures, those that are recomputed in full among them."""

    dense: int
    mixtures: int = 0
    dense_again: int = 0
    mixtures_again: int = 0

    @property
    def again(self) -> int:
        return self.dense_again + self.mixtures_again


@functools.lru_cache(maxsize=1 << 14)
def _kinds(stages: tuple[tuple[int, ...], ...], dualpipe: bool, experts: ExpertShape) -> tuple[tuple[tuple[bool, ...], ...], ...]:
    """[stage][chunk][layer]: whether it is a mixture."""
    layout = Strategy(tp=1, pp=len(stages), dp=1, cp=1, micro_batch=1, stages=stages, dualpipe=dualpipe)
    found: list[list[tuple[bool, ...]]] = [[()] * len(chunks) for chunks in stages]
    first = 0
    for stage, chunk in layout.positions():
        count = stages[stage][chunk]
        found[stage][chunk] = tuple(experts.in_layer(layer) for layer in range(first, first + count))
        first += count
    return tuple(tuple(chunks) for chunks in found)


def chunk_layers(shape: ModelShape, strategy: Strategy, stage: int) -> list[ChunkLayers]:
    """The layers of each chunk of a stage. Recomputation takes the first ones of a chunk."""
    recomputed = strategy.recomputed(stage)
    if shape.experts is None:
        return [ChunkLayers(layers, 0, again) for layers, again in zip(strategy.stages[stage], recomputed, strict=True)]
    found = []
    kinds = _kinds(strategy.stages, strategy.dualpipe, shape.experts)[stage]
    for kind, again in zip(kinds, recomputed, strict=True):
        mixtures, mixed_again = sum(kind), sum(kind[:again])
        found.append(ChunkLayers(len(kind) - mixtures, mixtures, again - mixed_again, mixed_again))
    return found


def keeps_mixtures(shape: ModelShape, strategy: Strategy) -> bool:
    """Whether no-op layers leave every layer what it is: Megatron counts them when it looks for mixtures."""
    # `noop_layers`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/transformer_block.py#L139
    empty = set(strategy.noop_layers)
    if shape.experts is None or not empty:
        return True
    real = [index for index in range(strategy.layers + len(empty)) if index not in empty]
    return all(shape.is_mixture(layer) == shape.is_mixture(index) for layer, index in enumerate(real))


def telling_stages(shape: ModelShape, strategy: Strategy) -> Sequence[int]:
    """Stages that can hold the most: later middle stages hold fewer microbatches of as many layers."""
    if strategy.pp <= 2 or strategy.recompute.each or strategy.dualpipe:
        return range(strategy.pp)
    found = [0]
    most = most_mixtures = -1
    for stage in range(1, strategy.pp - 1):
        layers, mixtures = sum(strategy.stages[stage]), mixture_layers(shape, strategy, stage)
        if layers > most or mixtures > most_mixtures:
            most, most_mixtures = max(most, layers), max(most_mixtures, mixtures)
            found.append(stage)
    return [*found, strategy.pp - 1]


def mixture_layers(shape: ModelShape, strategy: Strategy, stage: int) -> int:
    """How many of a stage's layers are mixtures of experts."""
    if shape.experts is None:
        return 0
    return sum(map(sum, _kinds(strategy.stages, strategy.dualpipe, shape.experts)[stage]))


def stage_parameters(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Parameters of the matrices that a rank of this stage holds beside routed experts."""
    layers, mixtures = sum(strategy.stages[stage]), mixture_layers(shape, strategy, stage)
    first, last = stage == 0, stage == strategy.head_stage
    parameters = layers * shape.attention_parameters + (layers - mixtures) * shape.mlp_parameters(shape.ffn)
    # A tied output layer on another stage than the embedding holds its own copy of the table.
    tables = 1 if shape.tied and first and last else first + last
    if last and shape.prediction_layers:
        # Each joins two hidden states and is a layer; it looks its tokens up in a table of the last stage's own.
        each = 2 * shape.hidden**2 + shape.attention_parameters
        each += shape.shared_parameters if shape.experts else shape.mlp_parameters(shape.ffn)
        parameters += shape.prediction_layers * each
        tables += 0 if first or shape.tied else 1
    parameters += mixtures * shape.shared_parameters
    return (parameters + tables * shape.vocabulary_parameters) / strategy.tp


def replicated_parameters(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Parameters that every tensor-parallel rank holds whole: routers, and the compressions of latent attention."""
    more = shape.prediction_layers if stage == strategy.head_stage else 0
    found = 0.0
    if shape.experts:
        found += (mixture_layers(shape, strategy, stage) + more) * shape.hidden * shape.experts.number
    if shape.latent:
        ranks = shape.latent.query_rank + shape.latent.key_rank + shape.latent.rope
        found += (sum(strategy.stages[stage]) + more) * shape.hidden * ranks
    return found


def expert_parameters(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Parameters of the routed experts that a rank of this stage holds."""
    if shape.experts is None:
        return 0.0
    mixtures = mixture_layers(shape, strategy, stage)
    mixtures += shape.prediction_layers if stage == strategy.head_stage else 0
    return mixtures * local_experts(shape, strategy)


def local_experts(shape: ModelShape, strategy: Strategy) -> float:
    """Parameters of one mixture's experts that a rank holds."""
    return shape.routed_parameters / (strategy.ep * max(1, strategy.etp))


def routed_rows(shape: ModelShape, strategy: Strategy) -> float:
    """Tokens of a microbatch, counted once for each of their experts, that a rank's experts work on when load is even."""
    experts = shape.experts
    if experts is None:
        return 0.0
    tokens = strategy.tokens(shape.seq)
    kept = min(1.0, experts.capacity) if experts.capacity is not None and experts.capacity > 0 else 1.0
    # Sequence parallelism deals tokens out; ranks that share an expert gather each other's.
    share = max(1, strategy.etp) / strategy.tp if strategy.sequence_parallel else 1.0
    return tokens * share * experts.topk * kept
