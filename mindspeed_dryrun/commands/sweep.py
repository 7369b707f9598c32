"""Run variants of one script into one table.

    mindspeed-dryrun sweep examples/sweeps/qwen25_7b_lab.yaml

FILE names a script and its variants: a list, or the product of choices. A variant may change script variables (`set`),
trainer arguments (`args`) and environment variables (`env`). Results: a table, `sweep.json` and `sweep.html` in --out,
and one record a variant below it; the same --out continues where it stopped.
Exit status: 0 all fit, 3 at least one does not fit, 1 one failed, timed out or was not reached, 2 wrong use,
128 + N ended by signal N.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from mindspeed_dryrun.commands.launch import add_device_arguments, add_execution_arguments, add_trainer_arguments, execution_from
from mindspeed_dryrun.errors import exit_status_after
from mindspeed_dryrun.files import json_text
from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.units import parse_size_mb

_MANY = 4096  # ranks at once on a cluster: Ray itself decides by its CPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What sweep and launch have in common, and the file."""
    parser.add_argument("file", metavar="FILE.yaml", type=Path, help="script and variants")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder for the results (default: sweep-FILE)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """How dry runs are run; the same for sweep and search."""
    add_device_arguments(parser)
    add_trainer_arguments(parser)
    add_execution_arguments(parser)


def run_spec(args: argparse.Namespace, budget_mb: int | None) -> RunSpec:
    """What sweep and search have counted of each variant; the command line's budget goes before the file's."""
    return RunSpec(
        trainer=args.trainer,
        device=args.device,
        device_from=args.device_from,
        budget_mb=parse_size_mb(args.budget) if args.budget else budget_mb,
        margin=args.margin,
    )


def run(args: argparse.Namespace) -> int:
    """Reads, runs, prints."""
    from mindspeed_dryrun.launch.executors import SharedPlaces, host
    from mindspeed_dryrun.launch.run import dry_run_beside
    from mindspeed_dryrun.report.text import duration, say
    from mindspeed_dryrun.sweep.sweep import Sweep, VariantResult, exit_status, to_json, to_text
    from mindspeed_dryrun.sweep.sweep_file import read_sweep

    plan = read_sweep(args.file)
    folder = args.out or Path(f"sweep-{args.file.stem}")
    at_once = args.jobs or (host.usable_cores() if args.executor == "local" else len(plan.variants))
    shared = SharedPlaces(args.jobs or (at_once if args.executor == "local" else _MANY), args.cold)
    execution = dataclasses.replace(execution_from(args), shared=shared)
    spec = run_spec(args, plan.budget_mb)
    started = time.monotonic()

    def on_row(before: int, row: VariantResult) -> None:
        missing = len(plan.variants) - before - 1
        left = ", " + t(f"about {duration((time.monotonic() - started) / (before + 1) * missing)} left") if missing else ""
        say(f"[{before + 1}/{len(plan.variants)}] {row.variant.name}: {t(row.said)}{left}")

    def dry_run(job: Job, stem: Path) -> Report:
        return dry_run_beside(job, stem, spec, execution)[0]

    if args.executor == "ray":
        from mindspeed_dryrun.launch.executors import ray

        ray.connected()  # in this thread, for all of them
    sweep = Sweep(plan, folder, dry_run, on_row, at_once, shared.stop)
    with shared:
        rows = sweep.run()
    if args.json:
        print(json_text(to_json(rows)), end="")
    else:
        print(to_text(plan, rows))
        print(t(f"record: {folder} (sweep.html, sweep.json)"))
    if sweep.interrupted:
        say("Interrupted: these are the results so far. The same --out continues.")
        return exit_status_after(sweep.interrupted)
    return exit_status(rows)
