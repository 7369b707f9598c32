"""What Megatron refuses, refused before anything runs: one set of checks for the planner and for a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron import sizes
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.flags import FLAGS, with_tag
from mindspeed_dryrun.megatron.layout import RING, ULYSSES, Batch, Layout, read_batch, read_layout

_MOST_LAYERS = 10_000
_MOST_RANKS = 1 << 20


def read_checked(arguments: Arguments, world_size: int, nodes: Sequence[int] = ()) -> tuple[Layout, Batch]:
    """Layout and batch of arguments that Megatron would accept; `UsageError` with the numbers and the way out otherwise."""
    missing = [flag for flag in with_tag("required") if not arguments.has(flag)]
    if missing:
        raise UsageError(f"The trainer's arguments lack {', '.join(missing)}.")
    _check_words(arguments)
    _check_size(arguments, world_size)
    layout = read_layout(arguments, world_size, nodes)
    batch = read_batch(arguments, layout.parallel.dp)
    _check_schedule(arguments, layout, batch)
    _check_recomputation(arguments)
    _check_model(arguments, layout)
    _check_sequence(arguments, layout)
    _check_experts(arguments, layout)
    _check_flags(arguments)
    return layout, batch


# Sizes that Megatron divides by, or makes tensors of.
_POSITIVE = (
    "--ffn-hidden-size", "--kv-channels", "--padded-vocab-size", "--make-vocab-size-divisible-by", "--num-experts",
    "--moe-router-topk", "--moe-ffn-hidden-size", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--lora-r",
)  # fmt: skip
_SHORTENED = frozenset(("layout", "batch", "layers", "recompute", "model", "experts", "optimizer"))


def _check_words(arguments: Arguments) -> None:
    """argparse takes `--tensor-mo 4`, and a planner that did not would count another job."""
    for name in arguments.values:
        if name in FLAGS:
            continue
        longer = [flag for flag in FLAGS if flag.startswith(name)]
        if len(longer) == 1 and FLAGS[longer[0]].about in _SHORTENED:
            raise UsageError(f"{name} abbreviates {longer[0]}: write it in full.")
    for name in _POSITIVE:
        if arguments.has(name):
            arguments.positive(name, 1)


def _check_size(arguments: Arguments, world_size: int) -> None:
    """Every layer and every rank is listed: a slip of the finger must not fill the memory of this machine."""
    layers = arguments.positive("--num-layers", 1)
    if layers > _MOST_LAYERS:
        raise UsageError(f"--num-layers is {layers}: a dry run takes at most {_MOST_LAYERS} layers.")
    if world_size > _MOST_RANKS:
        raise UsageError(f"The job has {world_size} ranks: a dry run takes at most {_MOST_RANKS}.")


def _check_schedule(arguments: Arguments, layout: Layout, batch: Batch) -> None:
    # `microbatch_group_size_per_vp_stage`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/pipeline_parallel/schedules.py#L789
    parallel = layout.parallel
    if not parallel.vpp or layout.u_shaped or arguments.has("--schedules-method"):
        return
    group = arguments.number("--microbatch-group-size-per-virtual-pipeline-stage", parallel.pp) or 1
    rest = batch.microbatches % group
    if batch.microbatches < group or 0 < rest < parallel.pp:
        step = parallel.dp * batch.micro
        raise UsageError(
            f"VPP needs the {batch.microbatches} microbatches of an iteration to be a multiple of PP {parallel.pp}: "
            f"use --global-batch-size {math.ceil(batch.whole / (step * group)) * step * group}."
        )


def _check_recomputation(arguments: Arguments) -> None:
    # `recompute_method is not None`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L742
    granularity, method = sizes.recompute_granularity(arguments), arguments.text("--recompute-method")
    if granularity == "full" and method is None:
        raise UsageError("--recompute-granularity full needs --recompute-method (uniform or block).")
    if granularity == "selective" and method is not None:
        raise UsageError("--recompute-granularity selective does not take --recompute-method.")
    if granularity == "full" and method == "uniform":
        # `self.recompute_num_layers is None`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/transformer_config.py#L702
        if not arguments.has("--recompute-num-layers"):
            raise UsageError("--recompute-method uniform needs --recompute-num-layers.")
        arguments.positive("--recompute-num-layers", 1)  # Megatron would go from layer to layer in steps of 0


def _check_model(arguments: Arguments, layout: Layout) -> None:
    # `tensor_model_parallel_size`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/transformer_config.py#L559
    heads, hidden = arguments.positive("--num-attention-heads", 1), arguments.positive("--hidden-size", 1)
    tp = layout.edge[1] if layout.edge and heads % layout.edge[1] else layout.parallel.tp
    if heads % tp:
        fitting = [value for value in range(1, heads + 1) if heads % value == 0 and value <= 64]
        raise UsageError(f"{heads} attention heads are not divisible by TP {tp}: TP can be {', '.join(map(str, fitting))}.")
    if not arguments.has("--kv-channels") and hidden % heads:
        raise UsageError(f"--hidden-size {hidden} is not divisible by {heads} attention heads: set --kv-channels.")
    groups = sizes.query_groups(arguments)
    if groups % tp:
        raise UsageError(f"{groups} query groups (--num-query-groups) are not divisible by TP {tp}.")
    ffn = arguments.number("--ffn-hidden-size")
    if ffn and ffn % tp:
        raise UsageError(f"--ffn-hidden-size {ffn} is not divisible by TP {tp}.")
    vocabulary = arguments.number("--padded-vocab-size")
    if vocabulary and vocabulary % tp:
        raise UsageError(f"--padded-vocab-size {vocabulary} is not divisible by TP {tp}: use {-(-vocabulary // tp) * tp}.")
    # `max_position_embeddings >= args.seq_length`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L696
    positions, length = arguments.number("--max-position-embeddings"), arguments.positive("--seq-length", 1)
    if positions is not None and positions < length:
        raise UsageError(f"--seq-length {length} is above --max-position-embeddings {positions}: raise the latter.")


def _check_sequence(arguments: Arguments, layout: Layout) -> None:
    tp, cp, length = layout.parallel.tp, layout.parallel.cp, arguments.positive("--seq-length", 1)
    algorithm = arguments.text("--context-parallel-algo") or RING
    if cp > 1:
        # `context_parallel_size`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/features_manager/context_parallel/context_parallel_feature.py#L40
        parts = cp if algorithm == ULYSSES else 2 * cp
        if length % parts:
            raise UsageError(f"--seq-length {length} is not divisible by {parts} (CP {cp}, {algorithm}).")
        heads = arguments.positive("--num-attention-heads", 1)
        ulysses = cp if algorithm == ULYSSES else arguments.positive("--ulysses-degree-in-cp", 1)
        if algorithm in (ULYSSES, "hybrid_cp_algo") and heads % (ulysses * tp):
            raise UsageError(
                f"{heads} attention heads are not divisible by Ulysses {ulysses} × TP {tp} = {ulysses * tp}: "
                f"lower one of them, or use --context-parallel-algo {RING}."
            )
    if arguments.has("--sequence-parallel") and tp > 1 and length // cp % tp:
        raise UsageError(f"With --sequence-parallel, --seq-length {length} / CP {cp} must be divisible by TP {tp}.")


def _check_experts(arguments: Arguments, layout: Layout) -> None:
    parallel = layout.parallel
    experts = arguments.number("--num-experts") or 0
    if not experts:
        if parallel.ep > 1:
            raise UsageError(f"--expert-model-parallel-size {parallel.ep} needs --num-experts.")
        return
    if (topk := arguments.number("--moe-router-topk") or 1) > experts:
        raise UsageError(f"--moe-router-topk {topk} is above --num-experts {experts}.")
    extended = arguments.has("--moe-tp-extend-ep")
    spread = parallel.ep * (parallel.tp if extended else 1)
    # `expert_model_parallel_size`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L852
    if experts % spread:
        raise UsageError(f"{experts} experts are not divisible by EP {spread}.")
    expert_tp = parallel.tp if extended else arguments.number("--expert-tensor-parallel-size") or parallel.tp
    grid = expert_tp * parallel.ep * parallel.pp
    world = layout.world_size if not layout.u_shaped else parallel.tp * parallel.cp * parallel.dp * parallel.pp
    if world % grid:
        raise UsageError(
            f"World size {world} is not divisible by expert TP {expert_tp} × EP {parallel.ep} × PP {parallel.pp} = {grid}."
        )
    # Megatron-LM, core/parallel_state.py, "When not using pp-last rank ordering"
    # `When not using pp-last rank ordering`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/parallel_state.py#L720
    if arguments.has("--use-tp-pp-dp-mapping") and parallel.pp > 1 and expert_tp * parallel.ep != parallel.tp * parallel.cp:
        raise UsageError(
            f"--use-tp-pp-dp-mapping needs expert TP {expert_tp} × EP {parallel.ep} to be TP {parallel.tp} × CP {parallel.cp}: "
            "Megatron stops otherwise. Leave the mapping out."
        )
    if expert_tp != parallel.tp and arguments.text("--moe-token-dispatcher-type") == "alltoall_seq":
        raise UsageError(
            f"--moe-token-dispatcher-type alltoall_seq does not work with expert TP {expert_tp} and TP {parallel.tp}: "
            "use allgather."
        )
    # `sequence_parallel`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/moe/moe_layer.py#L133
    if parallel.tp > 1 and parallel.ep > 1 and not arguments.has("--sequence-parallel"):
        raise UsageError("Experts with both TP and EP need --sequence-parallel.")
    _check_dense_layers(arguments, parallel.pp)


def _check_dense_layers(arguments: Arguments, pp: int) -> None:
    """MindSpeed-LLM refuses a stage without a mixture (2.2.0, features_manager/transformer/transformer_block.py:14)."""
    # `first_k_dense_replace`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/transformer/transformer_block.py#L18
    dense, layers = arguments.number("--first-k-dense-replace") or 0, arguments.number("--num-layers") or 0
    if layers and dense >= layers // pp:
        raise UsageError(
            f"--first-k-dense-replace {dense} leaves no mixture on the first of {pp} stages of {layers // pp} layers: "
            "MindSpeed-LLM needs one on every stage. Use fewer stages."
        )


# (flag, what it needs or excludes, the sentence)
# `overlap_grad_reduce`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L505
_EXCLUDES = (
    ("--fp16", "--bf16", message("--fp16 and --bf16 exclude each other.")),
    ("--swap-optimizer", "--reuse-fp32-param", message("--swap-optimizer and --reuse-fp32-param exclude each other.")),
    ("--train-iters", "--train-samples", message("--train-iters and --train-samples exclude each other.")),
    ("--train-iters", "--rampup-batch-size", message("--rampup-batch-size works with --train-samples, not with --train-iters.")),
)
_NEEDS = (
    ("--overlap-param-gather", "--use-distributed-optimizer"),
    ("--overlap-param-gather", "--overlap-grad-reduce"),
    ("--reuse-fp32-param", "--bf16"),
    ("--reuse-fp32-param", "--use-distributed-optimizer"),
    ("--swap-optimizer", "--use-distributed-optimizer"),
)


def _check_flags(arguments: Arguments) -> None:
    for one, other, sentence in _EXCLUDES:
        if arguments.has(one) and arguments.has(other):
            raise UsageError(sentence)
    for flag, needed in _NEEDS:
        if arguments.has(flag) and not arguments.has(needed):
            raise UsageError(f"{flag} needs {needed}.")
