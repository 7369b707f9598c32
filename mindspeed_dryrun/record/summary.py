"""From ranks to a verdict: the worst rank, what it needs, whether it fits. Reads records and logs, runs nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron.layout import Parallel
from mindspeed_dryrun.record.model import EngineSummary, JobSummary, RankReport, Report
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.worker_log import RankLog, read_worker_log

_WORKER_LOG = re.compile(r"worker_(\d{1,7})\.log")
_OUT_OF_MEMORY = re.compile(r"out of memory|memory (?:is )?not enough|memory isn't enough|EL0004|207018", re.IGNORECASE)


def build_report(record_dir: Path) -> Report:
    """The report of a record, from the record alone. Ranks that were planned and not run are named in `notes`."""
    record = Record.open(record_dir)
    job, results = record.job(), record.results()
    plan = {int(task["rank"]): task for task in job.get("plan", ()) if isinstance(task, dict) and "rank" in task}
    for rank, result in results.items():
        plan.setdefault(rank, result)
    represents = _exactly_once(plan)
    ranks = [_rank_report(rank, plan[rank], results[rank], represents[rank]) for rank in sorted(results)]
    notes = [str(note) for note in job.get("notes", ())]
    notes += [f"rank {rank}: {result['note']}" for rank, result in sorted(results.items()) if result.get("note")]
    missing = sorted(plan.keys() - results.keys())
    if missing:
        notes.append(f"not run: {_ranks(missing)}; start the same launch again to run what is missing")
    report = summarise(
        _job_summary(job.get("job")),
        _engine_summary(job.get("engine")),
        ranks,
        budget_mb=job.get("budget_mb"),
        not_counted=[str(line) for line in job.get("not_counted", ())],
        notes=notes,
    )
    return dataclasses.replace(report, fits=None) if missing and report.fits else report


def report_from_logs(folder: Path) -> Report:
    """The report of `worker_N.log` files, real or dry. Logs have no exit status: an exception in one is a failure."""
    files = _worker_logs(Path(folder))
    ranks, notes = [], []
    for rank, file in sorted(files.items()):
        log = read_worker_log(file, rank)
        status, error = judge_log(log)
        ranks.append(
            RankReport(
                rank=rank,
                represents=(rank,),
                stage=None,
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
            notes.append(
                f"rank {rank}: its log holds several memory blocks with different figures; the largest are shown"
            )
    notes.append("read from worker logs alone: they hold no exit status, and no word of the ranks that left no log")
    engine = EngineSummary(mindspore=None, cann=None, level=None)
    return summarise(None, engine, ranks, budget_mb=None, not_counted=(), notes=notes)


def judge_log(log: RankLog) -> tuple[str, str | None]:
    """Status and error of a rank of which there is only a log."""
    finished = bool(log.iterations_total) and log.iterations_seen == log.iterations_total
    if log.raised and not finished:
        return ("oom" if _OUT_OF_MEMORY.search(log.raised) else "failed"), log.raised
    if log.whole:
        return "ok", None
    if log.first_error:
        return ("oom" if _OUT_OF_MEMORY.search(log.first_error) else "failed"), log.first_error
    if log.truncated:
        return "failed", "the log ends inside the memory block"
    return "failed", "the log holds no memory block: the run was stopped, or GLOG_v hides it (use GLOG_v=2)"


def summarise(
    job: JobSummary | None,
    engine: EngineSummary,
    ranks: Iterable[RankReport],
    budget_mb: int | None,
    not_counted: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Report:
    """The report of these ranks. A rank whose peak with fragments exceeds the budget is `oom`.

    The budget is by default what the engine may use of the device. A failed rank's figures decide nothing, and `fits`
    is None then: it may be the worst.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    usable = min((rank.usable_mb for rank in ranks if rank.usable_mb is not None), default=None)
    total = min((rank.device_total_mb for rank in ranks if rank.device_total_mb is not None), default=None)
    budget = budget_mb if budget_mb is not None else usable
    ranks = [_against(rank, budget) for rank in ranks]
    counted = [rank for rank in ranks if rank.status in ("ok", "oom") and rank.actual_peak_mb is not None]
    worst = max(counted, key=lambda rank: (rank.actual_peak_mb or 0, rank.used_peak_mb or 0, -rank.rank), default=None)
    fits: bool | None = None
    if any(rank.status == "oom" for rank in ranks):
        fits = False
    elif ranks and budget is not None and all(rank.status == "ok" for rank in ranks):
        fits = True
    return Report(
        job=job,
        engine=engine,
        device_total_mb=total,
        device_usable_mb=usable,
        budget_mb=budget,
        ranks=tuple(ranks),
        worst_rank=worst.rank if worst else None,
        used_peak_mb=worst.used_peak_mb if worst else None,
        actual_peak_mb=worst.actual_peak_mb if worst else None,
        fits=fits,
        not_counted=tuple(not_counted),
        notes=tuple(notes),
    )


def _against(rank: RankReport, budget_mb: int | None) -> RankReport:
    if rank.status not in ("ok", "oom") or rank.error:  # with an error: it really ran out of memory
        return rank
    peak = max((mb for mb in (rank.used_peak_mb, rank.actual_peak_mb) if mb is not None), default=None)
    over = budget_mb is not None and peak is not None and peak > budget_mb
    return dataclasses.replace(rank, status="oom" if over else "ok")


def _rank_report(
    rank: int, task: Mapping[str, Any], result: Mapping[str, Any], represents: tuple[int, ...]
) -> RankReport:
    names = {field.name for field in dataclasses.fields(RankReport)}
    data = {key: value for key, value in result.items() if key in names}
    placed = {key: task[key] for key in ("stage", "why") if task.get(key) is not None}
    data = {"stage": None, "status": "failed", **data, **placed, "rank": rank, "represents": represents}
    return RankReport(**data)


def _exactly_once(plan: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, ...]]:
    """Whom each rank stands for. A rank that is itself in the plan stands for itself, whatever other launches planned."""
    taken = set(plan)
    result = {}
    for rank in sorted(plan):
        own = [other for other in plan[rank].get("represents", ()) if other not in taken]
        taken.update(own)
        result[rank] = tuple(sorted({rank, *own}))
    return result


def _worker_logs(folder: Path) -> dict[int, Path]:
    if folder.is_file():
        match = _WORKER_LOG.fullmatch(folder.name)
        return {int(match[1]) if match else 0: folder}
    for place in (folder, folder / "msrun_log"):
        found: dict[int, Path] = {}
        for file in sorted(place.glob("worker_*.log")):
            match = _WORKER_LOG.fullmatch(file.name)
            if match and file.is_file():
                found[int(match[1])] = file
        if found:
            return found
    raise UsageError(f"{folder} holds neither a dry run (job.json) nor worker logs (worker_0.log, …).")


def _job_summary(data: Any) -> JobSummary | None:
    if not isinstance(data, dict):
        return None
    parallel = data.get("parallel") or {}
    known = {field.name for field in dataclasses.fields(Parallel)}
    return JobSummary(
        script=str(data.get("script", "")),
        world_size=int(data.get("world_size", 1)),
        parallel=Parallel(**{key: value for key, value in parallel.items() if key in known}),
        trainer=str(data.get("trainer", "")),
        trainer_args=tuple(data.get("trainer_args", ())),
    )


def _engine_summary(data: Any) -> EngineSummary:
    data = data if isinstance(data, dict) else {}
    return EngineSummary(mindspore=data.get("mindspore"), cann=data.get("cann"), level=data.get("level"))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
