"""Where a job's layers, ranks and microbatches are: the one layout that the planner, the trainer and the search share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron.arguments import Arguments

RING, ULYSSES = "megatron_cp_algo", "ulysses_cp_algo"
# Context parallelism by a ring: what a rank holds at once depends on its place in the ring.
RING_ALGORITHMS = (RING, "hybrid_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo")

# [stage][chunk] → indices of its layers
StageLayers = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The parallel sizes of a job. `vpp` is the number of chunks per stage, None without the interleaved schedule."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks and layers of a job. `stages` holds every layer that Megatron counts, no-op layers included."""

    world_size: int
    parallel: Parallel
    stages: StageLayers
    noop: frozenset[int]
    pipeline_before_data: bool = False  # --use-tp-pp-dp-mapping
    edge: tuple[int, int] | None = None  # ranks of the edge, and their TP (--layerwise-disaggregated-training)

    @property
    def u_shaped(self) -> bool:
        """The first stage, on the edge, has the first layers and the last ones; the stages of the cloud have those between."""
        return self.edge is not None

    def on_edge(self, rank: int) -> bool:
        """Whether the rank is one of the edge, which waits for the cloud and its many layers."""
        return self.edge is not None and rank < self.edge[0]

    @property
    def order(self) -> str:
        """As `initialize_model_parallel` takes it (Megatron-LM core_v0.12.1, megatron/training/initialize.py:354)."""
        # `order`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/initialize.py#L354
        return "tp-cp-ep-pp-dp" if self.pipeline_before_data else "tp-cp-ep-dp-pp"

    def place(self, rank: int) -> Place:
        """Tensor fastest, then context; then data and pipeline, or pipeline and data."""
        # `RankGenerator`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/parallel_state.py#L329
        sizes = self.parallel
        if self.edge and self.on_edge(rank):
            rank, tp = divmod(rank, self.edge[1])
            dp, cp = divmod(rank, sizes.cp)
            return Place(tp, cp, dp, 0)
        rank, tp = divmod(rank - self.edge[0] if self.edge else rank, sizes.tp)
        rank, cp = divmod(rank, sizes.cp)
        if self.edge:
            pp, dp = divmod(rank, sizes.dp)
            pp += 1
        elif self.pipeline_before_data:
            dp, pp = divmod(rank, sizes.pp)
        else:
            pp, dp = divmod(rank, sizes.dp)
        return Place(tp, cp, dp, pp)

    def kind_of_group(self, ranks: Sequence[int]) -> str:
        """Which of Megatron's process groups these ranks are (tp, pp, dp, cp, mp, embd, …), by the places that differ."""
        # `EMBEDDING_GROUP`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/parallel_state.py#L1072
        places = [self.place(rank) for rank in ranks if rank < self.world_size]
        if self.edge and len(places) == self.parallel.pp == len({place.pp for place in places}):
            return "pp"  # from the edge, whose TP and DP may be others, through the cloud
        varied = {name for name in ("tp", "cp", "dp", "pp") if len({getattr(place, name) for place in places}) > 1}
        if varied == {"pp"} and len(ranks) < self.parallel.pp:
            return "embd" if {place.pp for place in places} == {0, self.parallel.pp - 1} else "pp"
        if varied == {"dp"} and len(ranks) < self.parallel.dp:
            return "exp"
        names = {"tp,pp": "mp", "tp,cp,dp": "tp_dp_cp", "cp,dp": "dp_cp", "tp,dp": "tp_dp", "tp,cp": "tp_cp"}
        words = ",".join(name for name in ("tp", "cp", "dp", "pp") if name in varied)
        return names.get(words, words if words in ("tp", "cp", "dp", "pp") else "world" if words else "self")

    def real_layers(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """By chunk, the layers of a stage that are not no-ops."""
        return tuple(tuple(layer for layer in chunk if layer not in self.noop) for chunk in self.stages[stage])


@dataclass(frozen=True)
class Batch:
    """Samples of one iteration."""

    micro: int
    whole: int  # of all data-parallel ranks
    microbatches: int  # of one iteration on one rank


def held_microbatches(pp: int, vpp: int | None, stage: int, microbatches: int) -> tuple[int, ...]:
    """For each chunk of a stage, the microbatches whose activations are held when the warm-up is over.

    Megatron's schedules: 1F1B holds `pp - stage`; the interleaved one runs `2 (pp - stage - 1) + (vpp - 1) pp` passes
    before the first backward pass, in groups of `pp` microbatches a chunk, and then one more
    (Megatron-LM core_v0.12.1, megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`).
    """
    # `get_pp_rank_microbatches`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/pipeline_parallel/schedules.py#L574
    if vpp is None:
        return (min(microbatches, pp - stage),)
    passes = min(microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    held = [0] * vpp
    for index in range(passes):
        held[index // pp % vpp] += 1
    return tuple(held)


def read_layout(arguments: Arguments, world_size: int, nodes: Sequence[int] = ()) -> Layout:
    """The layout that the arguments spell out, or a `UsageError` with the numbers and the way out.

    `nodes`: the ranks of each node, where they are known to have sizes of their own.
    """
    tp = arguments.positive("--tensor-model-parallel-size", 1)
    pp = arguments.positive("--pipeline-model-parallel-size", 1)
    cp = arguments.positive("--context-parallel-size", 1)
    ep = arguments.positive("--expert-model-parallel-size", 1)
    edge = None
    if arguments.has(DISAGGREGATED):
        dp, edge = _disaggregated(arguments, Parallel(tp=tp, pp=pp, cp=cp), world_size, nodes)
    else:
        size = tp * pp * cp
        if world_size % size:
            more = f"use a multiple of {size} ranks" if world_size > size else f"it needs at least {size} ranks"
            raise UsageError(f"World size {world_size} is not divisible by TP {tp} × PP {pp} × CP {cp} = {size}: {more}.")
        dp = world_size // size
    vpp, noop = _virtual_stages(arguments, pp), _noop_layers(arguments)
    return Layout(
        world_size=world_size,
        parallel=Parallel(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=_expert_tensor(arguments, tp), vpp=vpp),
        stages=_u_shape(arguments, pp) if edge else _stages(arguments, pp, vpp, noop),
        noop=noop,
        pipeline_before_data=arguments.has("--use-tp-pp-dp-mapping"),
        edge=edge,
    )


DISAGGREGATED = "--layerwise-disaggregated-training"


def _disaggregated(arguments: Arguments, sizes: Parallel, world_size: int, nodes: Sequence[int]) -> tuple[int, tuple[int, int]]:
    """Data-parallel size of the cloud, and the edge's ranks with their TP: node 0 is the edge, the others are the cloud.

    With as many nodes as stages, or more, a stage's TP is the size of its node (`_auto_detect_vtp_sizes`); upstream takes the
    cloud's data-parallel size for the whole job (`_get_vdp_size`).
    """
    # `_get_vdp_size`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/core/layerwise_disaggregated_training/initialize.py#L1106
    # `_auto_detect_vtp_sizes`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/core/layerwise_disaggregated_training/parallel_state.py#L183
    tp, pp, cp = sizes.tp, sizes.pp, sizes.cp
    if len(nodes) < 2 or sum(nodes) != world_size:
        raise UsageError(
            f"{DISAGGREGATED} is one job of an edge and a cloud, nodes of different sizes: the torchrun calls of all nodes are "
            "needed. Write a script that starts the script of each node (bash EDGE & bash CLOUD & wait), and give that."
        )
    if pp < 2 or _virtual_stages(arguments, pp) != 2:
        raise UsageError(
            f"{DISAGGREGATED} needs a pipeline (PP is {pp}) and two chunks of a stage (--num-virtual-stages-per-pipeline-rank 2)."
        )
    edge, cloud, stage = nodes[0], world_size - nodes[0], tp * cp * (pp - 1)
    if cloud % stage:
        raise UsageError(f"The cloud's {cloud} ranks are not divisible by TP {tp} × CP {cp} × {pp - 1} stages = {stage}.")
    if len(nodes) < pp:
        if edge % (tp * cp):
            raise UsageError(f"The edge's {edge} ranks are not divisible by TP {tp} × CP {cp} = {tp * cp}.")
        return cloud // stage, (edge, tp)
    if cp > 1 or any(node != tp for node in nodes[1:pp]):
        told = ", ".join(map(str, nodes))
        raise UsageError(
            f"With as many nodes as stages, TP is the size of a node: the cloud's nodes must have TP {tp} ranks each, "
            f"CP must be 1, and this job has nodes of {told} ranks and CP {cp}."
        )
    return cloud // stage, (edge, edge)


def _u_shape(arguments: Arguments, pp: int) -> StageLayers:
    """`2,8,8,8,2` of PP 4: the first stage has the first layers and the last ones, in two chunks."""
    # `tmp_num_layer_list`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/tasks/posttrain/ldt_sft/ldt_sft_trainer.py#L118
    counts, layers = arguments.numbers("--num-layer-list"), arguments.positive("--num-layers", 1)
    if len(counts) != pp + 1 or sum(counts) != layers:
        raise UsageError(
            f"{DISAGGREGATED} needs a --num-layer-list of {pp + 1} numbers (PP + 1: the edge has the first and the last) "
            f"that add up to {layers} layers, and it has {len(counts)} that add up to {sum(counts)}."
        )
    starts = [sum(counts[:place]) for place in range(pp + 1)]
    chunks = [tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    return ((chunks[0], chunks[-1]), *((chunk, ()) for chunk in chunks[1:-1]))


def _expert_tensor(arguments: Arguments, tp: int) -> int:
    """Tensor-parallel size of the experts; 1 without experts, and where `--moe-tp-extend-ep` gives their share to EP."""
    # `expert_tensor_parallel_size is None`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/parallel_state.py#L694
    if not arguments.has("--num-experts") or arguments.has("--moe-tp-extend-ep"):
        return 1
    return arguments.number("--expert-tensor-parallel-size") or tp


def read_batch(arguments: Arguments, dp: int) -> Batch:
    """The batch of one iteration; it must be made of whole microbatches on every data-parallel rank."""
    # `is not divisible by micro batch size`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/num_microbatches_calculator.py#L341
    micro = arguments.positive("--micro-batch-size", 1)
    step = dp * micro
    whole = arguments.positive("--global-batch-size", step)
    if whole % step:
        near = [value for value in (whole // step * step, (whole // step + 1) * step) if value]
        raise UsageError(
            f"--global-batch-size {whole} is not divisible by DP {dp} × micro batch {micro} = {step}: "
            f"use {' or '.join(map(str, near))}."
        )
    return Batch(micro, whole, whole // step)


def _virtual_stages(arguments: Arguments, pp: int) -> int | None:
    # `num_virtual_stages_per_pipeline_rank`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L429
    if arguments.text("--schedules-method") == "dualpipev":
        return 2
    if arguments.has("--pipeline-model-parallel-layout"):
        parts = len(_drawn(arguments)) // pp
        return parts if parts > 1 else None
    each = arguments.number("--num-layers-per-virtual-pipeline-stage")
    chunks = arguments.number("--num-virtual-stages-per-pipeline-rank")
    if each is None and chunks is None:
        return None
    if pp == 1:
        raise UsageError("Virtual pipeline stages (VPP) need a pipeline: --pipeline-model-parallel-size is 1.")
    if each is not None and chunks is not None:
        raise UsageError("--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other.")
    if chunks is not None:
        return max(1, chunks)
    layers, each = arguments.positive("--num-layers", 1) + sum(_accounted(arguments)), max(1, each or 1)
    if layers % pp or layers // pp % each:
        raise UsageError(_uneven(arguments, layers, pp, each))
    return layers // pp // each


def _noop_layers(arguments: Arguments) -> frozenset[int]:
    # `args.noop_layers`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/features_manager/pipeline_parallel/noop_layers.py#L39
    layers = arguments.positive("--num-layers", 1)
    found = frozenset(arguments.numbers("--noop-layers"))
    wrong = sorted(index for index in found if not 0 <= index < layers)
    if wrong:
        raise UsageError(
            f"--noop-layers names layer {wrong[0]}, but there are layers 0 to {layers - 1}: "
            "--num-layers must count the no-op layers too."
        )
    return found


def _stages(arguments: Arguments, pp: int, vpp: int | None, noop: frozenset[int]) -> StageLayers:
    chunks, layers = vpp or 1, arguments.positive("--num-layers", 1)
    # `num_layer_list`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/pipeline_parallel/num_layer_list.py#L20
    listed = arguments.has("--num-layer-list") and not noop  # no-op layers switch the list off
    if arguments.has("--pipeline-model-parallel-layout"):
        counts = _by_drawing(arguments, pp, chunks, layers)
    else:
        counts = _listed(arguments, pp, vpp, layers) if listed else _even_or_ends(arguments, pp, chunks, layers)
    order = [(stage, chunk) for chunk in range(chunks) for stage in range(pp)]
    # `generate_dualpipev_schedule`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/pipeline_parallel/dualpipev/dualpipev_schedules.py#L310
    if arguments.text("--schedules-method") == "dualpipev":  # the second chunk runs back: a V
        order = [(stage, 0) for stage in range(pp)] + [(stage, 1) for stage in reversed(range(pp))]
    found: list[list[tuple[int, ...]]] = [[() for _ in range(chunks)] for _ in range(pp)]
    start = 0
    for stage, chunk in order:
        count = counts[stage][chunk]
        found[stage][chunk] = tuple(range(start, start + count))
        start += count
    return tuple(tuple(stage) for stage in found)


def _listed(arguments: Arguments, pp: int, vpp: int | None, layers: int) -> list[list[int]]:
    counts, text = arguments.numbers("--num-layer-list"), arguments.text("--num-layer-list")
    if len(counts) != pp:
        raise UsageError(f"--num-layer-list {text} has {len(counts)} stages and PP is {pp}: they must agree.")
    if sum(counts) != layers:
        raise UsageError(f"--num-layer-list {text} adds up to {sum(counts)} layers and --num-layers is {layers}.")
    if pp == 1:
        raise UsageError("--num-layer-list needs a pipeline: --pipeline-model-parallel-size is 1.")
    if vpp:
        raise UsageError("--num-layer-list and virtual pipeline stages (VPP) exclude each other.")
    return [[count] for count in counts]


_TIMES = re.compile(r"(?:\((?P<parts>[^()]+)\)|(?P<one>[^()*]))\*(?P<times>\d+)")  # (tt|)*3, t*2
_LONGEST_DRAWING = 100_000


def _drawn(arguments: Arguments) -> list[str]:
    """The parts of `--pipeline-model-parallel-layout` in the order of their layers: `Et*2|(t|)*2tmL` is Ett, t, t, tmL."""
    # `parse_str_to_list`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.14.0/megatron/core/transformer/pipeline_parallel_layer_layout.py#L254
    given = arguments.text("--pipeline-model-parallel-layout") or ""

    def repeated(found: re.Match[str]) -> str:
        part, times = found["parts"] or found["one"], int(found["times"][:9])
        if len(part) * times > _LONGEST_DRAWING:
            raise UsageError(f"--pipeline-model-parallel-layout {given} is longer than a dry run takes: {found[0]}.")
        return part * times

    text = given.replace(",", "")
    while (longer := _TIMES.sub(repeated, text)) != text:
        text = longer
    return text.split("|")


def _by_drawing(arguments: Arguments, pp: int, chunks: int, layers: int) -> list[list[int]]:
    parts, text = _drawn(arguments), arguments.text("--pipeline-model-parallel-layout")
    if len(parts) != pp * chunks:
        raise UsageError(f"--pipeline-model-parallel-layout {text} has {len(parts)} parts, not a multiple of PP {pp}.")
    drawn = sum(part.count("t") for part in parts)
    if drawn != layers:
        raise UsageError(f"--pipeline-model-parallel-layout {text} has {drawn} layers and --num-layers is {layers}.")
    return [[parts[chunk * pp + stage].count("t") for chunk in range(chunks)] for stage in range(pp)]


def _accounted(arguments: Arguments) -> tuple[int, int]:
    """Whether embedding and loss count as a layer each when layers are dealt out."""
    # `account_for_embedding_in_pipeline_split`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L451
    return (
        int(arguments.has("--account-for-embedding-in-pipeline-split")),
        int(arguments.has("--account-for-loss-in-pipeline-split")),
    )


def _even_or_ends(arguments: Arguments, pp: int, chunks: int, layers: int) -> list[list[int]]:
    """Layers of each chunk of each stage; the first and the last stage may have fewer."""
    # `get_num_layers_to_build`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/transformer/transformer_block.py#L52
    first = arguments.number("--decoder-first-pipeline-num-layers")
    last = arguments.number("--decoder-last-pipeline-num-layers")
    if first is not None or last is not None:
        middle = pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if rest < 0 or (middle and rest % middle) or (not middle and rest):
            raise UsageError(f"{rest} layers cannot be divided evenly over the {middle} stages between the first and the last.")
        counts = [rest // middle if middle else 0] * pp
        counts[0] = first if first is not None else counts[0]
        counts[-1] = last if last is not None else counts[-1]
        if any(count % chunks for count in counts):
            raise UsageError(_uneven(arguments, layers, pp, chunks))
        return [[count // chunks] * chunks for count in counts]
    embedding, loss = _accounted(arguments)
    total = layers + embedding + loss
    if total % (pp * chunks):
        raise UsageError(_uneven(arguments, layers, pp, chunks))
    found = [[total // (pp * chunks)] * chunks for _ in range(pp)]
    found[0][0] -= embedding
    found[-1][-1] -= loss
    return found


def _uneven(arguments: Arguments, layers: int, pp: int, each: int) -> str:
    """28 layers over PP 4 with 2 layers a chunk, and the way out: no-op layers."""
    interleaved = arguments.has_any(("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"))
    multiple = pp * each
    target = math.ceil(layers / multiple) * multiple
    lacking = target - layers
    chunks = f" with chunks of {each} layers (multiples of {multiple})" if interleaved else ""
    old = [int(item) for item in (arguments.text("--noop-layers") or "").split(",") if item.strip().isdigit()]
    indices = ",".join(map(str, [*old, *range(layers, target)]))
    split = ",".join(map(str, spread(layers, pp)))
    unevenly = "" if interleaved else message(f", or split them unevenly (-- --num-layer-list {split})")
    return message(
        f"{layers} layers cannot be divided over PP {pp}{chunks}: add {lacking} no-op layer{'s' if lacking > 1 else ''} "
        f"to reach {target} (-- --num-layers {target} --noop-layers {indices}; any {len(old) + lacking} indices will do)"
        f"{unevenly}."
    )


def spread(layers: int, stages: int) -> Sequence[int]:
    """As even as can be; the later stages, which hold fewer microbatches, get the larger share."""
    small, more = divmod(layers, stages)
    return [small + (stage >= stages - more) for stage in range(stages)]
