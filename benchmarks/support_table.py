"""Dry-runs every training script of a release through the product, and writes the table of several releases side by side.

    export MINDSPEED_CORE_MS_PATH=DIR                     # MindSpeed-LLM, MindSpeed and Megatron-LM of one release
    python benchmarks/support_table.py run --records RECORDS/26.1.0
    python benchmarks/support_table.py run --records RECORDS/26.1.0 --only 'qwen25/*' --ranks 0
    python benchmarks/support_table.py run DIR/MindSpeed-LLM/examples/mcore --records RECORDS/torch     # with torch_npu
    python benchmarks/support_table.py page RECORDS/2.2.0 RECORDS/26.1.0 > docs/support.md

`run` needs the packages that upstream imports (`mindspeed-dryrun doctor` names them). Each script has a record of its own;
started again, ranks that are done are not run again. Scripts run as they are: nothing is set, nothing is changed. Where a
script fails by an error of upstream's own for which the tool names a flag, it is run once more with that flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.releases import release_of
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec

EXAMPLES = "examples/mindspore"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One script of one release."""

    script: str
    layout: str = ""
    ranks: str = ""  # used peak by simulated rank
    used_peak_mb: int | None = None
    actual_peak_mb: int | None = None
    worst: str = ""
    seconds: float | None = None
    result: str = ""
    flag: str = ""  # that had to be added: the script fails without it, on an NPU too

    @property
    def of_rank_0(self) -> int | None:
        """Used peak of rank 0, which every table has: what releases are compared by."""
        figures = dict(pair.split(":") for pair in self.ranks.split())
        return int(figures["0"]) if self.used_peak_mb is not None and figures.get("0", "-").isdigit() else None


def training_scripts(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Shell scripts that call msrun, torchrun or torch.distributed.launch with a trainer of MindSpeed-LLM."""
    for script in sorted(folder.rglob("*.sh")):
        text = script.read_text(encoding="utf-8", errors="replace")
        starts = any(launcher in text for launcher in ("msrun", "torchrun", "torch.distributed."))
        trains = starts and ("pretrain_gpt.py" in text or "posttrain_gpt.py" in text)
        if trains and (not patterns or any(fnmatch(str(script.relative_to(folder)), pattern) for pattern in patterns)):
            yield script


def row_of(script: Path, folder: Path, spec: RunSpec, execution: Execution, records: Path) -> Row:
    """Runs one script; what goes wrong is the row's result."""
    name = str(script.relative_to(folder))
    record = records / name.removesuffix(".sh").replace("/", "_")
    row = _run(name, script, spec, execution, record)
    sentence, _, flag = row.result.partition("Add it to the command: -- ")
    if not flag:
        return row
    with_flag = dataclasses.replace(spec, overrides=tuple(flag.split()))
    again = _run(name, script, with_flag, execution, record.with_name(f"{record.name}_with_flag"))
    result = f"{sentence.removeprefix('failed: ').strip()} With it: {again.result}"
    return dataclasses.replace(again, flag=flag, result=result)


def _run(name: str, script: Path, spec: RunSpec, execution: Execution, record: Path) -> Row:
    start = time.monotonic()
    layout = ""
    try:
        job = read_job(script, spec)
        layout = _layout(job.parallel, job.world_size)
        report = dry_run_job(job, record, spec, execution)
    except DryRunError as error:
        return Row(script=name, layout=layout, result=f"not run: {error}")
    return _row(name, layout, report, time.monotonic() - start)


def _row(name: str, layout: str, report: Report, seconds: float) -> Row:
    failed = [rank for rank in report.ranks if rank.status in ("failed", "timeout")]
    counted = sum(rank.seconds or 0 for rank in report.ranks) or seconds
    ranks = " ".join(f"{rank.rank}:{rank.used_peak_mb or '-'}" for rank in report.ranks)
    if failed:
        result = f"{failed[0].status}: {failed[0].error}"
        return Row(script=name, layout=layout, ranks=ranks, seconds=counted, result=result)
    stage = next((rank.stage for rank in report.ranks if rank.rank == report.worst_rank), None)
    return Row(
        script=name,
        layout=layout,
        ranks=ranks,
        used_peak_mb=report.used_peak_mb,
        actual_peak_mb=report.actual_peak_mb,
        worst=f"{report.worst_rank} (stage {stage})",
        seconds=counted,
        result=report.verdict.value.replace("_", " "),
    )


def _layout(parallel: object, world_size: int) -> str:
    sizes = dataclasses.asdict(parallel)  # type: ignore[call-overload]
    parts = [f"{name.upper()}{size}" for name, size in sizes.items() if size and (size > 1 or name in ("tp", "pp"))]
    return f"{world_size}: {' '.join(parts)}"


# -- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The rows of one release, and what they were run with."""

    release: str
    versions: str
    ranks: str
    rows: tuple[Row, ...]
    folder: str = EXAMPLES

    @classmethod
    def read(cls, folder: Path) -> Table:
        content = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        rows = tuple(Row(**row) for row in content["rows"])
        return cls(content["release"], content["versions"], content["ranks"], rows, content.get("folder", EXAMPLES))

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / "rows.json").write_text(text, encoding="utf-8")

    @property
    def by_script(self) -> dict[str, Row]:
        return {row.script: row for row in self.rows}

    def counts(self) -> str:
        alone = sum(row.used_peak_mb is not None and not row.flag for row in self.rows)
        helped = sum(row.used_peak_mb is not None and bool(row.flag) for row in self.rows)
        more = f"; {helped} more with the flag that the tool names" if helped else ""
        return f"{alone} of {len(self.rows)} run to their end{more}"


