"""Finds the best parallel strategy under a memory budget.

    mindspeed-dryrun search examples/searches/qwen25_7b_8cards.yaml

FILE names the model's script, the cluster, the budget and what may vary. Every strategy that Megatron allows is listed,
what cannot fit is struck out, the rest is put in order by predicted time; memory is learnt from a few small dry runs, and
the winners are verified by full ones before they are named. Results in --out: `strategy.json`, the script with the
strategy set, the arguments that the weight conversion must be given, `search.html`. The same --out continues.
Exit status: 0 a strategy fits, 3 none does, 1 a dry run failed, 2 wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_dryrun.commands.launch import execution_from
from mindspeed_dryrun.commands.sweep import add_run_arguments, run_spec
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.units import parse_size_mb

if TYPE_CHECKING:
    from mindspeed_dryrun.search.search import SearchResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and how dry runs are run."""
    parser.add_argument("file", metavar="FILE.yaml", type=Path, help="script, cluster, budget and space")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the results (default: search-FILE)")
    parser.add_argument("--json", action="store_true", help="print strategy.json")
    parser.add_argument("--plan-only", action="store_true", help="list and count the strategies; dry-run nothing")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write the best one's predicted schedule as a Chrome trace (Perfetto)"
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Reads, searches, writes, prints."""
    from mindspeed_dryrun.estimate.operators import Operators, read_operators
    from mindspeed_dryrun.estimate.strategy import read_dispatcher
    from mindspeed_dryrun.launch.executors import Shared, host
    from mindspeed_dryrun.launch.script import capture
    from mindspeed_dryrun.megatron.arguments import override_args
    from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape
    from mindspeed_dryrun.report.text import duration, say
    from mindspeed_dryrun.search import results
    from mindspeed_dryrun.search.measure import DryRuns
    from mindspeed_dryrun.search.search import Progress, Search
    from mindspeed_dryrun.search.search_file import read_search
    from mindspeed_dryrun.search.space import strategies, why_nothing

    plan = read_search(args.file)
    budget_mb = parse_size_mb(args.budget) if args.budget else plan.budget_mb
    folder = args.out or Path(f"search-{args.file.stem}")
    call = capture(plan.script, plan.sets)
    call = dataclasses.replace(call, program_args=override_args(call.program_args, plan.args))
    shape = read_shape(call.program_args)
    words = call.program_args
    listed = strategies(shape, plan.world, plan.space, read_dispatcher(words))
    if not listed:
        raise UsageError(f"{args.file}: {why_nothing(shape, plan.world, plan.space)}")
    spec = run_spec(args, budget_mb)
    if spec.device is None and spec.device_from is None:
        spec = dataclasses.replace(spec, device=plan.device)
    shared = Shared(args.jobs or host.usable_cores(), args.cold) if args.executor == "local" else None
    execution = dataclasses.replace(execution_from(args), shared=shared)
    measure = DryRuns(call, str(plan.script), plan.cards_per_node, folder / "runs", spec, execution)

    def on_progress(progress: Progress) -> None:
        left = f", about {duration(progress.seconds_left)} left" if progress.seconds_left else ""
        say(f"[{progress.dry_runs + 1}] {progress.phase}: {progress.what}{left}")

    def variant(options: tuple[str, ...]) -> tuple[ModelShape, Operators]:
        changed = override_args(words, options)
        return read_shape(changed), read_operators(changed)

    search = Search(
        shape, listed, plan.hardware, budget_mb, measure, plan.winners, on_progress, plan.space.per_stage, variant=variant
    )
    if args.plan_only:
        _print_plan(search.result)
        return 0
    with shared or contextlib.nullcontext():
        result = search.run()
    written = results.write_results(folder, result, shape, plan.hardware, plan, args.trace)
    if args.json and result.winners:
        print((folder / "strategy.json").read_text(encoding="utf-8"), end="")
    elif args.json:
        print(json.dumps({"schema_version": results.SCHEMA_VERSION, "error": results.nothing_fits(result)}))
    else:
        print(results.to_text(result, shape, plan.hardware))
        print("written: " + ", ".join(str(path) for path in written))
    return _exit_status(result)


def _print_plan(found: SearchResult) -> None:
    print(f"{found.considered} strategies, {found.struck_out} struck out by the lower bound. The fastest of the rest:")
    for candidate in found.candidates[:20]:
        print(f"{candidate.seconds:8.2f} s  {candidate.strategy.name}  at least {candidate.bound_mb:.0f}M")


def _exit_status(result: SearchResult) -> int:
    if result.interrupted:
        return 130
    if result.winners:
        return 0
    return 1 if result.failed and not result.closest else 3
