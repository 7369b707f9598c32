"""The plan of a dry run: which ranks are simulated, each with its command and environment. Making one runs nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_dryrun.engines.mindspore.engine import Engine
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.mock_inputs import dry_args
from mindspeed_dryrun.launch.msrun_call import OPTIONS
from mindspeed_dryrun.launch.rank_classes import RankClass, rank_classes
from mindspeed_dryrun.launch.short_run import short_args
from mindspeed_dryrun.launch.trainers import Trainer, choose_trainer
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.record.model import Report

# Stands for the record's folder in a task, so that an executor may run it on another machine, in another folder.
RECORD = "{record}"
DEFAULT_TIMEOUT_S = 1800.0
_PACKAGE_ROOT = str(Path(__file__).parents[2])


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
    engine: Engine | None  # None where there is none: such a plan can be read, not run
    trainer: str  # "script" or "embedded"
    tasks: tuple[RankTask, ...]
    microbatches: int  # per iteration, of the job's own number
    patches: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None  # why it cannot be run here
    checks: tuple[tuple[int, int], ...] = ()  # (rank, its class's representative) simulated to check the classes
    moe_imbalance: float = 1.0  # times an even load that the busiest expert-parallel rank gets

    @property
    def fingerprint(self) -> str:
        """Changes whenever the figures could: the same folder never holds ranks of two jobs."""
        engine = (self.engine.mindspore, self.engine.cann, self.engine.level) if self.engine else None
        first = self.tasks[0]
        tracked = first.env.get("MS_ALLOC_CONF") is not None
        data = [self.job.world_size, self.trainer, list(first.argv[2:]), engine, tracked, list(self.patches)]
        if self.moe_imbalance != 1.0:
            data.append(self.moe_imbalance)
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def make_plan(
    job: Job,
    engine: Engine | None,
    *,
    ranks: str = "auto",
    microbatches: str = "auto",
    trainer: str = "auto",
    explain: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    patch_files: Sequence[Path] = (),
    check_classes: int = 0,
    moe_imbalance: float = 1.0,
) -> Plan:
    """The ranks to simulate and how. What stands in the way of running it is `problem`; `UsageError` for wrong options."""
    chosen = choose_trainer(job, trainer)
    args, iterations, count = short_args(job, microbatches)
    args, input_notes = dry_args(job, args)
    classes, checks = _with_checks(job, choose_ranks(job, ranks), check_classes)
    tasks = tuple(
        RankTask(
            rank=item.rank,
            represents=item.represents,
            stage=item.stage if job.is_megatron else None,
            why=item.why,
            argv=(sys.executable, "-m", "mindspeed_dryrun.rank", chosen.program, *args),
            env=rank_environment(job, engine, chosen, item.rank, iterations, explain, moe_imbalance),
            timeout_s=timeout_s,
            iterations=iterations,
        )
        for item in classes
    )
    notes = [*job.notes, *chosen.notes, *input_notes]
    if job.is_megatron and count < job.microbatches:
        notes.append(
            f"{iterations} iterations of {count} microbatches are run (the job has {job.microbatches} in each): "
            "enough to reach the peak; --microbatches all runs them all"
        )
    return Plan(
        job=job,
        engine=engine,
        trainer=chosen.kind,
        tasks=tasks,
        microbatches=count,
        patches=tuple(catalogue.compile(extra=[Path(file) for file in patch_files])),
        notes=tuple(notes),
        problem=chosen.problem,
        checks=checks,
        moe_imbalance=moe_imbalance,
    )


def choose_ranks(job: Job, ranks: str) -> tuple[RankClass, ...]:
    """`auto`: one of each class; `all`: every rank; a list such as `0,3,8-11`: those."""
    if ranks == "auto":
        return rank_classes(job)
    by_rank = {rank: item for item in rank_classes(job) for rank in item.represents}
    chosen = range(job.world_size) if ranks == "all" else _rank_list(ranks, job.world_size)
    return tuple(RankClass(rank, (rank,), by_rank[rank].stage, by_rank[rank].why) for rank in chosen)


def _rank_list(text: str, world_size: int) -> list[int]:
    result: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"--ranks wants auto, all or a list such as 0,3,8-11, and got '{text}'.")
        result.update(range(int(first), int(last if dash else first) + 1))
    wrong = sorted(rank for rank in result if rank >= world_size)
    if wrong or not result:
        raise UsageError(
            f"--ranks names rank {wrong[0] if wrong else '?'}, and this job has ranks 0 to {world_size - 1}."
        )
    return sorted(result)


def _with_checks(
    job: Job, classes: tuple[RankClass, ...], number: int
) -> tuple[tuple[RankClass, ...], tuple[tuple[int, int], ...]]:
    """`number` random members of the classes simulated as well; each leaves its class's list, so that all still count once."""
    others = [(rank, item) for item in classes for rank in item.represents if rank != item.rank]
    picked = dict(sorted(random.sample(others, min(number, len(others))), key=lambda pair: pair[0]))
    kept = [
        dataclasses.replace(item, represents=tuple(rank for rank in item.represents if rank not in picked))
        for item in classes
    ]
    extra = [
        RankClass(rank, (rank,), item.stage, f"check of rank {item.rank}'s class: {item.why}")
        for rank, item in picked.items()
    ]
    return tuple(kept + extra), tuple((rank, item.rank) for rank, item in picked.items())


