"""Dry-run a training script as it is: every rank's peak memory, the worst rank, whether the job fits.

    mindspeed-dryrun launch pretrain_qwen25_7b_32k_ms.sh
    mindspeed-dryrun launch SCRIPT --set TP=4 --set PP=2 -- --recompute-granularity full --recompute-method uniform

Words after SCRIPT are the script's own arguments ($1, $2, …); arguments after -- replace or extend the trainer's.
The script and everything it names stay untouched; all output goes to --out. The same --out continues where it stopped.
Exit status: 0 the job fits, 3 it does not (or leaves less than --margin), 1 a rank failed or the verdict is open, 2 wrong use.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from mindspeed_dryrun.commands import importing_meanwhile
from mindspeed_dryrun.engines.protocol import Engine
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.files import check_output, json_text, write_output
from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.plan import (
    DEFAULT_TIMEOUT_S,
    Plan,
    changed_environment,
    check_results,
    make_plan,
    plan_json,
    rewritten_call,
)
from mindspeed_dryrun.launch.run import Execution, default_out, plan_job, read_job, run_plan
from mindspeed_dryrun.megatron import moe_load
from mindspeed_dryrun.record.model import Report, TimeSummary
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.report.view import ranges, time_words
from mindspeed_dryrun.units import parse_size_mb

# Half of what a launch imports is needed when the ranks start, or for the report at the end.
_FOR_THE_RUN = (
    "mindspeed_dryrun.launch.executors.local",
    "mindspeed_dryrun.launch.rank_cache",
    "mindspeed_dryrun.report.progress",
    "mindspeed_dryrun.advise.report_page",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fixed options of `launch`."""
    parser.add_argument("script", metavar="SCRIPT", help="the shell script that calls msrun or torchrun")
    parser.add_argument("script_args", metavar="ARG", nargs="*", help="the script's own arguments")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="change a variable of the script (repeatable)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the record (default: dryrun-SCRIPT)")
    parser.add_argument(
        "--ranks",
        default="auto",
        metavar="auto|all|LIST",
        help="ranks to simulate: one of each class, all, or a list such as 0,3,8-11",
    )
    parser.add_argument(
        "--microbatches", default="auto", choices=("auto", "all"), help="microbatches to run: enough to reach the peak, or all"
    )
    parser.add_argument("--level", type=int, default=1, choices=(0, 1, 2, 3), help="MindSpore's simulation level")
    add_device_arguments(parser)
    add_trainer_arguments(parser)
    add_execution_arguments(parser)
    parser.add_argument("--plan-only", action="store_true", help="show the rewritten call and the ranks, run nothing")
    parser.add_argument("--json", action="store_true", help="print the report (or plan) as JSON")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="also write the report as a JUnit file")
    parser.add_argument("--explain", action="store_true", help="record every allocation, and say what fills the memory")
    parser.add_argument("--ab", action="store_true", help="run the script for real as well (needs NPUs) and compare")
    parser.add_argument(
        "--check-classes",
        type=int,
        default=0,
        metavar="N",
        help="simulate N random other ranks and fail if they differ",
    )
    parser.add_argument(
        "--moe-load",
        metavar="even|hot:X|FILE",
        help="how tokens are spread over experts: evenly (default), X times an even load on the busiest expert-parallel rank, "
        "or a JSON file of tokens per expert",
    )
    parser.add_argument(
        "--sample-length",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a fine-tuning sample where the script does not pad them (default: the longest in the data set, if its "
        "index is on this machine, else the sequence length)",
    )
    parser.add_argument(
        "--moe-curve",
        action="store_true",
        help="also count every rank class at growing imbalances, and say where the job stops fitting",
    )
    parser.add_argument("--moe-imbalance", type=float, metavar="X", help="the same as --moe-load hot:X")
    parser.add_argument(
        "--hardware", metavar="NAME|FILE", help="predict the time of an iteration on this hardware, such as ascend910b-64g"
    )
    parser.add_argument("--patches", metavar="FILE", action="append", default=[], help="a patch file of your own")
    parser.add_argument("--partial", action="store_true", help="base the exit status on the ranks that ran, not on the whole job")
    parser.add_argument("--fresh", action="store_true", help="run every rank again, including those of an earlier run")


def add_trainer_arguments(parser: argparse.ArgumentParser) -> None:
    """What runs in a rank, and how many ranks at once; the same for every verb that runs ranks."""
    parser.add_argument(
        "--trainer",
        default="auto",
        choices=("auto", "script", "embedded"),
        help="which trainer to run: the script's own or the embedded one",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="number of ranks to run at once (default: by cores and free memory)"
    )


def add_execution_arguments(parser: argparse.ArgumentParser) -> None:
    """Where and how ranks are run; the same for launch, sweep and search."""
    parser.add_argument(
        "--executor", default="local", choices=("local", "ray"), help="run ranks on this machine or on a Ray cluster"
    )
    parser.add_argument("--cold", action="store_true", help="start every rank as a new process instead of forking a warm one")
    parser.add_argument("--no-cache", action="store_true", help="simulate every rank, even one whose result is cached")
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="time limit for one rank, in seconds"
    )


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """The card that a verdict is about; the same for launch and sweep."""
    parser.add_argument(
        "--device", metavar="NAME|FILE|here", help="the card (default: ascend910b-64g; `mindspeed-dryrun device` lists them)"
    )
    parser.add_argument("--device-from", metavar="DIR", help="read the card's memory from the worker logs of a real run")
    parser.add_argument("--budget", metavar="SIZE", help="memory limit, such as 40G (default: what is usable on the card)")
    parser.add_argument(
        "--margin", metavar="SIZE|PERCENT", help="exit with status 3 unless this much memory is left, such as 1G or 2%%"
    )


