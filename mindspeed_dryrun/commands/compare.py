"""Compare two records or folders of msrun logs: per rank, per stage and for the worst rank, in MB and percent.

A and B are records, folders of worker_*.log files (real or dry) or report.json files. One file of published figures
(examples/ab/) can stand alone and is shown as its table. `--max-diff 2%` is for CI: exit status 1 where the used
peaks of a rank differ by more, or where one side has no figure.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_dryrun.devices.real_runs import save_run
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import t
from mindspeed_dryrun.report import compare as view
from mindspeed_dryrun.report.compared_runs import read_run, real_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a record, a folder of logs, or a report.json")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="the run to compare it with")
    parser.add_argument("--labels", default=None, help="names of the two sides, e.g. real,dry (default: A,B)")
    parser.add_argument("--max-diff", metavar="LIMIT", help="2%% or 500M: fail if used peaks differ by more")
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")
    parser.add_argument(
        "--save", action="store_true", help="keep the pair: later verdicts leave the margin that your real runs needed"
    )


def run(args: argparse.Namespace) -> int:
    if args.b is None:
        if not args.a.is_file():
            raise UsageError("compare needs two runs (A and B), or one file of published figures.")
        print(view.render_published(args.a), end="")
        return _check([scenario.found for scenario in view.read_published(args.a).scenarios], args.max_diff)
    labels = tuple(part.strip() for part in (args.labels or "A,B").split(","))
    if len(labels) != 2 or not all(labels):
        raise UsageError(f"--labels '{args.labels}' must be two names with a comma between them, like real,dry.")
    a, b = read_run(args.a, labels[0]), read_run(args.b, labels[1])
    found = view.compare(a, b)
    renderers = {"table": view.render_table, "json": view.render_json, "markdown": view.render_markdown}
    print(renderers[args.format](found), end="")
    if args.save:
        file = save_run(real_run(a, b))
        print(t(f"The pair is kept in {file}; later verdicts read it."), file=sys.stderr)
    return _check([found], args.max_diff)


def _check(found: list[view.Comparison], limit: str | None) -> int:
    if limit is None:
        return 0
    sentences = [sentence for comparison in found for sentence in view.beyond(comparison, limit)]
    for sentence in sentences:
        print(f"mindspeed-dryrun: {t(sentence)}", file=sys.stderr)
    return 1 if sentences else 0
