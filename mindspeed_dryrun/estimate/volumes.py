"""How much a rank communicates: counted from the shape for the time model, and read from the engine's list to check it.

Bytes are those that a gather ends with or a scatter starts from; an all-reduce is a scatter and a gather. What pipeline
stages exchange is left out of the check: the engine lists their calls, and one call may carry both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.estimate.stage_parts import chunk_layers, expert_parameters, replicated_parameters, stage_parameters
from mindspeed_dryrun.estimate.strategy import DEFAULT_DISPATCHER, Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.record.communication import Collective, read_collectives
from mindspeed_dryrun.record.store import Record

# Gathers and scatters of a microbatch's hidden states over the tensor-parallel group, with or without sequence
# parallelism: two pairs in a layer's forward pass; the same backward, and what a column-parallel layer gathers again for
# its weight's gradient (without sequence parallelism it has it all).
LAYER_FORWARD = 4
LAYER_BACKWARD_WAITED = 2  # sequence parallelism: of the row-parallel layers
LAYER_BACKWARD_OVERLAPPED = 4  # of the column-parallel layers, during their products
EMBEDDING = 2


def head_times(strategy: Strategy) -> int:
    """Of the output layer: its input gathered, gathered again for the weight's gradient, and its gradient scattered."""
    return 3 if strategy.sequence_parallel else 2


@dataclass(frozen=True)
class Volumes:
    """Bytes of one rank: tensor and context parallelism and tokens for experts for a microbatch, the gradients' for an
    iteration."""

    tensor: float = 0.0
    context: float = 0.0
    data: float = 0.0
    experts: float = 0.0


def hidden_bytes(shape: ModelShape, strategy: Strategy) -> float:
    """The hidden states of a microbatch, whole, in 16 bits."""
    return 2.0 * strategy.tokens(shape.seq) * shape.hidden


def ring_bytes(shape: ModelShape, strategy: Strategy) -> float:
    """A block of keys and values."""
    return 2.0 * strategy.tokens(shape.seq) * shape.query_groups / strategy.tp * shape.head_dim * 2


def all_to_all_bytes(shape: ModelShape, strategy: Strategy) -> float:
    """Queries, keys, values and the result, once through a layer."""
    return strategy.tokens(shape.seq) * shape.head_dim * 2 * (2 * shape.heads + 2 * shape.query_groups) / strategy.tp


def exchange_bytes(shape: ModelShape, strategy: Strategy) -> float:
    """A microbatch's tokens on the way to their experts, once for each of them; as much comes back."""
    tokens = strategy.tokens(shape.seq) / (strategy.tp if strategy.sequence_parallel else 1)
    return 2.0 * tokens * shape.experts.topk * shape.hidden if shape.experts else 0.0


