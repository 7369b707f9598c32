"""How much a rank communicates: counted from the shape for the time model, and read from the engine's list to check it.

Bytes are those that a gather ends with or a scatter starts from; an all-reduce is a scatter and a gather. What pipeline
stages exchange is left out of the check: the engine lists their calls, and one call may carry both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.estimate.stage_parts import stage_parameters
from mindspeed_dryrun.estimate.strategy import Strategy
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
    """Bytes of one rank: tensor and context parallelism for a microbatch, the gradients' for an iteration."""

    tensor: float = 0.0
    context: float = 0.0
    data: float = 0.0


def hidden_bytes(shape: ModelShape, strategy: Strategy) -> float:
    """The hidden states of a microbatch, whole, in 16 bits."""
    return 2.0 * strategy.micro_batch * shape.seq / strategy.cp * shape.hidden


def ring_bytes(shape: ModelShape, strategy: Strategy) -> float:
    """A block of keys and values."""
    tokens = strategy.micro_batch * shape.seq / strategy.cp
    return 2.0 * tokens * shape.query_groups / strategy.tp * shape.head_dim * 2


def all_to_all_bytes(shape: ModelShape, strategy: Strategy) -> float:
    """Queries, keys, values and the result, once through a layer."""
    tokens = strategy.micro_batch * shape.seq / strategy.cp
    return tokens * shape.head_dim * 2 * (2 * shape.heads + 2 * shape.query_groups) / strategy.tp


def counted(shape: ModelShape, strategy: Strategy, stage: int) -> Volumes:
    """What the time model counts on."""
    layers = sum(strategy.stages[stage])
    again = sum(strategy.recomputed(stage))
    tensor = context = data = 0.0
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
    if strategy.dp * strategy.cp > 1:
        parameters = stage_parameters(shape, strategy, stage)
        data = (4.0 + 2.0 if strategy.distributed_optimizer else 8.0) * parameters
    return Volumes(tensor, context, data)


def listed(record: Path, strategy: Strategy) -> dict[int, Volumes]:
    """By stage, what the engine lists for the first rank of it that was simulated. Empty for a record without lists."""
    opened = Record.open(record)
    microbatches = opened.job().details.microbatches
    found: dict[int, Volumes] = {}
    for rank, result in sorted(opened.results().items()):
        stage, iterations = result.get("stage"), result.get("iterations")
        if not microbatches or not iterations or stage is None or stage in found:
            continue
        sums = {"tensor": 0.0, "context": 0.0, "data": 0.0}
        for call in read_collectives(record, rank):
            kind = _kind(call, rank, strategy)
            if kind:
                sums[kind] += call.bytes * (2 if "AllReduce" in call.primitive else 1)
        if any(sums.values()):
            steps = iterations * microbatches
            found[stage] = Volumes(sums["tensor"] / steps, sums["context"] / steps, sums["data"] / iterations)
    return found


def _kind(call: Collective, rank: int, strategy: Strategy) -> str | None:
    if len(call.ranks) < 2:
        return None
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
