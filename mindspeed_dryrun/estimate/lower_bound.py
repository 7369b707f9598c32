"""A lower bound of a stage's peak memory that needs no dry run: what fails it cannot fit.

Why it is low: from the second iteration on a rank holds, all at once, its weights (bf16), its gradient buffer (fp32),
its master weights and both Adam moments (fp32, shared out over the replicas by the distributed optimizer). Megatron
allocates each of them once and frees none. When the warm-up of the schedule is over it also holds, for every
microbatch in flight, what the backward pass of every layer cannot do without: the layer's input, and unless the layer
is recomputed the input and the output of the activation function. Biases, norms, communication and work buffers,
logits, fragments come on top, so the true peak is higher.
"""

from __future__ import annotations

from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.megatron.sizes import GRADIENT_BYTES, OPTIMIZER_BYTES, SHARED_MAIN_WEIGHT_BYTES, WEIGHT_BYTES

_MB = 1024.0 * 1024.0


def stage_parameters(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Parameters of the matrices that a rank of this stage holds."""
    parameters = sum(strategy.stages[stage]) * shape.layer_parameters
    first, last = stage == 0, stage == strategy.pp - 1
    # A tied output layer on another stage than the embedding holds its own copy of the table.
    tables = 1 if shape.tied and first and last else first + last
    return (parameters + tables * shape.vocabulary_parameters) / strategy.tp


def state_mb(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Weights, gradients and optimizer states of a stage."""
    parameters = stage_parameters(shape, strategy, stage)
    if not shape.full_states:
        return WEIGHT_BYTES * parameters / _MB
    replicas = strategy.dp * strategy.cp if strategy.distributed_optimizer else 1
    optimizer = OPTIMIZER_BYTES - (SHARED_MAIN_WEIGHT_BYTES if shape.shared_master else 0)
    return parameters * (WEIGHT_BYTES + GRADIENT_BYTES + optimizer / replicas) / _MB


def token_share(shape: ModelShape, strategy: Strategy) -> float:
    """Tokens of one microbatch on a rank of the context-parallel group, before tensor parallelism."""
    return strategy.micro_batch * shape.seq / strategy.cp


def saved_mb(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Activations that must be held at the end of the warm-up."""
    if not shape.full_activations:
        return 0.0
    tokens = token_share(shape, strategy)
    # Sequence parallelism shares out the layer's input; recomputation may save one input for several layers, and
    # `--distribute-saved-activations` may share it out: count it shared, once a chunk, in that case.
    layer_input = tokens * shape.hidden * 2.0 / (strategy.tp if strategy.sequence_parallel else 1)
    inside = tokens * shape.ffn * (3.0 if shape.gated else 2.0) * 2.0 / strategy.tp
    total = 0.0
    held = strategy.in_flight(stage, strategy.microbatches(shape.global_batch))
    recomputed = strategy.recomputed(stage)
    for layers, microbatches, again in zip(strategy.stages[stage], held, recomputed, strict=True):
        whole = layers - again
        inputs = whole * layer_input + (layer_input / strategy.tp if again else 0.0)
        total += microbatches * (inputs + whole * inside)
    return total / _MB


def stage_bound_mb(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """No rank of this stage can stay below it."""
    return state_mb(shape, strategy, stage) + saved_mb(shape, strategy, stage)


def lower_bound_mb(shape: ModelShape, strategy: Strategy) -> float:
    """The largest of all stages'."""
    return max(stage_bound_mb(shape, strategy, stage) for stage in range(strategy.pp))
