"""What a search may vary, and every strategy in it that Megatron allows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dryrun.estimate.stage_parts import keeps_mixtures
from mindspeed_dryrun.estimate.strategy import DEFAULT_DISPATCHER, HYBRID, OLD_DISPATCHER, Recompute, Strategy
from mindspeed_dryrun.megatron.layout import RING, ULYSSES, spread
from mindspeed_dryrun.megatron.model_shape import ModelShape

# How many layers an uneven split may move away from the first and from the last stage.
_FEWER_FIRST, _FEWER_LAST = 2, 4
# From this many tokens on, context parallelism is tried unless the file says otherwise.
_LONG, _CONTEXT_SIZES = 16384, (1, 2, 4, 8, 16)


_VARIED = {"recompute", "sequence_parallel", "distributed_optimizer", "options"}
_FIELDS = tuple(field.name for field in dataclasses.fields(Strategy) if field.name not in _VARIED)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The choices of a search. None means every value that Megatron allows within the limits."""

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None  # None: 1, and more for long sequences
    cp_algorithms: tuple[str, ...] = (RING, ULYSSES, HYBRID[0])
    ep: tuple[int, ...] | None = None
    etp: tuple[int, ...] | None = None  # None: every expert whole, or shared by all tensor-parallel ranks
    dispatchers: tuple[str, ...] = ()  # empty: as the script has it
    vpp: tuple[int, ...] = (1, 2)
    micro_batch: tuple[int, ...] = (1, 2)
    recompute: tuple[Recompute, ...] = (Recompute("none"), Recompute("selective"), Recompute("full", 1))
    blocks: bool = True  # every number of layers of a chunk, or of a stage, too
    per_stage: bool = True  # and a number for each stage of its own, as memory demands it (`balance`)
    distributed_optimizer: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (True,)
    uneven: bool = True
    dualpipe: bool = False  # DualPipeV beside 1F1B and the interleaved schedule
    options: tuple[tuple[str, ...], ...] = ((),)  # more trainer arguments, one of these sets of words at a time
    max_tp: int = 8
    max_pp: int = 1 << 30


def strategies(shape: ModelShape, world: int, space: Space, dispatcher: str = DEFAULT_DISPATCHER) -> list[Strategy]:
    """Every strategy of the space that Megatron and MindSpeed accept, each once. `dispatcher` is the script's own."""
    if shape.experts and not space.dispatchers:
        space = dataclasses.replace(space, dispatchers=(dispatcher,))
    return list(dict.fromkeys(_enumerate(shape, world, space)))


def why_nothing(shape: ModelShape, world: int, space: Space) -> str:
    """One sentence for a space without a single strategy."""
    tps = _tensor_sizes(shape, world, space)
    if not tps:
        return (
            f"No tensor-parallel size fits: it must divide {world} cards, {shape.heads} heads, {shape.query_groups} "
            f"query groups, the vocabulary of {shape.vocab}, and stay within {space.max_tp}."
        )
    return (
        f"No strategy of this space runs on {world} cards: TP × PP × CP × DP must be {world}, the global batch "
        f"{shape.global_batch} a multiple of DP × micro batch, and {shape.layers} layers must fill every stage. "
        "Widen tp, pp, dp or micro_batch."
    )


def _enumerate(shape: ModelShape, world: int, space: Space) -> Iterator[Strategy]:
    for layout in _layouts(shape, world, space):
        microbatches = layout.microbatches(shape.global_batch)
        for stages, dualpipe in _splits(shape.layers, layout.pp, microbatches, space):
            cut = dataclasses.replace(layout, stages=stages, dualpipe=dualpipe)
            if keeps_mixtures(shape, cut) and _mixes_everywhere(shape, cut):
                yield from _variants(cut, space)


def _mixes_everywhere(shape: ModelShape, cut: Strategy) -> bool:
    """MindSpeed-LLM refuses a first stage of dense layers alone (megatron/checks.py)."""
    return shape.experts is None or cut.pp == 1 or shape.experts.dense_in_front < cut.slots * cut.chunks


