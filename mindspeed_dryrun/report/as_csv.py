"""The report as CSV: one line per simulated rank, every field, for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io

from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report import view

COLUMNS = (
    "rank",
    "represents",
    "stage",
    "status",
    "used_peak_mb",
    "actual_peak_mb",
    "budget_mb",
    "free_mb",
    "seconds",
    "host_rss_mb",
    "error",
)


def render(report: Report) -> str:
    """RFC 4180 with `\\n` line ends. `represents` is a list of ranges (`0-1,4`)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rank in report.ranks:
        known = report.budget_mb is not None and rank.actual_peak_mb is not None
        writer.writerow(
            [
                rank.rank,
                view.ranges(rank.represents or (rank.rank,)),
                rank.stage,
                rank.status,
                rank.used_peak_mb,
                rank.actual_peak_mb,
                report.budget_mb,
                (report.budget_mb or 0) - (rank.actual_peak_mb or 0) if known else None,
                rank.seconds,
                rank.host_rss_mb,
                _not_a_formula(view.clean(rank.error)) if rank.error else None,
            ]
        )
    return out.getvalue()


def _not_a_formula(text: str) -> str:
    """Text from a log that a spreadsheet shows instead of calculating: https://owasp.org/www-community/attacks/CSV_Injection"""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
