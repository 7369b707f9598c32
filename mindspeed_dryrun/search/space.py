"""What a search may vary, and every strategy in it that Megatron allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.yaml_file import Section, whole

_CP_ALGORITHMS = {"ring": "megatron_cp_algo", "ulysses": "ulysses_cp_algo"}
_KEYS = (
    "tp", "pp", "dp", "cp", "cp_algorithm", "vpp", "micro_batch", "recompute", "distributed_optimizer",
    "sequence_parallel", "split",
)  # fmt: skip
# How many layers an uneven split may move away from the first and from the last stage.
_FEWER_FIRST, _FEWER_LAST = 2, 4


@dataclass(frozen=True)
class Space:
    """The choices of a search. None means every value that Megatron allows within the limits."""

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    cp: tuple[int, ...] = (1,)
    cp_algorithms: tuple[str, ...] = ("megatron_cp_algo",)
    vpp: tuple[int, ...] = (1, 2)
    micro_batch: tuple[int, ...] = (1, 2)
    recompute: tuple[Recompute, ...] = (Recompute("none"), Recompute("selective"), Recompute("full", 1))
    blocks: bool = True  # every number of layers of a chunk, or of a stage, too
    per_stage: bool = True  # and a number for each stage of its own, as memory wants it (`balance`)
    distributed_optimizer: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (True,)
    uneven: bool = True
    max_tp: int = 8
    max_pp: int = 1 << 30


def read_space(space: Any, limits: Any, cards_per_node: int, where: str) -> Space:
    """The `space` and `limits` sections of a search file."""
    section = Section(space or {}, f"{where}: 'space'", _KEYS)
    bounds = Section(limits or {}, f"{where}: 'limits'", ("max_tp", "max_pp"))
    choices: dict[str, Any] = {
        "max_tp": bounds.integer("max_tp", cards_per_node),
        "max_pp": bounds.integer("max_pp", 1 << 30),
    }
    for key in ("tp", "pp", "dp", "cp", "vpp", "micro_batch"):
        if section.has(key):
            choices[key] = section.integers(key)
    for key, limit in (("tp", "max_tp"), ("pp", "max_pp")):
        if key in choices and min(choices[key]) > choices[limit]:
            raise UsageError(
                f"{where}: 'space: {key}' starts at {min(choices[key])}, above 'limits: {limit}' {choices[limit]}: "
                "nothing is left to search."
            )
    if section.has("cp_algorithm"):
        names = [str(item) for item in section.items("cp_algorithm")]
        for name in names:
            if name not in _CP_ALGORITHMS:
                raise UsageError(f"{section.where}: cp_algorithm '{name}' is not one of {', '.join(_CP_ALGORITHMS)}.")
        choices["cp_algorithms"] = tuple(_CP_ALGORITHMS[name] for name in names)
    for key in ("distributed_optimizer", "sequence_parallel"):
        if section.has(key):
            choices[key] = section.booleans(key)
    if section.has("recompute"):
        choices["recompute"], choices["blocks"], choices["per_stage"] = _recomputes(section)
    if section.has("split"):
        names = [str(item) for item in section.items("split")]
        if not set(names) <= {"even", "uneven"}:
            raise UsageError(f"{section.where}: 'split' takes even, uneven or both, not {', '.join(names)}.")
        choices["uneven"] = "uneven" in names
    return Space(**choices)


def _recomputes(section: Section) -> tuple[tuple[Recompute, ...], bool, bool]:
    found, blocks, per_stage = [], False, False
    for item in section.items("recompute"):
        words = str(item).split()
        if words == ["block"]:
            blocks = True
        elif words == ["per_stage"]:
            per_stage = True
        elif len(words) == 2 and words[0] in ("block", "stage") and words[1].isdigit():
            found.append(Recompute(words[0], whole(int(words[1]), f"{section.where}: 'recompute: {words[0]}'")))
        elif words in (["none"], ["selective"]):
            found.append(Recompute(words[0]))
        elif words == ["full"]:
            found.append(Recompute("full", 1))
        else:
            raise UsageError(
                f"{section.where}: recompute '{item}' is not none, selective, full, block, block N, stage N or per_stage."
            )
    return tuple(found), blocks or per_stage, per_stage


def strategies(shape: ModelShape, world: int, space: Space) -> list[Strategy]:
    """Every strategy of the space that Megatron and MindSpeed accept, each once."""
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
    for tp in _tensor_sizes(shape, world, space):
        for cp, algorithm in _context(shape, tp, space):
            if world % (tp * cp):
                continue
            for pp in _divisors(world // (tp * cp)):
                dp = world // (tp * cp * pp)
                if pp > min(shape.layers, space.max_pp) or (space.pp is not None and pp not in space.pp):
                    continue
                if space.dp is not None and dp not in space.dp:
                    continue
                for micro_batch in space.micro_batch:
                    if shape.global_batch % (micro_batch * dp):
                        continue
                    microbatches = shape.global_batch // (micro_batch * dp)
                    for stages in _splits(shape.layers, pp, microbatches, space):
                        yield from _variants(tp, pp, dp, cp, algorithm, micro_batch, stages, space)


def _variants(
    tp: int, pp: int, dp: int, cp: int, algorithm: str, micro_batch: int, stages: tuple[tuple[int, ...], ...],
    space: Space,
) -> Iterator[Strategy]:  # fmt: skip
    # Without tensor parallelism Megatron switches sequence parallelism off; with one replica of the whole model there
    # is nothing for the distributed optimizer to share out.
    sharings = space.distributed_optimizer if dp * cp > 1 else (False,)
    for sequence_parallel in space.sequence_parallel if tp > 1 else (False,):
        for shared in sharings:
            for recompute in _recompute_choices(stages, space):
                yield Strategy(
                    tp, pp, dp, cp, micro_batch, stages, recompute, sequence_parallel, shared, algorithm
                )  # fmt: skip


def _tensor_sizes(shape: ModelShape, world: int, space: Space) -> list[int]:
    wanted = space.tp or _divisors(world)
    return [
        tp
        for tp in wanted
        if tp <= space.max_tp
        and world % tp == 0
        and all(size % tp == 0 for size in (shape.heads, shape.query_groups, shape.vocab, shape.ffn))
    ]


def _context(shape: ModelShape, tp: int, space: Space) -> Iterator[tuple[int, str]]:
    for cp in space.cp:
        if cp == 1:
            yield 1, "megatron_cp_algo"
            continue
        for algorithm in space.cp_algorithms:
            # Ring attention gives each rank two pieces of the sequence; Ulysses shares out the heads of a TP rank.
            ring = algorithm == "megatron_cp_algo"
            if (ring and shape.seq % (2 * cp * tp) == 0) or (not ring and shape.heads // tp % cp == 0):
                yield cp, algorithm


def _splits(layers: int, pp: int, microbatches: int, space: Space) -> Iterator[tuple[tuple[int, ...], ...]]:
    """How layers may be dealt to stages and chunks. What does not divide is filled up with no-op layers."""
    for chunks in space.vpp:
        if chunks == 1:
            yield from _plain_splits(layers, pp, space.uneven)
        # The interleaved schedule runs microbatches in groups of PP.
        elif pp > 1 and microbatches % pp == 0 and layers >= pp * chunks:
            slots = math.ceil(layers / (pp * chunks))
            empty = pp * chunks * slots - layers
            if empty and (slots == 1 or not space.uneven or empty > pp * chunks):
                continue
            yield _interleaved(pp, chunks, slots, empty)


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
            counts = [first, *_even(middle, pp - 2), last] if pp > 2 else [first, last]
            if min(counts) >= 1:
                yield tuple((count,) for count in counts)
    if pp == 2:
        for fewer_last in range(1, _FEWER_LAST + 1):
            last = layers // 2 - fewer_last
            if last >= 1:
                yield ((layers - last,), (last,))


def _even(layers: int, stages: int) -> list[int]:
    """As even as can be; the later stages, which hold fewer microbatches, get the larger share."""
    small, more = divmod(layers, stages)
    return [small + (index >= stages - more) for index in range(stages)]


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
    """So many recomputed layers of a stage. What all chunks share alike needs no flag of its own; None for all or none."""
    if layers >= longest * chunks:
        return None
    return Recompute("stage", layers) if layers % chunks else Recompute("block", layers // chunks)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
