"""The plan of a dry run: which ranks are simulated, each with its command and environment. Making one runs nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_dryrun.cann import Engine
    from mindspeed_dryrun.launch.job import Job

# Stands for the record's folder in a task, so that an executor may run it on another machine, in another folder.
RECORD = "{record}"


@dataclass(frozen=True)
class RankTask:
    """All that an executor needs to run one rank. Nothing else knows where a rank runs."""

    rank: int
    represents: tuple[int, ...]
    stage: int | None
    why: str  # what sets this rank's class apart
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)  # complete; `{record}` stands for the record's folder
    timeout_s: float
    iterations: int  # finished iterations that make the rank count as run

    def to_json(self) -> dict[str, Any]:
        """Plain data, for job.json and for executors on other machines."""
        return dataclasses.asdict(self) | {"represents": list(self.represents), "argv": list(self.argv)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankTask:
        """The inverse of `to_json`."""
        return cls(**{**data, "represents": tuple(data["represents"]), "argv": tuple(data["argv"])})


@dataclass(frozen=True)
class Plan:
    """A job with the engine, the trainer and the ranks that will be simulated."""

    job: Job
    engine: Engine
    trainer: str  # "script" or "embedded"
    tasks: tuple[RankTask, ...]
    patches: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
