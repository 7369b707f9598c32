"""The figures of a run as dataclasses, and their JSON shape (`report.json`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mindspeed_dryrun.devices.device import Device
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron.layout import Parallel

# History of report.json:
# 1: first version.
# 2: the verdict is about a real card: `device` has a name and a source, `verdict`, `margin_mb`, `needed_mb`, `asked_mb`,
#    `outside_pool` and `time` are new, a rank lists its `communicators`; `engine` has `name` and `version` in place of
#    `mindspore`, `job` has `back_end`. Version 1 is still read.
SCHEMA_VERSION = 2


class Status(str, Enum):
    """What became of a rank. `oom`: its peak is above the budget, or it really ran out of memory."""

    OK = "ok"
    OOM = "oom"
    FAILED = "failed"
    TIMEOUT = "timeout"

    __str__ = str.__str__

    @property
    def broken(self) -> bool:
        """It stopped early: its figures mean nothing."""
        return self in (Status.FAILED, Status.TIMEOUT)


class Verdict(str, Enum):
    """Whether a job fits its device. `barely`: with less to spare than real runs were seen to need, or growing."""

    FITS = "fits"
    BARELY = "barely"
    DOES_NOT_FIT = "does_not_fit"
    UNKNOWN = "unknown"

    __str__ = str.__str__

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known."""
        return {Verdict.DOES_NOT_FIT: False, Verdict.UNKNOWN: None}.get(self, True)


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """What a report says of the job."""

    script: str
    world_size: int
    parallel: Parallel
    trainer: str  # "script" or "embedded"
    trainer_args: tuple[str, ...] = ()
    back_end: str = "mindspore"  # or "torch"


@dataclass(frozen=True)
class EngineSummary:
    """What counted: the engine and its version, the CANN below it and MindSpore's simulation level."""

    name: str | None = None  # "mindspore" or "torch_npu"
    version: str | None = None
    cann: str | None = None
    level: int | None = None


@dataclass(frozen=True)
class Communicator:
    """A process group that a rank communicated in, and the buffers that HCCL gives it outside the pool."""

    group: str  # as the engine calls it
    kind: str  # tp, dp, pp, …
    size: int  # ranks
    buffer_mb: int


@dataclass(frozen=True)
class OutsidePool:
    """What the rank with the most communicators needs beside the pool, and what the device has left there."""

    communicators: int
    hccl_mb: int
    left_mb: int


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One simulated (or really run) rank. Figures are None where the engine printed none."""

    rank: int
    represents: tuple[int, ...]
    stage: int | None = None
    status: Status
    error: str | None = None
    used_peak_mb: int | None = None
    actual_peak_mb: int | None = None
    seconds: float | None = None
    host_rss_mb: int | None = None
    device_total_mb: int | None = None  # as the engine printed it; in simulation not a real card's
    usable_mb: int | None = None
    iterations: int | None = None
    why: str | None = None  # what sets this rank's class apart, in words
    communicators: tuple[Communicator, ...] = ()


@dataclass(frozen=True)
class StagePeak:
    """The worst rank of one stage."""

    used_mb: int
    actual_mb: int


@dataclass(frozen=True, kw_only=True)
class TimeSummary:
    """Predicted by the time model, not measured."""

    iteration_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_card: float
    tflops_per_card: float | None = None
    hardware: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadPeak:
    """The worst rank where the experts of every simulated rank are busier than an even load makes them."""

    load: float  # times an even one
    rank: int
    status: Status
    used_peak_mb: int
    actual_peak_mb: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The summary of a record: what `report.json` holds and every view shows."""

    job: JobSummary | None
    engine: EngineSummary
    device: Device | None
    budget_mb: int | None
    verdict: Verdict
    ranks: tuple[RankReport, ...]
    worst_rank: int | None = None
    used_peak_mb: int | None = None
    actual_peak_mb: int | None = None
    margin_mb: int | None = None  # what is left of the budget
    needed_mb: int | None = None  # what real runs were seen to need above a dry run of this size
    uncollected_mb: int | None = None  # waits for Python's garbage collector when the run ends: a longer one holds more
    asked_mb: int | None = None  # the margin that the user asked for
    outside_pool: OutsidePool | None = None
    time: TimeSummary | None = None
    loads: tuple[LoadPeak, ...] = ()
    not_counted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Barely counts as fits; None where it is not known."""
        return self.verdict.fits

    @property
    def exit_status(self) -> int:
        """0 it fits · 3 it does not, or with less margin than asked for · 1 a rank failed, or nobody knows."""
        if any(rank.status.broken for rank in self.ranks) or self.verdict is Verdict.UNKNOWN:
            return 1
        short = self.asked_mb is not None and self.margin_mb is not None and self.margin_mb < self.asked_mb
        return 3 if self.verdict is Verdict.DOES_NOT_FIT or short else 0

    @property
    def exit_status_of_ranks(self) -> int:
        """The same for one share of a job's ranks: an open verdict is not a failure."""
        return 0 if self.ranks and all(rank.status is Status.OK for rank in self.ranks) else self.exit_status

    @property
    def stage_peaks(self) -> dict[int, StagePeak]:
        """The largest figures of each stage, in order; a rank without figures counts nothing."""
        peaks: dict[int, StagePeak] = {}
        for rank in self.ranks:
            used, actual = rank.used_peak_mb or 0, rank.actual_peak_mb or 0
            old = peaks.get(rank.stage or 0, StagePeak(0, 0))
            peaks[rank.stage or 0] = StagePeak(max(old.used_mb, used), max(old.actual_mb, actual))
        return dict(sorted(peaks.items()))

    def to_json(self) -> dict[str, Any]:
        """The fixed shape of `report.json`."""
        return {"schema_version": SCHEMA_VERSION, **plain(self), "fits": self.fits}

    @classmethod
    def from_json(cls, data: Any, where: str = "report.json") -> Report:
        """The inverse of `to_json`; a `UsageError` names what is wrong. Keys that a newer writer added are ignored."""
        from mindspeed_dryrun.schema import check_version, read_as

        check_version(data, SCHEMA_VERSION, where)
        try:
            data = _from_version_1(data) if data["schema_version"] == 1 else data
        except (KeyError, TypeError, AttributeError):
            raise UsageError(f"{where} says schema_version 1, and is not a report of that version.") from None
        return read_as(cls, data, where)


def plain(value: Any) -> Any:
    """A dataclass as JSON has it: dicts, lists, strings, numbers."""
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Enum) else value


def _from_version_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """A report of version 1 in the shape of version 2."""
    engine = data.get("engine") or {}
    device = data.get("device") or {}
    budget, peak, fits = data.get("budget_mb"), data.get("actual_peak_mb"), data.get("fits")
    verdicts = {True: Verdict.FITS, False: Verdict.DOES_NOT_FIT}
    known = device.get("total_mb") is not None and device.get("usable_mb") is not None
    return {
        **data,
        "engine": {**engine, "name": "mindspore", "version": engine.get("mindspore")},
        "device": {"name": "", "title": "the engine's own device", **device, "source": "measured"} if known else None,
        "verdict": verdicts.get(fits, Verdict.UNKNOWN) if isinstance(fits, bool) else Verdict.UNKNOWN,
        "margin_mb": budget - peak if isinstance(budget, int) and isinstance(peak, int) else None,
    }
