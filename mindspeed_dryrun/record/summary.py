"""From ranks to a verdict: the worst rank, what it needs, whether it fits. Reads records and logs, runs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dryrun.devices.device import SIMULATED_MB, Device
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron import moe_load
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.layout import Layout, read_layout
from mindspeed_dryrun.record.communication import communicators
from mindspeed_dryrun.record.criteria import Criteria, make_criteria
from mindspeed_dryrun.record.model import (
    EngineSummary,
    JobSummary,
    LoadPeak,
    OutsidePool,
    RankReport,
    Report,
    Status,
    Verdict,
)
from mindspeed_dryrun.record.run_spec import JobFile, PlannedRank
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.worker_log import judge_log, read_worker_log, worker_logs
from mindspeed_dryrun.schema import read_as

# Of the peak. What waits for Python's collector grew 13 times from a short run to six iterations (Qwen3-30B-A3B, MindSpeed-LLM
# v26.1.0: 1180M and 15192M), and was growing still; 13 times this is the margin that real runs were seen to need.
_GROWS = 0.001
_NEAR = 0.1  # of the peak: an operator that ran with more room than that below it is not spoken of
LOADS = "loads"
"""The folder of a record that holds a record for each load of the experts that was counted."""


def load_report(directory: Path) -> tuple[Report, Path | None]:
    """The report of a record (with its folder) or of a folder of worker logs (with None)."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder: give a record or a folder of worker_*.log files.")
    if (directory / "job.json").exists():
        return build_report(directory), directory
    return report_from_logs(directory), None


def build_report(record_dir: Path) -> Report:
    """The report of a record, from the record alone. Ranks that were planned and not run leave the verdict open."""
    record = Record.open(record_dir)
    job, results = record.job(), record.results()
    plan = {task.rank: task for task in job.plan}
    for rank, result in results.items():
        plan.setdefault(rank, _unplanned(rank, result.get("represents")))
    represents = _exactly_once(plan)
    layout = _layout(job)
    ranks = [_rank_report(job, layout, plan[rank], results[rank], represents[rank]) for rank in sorted(results)]
    ranks, spread = _with_deciding(record.path / "deciding", ranks)
    notes = [*job.notes, *spread]
    notes += [f"rank {rank}: {result['note']}" for rank, result in sorted(results.items()) if result.get("note")]
    notes += _collected(results)
    near = _near_the_peak(results.values())
    if near:
        notes.append(f"the used peak is too LOW if one of these operators takes more workspace, which is not counted: {near}")
    missing = sorted(plan.keys() - results.keys())
    if missing:
        notes.append(f"not run: {_ranks(missing)}; start the same launch again to run what is missing")
    seen = {plan[rank].class_rank for rank in results}
    report = summarise(
        job.job,
        job.engine,
        ranks,
        job.criteria or make_criteria(engine=job.engine.name or "mindspore"),
        complete=not missing and seen.issuperset(job.classes),
        not_counted=(*job.not_counted, *_unknown_workspace(results.values()), *_kernels_not_run(results.values())),
        notes=notes,
        uncollected_mb=(_most(results, "uncollected_mb") or (None,))[0],
    )
    return dataclasses.replace(report, time=job.time, loads=_loads(record.path / LOADS, report))


def _loads(folder: Path, report: Report) -> tuple[LoadPeak, ...]:
    """The worst rank at an even load and at those that were counted beside it, in their order."""
    records = [path.parent for path in folder.glob("*/job.json")]
    reports = [(moe_load.parse(Record.open(path).job().spec.moe_load).factor, build_report(path)) for path in records]
    reports = sorted([(1.0, report), *reports], key=lambda pair: pair[0]) if reports else []
    worst = [(load, next((rank for rank in one.ranks if rank.rank == one.worst_rank), None)) for load, one in reports]
    return tuple(
        LoadPeak(
            load=load,
            rank=rank.rank,
            status=rank.status,
            used_peak_mb=rank.used_peak_mb or 0,
            actual_peak_mb=rank.actual_peak_mb,
        )
        for load, rank in worst
        if rank is not None and not rank.status.broken
    )


