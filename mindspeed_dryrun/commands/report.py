"""Summarise a record, or any folder of msrun worker logs, real or dry.

The worst rank comes first; thousands of ranks are folded by class. `--format html` prints one self-contained page.
Exit status: 0 everything fits, 3 something does not, 1 a rank failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report import FORMATS, render, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="a record, or a folder of worker_*.log files")
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write there instead of to the screen")


def run(args: argparse.Namespace) -> int:
    report, record = load(args.directory)
    if args.output:
        args.output.write_text(render(report, args.format, record), encoding="utf-8")
    elif args.format == "table":
        print(table.render(report, colour=wants_colour()), end="")
    else:
        print(render(report, args.format, record), end="")
    return exit_status(report)


def load(directory: Path) -> tuple[Report, Path | None]:
    """The report of a record (with its folder) or of a folder of logs (with None)."""
    from mindspeed_dryrun.record.summary import build_report, report_from_logs

    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder: give a record or a folder of worker_*.log files.")
    if (directory / "job.json").exists():
        return build_report(directory), directory
    return report_from_logs(directory), None


def exit_status(report: Report) -> int:
    """0 all fits · 3 at least one rank does not fit · 1 a rank failed or timed out, or there is no figure."""
    if any(rank.status in ("failed", "timeout") for rank in report.ranks) or not report.ranks:
        return 1
    return 3 if report.fits is False else 0


def wants_colour() -> bool:
    """On a terminal only, and not where the user said NO_COLOR."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
