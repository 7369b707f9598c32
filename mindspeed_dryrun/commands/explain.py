"""Say what fills the memory at the peak, and what to change.

DIR is a record made with `launch --explain`, a folder with MindSpore's memory_block.csv (of a real run, too), or such
a file itself. A rank on torch_npu writes one from torch_npu's own memory history, beside the memory_snapshot.pickle that
PyTorch's memory_viz opens. The blocks alive at the peak are told apart: weights, gradients, optimizer states, activations
by layer and by operator, communication, temporary, workspace. A trace_view.json of MindSpore's profiler beside it, or given
itself, is shown as a table of operator times.

`--try` dry-runs every proposed change and shows the measured figure beside the computed one. It runs what the record names,
so it asks first; `--yes` answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path

from mindspeed_dryrun.advise import levers as advice
from mindspeed_dryrun.advise import view as advice_view
from mindspeed_dryrun.advise.report_page import job_to_change
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch.job import Job, changed
from mindspeed_dryrun.launch.run import Execution, dry_run_beside
from mindspeed_dryrun.record.model import RankReport, Report
from mindspeed_dryrun.record.run_spec import JobFile
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import load_report
from mindspeed_dryrun.report import explain_view
from mindspeed_dryrun.report.explain import Explanation, explain, tracker_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DIR", type=Path, help="a record, a folder, a memory_block.csv or a trace_view.json")
    parser.add_argument("--rank", type=int, metavar="N", help="default: the worst rank")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--try", dest="try_levers", action="store_true", help="dry-run the proposed changes")
    parser.add_argument("--yes", action="store_true", help="with --try: run the program that the record names without asking")


def show_explanation(record: Path) -> None:
    """What `explain RECORD` prints."""
    run(argparse.Namespace(path=record, rank=None, format="table", try_levers=False, yes=False))


def run(args: argparse.Namespace) -> int:
    if not args.path.exists():
        raise UsageError(f"{args.path} does not exist.")
    if args.path.suffix == ".json" and args.path.is_file():
        print(_operator_times(args.path), end="")
        return 0
    report = _report(args.path)
    traces = [] if args.path.is_file() else sorted(args.path.rglob("trace_view.json"))
    files = tracker_files(args.path)
    if not files and not traces:
        raise UsageError(f"There is no memory_block.csv in {args.path}: launch with --explain to have one written.")
    if files:
        found = _explain_one(files, args.rank, report)
        if args.format == "json":
            print(explain_view.render_json([found]), end="")
        else:
            print(explain_view.render_text(found), end="")
            if report and report.job and report.job.parallel.vpp:
                print("\n" + t("With VPP each chunk of a microbatch is a forward of its own, and counted as one."))
            _advise(args, report, found)
    if args.format == "table":
        for trace in traces:
            print(f"\n{trace}\n{_operator_times(trace)}", end="")
    return 0


def _operator_times(trace: Path) -> str:
    """A table; few records have a profiler's trace beside them."""
    from mindspeed_dryrun.record.trace import read_trace
    from mindspeed_dryrun.report import trace_view

    return trace_view.render(read_trace(trace))


def _report(path: Path) -> Report | None:
    """The record's report, or that of the logs beside a file that a user brings; None where there are none."""
    try:
        return load_report(path)[0] if path.is_dir() else None
    except DryRunError:
        return None


def _explain_one(files: dict[int | None, Path], wanted: int | None, report: Report | None) -> Explanation:
    rank = wanted
    if rank is None and report is not None and report.worst_rank in files:
        rank = report.worst_rank
    if rank is None:
        rank = next(iter(files))
    if rank not in files:
        known = ", ".join(str(number) for number in files if number is not None) or "none"
        raise UsageError(f"Rank {rank} has no memory_block.csv here. Ranks that have one: {known}.")
    figures = next((item for item in report.ranks if item.rank == rank), None) if report else None
    return explain(files[rank], rank, *_figures(figures))


def _figures(rank: RankReport | None) -> tuple[int | None, int | None]:
    return (rank.used_peak_mb, rank.actual_peak_mb) if rank else (None, None)


def _advise(args: argparse.Namespace, report: Report | None, found: Explanation) -> None:
    if report is None or report.job is None:
        if args.try_levers:
            raise UsageError("--try needs a record of mindspeed-dryrun: a single file does not say which job it belongs to.")
        return
    job_file = Record.open(args.path).job()
    job = job_to_change(job_file)
    levers = advice.levers(report, job, found)
    tried: dict[str, Report | str] | None = None
    if args.try_levers and job is not None:
        _agree(job_file, args.yes)
        tried = {}
        for lever in levers:
            print(t(f"trying {t(lever.name)}"), file=sys.stderr)
            tried[lever.name] = _try(args.path, job_file, job, lever)
    stage = next((rank.stage for rank in report.ranks if rank.rank == found.rank), None)
    text = advice_view.render(levers, found.peak_bytes // 2**20, stage, tried)
    if text:
        print("\n" + text, end="")


def _agree(job_file: JobFile, yes: bool) -> None:
    """A record may come from anybody, and names a program, its environment and patches: the user must agree to run them."""
    if yes:
        return
    own = Path(job_file.details.cwd, job_file.details.program)
    program = "the embedded trainer" if job_file.job.trainer == "embedded" else own
    question = f"--try runs what this record names ({program}), with its environment and patches."
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Add --yes if the record is yours or you trust it.")
    print(t(question) + t(" Go on? [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("Nothing was run.")


def _try(record: Path, job_file: JobFile, job: Job, lever: advice.Lever) -> Report | str:
    """The job as its record tells it, exports, patches and all, with the lever pulled."""
    spec = dataclasses.replace(
        job_file.spec, trainer=job_file.job.trainer, explain=False, ranks="auto", overrides=(), check_classes=0
    )
    try:
        folder = record / "tries" / re.sub(r"[^a-z0-9]+", "-", lever.name.lower())
        return dry_run_beside(changed(job, lever.flags), folder, spec, Execution())[0]
    except DryRunError as error:
        return str(error)