def _unknown_workspace(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Operators that a rank used and whose workspace its engine has no formula for."""
    names = _told(results, "workspace_unknown")
    return [f"workspace of {len(names)} operators: {', '.join(names)}"] if names else []


def _collected(results: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What upstream dropped and only Python's collector frees: before the first iteration, and in the iterations."""
    notes = []
    if found := _most(results, "collected_mb"):
        most, ranks = found
        notes.append(
            message(
                f"the trainer builds up to {most}M that it drops again ({ranks}). Python's garbage collector frees it, here "
                f"before the first iteration: until it does so in a real run, the peak may be that much higher"
            )
        )
    if found := _most(results, "uncollected_mb"):
        most, ranks = found
        notes.append(
            message(
                f"the used peak is too LOW for a long run: at the end of this short one up to {most}M wait for Python's garbage "
                f"collector ({ranks}), and every iteration adds to them until it runs"
            )
        )
    return notes


def _most(results: Mapping[int, Mapping[str, Any]], name: str) -> tuple[int, str] | None:
    """The largest figure that ranks gave under this name, and which ranks gave one."""
    sizes = {rank: size for rank, result in results.items() if isinstance(size := result.get(name), int)}
    return (max(sizes.values()), _ranks(sorted(sizes))) if sizes else None


def _near_the_peak(results: Iterable[Mapping[str, Any]]) -> str:
    """Operators without a formula that ran when little was missing to the peak, with how much that was."""
    room: dict[str, int] = {}
    for result in results:
        peak = int(result.get("used_peak_mb") or 0) << 20
        for name, size in (result.get("workspace_room") or {}).items():
            if isinstance(size, int) and size <= _NEAR * peak:
                room[str(name)] = min(size, room.get(str(name), size))
    return ", ".join(f"{name} {-(-size // 2**20)}M" for name, size in sorted(room.items(), key=lambda item: item[1]))


def _kernels_not_run(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Kernels of Triton that a rank would have run: their outputs are counted, what they take for themselves is not."""
    kernels = ", ".join(_told(results, "kernels_not_run"))
    what = message(f"what Triton takes for itself: its kernels were not run, only their outputs are counted ({kernels})")
    return [what] if kernels else []


def _told(results: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """What the ranks said under this name, all together."""
    return sorted({str(item) for result in results for item in result.get(name) or ()})


def _with_deciding(folder: Path, ranks: list[RankReport]) -> tuple[list[RankReport], list[str]]:
    """The ranks with what longer runs of their classes needed with fragments, where a close verdict asked for them."""
    if not (folder / "job.json").is_file():
        return ranks, []
    closer = {rank.rank: rank.actual_peak_mb or 0 for rank in build_report(folder).ranks if not rank.status.broken}
    result, notes = [], []
    for rank in ranks:
        peaks = [closer[number] for number in rank.represents if number in closer]
        highest = max([rank.actual_peak_mb or 0, *peaks])
        if peaks:
            notes.append(
                f"the verdict is close: {len(peaks)} of the {len(rank.represents)} ranks of rank {rank.rank}'s class were run "
                f"with all microbatches; with fragments they need {min(peaks)}M to {highest}M (short run: {rank.actual_peak_mb}M)"
            )
        result.append(dataclasses.replace(rank, actual_peak_mb=highest) if peaks else rank)
    return result, notes


def report_from_logs(folder: Path) -> Report:
    """The report of `worker_N.log` files, real or dry. Logs have no exit status: an exception in one is a failure."""
    ranks, notes = [], []
    for rank, file in sorted(worker_logs(Path(folder)).items()):
        log = read_worker_log(file, rank)
        status, error = judge_log(log)
        ranks.append(
            RankReport(
                rank=rank,
                represents=(rank,),
                status=status,
                error=error,
                used_peak_mb=log.used_peak_mb,
                actual_peak_mb=log.actual_peak_mb,
                device_total_mb=log.device_total_mb,
                usable_mb=log.usable_mb,
                iterations=log.iterations_seen or None,
            )
        )
        if log.differs:
            notes.append(f"rank {rank}: its log holds several memory blocks with different figures; the largest are shown")
    notes.append("read from worker logs alone: they hold no exit status, and no word of the ranks that left no log")
    return summarise(None, EngineSummary(), ranks, _criteria_of(ranks), notes=notes)


def _criteria_of(ranks: Sequence[RankReport]) -> Criteria:
    """A real run's logs tell its card, and nothing needs to be left beside it; a simulation is judged by the default."""
    real = [
        (rank.usable_mb, rank.device_total_mb)
        for rank in ranks
        if rank.usable_mb and rank.device_total_mb and (rank.device_total_mb, rank.usable_mb) != SIMULATED_MB
    ]
    if not real:
        return make_criteria()
    usable, total = min(real)
    device = Device(name="from-logs", title="the card of these logs", total_mb=total, usable_mb=usable, source="measured")
    return Criteria(device=device, budget_mb=usable)


def summarise(
    job: JobSummary | None,
    engine: EngineSummary,
    ranks: Iterable[RankReport],
    criteria: Criteria,
    *,
    complete: bool = True,
    not_counted: Sequence[str] = (),
    notes: Sequence[str] = (),
    uncollected_mb: int | None = None,
) -> Report:
    """The report of these ranks. A rank whose peak with fragments exceeds the budget is `oom`.

    A failed rank's figures decide nothing, and there is no verdict then, nor where the ranks are not `complete`: what
    is missing may be the worst.
    """
    budget = criteria.budget_mb
    ranks = [_against(rank, budget) for rank in sorted(ranks, key=lambda rank: rank.rank)]
    counted = [rank for rank in ranks if not rank.status.broken and rank.actual_peak_mb is not None]
    worst = max(counted, key=lambda rank: (rank.actual_peak_mb or 0, rank.used_peak_mb or 0, -rank.rank), default=None)
    peak = worst.actual_peak_mb if worst else None
    needed = None if peak is None else criteria.needed_mb(peak)
    return Report(
        job=job,
        engine=engine,
        device=criteria.device,
        budget_mb=budget,
        verdict=_verdict(ranks, peak if complete else None, budget - (needed or 0), uncollected_mb or 0),
        ranks=tuple(ranks),
        worst_rank=worst.rank if worst else None,
        used_peak_mb=worst.used_peak_mb if worst else None,
        actual_peak_mb=peak,
        margin_mb=None if peak is None else budget - peak,
        needed_mb=needed,
        uncollected_mb=uncollected_mb,
        asked_mb=criteria.asked_mb,
        outside_pool=_outside_pool(ranks, criteria.device),
        not_counted=tuple(not_counted),
        notes=tuple(notes),
    )


def _verdict(ranks: Sequence[RankReport], peak: int | None, comfortable_mb: int, uncollected_mb: int) -> Verdict:
    """`comfortable_mb`: of the budget, less what real runs were seen to need above a dry run."""
    if any(rank.status is Status.OOM for rank in ranks):
        return Verdict.DOES_NOT_FIT
    if peak is None or not all(rank.status is Status.OK for rank in ranks):
        return Verdict.UNKNOWN
    return Verdict.BARELY if peak > comfortable_mb or uncollected_mb > _GROWS * peak else Verdict.FITS


def _against(rank: RankReport, budget_mb: int) -> RankReport:
    if rank.status.broken or rank.error:  # with an error: it really ran out of memory
        return rank
    peak = max((mb for mb in (rank.used_peak_mb, rank.actual_peak_mb) if mb is not None), default=0)
    return dataclasses.replace(rank, status=Status.OOM if peak > budget_mb else Status.OK)


def _outside_pool(ranks: Sequence[RankReport], device: Device) -> OutsidePool | None:
    listed = [rank.communicators for rank in ranks if rank.communicators]
    if not listed:
        return None
    most = max(listed, key=lambda groups: sum(group.buffer_mb for group in groups))
    return OutsidePool(len(most), sum(group.buffer_mb for group in most), device.total_mb - device.usable_mb)


def _rank_report(
    job: JobFile, layout: Layout | None, task: PlannedRank, result: Mapping[str, Any], represents: tuple[int, ...]
) -> RankReport:
    rank = read_as(
        RankReport,
        {**result, "stage": task.stage, "why": task.why, "rank": task.rank, "represents": represents, "communicators": ()},
        message(f"The result.json of rank {task.rank}"),
    )
    groups = result.get("groups") or {}
    found = communicators(
        read_as(dict[str, tuple[int, ...]], groups, message(f"The groups of rank {task.rank}")),
        layout,
        Arguments(job.job.trainer_args),
        job.environment,
    )
    return dataclasses.replace(rank, communicators=found)


def _layout(file: JobFile) -> Layout | None:
    nodes = file.call.node_sizes if file.call else ()
    try:
        return read_layout(Arguments(file.job.trainer_args), file.job.world_size, nodes)
    except DryRunError:
        return None


def _unplanned(rank: int, represents: Any) -> PlannedRank:
    """A rank that has a result and no plan: it stands for whom its result names."""
    where = message(f"The result.json of rank {rank}")
    return read_as(PlannedRank, {"rank": rank, "represents": represents or (rank,)}, where)


def _exactly_once(plan: Mapping[int, PlannedRank]) -> dict[int, tuple[int, ...]]:
    """Whom each rank stands for. A rank that is itself in the plan stands for itself, whatever other launches planned."""
    taken = set(plan)
    result = {}
    for rank in sorted(plan):
        own = [other for other in plan[rank].represents if other not in taken]
        taken.update(own)
        result[rank] = tuple(sorted({rank, *own}))
    return result


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