def dense_parameters(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Parameters of a rank's matrices beside routed experts, with those that tensor parallelism does not share out."""
    whole = replicated_parameters(shape, strategy, stage) if strategy.tp > 1 else 0.0
    return stage_parameters(shape, strategy, stage) + whole * (1 - 1 / strategy.tp)


def weight_gathers(strategy: Strategy, overlapped: bool = False) -> int:
    """How often the distributed optimizer gathers the weights in an iteration. Experts have an optimizer of their own, and
    each of the two gathers all (Megatron-LM core_v0.12.1, core/optimizer/distrib_optimizer.py:2107)."""
    # `step_with_ready_grads`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/optimizer/distrib_optimizer.py#L2088
    return 2 if strategy.etp and strategy.ep > 1 and not overlapped else 1


def checked_parts(strategy: Strategy) -> tuple[str, ...]:
    """Volumes of which both sides count the same. The engine's list does not tell the tensor-parallel gathers of attention
    from those of experts, nor gathered tokens from gathered weights."""
    if not strategy.etp:
        return "tensor", "context", "data"
    return ("context",) if strategy.dispatcher == DEFAULT_DISPATCHER else ("context", "data", "experts")


def counted(shape: ModelShape, strategy: Strategy, stage: int, overlapped_gather: bool = False) -> Volumes:
    """What the time model counts on."""
    layers = sum(strategy.stages[stage])
    again = sum(strategy.recomputed(stage))
    tensor = context = data = exchanged = 0.0
    if strategy.tp > 1:
        backward = LAYER_BACKWARD_WAITED + LAYER_BACKWARD_OVERLAPPED if strategy.sequence_parallel else LAYER_FORWARD
        times = layers * (LAYER_FORWARD + backward) + again * LAYER_FORWARD
        times += EMBEDDING * (stage == 0) + head_times(strategy) * (stage == strategy.pp - 1)
        tensor = times * hidden_bytes(shape, strategy)
    if strategy.cp > 1 and strategy.cp_algorithm == "megatron_cp_algo":
        # Forward once around; backward the keys and values once more, and their gradients.
        context = (3 * layers + again) * (strategy.cp - 1) * ring_bytes(shape, strategy)
    elif strategy.cp > 1:
        context = (2 * layers + again) * all_to_all_bytes(shape, strategy)
    parameters = dense_parameters(shape, strategy, stage) if strategy.replicas > 1 else 0.0
    parameters += expert_parameters(shape, strategy, stage) if strategy.expert_replicas > 1 else 0.0
    if parameters:
        shared = 4.0 + 2.0 * weight_gathers(strategy, overlapped_gather)
        data = (shared if strategy.distributed_optimizer else 8.0) * parameters
    if strategy.ep > 1 and strategy.dispatcher != DEFAULT_DISPATCHER:
        # There and back, forward, backward, and forward again where it is recomputed.
        chunks = chunk_layers(shape, strategy, stage)
        times = sum(4 * chunk.mixtures + 2 * chunk.mixtures_again for chunk in chunks)
        times += 4 * shape.prediction_layers * (stage == strategy.head_stage)
        exchanged = times * exchange_bytes(shape, strategy)
    return Volumes(tensor, context, data, exchanged)


def listed(record: Path, strategy: Strategy) -> dict[int, Volumes]:
    """By stage, what the engine lists for the first rank of it that was simulated. Empty for a record without lists."""
    opened = Record.open(record)
    microbatches = opened.job().details.microbatches
    found: dict[int, Volumes] = {}
    for rank, result in sorted(opened.results().items()):
        stage, iterations = result.get("stage"), result.get("iterations")
        if not microbatches or not iterations or stage is None or stage in found:
            continue
        sums = {"tensor": 0.0, "context": 0.0, "data": 0.0, "experts": 0.0}
        for call in read_collectives(record, rank):
            kind = _kind(call, rank, strategy)
            if kind:
                sums[kind] += call.bytes * (2 if "AllReduce" in call.primitive else 1)
        if any(sums.values()):
            steps = iterations * microbatches
            found[stage] = Volumes(
                sums["tensor"] / steps, sums["context"] / steps, sums["data"] / iterations, sums["experts"] / steps
            )
    return found


def _kind(call: Collective, rank: int, strategy: Strategy) -> str | None:
    if len(call.ranks) < 2:
        return None
    if strategy.ep > 1 and strategy.cp == 1 and "AllToAll" in call.primitive:
        return "experts"
    tensor = range(rank - rank % strategy.tp, rank - rank % strategy.tp + strategy.tp)
    if set(call.ranks) == set(tensor):
        return "tensor"
    replicas = strategy.tp * strategy.cp * strategy.dp  # of a stage
    if {member // replicas for member in call.ranks} != {rank // replicas}:
        return None  # between stages, or of the whole world
    if {member % strategy.tp for member in call.ranks} != {rank % strategy.tp}:
        return None
    if "recv" in call.primitive.lower():
        return None  # each has its send
    return "context" if "send" in call.primitive or "AllToAll" in call.primitive else "data"
