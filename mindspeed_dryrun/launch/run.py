"""A dry run from script to report: capture, understand, plan, run, record. The verbs are thin layers over this."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_dryrun import __version__
from mindspeed_dryrun.engines.back_ends import engine_for
from mindspeed_dryrun.engines.protocol import Engine
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.captured_call import MSRUN, CapturedCall
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.plan import DEFAULT_TIMEOUT_S, Plan, check_results, make_plan
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.megatron import moe_load
from mindspeed_dryrun.record.criteria import Criteria, device_of_logs, make_criteria, named_device
from mindspeed_dryrun.record.environment import engine_environment
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import JobDetails, JobFile, LauncherCall, RunSpec
from mindspeed_dryrun.record.store import Record, folder_for

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.executors import Event, SharedPlaces

View = Callable[["Event"], None]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Where ranks run, and how many at once. It decides no figure."""

    jobs: int | None = None
    executor: str = "local"
    timeout_s: float = DEFAULT_TIMEOUT_S
    fresh: bool = False  # nothing of an earlier run is used again
    cold: bool = False  # every rank is started by itself
    cache: bool = False  # ranks that were counted before, in whichever record, are not counted again
    shared: SharedPlaces | None = None  # with other runs of this process


def read_job(script: Path, spec: RunSpec) -> Job:
    """The job of a script: bash runs it up to its launcher call."""
    job = understand(capture(script, spec.sets, spec.script_args, spec.env), str(script), spec.overrides)
    return dataclasses.replace(job, env={**job.env, **spec.env})


def dry_run(script: Path, spec: RunSpec, out: Path | None = None, view: View | None = None) -> Report:
    """Script in, report out; the record is in `out`, or in the first free `dryrun-NAME` folder."""
    plan = plan_job(read_job(script, spec), spec)
    report = run_plan(plan, out or folder_for(default_out(script), plan.fingerprint), Execution(), view)
    check_results(plan, report)
    return report


def dry_run_job(job: Job, out: Path, spec: RunSpec, execution: Execution | None = None, view: View | None = None) -> Report:
    """The same from a job that is understood already."""
    execution = execution or Execution()
    plan = plan_job(job, spec, execution)
    report = run_plan(plan, out, execution, view)
    check_results(plan, report)
    return report


def dry_run_beside(
    job: Job,
    stem: Path,
    spec: RunSpec,
    execution: Execution,
    stages: Collection[int] | None = None,
    view: View | None = None,
) -> tuple[Report, Path]:
    """A dry run in `stem-FINGERPRINT`: found again by what is run, never mixed up with an older engine's or catalogue's."""
    plan = plan_job(job, spec, execution)
    if stages is not None:
        plan = dataclasses.replace(plan, tasks=tuple(task for task in plan.tasks if task.stage in stages))
    folder = stem.with_name(f"{stem.name}-{plan.fingerprint[:8]}").absolute()
    return run_plan(plan, folder, execution, view), folder


def plan_job(job: Job, spec: RunSpec, execution: Execution | None = None) -> Plan:
    """The plan of a job on the engine of this machine."""
    return make_plan(job, spec, _engine(job.back_end, spec.level), (execution or Execution()).timeout_s)


@functools.lru_cache(maxsize=8)
def _engine(back_end: str, level: int) -> Engine:
    return engine_for(back_end, level)


def run_plan(plan: Plan, out: Path, execution: Execution, view: View | None = None) -> Report:
    """Runs the ranks that the record does not hold yet, and what decides a close verdict; writes `report.json`."""
    from mindspeed_dryrun.launch.deciding import deciding_plans

    with shared_execution(plan, execution) as execution:
        report = _run(plan, out, execution, view)
        for closer in deciding_plans(plan, report):
            if report.fits:  # one rank that does not fit decides it
                _run(closer, out / "deciding", execution, view)
                report = _write_report(Record.open(out))
    return report


@contextlib.contextmanager
def shared_execution(plan: Plan, execution: Execution) -> Iterator[Execution]:
    """The execution with one set of warm servers for all that is run of a plan; of one rank alone none is worth while."""
    from mindspeed_dryrun.launch.executors import SharedPlaces, host

    if execution.shared or execution.executor != "local":
        yield execution
        return
    with SharedPlaces(execution.jobs or host.usable_cores(), execution.cold or len(plan.tasks) < 2) as shared:
        yield dataclasses.replace(execution, shared=shared)


