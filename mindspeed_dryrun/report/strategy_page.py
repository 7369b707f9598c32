"""The pages of sweep and search: data and geometry here, drawn by `report/templates/strategy.html`, which escapes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.language import t
from mindspeed_dryrun.report import html
from mindspeed_dryrun.report.charts import WIDTH, Piece, side_by_side
from mindspeed_dryrun.report.view import Headline

_PLOT_LEFT, _PLOT_WIDTH, _PLOT_HEIGHT = 64.0, 940.0, 440.0
_PLOT_TOP, _PLOT_BOTTOM = 22.0, 390.0
_KIND_SENTENCES = {
    "winner": "winner",
    "verified": "dry-run, fits",
    "over": "dry-run, does not fit",
    "predicted": "predicted only",
}
_DOT_SIZES = {"winner": 7, "verified": 5, "over": 4, "predicted": 3}


@dataclass(frozen=True, kw_only=True)
class StrategyBar:
    """One variant: what is used and what fragments add, against the budget."""

    label: str
    figure: str
    words: str
    pieces: tuple[Piece, ...]
    budget_x: float | None


@dataclass(frozen=True)
class Point:
    """One strategy: memory across, throughput up. `kind` is `winner`, `verified`, `over` or `predicted`."""

    label: str
    memory_mb: float
    throughput: float
    kind: str


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point, placed."""

    x: float
    y: float
    size: int
    kind: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Throughput over memory, placed on a canvas. `across` and `up` are ticks with their text."""

    unit: str
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    dots: tuple[Dot, ...]
    front: str  # the points of a line
    limit_x: float
    label: str
    left: float = _PLOT_LEFT
    width: float = _PLOT_WIDTH
    height: float = _PLOT_HEIGHT
    top: float = _PLOT_TOP
    bottom: float = _PLOT_BOTTOM


@dataclass(frozen=True)
class Table:
    """The first `left` columns are flush left; `marks` gives each row's last cell a tone: good, bad or nothing."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: int = 1
    marks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A part of a page: what it has of bars, plot, table, code and text is shown in this order."""

    title: str
    bars: Sequence[StrategyBar] = ()
    budget: int | None = None  # of the bars, MB
    plot: Plot | None = None
    table: Table | None = None
    code: Sequence[str] = ()
    text: Sequence[str] = ()


def render(title: str, verdict: Headline, sections: Sequence[PageSection]) -> str:
    """A whole page."""
    return html.from_template("strategy.html", title=title, verdict=verdict, sections=sections)


def bars(variants: Sequence[tuple[str, int | None, int | None]], budget_mb: int | None) -> list[StrategyBar]:
    """Name, used and actual peak of each; all share one scale, which holds the budget too."""
    scale = max([*(actual or 0 for _, _, actual in variants), budget_mb or 0, 1]) * 1.02
    found = []
    for label, used, actual in variants:
        if used is None or actual is None:
            found.append(StrategyBar(label=label, figure=t("no figures"), words=t("no figures"), pieces=(), budget_x=None))
            continue
        pieces = side_by_side([("used", used), ("fragments", actual - used)], scale)
        budget_x = round(WIDTH * budget_mb / scale, 2) if budget_mb else None
        found.append(
            StrategyBar(
                label=label,
                figure=f"{actual}M",
                words=t(f"{used}M used, {actual}M with fragments"),
                pieces=pieces,
                budget_x=budget_x,
            )
        )
    return found


def plot(points: Sequence[Point], budget_mb: float, unit: str) -> Plot:
    """Throughput over memory. The line is the Pareto front of throughput and memory."""
    memory = [*(point.memory_mb for point in points), budget_mb]
    rates = [point.throughput for point in points]
    # The differences are what matters: both axes start below the smallest value, not at zero.
    least_x, most_x = 0.9 * min(memory), 1.05 * max(memory)
    least_y, most_y = 0.95 * min(rates), 1.02 * max(rates)

    def x(value: float) -> float:
        return round(_PLOT_LEFT + (value - least_x) / (most_x - least_x) * (_PLOT_WIDTH - _PLOT_LEFT - 20), 1)

    def y(value: float) -> float:
        return round(_PLOT_BOTTOM - (value - least_y) / (most_y - least_y) * (_PLOT_BOTTOM - _PLOT_TOP), 1)

    kinds = list(_DOT_SIZES)
    front = pareto_front(points)
    return Plot(
        unit=unit,
        across=tuple((x(tick * 1024), f"{tick:g}G") for tick in _ticks(least_x / 1024, most_x / 1024)),
        up=tuple((y(tick), f"{tick:g}") for tick in _ticks(least_y, most_y)),
        dots=tuple(
            Dot(
                x=x(point.memory_mb), y=y(point.throughput), size=_DOT_SIZES[point.kind], kind=point.kind,
                label=f"{point.label} ({t(_KIND_SENTENCES[point.kind])}): {point.memory_mb:.0f}M, {point.throughput:.1f} {unit}",
            )
            for point in sorted(points, key=lambda point: kinds.index(point.kind), reverse=True)
        ),
        front=" ".join(f"{x(point.memory_mb)},{y(point.throughput)}" for point in front) if len(front) > 1 else "",
        limit_x=x(budget_mb),
        label=t(f"{unit} over memory: {len(points)} strategies, {len(front)} of them on the Pareto front"),
    )  # fmt: skip


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both memory and throughput, by memory."""
    front: list[Point] = []
    for point in sorted(points, key=lambda item: (item.memory_mb, -item.throughput)):
        if not front or point.throughput > front[-1].throughput:
            front.append(point)
    return front


def _ticks(least: float, most: float) -> list[float]:
    """Round numbers between both ends, eight at most."""
    span = max(most - least, 1e-9)
    step = 10 ** math.floor(math.log10(span))
    step *= next((factor for factor in (0.2, 0.5, 1.0) if span / (step * factor) <= 8), 2.0)
    return [round(step * index, 6) for index in range(math.ceil(least / step), int(most / step) + 1)]
