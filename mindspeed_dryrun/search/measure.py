"""The seam between a search and the engine: one strategy in, every stage's peak out.

`DryRuns` is the real one. Each strategy has its own record in the search's folder, named by what it was run with, so a
search that is started again finds what it has already counted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.estimate.strategy import Strategy, apply
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import MsrunCall
from mindspeed_dryrun.record.model import Report

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.run import LaunchOptions


@dataclass(frozen=True)
class StagePeak:
    """The worst rank of one stage."""

    used_mb: int
    actual_mb: int


@dataclass(frozen=True)
class Measurement:
    """What a dry run of a strategy counted, by stage; `error` says why there are no figures."""

    stages: Mapping[int, StagePeak]
    seconds: float = 0.0
    ranks: int = 0  # simulated
    error: str | None = None
    record: str | None = None

    @property
    def used_mb(self) -> int:
        return max(stage.used_mb for stage in self.stages.values())

    @property
    def actual_mb(self) -> int:
        return max(stage.actual_mb for stage in self.stages.values())


class Measure(Protocol):
    """Dry-runs a strategy, or some stages of it."""

    def __call__(self, strategy: Strategy, stages: Collection[int] | None = None) -> Measurement: ...


def read_measurement(report: Report, seconds: float, record: str | None = None) -> Measurement:
    """A report as a search needs it. A rank without figures makes the whole measurement an error."""
    failed = [rank for rank in report.ranks if rank.status not in ("ok", "oom") or rank.actual_peak_mb is None]
    if failed or not report.ranks:
        first = failed[0] if failed else None
        said = f"rank {first.rank}: {first.error or first.status}" if first else "no rank was simulated"
        return Measurement({}, seconds, len(report.ranks), said, record)
    return Measurement(stage_peaks(report), seconds, len(report.ranks), None, record)


def stage_peaks(report: Report) -> dict[int, StagePeak]:
    """The largest figures of each stage, in order; a rank without figures counts nothing."""
    peaks: dict[int, StagePeak] = {}
    for rank in report.ranks:
        used, actual = rank.used_peak_mb or 0, rank.actual_peak_mb or 0
        old = peaks.get(rank.stage or 0, StagePeak(0, 0))
        peaks[rank.stage or 0] = StagePeak(max(old.used_mb, used), max(old.actual_mb, actual))
    return dict(sorted(peaks.items()))


def job_of(call: MsrunCall, script: str, strategy: Strategy, cards_per_node: int) -> Job:
    """The script's job with this strategy on the cards that it needs."""
    options = {
        **call.options,
        "worker_num": str(strategy.world),
        "local_worker_num": str(min(cards_per_node, strategy.world)),
    }
    changed = dataclasses.replace(call, options=options, program_args=apply(call.program_args, strategy))
    return understand(changed, script)


def dry_run_beside(
    job: Job, stem: Path, options: LaunchOptions, stages: Collection[int] | None = None
) -> tuple[Report, Path]:
    """A dry run in `stem-FINGERPRINT`: found again by what is run, never mixed up with an older engine's or catalogue's."""
    from mindspeed_dryrun.engines.mindspore.engine import choose_engine
    from mindspeed_dryrun.launch.run import plan_job, run_plan

    plan = plan_job(job, options, choose_engine(options.level))
    if stages is not None:
        plan = dataclasses.replace(plan, tasks=tuple(task for task in plan.tasks if task.stage in stages))
    folder = stem.with_name(f"{stem.name}-{plan.fingerprint[:8]}").absolute()
    return run_plan(plan, folder, options), folder


def file_name(text: str) -> str:
    """A name that is safe as a folder's."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", text).strip("_")[:60] or "variant"


class DryRuns:
    """Measures by `launch`'s own dry run, one record a strategy below `folder`."""

    def __init__(self, call: MsrunCall, script: str, cards_per_node: int, folder: Path, options: LaunchOptions):
        self.call, self.script, self.cards_per_node = call, script, cards_per_node
        self.folder, self.options = folder, options

    def __call__(self, strategy: Strategy, stages: Collection[int] | None = None) -> Measurement:
        try:
            job = job_of(self.call, self.script, strategy, self.cards_per_node)
            report, folder = dry_run_beside(job, self.folder / file_name(strategy.name), self.options, stages)
        except DryRunError as error:
            return Measurement({}, error=str(error))
        seconds = sum(rank.seconds or 0.0 for rank in report.ranks)
        return read_measurement(report, seconds, str(folder))
