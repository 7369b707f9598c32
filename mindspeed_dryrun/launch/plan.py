"""The plan of a dry run: which ranks are simulated, each with its command and environment. Making one runs nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_dryrun import __version__
from mindspeed_dryrun.engines.back_ends import NAMES
from mindspeed_dryrun.engines.protocol import Engine
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.launch.captured_call import TORCHRUN
from mindspeed_dryrun.launch.job import Job, ShortRun
from mindspeed_dryrun.launch.mock_inputs import dry_args
from mindspeed_dryrun.launch.msrun_call import OPTIONS
from mindspeed_dryrun.launch.rank_classes import RankClass, rank_classes
from mindspeed_dryrun.launch.sample_length import sample_length
from mindspeed_dryrun.launch.short_run import short_run
from mindspeed_dryrun.launch.trainers import Trainer, choose_trainer, code_digest
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.record.environment import engine_environment
from mindspeed_dryrun.record.model import SCHEMA_VERSION, Report, TimeSummary
from mindspeed_dryrun.record.run_spec import PlannedRank, RunSpec

# Stands for the record's folder in a task, so that an executor may run it on another machine, in another folder.
RECORD = "{record}"
DEFAULT_TIMEOUT_S = 1800.0
_PACKAGE = str(Path(__file__).parents[1])
_PACKAGE_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """All that an executor needs to run one rank. Nothing else knows where a rank runs."""

    rank: int
    represents: tuple[int, ...]
    stage: int | None
    class_rank: int | None = None  # the representative of its class
    why: str  # what sets this rank's class apart
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)  # complete; `{record}` stands for the record's folder
    timeout_s: float
    iterations: int  # finished iterations that make the rank count as run

    def planned(self) -> PlannedRank:
        """What `job.json` keeps of it."""
        names = [item.name for item in dataclasses.fields(PlannedRank)]
        return PlannedRank(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job with the engine, the trainer and the ranks that will be simulated."""

    job: Job
    spec: RunSpec
    engine: Engine | None  # None where there is none: such a plan can be read, not run
    trainer: Trainer
    tasks: tuple[RankTask, ...]
    classes: tuple[int, ...]  # the representatives of all rank classes, whether they are simulated or not
    microbatches: int  # per iteration, of the job's own number
    patches: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    checks: tuple[tuple[int, int], ...] = ()  # (rank, its class's representative) simulated to check the classes
    time: TimeSummary | None = None  # predicted, of one iteration

    @property
    def problem(self) -> str | None:
        """Why it cannot be run here."""
        folders = [*self.trainer.path, *filter(None, self.job.env.get("PYTHONPATH", "").split(os.pathsep))]
        return self.trainer.problem or catalogue.first_drift(self.patches, self.trainer.kind, folders)

    @property
    def environment(self) -> dict[str, str]:
        """What of a rank's environment decides its figures."""
        return engine_environment(self.tasks[0].env)

    @property
    def fingerprint(self) -> str:
        """Changes whenever the figures could: the same folder never holds ranks of two jobs."""
        engine = dataclasses.astuple(self.engine.summary) if self.engine else None
        first = self.tasks[0]
        data = [
            __version__, self.job.world_size, self.trainer.kind, first.argv[2:], engine, self.spec.explain,
            self.spec.moe_load, self.spec.sample_length, self.patches, self.environment, self.trainer.path, self.trainer.release,
            code_digest([*(self.trainer.path if self.trainer.kind == "script" else ()), _PACKAGE]),
            *self.job.node_sizes,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def make_plan(job: Job, spec: RunSpec, engine: Engine | None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Plan:
    """The ranks to simulate and how. What stands in the way of running it is `problem`; `UsageError` for wrong options."""
    chosen = choose_trainer(job, spec.trainer)
    short = short_run(job, spec.microbatches)
    samples = sample_length(job, spec, chosen.release)
    spec = dataclasses.replace(spec, sample_length=samples.tokens)
    args, input_notes = dry_args(job, short.args)
    classes, checks = _with_checks(job, choose_ranks(job, spec.ranks), spec.check_classes)
    every_class = rank_classes(job)
    by_rank = {rank: item for item in every_class for rank in item.represents}
    cores = _cores(job, spec)
    tasks = tuple(
        RankTask(
            rank=item.rank,
            represents=item.represents,
            stage=item.stage if job.is_megatron else None,
            class_rank=by_rank[item.rank].rank,
            why=item.why,
            argv=(sys.executable, "-m", "mindspeed_dryrun.rank", chosen.program, *args),
            env=rank_environment(job, engine, chosen, item.rank, short.iterations, spec, cores),
            timeout_s=timeout_s,
            iterations=short.iterations,
        )
        for item in classes
    )
    notes = [*(engine.notes if engine else ()), *job.notes, *chosen.notes, *input_notes]
    notes += [samples.note] if samples.note else []
    if job.is_megatron and short.microbatches < job.microbatches:
        notes.append(_of_a_short_run(job, short, chosen.keeps_checkpoints))
    return Plan(
        job=job,
        spec=spec,
        engine=engine,
        trainer=chosen,
        tasks=tasks,
        classes=tuple(item.rank for item in every_class),
        microbatches=short.microbatches,
        patches=tuple(catalogue.compile(extra=[Path(file) for file in spec.patch_files], engine=NAMES[job.back_end])),
        notes=tuple(notes),
        checks=checks,
    )


def _of_a_short_run(job: Job, short: ShortRun, grows: bool) -> str:
    iterations, count = short.iterations, short.microbatches
    if grows:
        return message(
            f"{iterations} iterations of {count} microbatches are run (the job has {job.microbatches} in each): a longer run "
            "may need more; --microbatches all runs them all"
        )
    return message(
        f"{iterations} iterations of {count} microbatches are run (the job has {job.microbatches} in each): "
        "enough to reach the peak; --microbatches all runs them all"
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
            raise UsageError(f"--ranks expects auto, all or a list such as 0,3,8-11, and got '{text}'.")
        low, high = int(first), int(last if dash else first)
        if max(low, high) >= world_size:
            raise UsageError(f"--ranks names rank {max(low, high)}, and this job has ranks 0 to {world_size - 1}.")
        result.update(range(low, high + 1))
    if not result:
        raise UsageError(f"--ranks '{text}' names no rank: write the smaller one first, as in 8-11.")
    return sorted(result)


def _with_checks(
    job: Job, classes: tuple[RankClass, ...], number: int
) -> tuple[tuple[RankClass, ...], tuple[tuple[int, int], ...]]:
    """`number` random members of the classes simulated as well; each leaves its class's list, so that all still count once."""
    others = [(rank, item) for item in classes for rank in item.represents if rank != item.rank]
    picked = dict(sorted(random.sample(others, min(number, len(others))), key=lambda pair: pair[0]))
    kept = [
        dataclasses.replace(item, represents=tuple(rank for rank in item.represents if rank not in picked)) for item in classes
    ]
    extra = [
        RankClass(rank, (rank,), item.stage, message(f"check of rank {item.rank}'s class: {item.why}"))
        for rank, item in picked.items()
    ]
    return tuple(kept + extra), tuple((rank, item.rank) for rank, item in picked.items())


def rank_environment(
    job: Job, engine: Engine | None, trainer: Trainer, rank: int, iterations: int, spec: RunSpec, cube_cores: int
) -> dict[str, str]:
    """Everything a rank's process sees: the script's exports, the engine's settings, its place, and our activation."""
    base = dict(job.env or os.environ)
    folder = f"{RECORD}/ranks/{rank:05d}"
    env = base
    if engine:
        env = engine.environment(base) | engine.place(rank, job.nodes)
        env |= engine.recording() if spec.explain else {}
    env.update(MS_DRY_RUN="1", PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1")
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    env["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys(part for part in (*trainer.path, _PACKAGE_ROOT, *env.get("PYTHONPATH", "").split(os.pathsep)) if part)
    )
    activation = config.Activation(
        mode="rank",
        rank=rank,
        world_size=job.world_size,
        engine=NAMES[job.back_end],
        trainer=trainer.kind,
        progress=f"{folder}/progress.jsonl",
        patches=f"{RECORD}/patches.json",
        iterations=iterations,
        scratch=f"{folder}/scratch",
        moe_load=spec.moe_load,
        release=trainer.release,
        keeps_checkpoints=trainer.keeps_checkpoints,
        hooks_blocks_only=trainer.hooks_blocks_only,
        sample_length=spec.sample_length,
        nodes=job.node_sizes,
        late_streams=job.layout.on_edge(rank),
        cube_cores=cube_cores,
    )
    return {**env, **activation.to_env()}


def _cores(job: Job, spec: RunSpec) -> int:
    """Of the named card, for the engine that counts what operators ask for; the default's where no card is named."""
    if job.back_end != "torch" or not spec.device:
        return config.Activation.cube_cores
    from mindspeed_dryrun.devices.hardware import read_hardware
    from mindspeed_dryrun.devices.local import HERE

    return config.Activation.cube_cores if spec.device == HERE else read_hardware(spec.device).cores


def rewritten_call(job: Job, level: int, out: Path) -> list[str]:
    """The call that a person would have to write by hand: for msrun with `--rank`, `--log_dir`, `--sim_level`.

    torchrun has no simulation: its call is the script's own, with the trainer arguments as they are run.
    """
    options = dict(job.launcher_options)
    if job.launcher == TORCHRUN:
        own = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [TORCHRUN, *own, job.program, *job.args]
    options.update(log_dir=str(out), sim_level=str(level))
    words = ["msrun"]
    for name in OPTIONS:
        if name in options:
            words += ["--rank" if name == "node_rank" else f"--{name}", options[name]]
    return [*words, job.program, *job.args]


def check_results(plan: Plan, report: Report) -> str | None:
    """`--check-classes`: a used peak that differs inside a class is a failure. A sentence tells the spread with fragments."""
    found = {rank.rank: rank for rank in report.ranks}
    spread, failed = 0, []
    for rank, representative in plan.checks:
        mine, theirs = found.get(rank), found.get(representative)
        if mine and theirs and (mine.used_peak_mb is None or theirs.used_peak_mb is None):
            failed.append(rank)
            continue
        if mine is None or theirs is None or mine.used_peak_mb != theirs.used_peak_mb:
            at = plan.job.layout.place(rank)
            used, other = (item.used_peak_mb if item else None for item in (mine, theirs))
            raise DryRunError(
                f"Rank {rank} (TP {at.tp}, CP {at.cp}, DP {at.dp}, stage {at.pp}) used {used}M and rank {representative}, "
                f"which stands for it, {other}M: the rank classes are wrong for this job. Use --ranks all and report it."
            )
        spread = max(spread, abs((mine.actual_peak_mb or 0) - (theirs.actual_peak_mb or 0)))
    if not plan.checks:
        return None
    if failed:
        return message(
            f"{len(failed)} of {len(plan.checks)} other ranks could not be compared with their class: one of the two failed."
        )
    return message(
        f"{len(plan.checks)} other ranks were simulated: used peaks are equal inside every class, "
        f"with fragments they differ by up to {spread}M."
    )


def plan_json(plan: Plan, out: Path) -> dict[str, Any]:
    """`job` and `ranks` in the shape of report.json, and the rewritten call."""
    level = plan.engine.level if plan.engine else 1
    return {
        "schema_version": SCHEMA_VERSION,
        "job": dataclasses.asdict(plan.job.summary(plan.trainer.kind)),
        "engine": dataclasses.asdict(plan.engine.summary) if plan.engine else None,
        "ranks": [
            {"rank": task.rank, "represents": list(task.represents), "stage": task.stage, "why": task.why} for task in plan.tasks
        ],
        "iterations": plan.tasks[0].iterations,
        "microbatches": plan.microbatches,
        "msrun": rewritten_call(plan.job, level, out),
        "environment": changed_environment(plan),
        "command": list(plan.tasks[0].argv),
        "notes": list(plan.notes),
        "problem": plan.problem,
        **({"time": dataclasses.asdict(plan.time)} if plan.time else {}),
    }


def changed_environment(plan: Plan) -> dict[str, str]:
    """What a rank's environment has that the script's has not."""
    before = dict(plan.job.env or os.environ)
    task = plan.tasks[0]
    return {name: value for name, value in sorted(task.env.items()) if before.get(name) != value}
