"""What a user asked to be counted, and the record's `job.json` that keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_dryrun.record.criteria import Criteria
from mindspeed_dryrun.record.model import EngineSummary, JobSummary, TimeSummary, plain

# History of job.json:
# 1: first version.
# 2: `spec` and `call` (what was asked for, and the launcher call behind it), `criteria` in place of `budget_mb`;
#    `engine` has `name` and `version`.
SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything about a dry run that its user chose and that decides its figures or its verdict.

    Where and how fast it runs (`Execution` in launch/run.py) is not part of it.
    """

    sets: Mapping[str, str] = field(default_factory=dict)  # variables of the script
    env: Mapping[str, str] = field(default_factory=dict)  # variables exported to it
    script_args: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()  # trainer arguments
    ranks: str = "auto"
    microbatches: str = "auto"
    level: int = 1
    trainer: str = "auto"
    explain: bool = False
    check_classes: int = 0
    moe_load: str = "even"  # or hot:X, or tokens per expert as a JSON list
    sample_length: int = 0  # tokens of an instruction sample; 0: the sequence length
    patch_files: tuple[str, ...] = ()
    device: str | None = None  # a name, or a hardware file
    device_from: str | None = None  # worker logs of a real run
    budget_mb: int | None = None
    margin: str | None = None
    hardware: str | None = None  # for predicted times


@dataclass(frozen=True, kw_only=True)
class LauncherCall:
    """The call of msrun or torchrun that the script made, enough to understand the job again."""

    launcher: str
    options: Mapping[str, str]
    program: str
    args: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)  # of the script's exports what decides figures
    node_sizes: tuple[int, ...] = ()  # ranks of each node, where the script calls the launcher once for each


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """A rank that is simulated. Its environment is left out: it may hold secrets."""

    rank: int
    represents: tuple[int, ...]
    stage: int | None = None
    class_rank: int | None = None  # the representative of its class
    why: str | None = None
    argv: tuple[str, ...] = ()
    timeout_s: float | None = None
    iterations: int = 0


@dataclass(frozen=True, kw_only=True)
class JobDetails:
    """The job in figures, for people and for `explain`."""

    kind: str | None = None
    cwd: str = "."
    program: str = "pretrain_gpt.py"
    num_layers: int = 0
    stage_layers: tuple[tuple[tuple[int, ...], ...], ...] = ()
    seq_length: int = 0
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str | None = None
    distributed_optimizer: bool = False
    microbatches: int = 1


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """`job.json`: written before the first rank starts, enough to make the report again and to run the job again."""

    version: str  # of mindspeed-dryrun
    fingerprint: str
    job: JobSummary
    details: JobDetails
    engine: EngineSummary
    spec: RunSpec = field(default_factory=RunSpec)
    call: LauncherCall | None = None
    criteria: Criteria | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    not_counted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plan: tuple[PlannedRank, ...] = ()
    classes: tuple[int, ...] = ()  # representatives of all rank classes: without one of each there is no verdict
    time: TimeSummary | None = None  # predicted, of one iteration

    def to_json(self) -> dict[str, Any]:
        """The shape of `job.json`."""
        return {"schema_version": SCHEMA_VERSION, **plain(self)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> JobFile:
        """The inverse of `to_json`, also of version 1; a `UsageError` names what is wrong."""
        from mindspeed_dryrun.schema import check_version, read_as

        check_version(data, SCHEMA_VERSION, where)
        if data["schema_version"] == 1 and isinstance(data.get("engine"), dict):
            data = {**data, "engine": {**data["engine"], "name": "mindspore", "version": data["engine"].get("mindspore")}}
        return read_as(cls, data, where)
