"""A dry run from script to report: capture, understand, plan, run, record. The verbs are thin layers over this."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_dryrun import __version__
from mindspeed_dryrun.engines.mindspore.engine import Engine, choose_engine
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.plan import DEFAULT_TIMEOUT_S, Plan, check_results, make_plan
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.record.environment import engine_environment
from mindspeed_dryrun.record.model import Report

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.executors import Event, Shared

View = Callable[["Event"], None]


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of `launch`, for programs."""

    sets: Mapping[str, str] = field(default_factory=dict)
    script_args: Sequence[str] = ()
    overrides: Sequence[str] = ()
    out: Path | None = None
    ranks: str = "auto"
    microbatches: str = "auto"
    level: int = 1
    budget_mb: int | None = None
    trainer: str = "auto"
    jobs: int | None = None
    executor: str = "local"
    timeout_s: float = DEFAULT_TIMEOUT_S
    explain: bool = False
    check_classes: int = 0
    moe_imbalance: float = 1.0
    patch_files: Sequence[Path] = ()
    shared: Shared | None = None  # with other runs of this process


def read_job(script: Path, options: LaunchOptions) -> Job:
    """The job of a script: bash runs it up to its msrun call."""
    return understand(capture(script, options.sets, options.script_args), str(script), options.overrides)


def plan_job(job: Job, options: LaunchOptions, engine: Engine | None) -> Plan:
    """The plan that these options ask for."""
    return make_plan(
        job,
        engine,
        ranks=options.ranks,
        microbatches=options.microbatches,
        trainer=options.trainer,
        explain=options.explain,
        timeout_s=options.timeout_s,
        patch_files=options.patch_files,
        check_classes=options.check_classes,
        moe_imbalance=options.moe_imbalance,
    )


def dry_run(script: Path, options: LaunchOptions, view: View | None = None) -> Report:
    """Script in, report out; the record is in `options.out` or in the next free `dryrun-…` folder."""
    return dry_run_job(read_job(script, options), options.out or default_out(script), options, view)


def dry_run_job(job: Job, out: Path, options: LaunchOptions, view: View | None = None) -> Report:
    """The same from a job that is understood already."""
    plan = plan_job(job, options, choose_engine(options.level))
    report = run_plan(plan, out, options, view)
    check_results(plan, report)
    return report


def run_plan(plan: Plan, out: Path, options: LaunchOptions, view: View | None = None) -> Report:
    """Runs the ranks that the record does not hold yet, and writes `report.json`."""
    # Only a run needs these: a plan is shown without them.
    from mindspeed_dryrun.launch.executors import Event, get_executor
    from mindspeed_dryrun.record.store import Record
    from mindspeed_dryrun.record.summary import build_report

    if plan.problem:
        raise UsageError(plan.problem if plan.problem.endswith(".") else plan.problem + ".")
    record = Record.create(out, job_json(plan, options))
    record.write_json("patches.json", list(plan.patches))
    done = record.ranks_done()
    missing = [task for task in plan.tasks if task.rank not in done]
    view = view or _no_view
    for rank in build_report(record.path).ranks if done else ():
        if rank.rank in done:
            view(Event(rank.rank, "finished", result=rank))
    try:
        if missing:
            get_executor(options.executor, options.jobs, options.shared).run(missing, record.path, view)
    finally:  # also after Ctrl-C: the report of what is known
        with record.locked():
            report = build_report(record.path)
            record.write_json("report.json", report.to_json())
    return report


def job_json(plan: Plan, options: LaunchOptions) -> dict[str, Any]:
    """What `job.json` holds: enough to make the report again, and to notice a changed job."""
    if plan.engine is None:
        raise DryRunError("There is no engine to run this plan.")
    job = plan.job
    return {
        "schema_version": 1,
        "version": __version__,
        "fingerprint": plan.fingerprint,
        "job": dataclasses.asdict(job.summary(plan.trainer)),
        "details": {
            "kind": job.kind,
            "cwd": job.cwd,
            "program": job.program,
            "num_layers": job.num_layers,
            "stage_layers": job.stage_layers,
            "seq_length": job.seq_length,
            "micro_batch": job.micro_batch,
            "global_batch": job.global_batch,
            "recompute": job.recompute,
            "distributed_optimizer": job.distributed_optimizer,
            "microbatches": plan.microbatches,
        },
        "engine": {"mindspore": plan.engine.mindspore, "cann": plan.engine.cann, "level": plan.engine.level},
        "environment": engine_environment(plan.tasks[0].env),
        "budget_mb": options.budget_mb,
        "not_counted": not_counted(plan),
        "notes": list(plan.notes),
        "patches": [patch["name"] for patch in plan.patches if plan.trainer in patch["trainers"]],
        "plan": [_task_json(task.to_json()) for task in plan.tasks],
    }


def _task_json(task: dict[str, Any]) -> dict[str, Any]:
    # Environments hold secrets now and then, and repeat themselves: the record keeps the activation only.
    return {key: value for key, value in task.items() if key != "env"}


def not_counted(plan: Plan) -> list[str]:
    """What this engine at this level cannot see."""
    level = plan.engine.level if plan.engine else 1
    result = []
    if level < 2:
        result.append("operator workspace (level 1 does not ask CANN for it)")
    result.append("HCCL buffers beyond the engine's reserve")
    if plan.job.arguments.has("--use-ascend-coc"):
        result.append("buffers of the fused communication kernels (NNAL)")
    if plan.job.arguments.has("--num-experts"):
        load = "every expert gets the same number of tokens" if plan.moe_imbalance == 1.0 else f"beyond {plan.moe_imbalance:g} ×"
        result.append(f"MoE imbalance ({load})")
    if plan.job.arguments.has("--eval-iters"):
        result.append("evaluation between training iterations")
    return result


def default_out(script: Path) -> Path:
    """`dryrun-NAME` in the working directory; a second run of the same job continues in it."""
    return Path(f"dryrun-{script.stem}")


def exit_status(report: Report) -> int:
    """0 all simulated ranks fit · 3 at least one does not · 1 a rank failed or timed out."""
    if any(rank.status in ("failed", "timeout") for rank in report.ranks) or not report.ranks:
        return 1
    return 3 if any(rank.status == "oom" for rank in report.ranks) or report.fits is False else 0


def _no_view(event: Event) -> None:
    pass