def run(args: argparse.Namespace) -> int:
    """Script → job → plan → record → summary."""
    script = Path(args.script)
    spec = spec_from(args)
    with importing_meanwhile(*(_FOR_THE_RUN if not args.plan_only else ())):
        job = read_job(script, spec)
    stem = Path(args.out) if args.out else default_out(script)
    if not args.ab or args.plan_only:
        return run_job(job, stem, args)
    from mindspeed_dryrun.launch.real_run import run_for_real
    from mindspeed_dryrun.report.compare import compare, render_table
    from mindspeed_dryrun.report.compared_runs import read_run

    logs = run_for_real(job, stem)
    status, out = _run_and_print(job, stem, args)
    print(render_table(compare(read_run(logs, "real"), read_run(out, "dry"))), end="")
    return status


def parser() -> argparse.ArgumentParser:
    """The options alone, for an activated msrun."""
    result = argparse.ArgumentParser(prog="mindspeed-dryrun launch", description=__doc__)
    add_arguments(result)
    return result


def run_job(job: Job, stem: Path, args: argparse.Namespace) -> int:
    """Plans and runs a job that is understood, prints what was asked for, and returns the exit status."""
    if args.plan_only:
        return _show_plan(job, stem.absolute(), args)
    if args.junit:
        check_output("--junit", args.junit)
    return _run_and_print(job, stem, args)[0]


def _show_plan(job: Job, out: Path, args: argparse.Namespace) -> int:
    from mindspeed_dryrun.engines.back_ends import engine_for

    engine: Engine | None = None
    missing = ""
    try:
        engine = engine_for(job.back_end, args.level)
    except DryRunError as error:
        missing = str(error)
    plan = dataclasses.replace(make_plan(job, spec_from(args), engine), time=predicted_time(job, args.hardware))
    if args.json:
        print(json_text(plan_json(plan, out)), end="")
        return 0
    print(plan_text(plan, out))
    if plan.time:
        print(time_words(plan.time))
    if missing:
        print(t("note: ") + t(f"this plan cannot be run here: {missing}"))
    return 0


def _run_and_print(job: Job, stem: Path, args: argparse.Namespace) -> tuple[int, Path]:
    """The exit status and the folder of the record: `--out` as it is, else the first that is free or holds this job."""
    from mindspeed_dryrun.launch import load_curve
    from mindspeed_dryrun.launch.executors import Interrupted
    from mindspeed_dryrun.record.store import Record, folder_for
    from mindspeed_dryrun.record.summary import build_report
    from mindspeed_dryrun.report.progress import progress_view

    execution = execution_from(args)
    plan = dataclasses.replace(plan_job(job, spec_from(args), execution), time=predicted_time(job, args.hardware))
    out = (stem if args.out else folder_for(stem, plan.fingerprint)).absolute()
    if args.moe_curve:
        load_curve.check(job, plan.spec)
    before = Record.open(out).ranks_done() if (out / "job.json").is_file() and not args.fresh else set()
    try:
        with progress_view(plan.tasks, quiet=args.json) as view:
            report = run_plan(plan, out, execution, view)
        if args.moe_curve:
            report = load_curve.count_loads(plan, out, report, execution)
    except Interrupted:
        _print_report(build_report(out), out, args)
        raise
    _print_report(report, out, args)
    reused = len(before & {task.rank for task in plan.tasks})
    if reused and not args.json:
        print(t(f"{reused} of {len(plan.tasks)} ranks were run before, by the same versions; --fresh runs them again."))
    if spread := check_results(plan, report):
        print(t(spread))
    return report.exit_status_of_ranks if args.partial else report.exit_status, out


def predicted_time(job: Job, hardware: str | None) -> TimeSummary | None:
    """The time of an iteration on the hardware that was asked for."""
    if hardware is None:
        return None
    from mindspeed_dryrun.devices.hardware import read_hardware
    from mindspeed_dryrun.estimate.job_time import predict_job

    return predict_job(job, read_hardware(hardware))