def rank_environment(
    job: Job, engine: Engine | None, trainer: Trainer, rank: int, iterations: int, explain: bool, moe_imbalance: float = 1.0
) -> dict[str, str]:
    """Everything a rank's process sees: the script's exports, the engine's settings, its place, and our activation."""
    base = dict(job.env or os.environ)
    env = engine.environment(base) if engine else base
    folder = f"{RECORD}/ranks/{rank:05d}"
    env.update(
        RANK_ID=str(rank),
        RANK_SIZE=str(job.world_size),
        MS_WORKER_NUM=str(job.world_size),
        DEVICE_ID=str(rank % 8),
        LOCAL_RANK=str(rank % job.local_world_size),
        MS_DRY_RUN="1",
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONUNBUFFERED="1",
    )
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    env["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys(
            part for part in (*trainer.path, _PACKAGE_ROOT, *env.get("PYTHONPATH", "").split(os.pathsep)) if part
        )
    )
    if explain:
        env["MS_ALLOC_CONF"] = f"memory_tracker:True,memory_tracker_path:{folder}"
    env[config.VARIABLE] = json.dumps(
        {
            "mode": "rank",
            "rank": rank,
            "world_size": job.world_size,
            "trainer": trainer.kind,
            "progress": f"{folder}/progress.jsonl",
            "patches": f"{RECORD}/patches.json",
            "iterations": iterations,
            "scratch": f"{folder}/scratch",
            "moe_imbalance": moe_imbalance,
        }
    )
    return env


def rewritten_call(job: Job, level: int, out: Path) -> list[str]:
    """The msrun call that a person would have to write by hand for this dry run: `--rank`, `--log_dir`, `--sim_level`."""
    options = dict(job.msrun_options)
    options.update(log_dir=str(out), sim_level=str(level))
    words = ["msrun"]
    for name in OPTIONS:
        if name in options:
            words += ["--rank" if name == "node_rank" else f"--{name}", options[name]]
    return [*words, job.program, *job.args]


def check_results(plan: Plan, report: Report) -> None:
    """`--check-classes`: a rank that differs from its class's representative is a failure, with the numbers."""
    used_peak_mb = {rank.rank: rank.used_peak_mb for rank in report.ranks}
    for rank, representative in plan.checks:
        mine, theirs = used_peak_mb.get(rank), used_peak_mb.get(representative)
        if mine != theirs:
            at = plan.job.layout.place(rank)
            raise DryRunError(
                f"Rank {rank} (TP {at.tp}, CP {at.cp}, DP {at.dp}, stage {at.pp}) used {mine}M and rank {representative}, which "
                f"stands for it, {theirs}M: the rank classes are wrong for this job. Use --ranks all and report it."
            )


def plan_json(plan: Plan, out: Path) -> dict[str, Any]:
    """`job` and `ranks` in the shape of report.json, and the rewritten call."""
    level = plan.engine.level if plan.engine else 1
    return {
        "schema_version": 1,
        "job": dataclasses.asdict(plan.job.summary(plan.trainer)),
        "engine": {"mindspore": plan.engine.mindspore, "cann": plan.engine.cann, "level": level}
        if plan.engine
        else None,
        "ranks": [
            {"rank": task.rank, "represents": list(task.represents), "stage": task.stage, "why": task.why}
            for task in plan.tasks
        ],
        "iterations": plan.tasks[0].iterations,
        "microbatches": plan.microbatches,
        "msrun": rewritten_call(plan.job, level, out),
        "environment": changed_environment(plan),
        "command": list(plan.tasks[0].argv),
        "notes": list(plan.notes),
        "problem": plan.problem,
    }


def changed_environment(plan: Plan) -> dict[str, str]:
    """What a rank's environment has that the script's has not."""
    before = dict(plan.job.env or os.environ)
    task = plan.tasks[0]
    return {name: value for name, value in sorted(task.env.items()) if before.get(name) != value}
