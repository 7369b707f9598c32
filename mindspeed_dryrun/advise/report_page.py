"""The page of a record: the report's, with what to change."""

from __future__ import annotations

from pathlib import Path

from mindspeed_dryrun.advise.levers import levers
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.files import write_text
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.run import job_of_record
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import JobFile
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import build_report
from mindspeed_dryrun.report import html
from mindspeed_dryrun.report.explain import explain_ranks


def render_page(report: Report, record: Path | None = None) -> str:
    """The page of a report; a record adds the breakdown, the curve, the environment, the patches and what to change."""
    if record is None:
        return html.page(report)
    job_file = Record.open(record).job()
    explained = explain_ranks(record, report.ranks)
    shown = html.explanation_to_show(report, explained)
    return html.page(report, job_file, explained, levers(report, job_to_change(job_file), shown))


def job_to_change(job_file: JobFile) -> Job | None:
    """The job of a record; None where it cannot be understood again."""
    try:
        return job_of_record(job_file)
    except DryRunError:
        return None


def write_page(record: Path) -> Path:
    """Writes `report.html` of a record and returns its path."""
    target = record / "report.html"
    write_text(target, render_page(build_report(record), record))
    return target
