"""The two sides of a comparison: a record, a folder of logs or a report.json, with what it tells of its settings."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_dryrun.devices.device import SIMULATED_MB
from mindspeed_dryrun.devices.real_runs import Peaks, RealRun
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron.arguments import pairs
from mindspeed_dryrun.record.model import RankReport, Report
from mindspeed_dryrun.record.store import Record, read_json_of_user
from mindspeed_dryrun.record.summary import load_report
from mindspeed_dryrun.report import view
from mindspeed_dryrun.report.compare import Run

_LOGGED_ARGUMENT = re.compile(rb"^\s{0,4}([a-z]\w+) \.{2,} (.*?)\s*$")


def read_run(path: Path, label: str) -> Run:
    """One side of a comparison, with what its record or its logs tell of its arguments and environment."""
    if path.is_file():
        report = Report.from_json(read_json_of_user(path), str(path))
        return Run(label=label, report=report, flags=_flags(report), environment={})
    report, record = load_report(path)
    if record is None:
        return Run(label=label, report=report, flags=logged_arguments(path), environment={}, flags_logged=True)
    return Run(label=label, report=report, flags=_flags(report), environment=Record.open(record).job().environment)


def logged_arguments(folder: Path) -> dict[str, str]:
    """The arguments that Megatron prints at the start of a log, as flags; empty where no log has them."""
    for log in sorted(folder.glob("**/worker_*.log"))[:8]:
        found = {}
        with log.open("rb") as file:
            for number, line in enumerate(file):
                match = _LOGGED_ARGUMENT.match(line)
                if match:
                    name = "--" + match[1].decode().replace("_", "-")
                    found[name] = match[2].decode(errors="replace")
                elif (found and b"end of arguments" in line) or number > 20_000:
                    break
        if found:
            return found
    return {}


def _flags(report: Report) -> dict[str, str]:
    if report.job is None:
        return {}
    return {name: " ".join(words) or "set" for name, words in pairs(report.job.trainer_args) if name}


def real_run(a: Run, b: Run) -> RealRun:
    """A real run and its dry run, whichever side each is on, as a pair to keep: the rank that needed most above its dry run."""
    dry, real = (a, b) if is_dry(a.report) else (b, a)
    if is_dry(real.report) or not is_dry(dry.report):
        raise UsageError("--save keeps a real run and its dry run: one side must be a dry run, the other the logs of a real one.")
    measured = {rank.rank: rank for rank in real.report.ranks if rank.actual_peak_mb and not rank.status.broken}
    found = [
        (_peaks(rank), _peaks(measured[number]))
        for rank in dry.report.ranks
        for number in rank.represents
        if number in measured and rank.actual_peak_mb and not rank.status.broken
    ]
    if not found:
        raise UsageError("--save: no rank has figures on both sides.")
    mine, theirs = max(found, key=lambda pair: pair[1].actual_peak_mb / pair[0].actual_peak_mb)
    job = dry.report.job
    return RealRun(
        job=job.script if job else "worker logs",
        engine=dry.report.engine.name or "mindspore",
        device=f"{real.report.device.total_mb}M" if real.report.device else "unknown",
        dry=mine,
        real=theirs,
        layout=view.parallel_words(job) if job else None,
        versions=view.engine_words(dry.report) or None,
    )


def _peaks(rank: RankReport) -> Peaks:
    return Peaks(rank.used_peak_mb or 0, rank.actual_peak_mb or 0)


def is_dry(report: Report) -> bool:
    """The figures were counted in simulation."""
    return any((rank.device_total_mb, rank.usable_mb) == SIMULATED_MB for rank in report.ranks)
