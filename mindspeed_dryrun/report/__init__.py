"""Views of a record: table, JSON, CSV, Markdown, HTML, comparison and explanation. Nothing here runs anything."""

from __future__ import annotations

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.files import json_text
from mindspeed_dryrun.record.model import Report

FORMATS = ("table", "json", "csv", "markdown", "html")


def render(report: Report, format: str) -> str:
    """The report as text in one of FORMATS."""
    if format == "table":
        from mindspeed_dryrun.report import table

        return table.render(report)
    if format == "json":
        return json_text(report.to_json())
    if format == "csv":
        from mindspeed_dryrun.report import as_csv

        return as_csv.render(report)
    if format == "markdown":
        from mindspeed_dryrun.report import markdown

        return markdown.render(report)
    if format == "html":
        from mindspeed_dryrun.report import html

        return html.page(report)
    raise UsageError(f"'{format}' is not a report format: choose one of {', '.join(FORMATS)}.")