def _print_report(report: Report, out: Path, args: argparse.Namespace) -> None:
    from mindspeed_dryrun import report as views
    from mindspeed_dryrun.advise.report_page import write_page

    if args.json:
        print(json_text(report.to_json()), end="")
    else:
        print(views.render(report, "table"))
        print(t(f"record: {out}"))
    if args.junit:
        from mindspeed_dryrun.report import junit

        write_output(args.junit, junit.render(report))
    write_page(out)  # last: on a full disk the figures have been shown
    if args.explain and not args.json and report.worst_rank is not None:  # of ranks that all failed there is nothing to explain
        from mindspeed_dryrun.commands.explain import show_explanation

        show_explanation(out)


def _moe_load(args: argparse.Namespace) -> str:
    """The load as a record keeps it: a file's content, not its name."""
    if args.moe_load is not None and args.moe_imbalance is not None:
        raise UsageError("--moe-load and --moe-imbalance exclude each other.")
    return str(moe_load.parse(args.moe_load or (f"hot:{args.moe_imbalance}" if args.moe_imbalance is not None else "even")))


def spec_from(args: argparse.Namespace) -> RunSpec:
    """What the command line asks to be counted; wrong values are refused here."""
    if args.check_classes < 0:
        raise UsageError(f"--check-classes {args.check_classes}: give a number of ranks.")
    if args.sample_length < 0:
        raise UsageError("--sample-length is a number of tokens.")
    return RunSpec(
        sets=parse_sets(args.set),
        script_args=tuple(args.script_args),
        overrides=tuple(getattr(args, "after_dashes", ())),
        ranks=args.ranks,
        microbatches=args.microbatches,
        level=args.level,
        trainer=args.trainer,
        explain=args.explain,
        check_classes=args.check_classes,
        moe_load=_moe_load(args),
        sample_length=args.sample_length,
        patch_files=tuple(str(Path(file).absolute()) for file in args.patches),
        device=args.device,
        device_from=args.device_from,
        budget_mb=parse_size_mb(args.budget) if args.budget else None,
        margin=args.margin,
        hardware=args.hardware,
    )


def execution_from(args: argparse.Namespace) -> Execution:
    """How the command line asks ranks to be run."""
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: at least one rank must run at a time.")
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout {args.timeout}: give a number of seconds above 0.")
    fresh = bool(getattr(args, "fresh", False))
    return Execution(
        jobs=args.jobs,
        executor=args.executor,
        timeout_s=args.timeout,
        fresh=fresh,
        cold=args.cold,
        cache=not args.no_cache and not fresh,
    )


def parse_sets(words: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` words as a mapping."""
    result = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set expects NAME=VALUE and got '{word}'.")
        result[name] = value
    return result


def plan_text(plan: Plan, out: Path) -> str:
    """The rewritten call, the environment, the ranks, and what to know."""
    job, p = plan.job, plan.job.parallel
    level = plan.engine.level if plan.engine else 1
    layout = f"TP {p.tp} · PP {p.pp} · DP {p.dp} · CP {p.cp} · EP {p.ep}" + (f" · VPP {p.vpp}" if p.vpp else "")
    lines = [t(f"job: {job.script} ({job.kind}), {job.world_size} ranks, {layout}")]
    if job.is_megatron:
        lines.append(
            "     "
            + t(
                f"{job.num_layers} layers, {job.seq_length} tokens, micro batch {job.micro_batch}, "
                f"global batch {job.global_batch}, recompute {job.recompute or 'none'}, "
                f"distributed optimizer {'yes' if job.distributed_optimizer else 'no'}"
            )
        )
    engine = f"{plan.engine.title}, CANN {plan.engine.cann}, level {level}" if plan.engine else "none"
    lines += [t(f"engine: {engine}"), t(f"trainer: {plan.trainer.kind}"), "", t(f"{job.launcher} call, rewritten:")]
    lines.append("  " + shlex.join(rewritten_call(job, level, out)))
    lines += ["", t("environment of a rank (beyond the script's own):")]
    lines += [f"  {name}={_shortened(value)}" for name, value in changed_environment(plan).items()]
    lines += ["", t(f"ranks to simulate: {len(plan.tasks)} of {job.world_size}")]
    for task in plan.tasks:
        stage = "-" if task.stage is None else task.stage
        lines.append("  " + t(f"rank {task.rank}  stage {stage}  stands for {ranges(task.represents)}  ({t(task.why)})"))
    lines += ["", t("command of the first one:"), "  " + shlex.join(plan.tasks[0].argv)]
    lines += [t("note: ") + t(note) for note in plan.notes]
    if plan.problem:
        lines.append(t("note: ") + t(f"this plan cannot be run here: {plan.problem}"))
    return "\n".join(lines)


def _shortened(value: str) -> str:
    return value if len(value) <= 160 else value[:157] + "…"
