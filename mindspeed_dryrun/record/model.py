"""The figures of a run as dataclasses, and their JSON shape (`report.json`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mindspeed_dryrun.megatron.layout import Parallel

# History of report.json:
# 1: first version (docs: DESIGN, "Fixed: the record").
SCHEMA_VERSION = 1

STATUSES = ("ok", "oom", "failed", "timeout")


@dataclass(frozen=True)
class JobSummary:
    """What a report says of the job."""

    script: str
    world_size: int
    parallel: Parallel
    trainer: str  # "script" or "embedded"
    trainer_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineSummary:
    """What counted: MindSpore's version, the CANN below it and the simulation level."""

    mindspore: str | None
    cann: str | None
    level: int | None


@dataclass(frozen=True)
class Device:
    """The card that a verdict is about."""

    name: str  # as `--device` takes it
    title: str  # for people
    total_mb: int  # as the driver reports it
    usable_mb: int  # by the framework's memory pool
    source: str  # of the two figures: published, derived, measured


@dataclass(frozen=True)
class RankReport:
    """One simulated (or really run) rank. Figures are None where the engine printed none."""

    rank: int
    represents: tuple[int, ...]
    stage: int | None
    status: str
    error: str | None = None
    used_peak_mb: int | None = None
    actual_peak_mb: int | None = None
    seconds: float | None = None
    host_rss_mb: int | None = None
    device_total_mb: int | None = None
    usable_mb: int | None = None
    iterations: int | None = None
    why: str | None = None  # what sets this rank's class apart, in words


@dataclass(frozen=True)
class Report:
    """The summary of a record: what `report.json` holds and every view shows."""

    job: JobSummary | None
    engine: EngineSummary
    device_total_mb: int | None
    device_usable_mb: int | None
    budget_mb: int | None
    ranks: tuple[RankReport, ...]
    worst_rank: int | None
    used_peak_mb: int | None
    actual_peak_mb: int | None
    fits: bool | None
    not_counted: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The fixed shape of `report.json`, schema_version 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": _plain(self.job) if self.job else None,
            "engine": _plain(self.engine),
            "device": {"total_mb": self.device_total_mb, "usable_mb": self.device_usable_mb},
            "budget_mb": self.budget_mb,
            "ranks": [_plain(rank) for rank in self.ranks],
            "worst_rank": self.worst_rank,
            "used_peak_mb": self.used_peak_mb,
            "actual_peak_mb": self.actual_peak_mb,
            "fits": self.fits,
            "not_counted": list(self.not_counted),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """The inverse of `to_json`; keys that a newer writer added are ignored."""
        job = data.get("job")
        summary = None
        if job:
            summary = JobSummary(
                script=job["script"],
                world_size=job["world_size"],
                parallel=_build(Parallel, job["parallel"]),
                trainer=job["trainer"],
                trainer_args=tuple(job.get("trainer_args", ())),
            )
        device = data.get("device") or {}
        return cls(
            job=summary,
            engine=_build(EngineSummary, data["engine"]),
            device_total_mb=device.get("total_mb"),
            device_usable_mb=device.get("usable_mb"),
            budget_mb=data.get("budget_mb"),
            ranks=tuple(
                _build(RankReport, {**rank, "represents": tuple(rank["represents"])}) for rank in data["ranks"]
            ),
            worst_rank=data.get("worst_rank"),
            used_peak_mb=data.get("used_peak_mb"),
            actual_peak_mb=data.get("actual_peak_mb"),
            fits=data.get("fits"),
            not_counted=tuple(data.get("not_counted", ())),
            notes=tuple(data.get("notes", ())),
        )


def _plain(value: Any) -> dict[str, Any]:
    return {key: list(item) if isinstance(item, tuple) else item for key, item in dataclasses.asdict(value).items()}


def _build(kind: Any, data: dict[str, Any]) -> Any:
    names = {item.name for item in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in data.items() if key in names})
