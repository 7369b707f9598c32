"""Print the JSON Schemas of the files that mindspeed-dryrun reads and writes.

Without a name all are printed as one object; `--into DIR` writes one file each (docs/schema/ is made this way).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindspeed_dryrun.devices.hardware import HardwareFile
from mindspeed_dryrun.devices.real_runs import RealRun
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.files import cannot_write, json_text, write_text
from mindspeed_dryrun.record import model, run_spec
from mindspeed_dryrun.schema import json_schema
from mindspeed_dryrun.search.search_file import SearchFile
from mindspeed_dryrun.sweep.calibration_rows import RowsFile
from mindspeed_dryrun.sweep.sweep_file import SweepFile


def schemas() -> dict[str, dict[str, Any]]:
    """By name, in the order of the data's way."""
    fits = {"fits": {"type": ["boolean", "null"]}}
    return {
        "job": json_schema(run_spec.JobFile, "job.json", run_spec.SCHEMA_VERSION),
        "report": json_schema(model.Report, "report.json", model.SCHEMA_VERSION, fits),
        "hardware": json_schema(HardwareFile, "A device: its memory and its speed"),
        "sweep": json_schema(SweepFile, "A sweep file"),
        "search": json_schema(SearchFile, "A search file"),
        "calibration": json_schema(RowsFile, "Measured rows for `calibrate`"),
        "real_runs": json_schema(list[RealRun], "Dry runs that were run for real as well"),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="job, report, hardware, sweep, search, calibration or real_runs (default: all)"
    )
    parser.add_argument("--into", metavar="DIR", type=Path, help="write NAME.json files there instead of printing")


def run(args: argparse.Namespace) -> int:
    known = schemas()
    if args.name and args.name not in known:
        raise UsageError(f"There is no schema '{args.name}'; known are {', '.join(known)}.")
    chosen = {args.name: known[args.name]} if args.name else known
    if args.into:
        try:
            args.into.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(args.into, error) from None
        for name, schema in chosen.items():
            write_text(args.into / f"{name}.json", json_text(schema))
    else:
        print(json_text(chosen[args.name] if args.name else chosen), end="")
    return 0
