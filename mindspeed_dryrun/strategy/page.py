"""Self-contained HTML pages with charts drawn as SVG. Data comes in as plain values; everything is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --soft: #667085; --line: #d7dce3; --a: #2f6fde;
        --b: #9dc0ff; --bad: #c62f2f; --good: #1f8a4c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --paper: #14181f; --soft: #98a2b3; --line: #333b47;
        --a: #6ea2ff; --b: #2b4a80; --bad: #ff7b72; --good: #56d364; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: right; padding: .35rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: color-mix(in srgb, var(--line) 40%, transparent); padding: .8rem;
      white-space: pre-wrap; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
.soft { color: var(--soft); } .bad { color: var(--bad); } .good { color: var(--good); }
"""


@dataclass(frozen=True)
class Bar:
    """One variant: what is used, and what fragments add."""

    label: str
    used_mb: float | None
    actual_mb: float | None
    fits: bool | None


@dataclass(frozen=True)
class Point:
    """One strategy: memory across, throughput up. `kind` is `winner`, `verified`, `over` or `predicted`."""

    label: str
    memory_mb: float
    throughput: float
    kind: str


def page(title: str, sections: Sequence[tuple[str, str]], lead: str = "") -> str:
    """A whole page. Section bodies are HTML already; titles and lead are not."""
    body = "".join(f"<h2>{html.escape(name)}</h2>{content}" for name, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="soft">{html.escape(lead)}</p>{body}</body></html>\n'
    )


def write(path: Path, text: str) -> None:
    """Under a temporary name first, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def html_table(header: Sequence[str], rows: Sequence[Sequence[object]], marks: Sequence[str] = ()) -> str:
    """`marks` gives each row's last cell a class: good, bad or nothing."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = []
    for index, row in enumerate(rows):
        mark = marks[index] if index < len(marks) else ""
        cells = [f"<td>{html.escape(str(cell))}</td>" for cell in row]
        if mark:
            cells[-1] = cells[-1].replace("<td>", f'<td class="{mark}">')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def bar_chart(bars: Sequence[Bar], budget_mb: float | None) -> str:
    """Horizontal bars in GB with the budget as a line."""
    known = [bar.actual_mb for bar in bars if bar.actual_mb]
    most = max([*known, budget_mb or 0.0, 1.0]) * 1.04
    left, width, step = 220, 760, 30
    height = step * len(bars) + 40
    parts = []
    for index, bar in enumerate(bars):
        y = 24 + index * step
        name = html.escape(bar.label)
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
        if bar.used_mb is None or bar.actual_mb is None:
            parts.append(f'<text x="{left + 4}" y="{y + 14}" style="fill:var(--bad)">no figures</text>')
            continue
        used, actual = bar.used_mb / most * width, bar.actual_mb / most * width
        colour = "var(--bad)" if bar.fits is False else "var(--a)"
        parts.append(
            f'<g><title>{name}: {bar.used_mb:.0f}M used, {bar.actual_mb:.0f}M with fragments</title>'
            f'<rect x="{left}" y="{y}" width="{actual:.1f}" height="20" style="fill:var(--b)"/>'
            f'<rect x="{left}" y="{y}" width="{used:.1f}" height="20" style="fill:{colour}"/></g>'
            f'<text x="{left + actual + 6:.1f}" y="{y + 14}">{bar.actual_mb / 1024:.1f}G</text>'
        )
    if budget_mb:
        x = left + budget_mb / most * width
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{height - 14}" stroke-width="2" stroke-dasharray="5 4" '
            f'style="stroke:var(--bad)"/><text x="{x:.1f}" y="12" text-anchor="middle">budget {budget_mb / 1024:.1f}G</text>'
        )
    return _svg(left + width + 70, height, parts, "peak memory of every variant")


def pareto_chart(points: Sequence[Point], budget_mb: float, unit: str) -> str:
    """Throughput over memory. The line joins what nothing beats in both."""
    left, width, height = 60, 880, 420
    memory = [*(point.memory_mb for point in points), budget_mb]
    rates = [point.throughput for point in points]
    # The differences are what matters: both axes start below the smallest value, not at zero.
    least_x, most_x = 0.9 * min(memory), 1.05 * max(memory)
    least_y, most_y = 0.95 * min(rates), 1.02 * max(rates)

    def x(value: float) -> float:
        return left + (value - least_x) / (most_x - least_x) * width

    def y(value: float) -> float:
        return height - 40 - (value - least_y) / (most_y - least_y) * (height - 70)

    parts = []
    for tick in _ticks(least_x / 1024, most_x / 1024):
        parts.append(
            f'<text x="{x(tick * 1024):.1f}" y="{height - 22}" text-anchor="middle">{tick:g}G</text>'
            f'<line x1="{x(tick * 1024):.1f}" x2="{x(tick * 1024):.1f}" y1="20" y2="{height - 40}" style="stroke:var(--line)"/>'
        )
    for tick in _ticks(least_y, most_y):
        parts.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{height - 4}" text-anchor="middle">peak memory of the worst rank</text>')
    parts.append(f'<text x="{left}" y="12">{html.escape(unit)}</text>')
    style = {
        "winner": ("var(--good)", 6),
        "verified": ("var(--a)", 5),
        "over": ("var(--bad)", 4),
        "predicted": ("var(--b)", 3),
    }
    for point in sorted(points, key=lambda point: list(style).index(point.kind), reverse=True):
        colour, size = style[point.kind]
        parts.append(
            f'<circle cx="{x(point.memory_mb):.1f}" cy="{y(point.throughput):.1f}" r="{size}" style="fill:{colour}">'
            f"<title>{html.escape(point.label)} ({point.kind}): {point.memory_mb:.0f}M, {point.throughput:.1f}</title></circle>"
        )
    front = pareto_front(points)
    if len(front) > 1:
        path = " ".join(f"{x(point.memory_mb):.1f},{y(point.throughput):.1f}" for point in front)
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="1.5" style="stroke:var(--soft)"/>')
    parts.append(
        f'<line x1="{x(budget_mb):.1f}" x2="{x(budget_mb):.1f}" y1="20" y2="{height - 40}" stroke-width="2" '
        f'stroke-dasharray="5 4" style="stroke:var(--bad)"/>'
        f'<text x="{x(budget_mb):.1f}" y="14" text-anchor="middle">budget</text>'
    )
    return _svg(left + width + 30, height, parts, "throughput over memory")


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


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