def _run(plan: Plan, out: Path, execution: Execution, view: View | None) -> Report:
    # Only a run needs these: a plan is shown without them.
    from mindspeed_dryrun.launch.executors import Event, get_executor
    from mindspeed_dryrun.launch.rank_cache import open_cache

    if problem := plan.problem:
        raise UsageError(problem if problem.endswith(".") else problem + ".")
    record = Record.create(out, job_file(plan))
    record.write_json("patches.json", list(plan.patches))
    if execution.fresh:
        record.forget(task.rank for task in plan.tasks)
    done = record.ranks_done()
    missing = [task for task in plan.tasks if task.rank not in done]
    view = view or (lambda event: None)
    cache = open_cache(plan, execution.cache)
    if cache:
        restored = {task.rank for task in missing if cache.restore(task, record.path)}
        missing = [task for task in missing if task.rank not in restored]
        done |= restored
    if done:
        from mindspeed_dryrun.record.summary import build_report

        for rank in build_report(record.path).ranks:
            if rank.rank in done:
                view(Event(rank=rank.rank, kind="finished", result=rank))
    try:
        if missing:
            executor = get_executor(execution.executor, execution.jobs, execution.shared, cold=execution.cold)
            executor.run(missing, record.path, view)
    finally:  # also after Ctrl-C: the report of what is known
        if cache:
            cache.keep(missing, record.path)
        report = _write_report(record)
    return report


def _write_report(record: Record) -> Report:
    from mindspeed_dryrun.record.summary import build_report

    with record.locked():
        report = build_report(record.path)
        record.write_json("report.json", report.to_json())
    return report


def job_of_record(file: JobFile) -> Job:
    """The job of a record, to be planned again; `UsageError` where the record does not hold enough."""
    call = file.call
    options = call.options if call else {}  # before version 2
    local = options.get("local_worker_num") or options.get("nproc_per_node") or "8"
    return understand(
        CapturedCall(
            launcher=call.launcher if call else MSRUN,
            argv=(),
            cwd=call.cwd if call else file.details.cwd,
            options=options,
            world_size=file.job.world_size,
            local_world_size=min(int(local) if local.isdigit() else 8, file.job.world_size),
            node_sizes=call.node_sizes if call else (),
            program=call.program if call else file.details.program,
            program_args=file.job.trainer_args,
            env={**os.environ, **(call.env if call else {})},
        ),
        file.job.script,
    )


def criteria_of(spec: RunSpec, engine: str) -> Criteria:
    """What the peaks of this run are judged by."""
    if spec.device and spec.device_from:
        raise UsageError("--device and --device-from exclude each other: one names the card, the other reads it from logs.")
    device = device_of_logs(Path(spec.device_from)) if spec.device_from else named_device(spec.device)
    return make_criteria(device, spec.budget_mb, spec.margin, engine)


def job_file(plan: Plan) -> JobFile:
    """What `job.json` holds: enough to make the report again, and to notice a changed job."""
    if plan.engine is None:
        raise DryRunError("There is no engine to run this plan.")
    job, engine = plan.job, plan.engine.summary
    return JobFile(
        version=__version__,
        fingerprint=plan.fingerprint,
        job=job.summary(plan.trainer.kind),
        details=JobDetails(
            kind=job.kind,
            cwd=job.cwd,
            program=job.program,
            num_layers=job.num_layers,
            stage_layers=job.stage_layers,
            seq_length=job.seq_length,
            micro_batch=job.micro_batch,
            global_batch=job.global_batch,
            recompute=job.recompute,
            distributed_optimizer=job.distributed_optimizer,
            microbatches=plan.microbatches,
        ),
        engine=engine,
        spec=plan.spec,
        call=LauncherCall(
            launcher=job.launcher,
            options=job.launcher_options,
            program=job.program,
            args=job.args,
            cwd=job.cwd,
            env=engine_environment(job.env),
            node_sizes=job.node_sizes,
        ),
        criteria=criteria_of(plan.spec, engine.name or ""),
        environment=plan.environment,
        patches=tuple(patch["name"] for patch in plan.patches if plan.trainer.kind in patch["trainers"]),
        not_counted=tuple(not_counted(plan)),
        notes=plan.notes,
        plan=tuple(task.planned() for task in plan.tasks),
        classes=plan.classes,
        time=plan.time,
    )


def not_counted(plan: Plan) -> list[str]:
    """What this engine at this level cannot see."""
    result = list(plan.engine.not_counted if plan.engine else ())
    result.append(message("HCCL buffers, which lie outside the pool: see the communicators"))
    if plan.job.arguments.has("--use-ascend-coc"):
        result.append(message("buffers of the fused communication kernels (NNAL)"))
    if plan.job.arguments.has("--num-experts"):
        load = moe_load.parse(plan.spec.moe_load)
        words = "every expert gets the same number of tokens" if load.is_even else f"beyond {load.words}"
        result.append(message(f"MoE imbalance ({words})"))
    if plan.job.arguments.has("--eval-iters"):
        result.append(message("evaluation between training iterations"))
    return result


def default_out(script: Path) -> Path:
    """`dryrun-NAME` in the working directory."""
    return Path(f"dryrun-{script.stem}")
