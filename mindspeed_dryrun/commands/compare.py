"""Compare two records or folders of msrun logs: per rank, per stage and for the worst rank, in MB and percent.

A and B are records, folders of worker_*.log files (real or dry) or report.json files. One file of published figures
(examples/ab/) can stand alone and is shown as its table. `--max-diff 2%` is for CI: exit status 1 where the used
peaks of a rank differ by more, or where one side has no figure.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from mindspeed_dryrun.commands.report import load
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron.arguments import pairs
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report import compare as view
from mindspeed_dryrun.report.compare import Run

_LOGGED_ARGUMENT = re.compile(rb"^\s{0,4}([a-z]\w+) \.{2,} (.*?)\s*$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a record, a folder of logs, or a report.json")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="the other one")
    parser.add_argument("--labels", default=None, help="names of the two sides, e.g. real,dry (default: A,B)")
    parser.add_argument("--max-diff", metavar="LIMIT", help="2%% or 500M: fail if used peaks differ by more")
    parser.add_argument("--format", choices=("table", "json", "markdown"), default="table")


def run(args: argparse.Namespace) -> int:
    if args.b is None:
        if not args.a.is_file():
            raise UsageError("compare needs two runs (A and B), or one file of published figures.")
        print(view.render_published(args.a), end="")
        _, _, scenarios = view.read_published(args.a)
        return _check([found for _, found, _, _ in scenarios], args.max_diff)
    labels = tuple(part.strip() for part in (args.labels or "A,B").split(","))
    if len(labels) != 2 or not all(labels):
        raise UsageError(f"--labels '{args.labels}' must be two names with a comma between them, like real,dry.")
    found = view.compare(read_run(args.a, labels[0]), read_run(args.b, labels[1]))
    renderers = {"table": view.render_table, "json": view.render_json, "markdown": view.render_markdown}
    print(renderers[args.format](found), end="")
    return _check([found], args.max_diff)


def read_run(path: Path, label: str) -> Run:
    """One side of a comparison, with what its record or its logs tell of its arguments and environment."""
    if path.is_file():
        try:
            report = Report.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a report.json ({error!r}).") from None
        return Run(label, report, _flags(report), {})
    report, record = load(path)
    if record is None:
        return Run(label, report, logged_arguments(path), {}, flags_logged=True)
    return Run(label, report, _flags(report), _environment(record))


def logged_arguments(folder: Path) -> dict[str, str]:
    """The arguments that Megatron prints at the start of a log, as flags; empty where no log has them."""
    for log in sorted(folder.glob("**/worker_*.log"))[:8]:
        found = {}
        with log.open("rb") as file:
            for number, line in enumerate(file):
                match = _LOGGED_ARGUMENT.match(line)
                if match:
                    name = "--" + match[1].decode().replace("_", "-")
                    found[name] = match[2].decode(errors="replace")
                elif (found and b"end of arguments" in line) or number > 20_000:
                    break
        if found:
            return found
    return {}


def _flags(report: Report) -> dict[str, str]:
    if report.job is None:
        return {}
    return {name: " ".join(words) or "set" for name, words in pairs(report.job.trainer_args) if name}


def _environment(record: Path) -> Mapping[str, str]:
    try:
        return dict(json.loads((record / "job.json").read_text(encoding="utf-8")).get("environment", {}))
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _check(found: list[view.Comparison], limit: str | None) -> int:
    if limit is None:
        return 0
    sentences = [sentence for comparison in found for sentence in view.beyond(comparison, limit)]
    for sentence in sentences:
        print(f"mindspeed-dryrun: {sentence}", file=sys.stderr)
    return 1 if sentences else 0
