"""Tries as the page shows them: the report's own charts in fragments of HTML. Whatever comes from a log is escaped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

from mindspeed_dryrun import __version__
from mindspeed_dryrun.language import speaking, t
from mindspeed_dryrun.report import charts, html, strategy_page, view
from mindspeed_dryrun.studio.choices import as_patch
from mindspeed_dryrun.studio.session import Try
from mindspeed_dryrun.studio.words import words


@functools.cache
def _environment() -> Environment:
    return html.environment(ChoiceLoader([PackageLoader("mindspeed_dryrun.studio", "page"), html.TEMPLATES]))


def render(template: str, language: str, **values: Any) -> str:
    """A template of `page/`, everything in it escaped."""
    found = _environment().get_template(template)
    with speaking(language):
        return found.render(version=__version__, w=words(language), language=language, **values)


def result(one: Try, language: str, pinned: Try | None = None) -> str:
    """The right-hand side: verdict, stages, memory over an iteration, what fills the peak, time, advice."""
    with speaking(language):
        return _result(one, language, pinned)


def _result(one: Try, language: str, pinned: Try | None) -> str:
    report = one.report
    shown = one.explained
    bars: list[charts.RankBar] = []
    if report:
        explained = {shown.rank: shown} if shown and shown.rank is not None else {}
        bars = charts.bars(view.rows(report), explained, report.budget_mb)
    return render(
        "result.html",
        language,
        one=one,
        report=report,
        headline=view.headline(report) if report else None,
        verdict=verdict_key(one),
        bars=bars,
        legend=list(dict.fromkeys(piece.name for bar in bars for piece in bar.pieces)),
        errors=view.errors(view.rows(report)) if report else [],
        explained=shown,
        curve=charts.curve(shown.iteration, shown.peak_time, shown.peak_bytes) if shown else None,
        levers=[(lever, as_patch(lever.flags)) for lever in one.levers],
        pinned=pinned if pinned and pinned.number != one.number else None,
        notes=[note for note in report.notes if "reused" in note] if report else [],
    )


def verdict_key(one: Try) -> str:
    """`fits`, `barely`, `does_not_fit`, `unknown` or `failed`; empty while it is counted."""
    if one.report is None:
        return "failed" if one.error else ""
    if any(rank.status.broken for rank in one.report.ranks):
        return "failed"
    return str(one.report.verdict)


def history(tries: Mapping[int, Try], language: str, budget_mb: int, pinned: int | None) -> str:
    """The rows and points below."""
    rows = sorted(tries.values(), key=lambda one: -one.number)
    with speaking(language):
        plot = _plot(rows, budget_mb)
    return render("history.html", language, rows=rows, plot=plot, verdict_key=verdict_key, pinned=pinned)


def _plot(rows: Sequence[Try], budget_mb: int) -> strategy_page.Plot | None:
    shown = [one for one in rows if one.report and one.report.actual_peak_mb and one.time]
    fitting = [one for one in shown if one.report and one.report.fits]
    best = max((one.time.tokens_per_s_per_card for one in fitting if one.time), default=None)
    points = []
    for one in shown:
        assert one.report and one.report.actual_peak_mb and one.time
        rate = one.time.tokens_per_s_per_card
        kind = "over" if not one.report.fits else "winner" if rate == best else "verified"
        points.append(strategy_page.Point(one.name, one.report.actual_peak_mb, rate, kind))
    if len({(point.memory_mb, point.throughput) for point in points}) < 2:
        return None
    return strategy_page.plot(points, budget_mb, t("tokens/s/card"))
