"""Dry-runs every training script of a folder through the product and writes a table: figures, seconds, or why not.

    python benchmarks/support_table.py $MINDSPEED_CORE_MS_PATH/MindSpeed-LLM/examples/mindspore --records DIR --markdown FILE
    python benchmarks/support_table.py … --only 'qwen25/*' --only 'llama3/pretrain*'

Needs MINDSPEED_CORE_MS_PATH and the packages of MindSpeed-Core-MS's requirements.txt. Each script has a record of its own in
DIR; started again, ranks that are done are not run again. Scripts run as they are: nothing is set, nothing is changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec


@dataclass(frozen=True)
class Row:
    """One script."""

    script: str
    layout: str = ""
    ranks: str = ""
    used_peak_mb: int | None = None
    actual_peak_mb: int | None = None
    worst: str = ""
    seconds: float | None = None
    result: str = ""


def training_scripts(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Shell scripts that call msrun with a trainer of MindSpeed-LLM."""
    for script in sorted(folder.rglob("*.sh")):
        text = script.read_text(encoding="utf-8", errors="replace")
        trains = "msrun" in text and ("pretrain_gpt.py" in text or "posttrain_gpt.py" in text)
        if trains and (not patterns or any(fnmatch(str(script.relative_to(folder)), pattern) for pattern in patterns)):
            yield script


def row_of(script: Path, folder: Path, spec: RunSpec, execution: Execution, records: Path) -> Row:
    """Runs one script; what goes wrong is the row's result."""
    name = str(script.relative_to(folder))
    start = time.monotonic()
    try:
        job = read_job(script, spec)
        layout = _layout(job.parallel, job.world_size)
        try:
            report = dry_run_job(job, records / name.removesuffix(".sh").replace("/", "_"), spec, execution)
        except DryRunError as error:
            return Row(name, layout, result=f"not run: {error}")
    except DryRunError as error:
        return Row(name, result=f"not run: {error}")
    return _row(name, layout, report, time.monotonic() - start)


def _row(name: str, layout: str, report: Report, seconds: float) -> Row:
    failed = [rank for rank in report.ranks if rank.status in ("failed", "timeout")]
    counted = sum(rank.seconds or 0 for rank in report.ranks)
    ranks = " ".join(f"{rank.rank}:{rank.used_peak_mb or '-'}" for rank in report.ranks)
    if failed:
        return Row(name, layout, ranks, seconds=counted or seconds, result=f"{failed[0].status}: {failed[0].error}")
    stage = next((rank.stage for rank in report.ranks if rank.rank == report.worst_rank), None)
    return Row(
        name,
        layout,
        ranks,
        report.used_peak_mb,
        report.actual_peak_mb,
        f"{report.worst_rank} (stage {stage})",
        counted or seconds,
        "fits" if report.fits else "does not fit",
    )


def _layout(parallel: object, world_size: int) -> str:
    sizes = dataclasses.asdict(parallel)  # type: ignore[call-overload]
    parts = [f"{name.upper()}{size}" for name, size in sizes.items() if size and (size > 1 or name in ("tp", "pp"))]
    return f"{world_size}: {' '.join(parts)}"


def markdown(rows: Sequence[Row]) -> str:
    """The table, and how many work."""
    lines = [
        "| script | ranks: layout | used peak | with fragments | worst rank | used peak by simulated rank | s | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.script,
            row.layout,
            f"{row.used_peak_mb}M" if row.used_peak_mb else "",
            f"{row.actual_peak_mb}M" if row.actual_peak_mb else "",
            row.worst,
            row.ranks,
            f"{row.seconds:.0f}" if row.seconds is not None else "",
            " ".join(row.result.split())[:160],
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    good = sum(row.used_peak_mb is not None for row in rows)
    return "\n".join([f"{good} of {len(rows)} scripts run to their end.", "", *lines, ""])


def main() -> None:
    """Runs the scripts one after the other; the table is written again after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=Path, required=True, help="folder for the records")
    parser.add_argument("--markdown", type=Path, help="file for the table (default: standard output, at the end)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="scripts by their path in the folder"
    )
    parser.add_argument("--jobs", type=int, default=1, help="ranks at a time")
    parser.add_argument("--ranks", default="auto", help="as in `launch`: auto (every rank class), all, or a list")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for each rank")
    args = parser.parse_args()
    rows_file = args.records / "rows.json"
    rows = {row["script"]: Row(**row) for row in json.loads(rows_file.read_text())} if rows_file.is_file() else {}
    args.records.mkdir(parents=True, exist_ok=True)
    spec = RunSpec(trainer="script", ranks=args.ranks)
    execution = Execution(jobs=args.jobs, timeout_s=args.timeout)
    for script in training_scripts(args.folder, args.only):
        row = row_of(script, args.folder, spec, execution, args.records)
        rows[row.script] = row
        print(f"{row.script}: {row.result} {row.ranks}", flush=True)
        ordered = [rows[name] for name in sorted(rows)]
        rows_file.write_text(json.dumps([dataclasses.asdict(row) for row in ordered], indent=1))
        if args.markdown:
            args.markdown.write_text(markdown(ordered), encoding="utf-8")
    if not args.markdown:
        print(markdown([rows[name] for name in sorted(rows)]))


if __name__ == "__main__":
    main()
