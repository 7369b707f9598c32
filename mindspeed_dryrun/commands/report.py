"""Summarise a record, or any folder of msrun worker logs, real or dry.

The worst rank comes first; thousands of ranks are folded by class. `--format html` prints one self-contained page.
Exit status: 0 it fits, 3 it does not, 1 a rank failed or the verdict is open.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mindspeed_dryrun.files import write_output
from mindspeed_dryrun.record.summary import load_report
from mindspeed_dryrun.report import FORMATS, render, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="a record, or a folder of worker_*.log files")
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write to this file instead of the screen")


def run(args: argparse.Namespace) -> int:
    report, record = load_report(args.directory)
    if args.format == "html":
        from mindspeed_dryrun.advise.report_page import render_page

        text = render_page(report, record)
    elif args.format == "table" and not args.output:
        text = table.render(report, colour=wants_colour())
    else:
        text = render(report, args.format)
    if args.output:
        write_output(args.output, text)
    else:
        print(text, end="")
    return report.exit_status


def wants_colour() -> bool:
    """On a terminal only, and not where the user said NO_COLOR."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
