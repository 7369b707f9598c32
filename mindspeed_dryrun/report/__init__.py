"""Views of a record: table, JSON, CSV, Markdown, HTML, comparison and explanation. Nothing here runs anything."""

from __future__ import annotations

from pathlib import Path

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.model import Report

FORMATS = ("table", "json", "csv", "markdown", "html")


def render(report: Report, format: str, record: Path | None = None) -> str:
    """The report as text in one of FORMATS. `record` lets the HTML page show what `report.json` does not hold."""
    if format == "table":
        from mindspeed_dryrun.report import table

        return table.render(report)
    if format == "json":
        from mindspeed_dryrun.report import as_json

        return as_json.render(report)
    if format == "csv":
        from mindspeed_dryrun.report import as_csv

        return as_csv.render(report)
    if format == "markdown":
        from mindspeed_dryrun.report import markdown

        return markdown.render(report)
    if format == "html":
        from mindspeed_dryrun.report import html

        return html.render(report, record)
    raise UsageError(f"'{format}' is not a report format: choose one of {', '.join(FORMATS)}.")


def write_html(record: Path) -> Path:
    """Writes `report.html` of a record (temporary name, then renamed) and returns its path."""
    import os

    from mindspeed_dryrun.record.summary import build_report
    from mindspeed_dryrun.report import html

    page = html.render(build_report(record), record)
    target = record / "report.html"
    temporary = record / f".report.html.{os.getpid()}"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(target)
    return target
