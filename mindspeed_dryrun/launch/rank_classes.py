"""Rank classes: ranks whose memory must be the same. One of each class, the representative, is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.megatron.layout import RING, RING_ALGORITHMS


@dataclass(frozen=True)
class RankClass:
    """The representative, the ranks it stands for (itself among them), and what sets the class apart."""

    rank: int
    represents: tuple[int, ...]
    stage: int
    why: str


def rank_classes(job: Job) -> tuple[RankClass, ...]:
    """Classes in the order of their representatives; their lists cover the world exactly once.

    - The stage always matters: its layers, embedding or head, and how many microbatches it holds at once.
    - The place in a context-parallel ring matters: causal attention lets the first rank skip what the last one computes.
    - Tensor- and expert-parallel ranks hold equal shards (sizes that do not divide are refused or padded), and routing is
      counted as balanced, so they are alike.
    - Data-parallel ranks are alike too. With the distributed optimizer each holds an equal share of every buffer; the last share
      holds the padding, which is allocated like the rest.
    - In a U-shaped pipeline the first rank of a tensor-parallel group sends and receives for the others, so it is set apart.
    """
    if job.is_fsdp2:  # shards are equal, or the first ones are the largest (torch.chunk)
        return (RankClass(0, tuple(range(job.world_size)), 0, message("its shards are as large as any")),)
    if not job.is_megatron:
        return tuple(RankClass(rank, (rank,), 0, "layout not known") for rank in range(job.world_size))
    groups: dict[tuple[int, int, bool], list[int]] = {}
    for rank in range(job.world_size):
        where = job.layout.place(rank)
        receives = job.layout.u_shaped and where.tp > 0
        groups.setdefault((where.pp, _ring_place(job, where.cp), receives), []).append(rank)
    return tuple(
        RankClass(ranks[0], tuple(ranks), stage, _why(job, stage, ring, receives))
        for (stage, ring, receives), ranks in sorted(groups.items(), key=lambda item: item[1][0])
    )


def _ring_place(job: Job, cp: int) -> int:
    """0 first, 1 between, 2 last. The first skips all blocks before its own, the last none, those between some."""
    size = job.parallel.cp
    algorithm = job.arguments.text("--context-parallel-algo") or RING
    if size == 1 or algorithm not in RING_ALGORITHMS:
        return 0
    if algorithm != RING:
        ulysses = job.arguments.positive("--ulysses-degree-in-cp", 1)
        cp, size = cp // ulysses, size // ulysses
    return 0 if cp == 0 else 2 if cp == size - 1 else 1


def _why(job: Job, stage: int, ring: int, receives: bool) -> str:
    chunks = job.stage_layers[stage]
    last = job.parallel.pp - 1
    count = sum(len(chunk) for chunk in chunks)
    plural = "" if count == 1 else "s"
    chunked = len(chunks) > 1
    words = [message(f"{count} layer{plural} in {len(chunks)} chunks") if chunked else message(f"{count} layer{plural}")]
    total = sum(len(chunk) for chunk in job.layout.stages[stage])
    if count < total:
        words.append(message(f"{total - count} no-op"))
    if job.layout.u_shaped:
        words[:0] = [message("first stage"), message("embedding and head")] if stage == 0 else [message("middle stage")]
    elif stage == 0:
        words[:0] = [message("first stage"), message("embedding")] if last else [message("embedding and head")]
    elif stage == last:
        words[:0] = [message("last stage"), message("head")]
    else:
        words[:0] = [message("middle stage")]
    if receives:
        words.append(message("not the first of its tensor-parallel group"))
    ring_words = (message("first in the ring"), message("inside the ring"), message("last in the ring"))
    algorithm = job.arguments.text("--context-parallel-algo") or RING
    if job.parallel.cp > 1 and algorithm in RING_ALGORITHMS:
        words.append(ring_words[ring])
    return ", ".join(words)
