"""A lower bound of a stage's peak memory that needs no dry run: what fails it cannot fit.

Why it is low: from the second iteration on a rank holds, all at once, its weights (bf16), its gradient buffer (fp32),
its master weights and both Adam moments (fp32, shared out over the replicas by the distributed optimizer). Megatron
allocates each of them once and frees none. When the warm-up of the schedule is over it also holds, for every
microbatch in flight, what the backward pass of every layer cannot do without: the layer's input, and unless the layer
is recomputed the input and the output of the activation function. Biases, norms, communication and work buffers,
logits, fragments come on top, so the true peak is higher.
"""

from __future__ import annotations

from mindspeed_dryrun.estimate.stage_parts import (
    chunk_layers,
    expert_parameters,
    routed_rows,
    stage_parameters,
    telling_stages,
)
from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.megatron.sizes import GRADIENT_BYTES, OPTIMIZER_BYTES, SHARED_MAIN_WEIGHT_BYTES, WEIGHT_BYTES

_MB = 1024.0 * 1024.0


def state_mb(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Weights, gradients and optimizer states of a stage."""
    dense, experts = stage_parameters(shape, strategy, stage), expert_parameters(shape, strategy, stage)
    if not shape.full_states:
        return WEIGHT_BYTES * (dense + experts) / _MB
    optimizer = OPTIMIZER_BYTES - (SHARED_MAIN_WEIGHT_BYTES if shape.shared_master else 0)
    shared = strategy.distributed_optimizer
    owned = dense / (strategy.replicas if shared else 1) + experts / (strategy.expert_replicas if shared else 1)
    return ((dense + experts) * (WEIGHT_BYTES + GRADIENT_BYTES) + owned * optimizer) / _MB


def saved_mb(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """Activations that must be held at the end of the warm-up."""
    if not shape.full_activations:
        return 0.0
    tokens = strategy.tokens(shape.seq)
    # Sequence parallelism shares out the layer's input; recomputation may save one input for several layers, and
    # `--distribute-saved-activations` may share it out: count it shared, once a chunk, in that case.
    layer_input = tokens * shape.hidden * 2.0 / (strategy.tp if strategy.sequence_parallel else 1)
    each = 2.0 * (3.0 if shape.gated else 2.0)
    inside = tokens * shape.ffn * each / strategy.tp
    mixed = _inside_mixture(shape, strategy, tokens) * each
    total = 0.0
    held = strategy.in_flight(stage, strategy.microbatches(shape.global_batch))
    for layers, microbatches in zip(chunk_layers(shape, strategy, stage), held, strict=True):
        dense, mixtures = layers.dense - layers.dense_again, layers.mixtures - layers.mixtures_again
        inputs = (dense + mixtures) * layer_input + (layer_input / strategy.tp if layers.again else 0.0)
        total += microbatches * (inputs + dense * inside + mixtures * mixed)
    return total / _MB


def _inside_mixture(shape: ModelShape, strategy: Strategy, tokens: float) -> float:
    """Numbers at the activation functions of a mixture: of its shared experts and of the tokens that come when load is
    even. Over all ranks of a group they are as many whatever the load, so that the busiest has no fewer."""
    if shape.experts is None:
        return 0.0
    routed = routed_rows(shape, strategy) * shape.experts.ffn / max(1, strategy.etp)
    return routed + tokens * shape.experts.shared_ffn / strategy.tp


def stage_bound_mb(shape: ModelShape, strategy: Strategy, stage: int) -> float:
    """No rank of this stage can stay below it."""
    return state_mb(shape, strategy, stage) + saved_mb(shape, strategy, stage)


def lower_bound_mb(shape: ModelShape, strategy: Strategy) -> float:
    """The largest of all stages'."""
    return max(stage_bound_mb(shape, strategy, stage) for stage in telling_stages(shape, strategy))
