"""The seam between a search and the engine: one strategy in, every stage's peak out.

`DryRuns` is the real one. Each strategy has its own record in the search's folder, named by what it was run with, so a
search that is started again finds what it has already counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.estimate.strategy import Strategy, apply
from mindspeed_dryrun.launch.captured_call import CapturedCall
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.run import Execution, dry_run_beside
from mindspeed_dryrun.launch.trainers import choose_trainer, embedded_refusal
from mindspeed_dryrun.record.model import Report, StagePeak
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.store import folder_name


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a dry run of a strategy counted, by stage; `error` says why there are no figures."""

    stages: Mapping[int, StagePeak]
    seconds: float = 0.0
    ranks: int = 0  # simulated
    error: str | None = None
    record: str | None = None
    outside_mb: int = 0  # buffers of communicators, which lie outside the pool

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
    failed = [rank for rank in report.ranks if rank.status.broken or rank.actual_peak_mb is None]
    if failed or not report.ranks:
        first = failed[0] if failed else None
        said = f"rank {first.rank}: {first.error or first.status}" if first else "no rank was simulated"
        return Measurement(stages={}, seconds=seconds, ranks=len(report.ranks), error=said, record=record)
    outside = report.outside_pool.hccl_mb if report.outside_pool else 0
    return Measurement(
        stages=report.stage_peaks, seconds=seconds, ranks=len(report.ranks), error=None, record=record, outside_mb=outside
    )


def job_with(call: CapturedCall, script: str, strategy: Strategy, cards_per_node: int) -> Job:
    """The script's job with this strategy on the cards that it needs."""
    changed = dataclasses.replace(
        call,
        world_size=strategy.world,
        local_world_size=min(cards_per_node, strategy.world),
        node_sizes=(),
        program_args=apply(call.program_args, strategy),
    )
    return understand(changed, script)


class DryRuns:
    """Measures by `launch`'s own dry run, one record a strategy below `folder`."""

    def __init__(self, call: CapturedCall, script: str, cards_per_node: int, folder: Path, spec: RunSpec, execution: Execution):
        self.call, self.script, self.cards_per_node = call, script, cards_per_node
        self.folder, self.spec, self.execution = folder, spec, execution

    def refusal(self, strategy: Strategy) -> str | None:
        """Why no rank of a strategy would start, known from its arguments alone; None where one would."""
        try:
            job = job_with(self.call, self.script, strategy, self.cards_per_node)
        except DryRunError as error:
            return str(error)
        return embedded_refusal(job) if self._embedded else None

    @functools.cached_property
    def _embedded(self) -> bool:
        return choose_trainer(understand(self.call, self.script), self.spec.trainer).kind == "embedded"

    def __call__(self, strategy: Strategy, stages: Collection[int] | None = None) -> Measurement:
        try:
            job = job_with(self.call, self.script, strategy, self.cards_per_node)
            report, folder = dry_run_beside(job, self.folder / folder_name(strategy.name), self.spec, self.execution, stages)
        except DryRunError as error:
            return Measurement(stages={}, error=str(error))
        seconds = sum(rank.seconds or 0.0 for rank in report.ranks)
        return read_measurement(report, seconds, str(folder))
