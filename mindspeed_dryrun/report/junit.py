"""The report as a JUnit file: one test case for each rank class and one for the job, for CI servers that show such files."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report import view


def render(report: Report) -> str:
    """A rank that does not fit, or a job that leaves less than was asked for, is a failure; a rank that broke is an error."""
    suite = Element("testsuite", name="mindspeed-dryrun")
    job = SubElement(suite, "testcase", classname="dry run", name=view.job_words(report))
    headline = view.headline(report)
    if report.exit_status == 3:
        SubElement(job, "failure", message=headline.sentence, type=headline.word)
    elif report.exit_status:
        SubElement(job, "error", message=headline.sentence, type=headline.word)
    for rank in report.ranks:
        stage = "" if rank.stage is None else f" of stage {rank.stage}"
        name = f"rank {view.ranges(rank.represents or (rank.rank,))}{stage}"
        case = SubElement(suite, "testcase", classname="rank", name=name, time=f"{rank.seconds or 0:.3f}")
        if rank.status.broken:
            SubElement(case, "error", message=view.clean(rank.error or "no error line in its log"), type=str(rank.status))
        elif rank.status != "ok":
            message = f"{view.mb(rank.actual_peak_mb)} with fragments, budget {view.mb(report.budget_mb)}"
            SubElement(case, "failure", message=message, type=str(rank.status))
        else:
            figures = f"{view.mb(rank.used_peak_mb)} used, {view.mb(rank.actual_peak_mb)} with fragments"
            SubElement(case, "system-out").text = figures
    for kind in ("failure", "error"):
        suite.set(f"{kind}s", str(sum(1 for _ in suite.iter(kind))))
    suite.set("tests", str(len(suite)))
    indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suite, encoding="unicode") + "\n"
