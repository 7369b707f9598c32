"""Find the best parallel strategy under a memory budget.

    mindspeed-dryrun search examples/searches/qwen25_7b_8cards.yaml

FILE names the model's script, the cluster, the budget and what may vary. Every strategy that Megatron allows is listed,
what cannot fit is struck out, the rest is put in order by predicted time; memory is learnt from a few small dry runs, and
the winners are verified by full ones before they are named. Results in --out: `strategy.json`, the script with the
strategy set, the arguments that the weight conversion must be given, `search.html`. The same --out continues.
Exit status: 0 a strategy fits, 3 none does, 1 a dry run failed, 2 wrong use, 128 + N ended by signal N.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mindspeed_dryrun.commands.launch import execution_from
from mindspeed_dryrun.commands.sweep import add_run_arguments, run_spec
from mindspeed_dryrun.errors import exit_status_after
from mindspeed_dryrun.language import t


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
    from mindspeed_dryrun.report.text import duration, say
    from mindspeed_dryrun.search import results
    from mindspeed_dryrun.search.run_search import finish, prepare
    from mindspeed_dryrun.search.search import SearchProgress

    def on_progress(progress: SearchProgress) -> None:
        left = ", " + t(f"about {duration(progress.seconds_left)} left") if progress.seconds_left else ""
        say(f"[{progress.dry_runs + 1}] {t(progress.phase)}: {progress.what}{left}")

    folder = args.out or Path(f"search-{args.file.stem}")
    prepared = prepare(args.file, folder, run_spec(args, None), execution_from(args), on_progress)
    if args.plan_only:
        listed = prepared.search.result
        print(t(f"{listed.considered} strategies, {listed.struck_out} struck out by the lower bound. The fastest of the rest:"))
        for candidate in listed.candidates[:20]:
            print(f"{candidate.seconds:8.2f} s  {candidate.strategy.name}  " + t(f"at least {candidate.bound_mb:.0f}M"))
        return 0
    found = finish(prepared, folder, args.trace)
    result = found.result
    if args.json and result.winners:
        print((folder / "strategy.json").read_text(encoding="utf-8"), end="")
    elif args.json:
        print(json.dumps({"schema_version": results.SCHEMA_VERSION, "error": results.nothing_fits(result)}))
    else:
        print(results.to_text(result, found.shape, found.plan.hardware))
        print(t(f"written: {', '.join(str(path) for path in found.written)}"))
    if result.interrupted:
        return exit_status_after(result.interrupted)
    if result.winners:
        return 0
    return 1 if result.failed and not result.closest else 3