def _layouts(shape: ModelShape, world: int, space: Space) -> Iterator[Strategy]:
    """How ranks are shared out, without layers, recomputation and options."""
    for tp in _tensor_sizes(shape, world, space):
        for cp, algorithm, ulysses in _context(shape, tp, space):
            if world % (tp * cp):
                continue
            for pp in _divisors(world // (tp * cp)):
                dp = world // (tp * cp * pp)
                if pp > min(shape.layers, space.max_pp) or (space.pp is not None and pp not in space.pp):
                    continue
                if space.dp is not None and dp not in space.dp:
                    continue
                for micro_batch in space.micro_batch:
                    if shape.global_batch % (micro_batch * dp) == 0:
                        plain = Strategy(
                            tp=tp,
                            pp=pp,
                            dp=dp,
                            cp=cp,
                            micro_batch=micro_batch,
                            stages=((1,),) * pp,
                            cp_algorithm=algorithm,
                            ulysses=ulysses,
                        )
                        yield from _with_experts(shape, plain, space)


def _with_experts(shape: ModelShape, layout: Strategy, space: Space) -> Iterator[Strategy]:
    """Experts spread over ranks of a stage, and each of them whole or shared by the tensor-parallel ranks."""
    if shape.experts is None:
        yield layout
        return
    ranks = layout.tp * layout.cp * layout.dp
    for dispatcher in space.dispatchers:
        for etp in space.etp or dict.fromkeys((1, layout.tp)):
            if etp > layout.tp or layout.tp % etp or shape.experts.ffn % etp:
                continue
            for ep in space.ep or _divisors(shape.experts.number):
                if shape.experts.number % ep or ranks % (ep * etp):
                    continue
                if dispatcher == OLD_DISPATCHER and not _old_dispatcher_allows(layout, ep, etp):
                    continue
                yield dataclasses.replace(layout, ep=ep, etp=etp, dispatcher=dispatcher)


def _old_dispatcher_allows(layout: Strategy, ep: int, etp: int) -> bool:
    """It spreads experts over data- and context-parallel ranks; with `--moe-tp-extend-ep` over tensor-parallel ones too."""
    if etp == layout.tp:
        return layout.dp * layout.cp % ep == 0
    return etp == 1 and ep % layout.tp == 0 and layout.dp * layout.cp % (ep // layout.tp) == 0


def _variants(layout: Strategy, space: Space) -> Iterator[Strategy]:
    # Without tensor parallelism Megatron switches sequence parallelism off; with one replica of the whole model there
    # is nothing for the distributed optimizer to share out.
    sharings = space.distributed_optimizer if layout.dp * layout.cp > 1 else (False,)
    # Experts with both TP and EP need sequence parallelism.
    sequences = space.sequence_parallel if layout.tp > 1 else (False,)
    if layout.etp and layout.tp > 1:
        sequences = (True,)
    # There are many: `dataclasses.replace` would take half of the time of all this.
    same: dict[str, Any] = {name: getattr(layout, name) for name in _FIELDS}
    choices = list(_recompute_choices(layout.stages, space))
    for options, sequence_parallel, shared in itertools.product(space.options, sequences, sharings):
        more: dict[str, Any] = {"options": options, "sequence_parallel": sequence_parallel, "distributed_optimizer": shared}
        for recompute in choices:
            yield Strategy(**same, **more, recompute=recompute)


def _tensor_sizes(shape: ModelShape, world: int, space: Space) -> list[int]:
    wanted = space.tp or _divisors(world)
    return [
        tp
        for tp in wanted
        if tp <= space.max_tp
        and world % tp == 0
        and all(size % tp == 0 for size in (shape.heads, shape.query_groups, shape.ffn))
        and (shape.vocab_grows or shape.vocab % tp == 0)
    ]


def _context(shape: ModelShape, tp: int, space: Space) -> Iterator[tuple[int, str, int]]:
    """(CP, algorithm, ranks that exchange heads in a hybrid)."""
    for cp in space.cp or (_CONTEXT_SIZES if shape.seq >= _LONG else (1,)):
        if cp == 1:
            yield 1, RING, 1
            continue
        # A ring gives each rank two pieces of the sequence; Ulysses shares out the heads of a TP rank.
        ring = shape.seq % (2 * cp * tp) == 0
        for algorithm in space.cp_algorithms:
            heads = shape.heads // tp % cp == 0 and shape.seq % (cp * tp) == 0
            if (heads and algorithm == ULYSSES) or (ring and algorithm == RING):
                yield cp, algorithm, 1
            elif algorithm in HYBRID and ring:
                for ulysses in _divisors(cp)[1:-1]:
                    if shape.heads // tp % ulysses == 0:
                        yield cp, algorithm, ulysses


def _splits(layers: int, pp: int, microbatches: int, space: Space) -> Iterator[tuple[tuple[tuple[int, ...], ...], bool]]:
    """How layers may be dealt to stages and chunks, and whether as a V. What does not divide is filled up with no-op
    layers."""
    for chunks in space.vpp:
        if chunks == 1:
            yield from ((stages, False) for stages in _plain_splits(layers, pp, space.uneven))
        # The interleaved schedule runs microbatches in groups of PP.
        elif pp > 1 and microbatches % pp == 0 and layers >= pp * chunks:
            slots = math.ceil(layers / (pp * chunks))
            empty = pp * chunks * slots - layers
            if empty and (slots == 1 or not space.uneven or empty > pp * chunks):
                continue
            yield _interleaved(pp, chunks, slots, empty), False
    # A V needs two microbatches for each stage, and as many layers in every chunk.
    if space.dualpipe and pp > 1 and microbatches >= 2 * pp and layers % (2 * pp) == 0:
        yield ((layers // (2 * pp),) * 2,) * pp, True


def _plain_splits(layers: int, pp: int, uneven: bool) -> Iterator[tuple[tuple[int, ...], ...]]:
    if layers % pp == 0:
        yield ((layers // pp,),) * pp
    if not uneven or pp == 1:
        return
    base = math.ceil(layers / pp)
    for fewer_last in range(_FEWER_LAST + 1):
        for fewer_first in range(_FEWER_FIRST + 1):
            first, last = base - fewer_first, base - fewer_last
            middle = layers - first - last
            if min(first, last, middle if pp > 2 else 1) < 1 or (pp == 2 and middle):
                continue
            counts = [first, *spread(middle, pp - 2), last] if pp > 2 else [first, last]
            if min(counts) >= 1:
                yield tuple((count,) for count in counts)
    if pp == 2:
        for fewer_last in range(1, _FEWER_LAST + 1):
            last = layers // 2 - fewer_last
            if last >= 1:
                yield ((layers - last,), (last,))


def _interleaved(pp: int, chunks: int, slots: int, empty: int) -> tuple[tuple[int, ...], ...]:
    """Takes the empty slots from the chunk with the output layer first, then from the one with the embedding, then
    from the others, one each."""
    order = [(pp - 1, chunks - 1), (0, 0)]
    order += [(stage, chunk) for chunk in range(chunks) for stage in range(pp) if (stage, chunk) not in order]
    fewer = set(order[:empty])
    return tuple(tuple(slots - ((stage, chunk) in fewer) for chunk in range(chunks)) for stage in range(pp))


def _recompute_choices(stages: Sequence[Sequence[int]], space: Space) -> Iterator[Recompute]:
    longest, chunks = max(max(stage) for stage in stages), len(stages[0])
    for choice in space.recompute:
        if choice.kind == "stage":
            if layers := _of_a_stage(choice.layers, longest, chunks):
                yield layers
        elif choice.kind != "block" or choice.layers < longest:
            yield choice
    if space.blocks:
        yield from filter(None, (_of_a_stage(layers, longest, chunks) for layers in range(1, longest * chunks)))


def _of_a_stage(layers: int, longest: int, chunks: int) -> Recompute | None:
    """A number of recomputed layers of a stage. What all chunks share alike needs no flag of its own; None for all or none."""
    if layers >= longest * chunks:
        return None
    return Recompute("stage", layers) if layers % chunks else Recompute("block", layers // chunks)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
