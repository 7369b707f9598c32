"""The report as a table for a terminal: as wide as it is, 80 columns elsewhere; worst rank first, colour only when asked for."""

from __future__ import annotations

import shutil
import sys

from mindspeed_dryrun.language import current, t, wrapped
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report import view
from mindspeed_dryrun.report.text import columns

_WIDTH = 80
_NARROWEST, _WIDEST = 40, 120  # a longer line is hard to read
_COLOURS = {"good": "\x1b[1;32m", "bad": "\x1b[1;31m", "warn": "\x1b[1;33m"}
_STATUS_TONES = {"ok": "good", "oom": "bad", "failed": "bad", "timeout": "bad"}


def render(report: Report, colour: bool = False) -> str:
    """Verdict, job, one line per rank class, errors, and what is not counted."""
    verdict = view.headline(report)
    lines = _wrap(f"{verdict.word}  {verdict.sentence}")
    lines[0] = paint(verdict.word, verdict.tone, colour) + lines[0][len(verdict.word) :]
    lines += _wrap(view.job_words(report))
    for words in (
        view.engine_words(report), view.device_words(report), view.outside_words(report), view.time_words(report.time)
    ):  # fmt: skip
        lines += _wrap(words) if words else []
    lines += ["", *_rank_lines(report, colour)]
    found = view.rows(report)
    for error in view.errors(found):
        lines += _wrap(error, most=3)
    if any(":" in view.shorten(view.ranges(row.ranks), 16) for row in found):
        lines += _wrap(t("0-6:2 stands for every second rank from 0 to 6."))
    if any(row.folded for row in found):
        lines += _wrap(t("A row holds ranks of one class; its figures are the largest among them."))
    if loads := view.load_lines(report):
        lines += ["", *loads[:-1], *_wrap(loads[-1])]
    if report.not_counted:
        lines += [
            "",
            *_wrap(
                t("Not counted: ")
                + ("；" if current() == "zh" else "; ").join(t(view.clean(item)) for item in report.not_counted)
            ),
        ]
    for note in report.notes:
        lines += _wrap(t("Note: ") + t(view.clean(note)))
    return "\n".join(lines) + "\n"


def paint(text: str, tone: str, colour: bool) -> str:
    """Text in the colour of its tone, or as it is."""
    return f"{_COLOURS[tone]}{text}\x1b[0m" if colour and tone in _COLOURS else text


def _rank_lines(report: Report, colour: bool) -> list[str]:
    found = view.rows(report)
    body = [view.rank_cells(row, report.budget_mb, width=16) for row in found]
    for cells, row in zip(body, found, strict=True):
        cells[0] = ("▶" if row.worst else " ") + cells[0]
    lines = columns(view.RANK_HEAD, body, left=(1, 3))
    if colour:
        for index, row in enumerate(found, start=1):
            status = t(row.status)
            tone = _STATUS_TONES.get(row.status, "warn")
            lines[index] = lines[index].replace(f"  {status}", "  " + paint(status, tone, True), 1)
    return lines


def _wrap(text: str, most: int | None = None) -> list[str]:
    across = _width()
    lines = wrapped(text, across, "  ")
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], view.shorten(lines[most - 1] + " …", across - 1)]
    return lines


def _width() -> int:
    if not sys.stdout.isatty():
        return _WIDTH
    return max(_NARROWEST, min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDEST))
