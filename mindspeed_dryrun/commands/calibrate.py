"""Fit the time model to your own training logs.

    mindspeed-dryrun calibrate worker_0.log --hardware ascend910b-64g --out mine.yaml
    mindspeed-dryrun calibrate rows.yaml --hardware ascend910b-64g --out mine.yaml

A SOURCE is a log of a real training run (rank 0's, which prints the trainer's arguments; with --script any rank's), or a
YAML file with `script` and `rows`, each row with `set`/`args` and one of `log`, `iteration_ms`, `tflops_per_card`.
Three efficiencies are fitted: computing, communicating, exchanging between pipeline stages. Give an interleaved (VPP) and
a plain run to tell the last one apart. Name the file that --out writes as `hardware` of a search or a sweep.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindspeed_dryrun.commands.launch import parse_sets
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.calibration import MeasuredRun
from mindspeed_dryrun.files import write_output
from mindspeed_dryrun.language import t


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sources and the hardware file to start from."""
    parser.add_argument("sources", metavar="SOURCE", nargs="+", type=Path, help="training logs, or a YAML file of rows")
    parser.add_argument("--hardware", metavar="NAME|FILE", required=True, help="the device or hardware file to start from")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the calibrated hardware file")
    parser.add_argument("--script", metavar="SCRIPT", type=Path, help="the script that the logs come from")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="script variable, as for launch")


def run(args: argparse.Namespace) -> int:
    """Reads, fits, prints, writes."""
    import yaml

    from mindspeed_dryrun.devices.hardware import read_hardware, to_yaml
    from mindspeed_dryrun.estimate.calibration import fit
    from mindspeed_dryrun.report.text import table

    hardware = read_hardware(args.hardware)
    if hardware.calibrated:
        raise UsageError(f"{args.hardware} is calibrated already: start from the file that it was made from.")
    rows = [row for source in args.sources for row in _rows(source, args)]
    done = fit(rows, hardware)
    held_out = dict(done.held_out)
    lines = [
        [
            name,
            row.strategy.name,
            f"{row.seconds:.2f}",
            f"{row.seconds * (1 + error):.2f}",
            f"{100 * error:+.1f}%",
            f"{100 * held_out[name]:+.1f}%" if name in held_out else "-",
        ]
        for row, (name, error) in zip(rows, done.residuals, strict=True)
    ]
    print(table(["row", "strategy", "measured s", "fitted s", "error", "error if left out"], lines, left=2))
    print(
        t(
            f"Computing {done.compute:.2f}, communicating {done.communication:.2f} and exchanging between stages "
            f"{done.exchange:.2f} times as fast as {args.hardware} says; "
            f"predictions are good to ±{100 * (done.hardware.error or 0):.0f}%."
        )
    )
    if args.out:
        text = f"# {hardware.name}, calibrated by mindspeed-dryrun from: {', '.join(row.name for row in rows)}\n"
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_output(args.out, text + yaml.safe_dump(to_yaml(done.hardware), sort_keys=False, allow_unicode=True))
        print(t(f"written: {args.out}"))
    return 0


def _rows(source: Path, args: argparse.Namespace) -> Sequence[MeasuredRun]:
    from mindspeed_dryrun.estimate.calibration import row_of_log
    from mindspeed_dryrun.sweep.calibration_rows import read_rows

    if source.suffix in (".yaml", ".yml"):
        return read_rows(source)
    if args.script is None:
        return [row_of_log(source)]
    from mindspeed_dryrun.sweep.sweep import variant_job
    from mindspeed_dryrun.sweep.sweep_file import Variant

    job = variant_job(args.script, Variant("", parse_sets(args.set)))
    return [row_of_log(source, job.args, job.world_size)]
