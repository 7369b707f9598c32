"""The report as Markdown, for merge requests and wikis."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from mindspeed_dryrun.language import t
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report import view


def render(report: Report) -> str:
    """Verdict, job, a table of rank classes, errors, what is not counted."""
    verdict = view.headline(report)
    lines = [f"## {verdict.word}", "", escape(verdict.sentence), "", escape(view.job_words(report))]
    for words in (
        view.engine_words(report), view.device_words(report), view.outside_words(report), view.time_words(report.time)
    ):  # fmt: skip
        lines += ["", escape(words)] if words else []
    found = view.rows(report)
    body = [view.rank_cells(row, report.budget_mb, width=40) for row in found]
    for cells, row in zip(body, found, strict=True):
        cells[0] = f"**{cells[0]}**" if row.worst else cells[0]
    lines += ["", *pipe_table(view.RANK_HEAD, body, left=(1, 3))]
    if problems := view.errors(found):
        lines += ["", *(f"- {escape(problem)}" for problem in problems)]
    if any(row.folded for row in found):
        lines += ["", t("A row holds ranks of one class; its figures are the largest among them.")]
    if loads := view.load_lines(report):
        lines += ["", loads[0], "", "```", *loads[1:-1], "```", "", loads[-1]]
    if report.not_counted:
        lines += ["", t("Not counted: ").rstrip(), "", *(f"- {escape(t(view.clean(item)))}" for item in report.not_counted)]
    if report.notes:
        lines += ["", t("Notes:"), "", *(f"- {escape(t(view.clean(item)))}" for item in report.notes)]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no broken table cell."""
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(text, quote=False))


def pipe_table(head: Sequence[str], body: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """A pipe table; numbers to the right except the columns named in `left`. Cells come escaped."""
    rule = [":--" if i in left else "--:" for i in range(len(head))]
    return ["| " + " | ".join(row) + " |" for row in [[t(name) for name in head], rule, *body]]