def page(tables: Sequence[Table]) -> str:
    """Releases side by side, then what differs between them, then why scripts do not run."""
    lines = ["# Support: upstream's own scripts", "", *(line.format(folder=tables[0].folder) for line in _INTRODUCTION), ""]
    lines += [f"- **{table.release}** ({table.versions}): {table.counts()}." for table in tables]
    lines += ["", "## Used peak of rank 0 in M, and seconds for all ranks that were run", ""]
    names = sorted({row.script for table in tables for row in table.rows})
    lines += _markdown(
        ["script", "ranks: layout", *(table.release for table in tables)],
        [[name, _layout_of(name, tables), *(_cell(table.by_script.get(name)) for table in tables)] for name in names],
    )
    lines += ["", "## Figures that differ between releases", "", *_differences(names, tables)]
    lines += ["", "## Why scripts do not run as they are", ""]
    reasons = [[table.release, row.script, _short(row.result)] for table in tables for row in table.rows if _stuck(row)]
    lines += _markdown(["release", "script", "reason"], reasons) if reasons else ["All run."]
    return "\n".join([*lines, ""])


_INTRODUCTION = (
    "The training scripts of `{folder}`, unmodified, with the real MindSpeed-LLM, MindSpeed and Megatron-LM of each",
    "release. Made by `benchmarks/support_table.py`; the seconds were measured on a busy machine with two cores. A figure with",
    "a star is of a script that fails on an NPU too, run with the flag that the tool names.",
)


def _stuck(row: Row) -> bool:
    return row.used_peak_mb is None or bool(row.flag)


def _layout_of(name: str, tables: Sequence[Table]) -> str:
    layouts = [table.by_script[name].layout for table in tables if name in table.by_script]
    return next((layout for layout in layouts if layout), "")


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row.used_peak_mb is None:
        return "does not run"
    return f"{row.of_rank_0 or row.used_peak_mb}{'*' if row.flag else ''} ({row.seconds or 0:.0f} s)"


def _differences(names: Sequence[str], tables: Sequence[Table]) -> list[str]:
    rows = []
    for name in names:
        found = {table.release: table.by_script[name] for table in tables if name in table.by_script}
        figures = {release: row.of_rank_0 for release, row in found.items() if row.of_rank_0}
        if len(set(figures.values())) > 1:
            reason = next((text for pattern, text in _REASONS.items() if fnmatch(name, pattern)), "not looked into yet")
            rows.append([name, ", ".join(f"{release}: {figure}" for release, figure in figures.items()), reason])
    header = ["script", "used peak of rank 0", "the tensor"]
    return _markdown(header, rows) if rows else ["None: every script counts the same in all releases."]


# Found with `launch --explain` on both releases and a look at what fills the memory at the peak.
_REASONS = {
    "gemma2/*": "from 26.0.0 on the data loader makes a mask (args.create_attention_mask_in_dataloader), and every layer with a "
    "sliding window makes its own from it: 21 of Bool[1, 1, 8192, 8192] (tasks/models/transformer/transformer_layer.py:82)",
    "llama3*/tune*full*": "from 26.0.0 on --transformer-impl is transformer_engine: its norm keeps bfloat16 where the one before "
    "kept Float32[8192, 1, 4096] (MindSpeed's te/pytorch/module/layernorm_column_parallel_linear.py, _rmsnorm)",
}


def _short(text: str) -> str:
    return " ".join(text.split())[:400]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


# -- command line ----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Runs the scripts one after the other; the rows are written again after each."""
    root = Path(os.environ.get("MINDSPEED_CORE_MS_PATH") or sys.exit("Set MINDSPEED_CORE_MS_PATH."))
    folder = args.folder or root / "MindSpeed-LLM" / EXAMPLES
    args.records.mkdir(parents=True, exist_ok=True)
    known = {}
    if (args.records / "rows.json").is_file():
        known = Table.read(args.records).by_script
    spec = RunSpec(trainer="script", ranks=args.ranks)
    execution = Execution(jobs=args.jobs, timeout_s=args.timeout)
    versions = _versions()
    named = str(folder.relative_to(root / "MindSpeed-LLM")) if folder.is_relative_to(root) else folder.name
    for script in training_scripts(folder, args.only):
        row = row_of(script, folder, spec, execution, args.records)
        known[row.script] = row
        print(f"{row.script}: {row.result} {row.ranks}", flush=True)
        rows = tuple(known[name] for name in sorted(known))
        Table(release_of(root) or "unknown", versions, args.ranks, rows, named).write(args.records)


def _versions() -> str:
    """The engine that is installed here: a Python has MindSpore or torch_npu, hardly both."""
    names = {"mindspore": "MindSpore", "torch_npu": "torch_npu"}
    return " and ".join(f"{title} {version}" for name, title in names.items() if (version := installed.version(name)))


def main() -> None:
    """`run` or `page`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    runs = verbs.add_parser("run", help="dry-run the scripts of one release")
    runs.add_argument("folder", type=Path, nargs="?", help="default: MindSpeed-LLM's examples/mindspore")
    runs.add_argument("--records", type=Path, required=True, help="folder for the records")
    runs.add_argument("--only", action="append", default=[], metavar="PATTERN", help="scripts by their path in the folder")
    runs.add_argument("--jobs", type=int, default=1, help="ranks at a time")
    runs.add_argument("--ranks", default="auto", help="as in `launch`: auto (every rank class), all, or a list")
    runs.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for each rank")
    runs.set_defaults(call=run)
    pages = verbs.add_parser("page", help="write the page of several releases")
    pages.add_argument("records", type=Path, nargs="+")
    pages.set_defaults(call=lambda args: print(page([Table.read(folder) for folder in args.records]), end=""))
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
