"""The runs that decide a close verdict.

Used peaks are the same in every rank of a class and in a short run. What fragments add is not: it depends on the order of
allocations. Seen so far: 260M between ranks of one class (DP 5 with the distributed optimizer), 410M between a short run and
the full one (VPP 4). Where less than that is left of the budget, the worst class is run rank by rank, with all microbatches.
"""

from __future__ import annotations

import dataclasses

from mindspeed_dryrun.launch.plan import Plan, make_plan
from mindspeed_dryrun.record.model import Report

# A margin below these is close: above what was seen, in MB and as a share of the peak.
_CLOSE_MB, _CLOSE_SHARE = 512, 0.01
_MOST_RANKS = 8
# Those that are run first: what differs between ranks of a class differs between neighbours.
_FIRST_RANKS = 2


def deciding_plans(plan: Plan, report: Report) -> list[Plan]:
    """The plans to run before a verdict is given, one after the other until one does not fit: two ranks of the worst class,
    then all that were chosen. None where the margin is wide, or where everything was run."""
    if not report.fits or report.margin_mb is None or report.actual_peak_mb is None or not plan.job.is_megatron:
        return []
    if report.margin_mb >= max(_CLOSE_MB, _CLOSE_SHARE * report.actual_peak_mb):
        return []
    worst = next(rank for rank in report.ranks if rank.rank == report.worst_rank)
    chosen = _spread_out(worst.represents)
    if plan.microbatches >= plan.job.microbatches and chosen == [worst.rank]:
        return []
    spec = dataclasses.replace(plan.spec, ranks=",".join(map(str, chosen)), microbatches="all", explain=False, check_classes=0)
    whole = make_plan(plan.job, spec, plan.engine, plan.tasks[0].timeout_s)
    if len(whole.tasks) <= _FIRST_RANKS:
        return [whole]
    return [dataclasses.replace(whole, tasks=whole.tasks[:_FIRST_RANKS]), whole]


def _spread_out(ranks: tuple[int, ...]) -> list[int]:
    """All of them, or a few from the first to the last."""
    if len(ranks) <= _MOST_RANKS:
        return list(ranks)
    return sorted({ranks[i * (len(ranks) - 1) // (_MOST_RANKS - 1)] for i in range(_MOST_RANKS)})
