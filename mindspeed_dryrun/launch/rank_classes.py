"""Rank classes: ranks whose memory must be the same. One of each class, the representative, is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_dryrun.launch.job import RING_ALGORITHMS, Job


@dataclass(frozen=True)
class RankClass:
    """The representative, the ranks it stands for (itself among them), and what sets the class apart."""

    rank: int
    represents: tuple[int, ...]
    stage: int
    why: str


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the layout."""

    tp: int
    cp: int
    dp: int
    pp: int


def place(job: Job, rank: int) -> Place:
    """Megatron's order: tensor fastest, then context, data and pipeline (or pipeline before data, if asked for)."""
    p = job.parallel
    rank, tp = divmod(rank, p.tp)
    rank, cp = divmod(rank, p.cp)
    if job.flags.has("--use-tp-pp-dp-mapping"):
        dp, pp = divmod(rank, p.pp)
    else:
        pp, dp = divmod(rank, p.dp)
    return Place(tp, cp, dp, pp)


def rank_classes(job: Job) -> tuple[RankClass, ...]:
    """Classes in the order of their representatives; their lists cover the world exactly once.

    - The stage always matters: its layers, embedding or head, and how many microbatches it holds at once.
    - The place in a context-parallel ring matters: causal attention lets the first rank skip what the last one computes.
    - Tensor- and expert-parallel ranks hold equal shards (sizes that do not divide are refused or padded), and routing is
      counted as balanced, so they are alike.
    - Data-parallel ranks are alike too. With the distributed optimizer each holds an equal share of every buffer; the last share
      holds the padding, which is allocated like the rest.
    """
    if not job.is_megatron:
        return tuple(RankClass(rank, (rank,), 0, "layout not known") for rank in range(job.world_size))
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(job.world_size):
        where = place(job, rank)
        groups.setdefault((where.pp, _ring_place(job, where.cp)), []).append(rank)
    return tuple(
        RankClass(ranks[0], tuple(ranks), stage, _why(job, stage, ring))
        for (stage, ring), ranks in sorted(groups.items(), key=lambda item: item[1][0])
    )


def _ring_place(job: Job, cp: int) -> int:
    """0 first, 1 between, 2 last. The first skips all blocks before its own, the last none, those between some."""
    size = job.parallel.cp
    algorithm = job.flags.text("--context-parallel-algo") or "megatron_cp_algo"
    if size == 1 or algorithm not in RING_ALGORITHMS:
        return 0
    if algorithm != "megatron_cp_algo":
        ulysses = job.flags.positive("--ulysses-degree-in-cp", 1)
        cp, size = cp // ulysses, size // ulysses
    return 0 if cp == 0 else 2 if cp == size - 1 else 1


def _why(job: Job, stage: int, ring: int) -> str:
    chunks = job.stage_layers[stage]
    last = job.parallel.pp - 1
    count = sum(len(chunk) for chunk in chunks)
    words = [f"{count} layer{'' if count == 1 else 's'}"]
    if len(chunks) > 1:
        words[0] += f" in {len(chunks)} chunks"
    total = job.num_layers // job.parallel.pp if not job.flags.has("--num-layer-list") else count
    if count < total:
        words.append(f"{total - count} no-op")
    if stage == 0:
        words.insert(0, "first stage, embedding" if last else "embedding and head")
    elif stage == last:
        words.insert(0, "last stage, head")
    else:
        words.insert(0, "middle stage")
    ring_words = ("first in the ring", "inside the ring", "last in the ring")
    algorithm = job.flags.text("--context-parallel-algo") or "megatron_cp_algo"
    if job.parallel.cp > 1 and algorithm in RING_ALGORITHMS:
        words.append(ring_words[ring])
    return ", ".join(words)
