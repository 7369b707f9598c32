"""Geometry of the page's charts. Pure numbers: the template draws them as plain SVG, the text around them is HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_dryrun.language import t
from mindspeed_dryrun.record.memory_block import Iteration
from mindspeed_dryrun.report.explain import Explanation
from mindspeed_dryrun.report.view import RankRow

WIDTH = 1000.0
HEIGHT = 300.0
# Categories that a bar shows, in order; what an explanation knows beyond them is `other`.
BAR_CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True)
class Piece:
    """A piece of a bar: what it is, where it lies, how much it is."""

    name: str
    x: float
    width: float
    mb: int


@dataclass(frozen=True)
class RankBar:
    """One rank class against the budget. `label` is what a screen reader says."""

    row: RankRow
    pieces: tuple[Piece, ...]
    budget_x: float | None
    label: str


@dataclass(frozen=True)
class Band:
    """A phase under the curve."""

    name: str
    phase: str
    x: float
    width: float


@dataclass(frozen=True, kw_only=True)
class CurveChart:
    """Used memory over one iteration: an area (SVG path), the peak's place in percent, phases, grid lines in MB."""

    path: str
    peak_left_percent: float
    peak_top_percent: float
    peak_mb: int
    bands: tuple[Band, ...]
    grid: tuple[tuple[float, int], ...]  # y in percent from the top, MB
    label: str


def bars(rows: Sequence[RankRow], explained: Mapping[int, Explanation], budget_mb: int | None) -> list[RankBar]:
    """A bar for each row that has a figure to trust; all bars share one scale, which holds the budget too."""
    shown = [row for row in rows if row.used_peak_mb is not None and row.status in ("ok", "oom")]
    peaks = [row.actual_peak_mb or row.used_peak_mb or 0 for row in shown]
    scale = max([*peaks, budget_mb or 0, 1]) * 1.02
    result = []
    for row in shown:
        pieces = side_by_side(_amounts(row, explained.get(row.rank)), scale)
        words = ", ".join(f"{t(piece.name)} {piece.mb}M" for piece in pieces)
        label = f"Rank {row.rank}: {words}" + (t("; budget {size}M", size=budget_mb) if budget_mb else "")
        budget_x = round(WIDTH * budget_mb / scale, 2) if budget_mb else None
        result.append(RankBar(row, pieces, budget_x, label))
    return result


def side_by_side(amounts: Sequence[tuple[str, int]], scale_mb: float) -> tuple[Piece, ...]:
    """Names and megabytes as the pieces of one bar, whose whole width stands for `scale_mb`."""
    x = 0.0
    pieces = []
    for name, mb in amounts:
        width = WIDTH * mb / scale_mb
        pieces.append(Piece(name, round(x, 2), round(width, 2), mb))
        x += width
    return tuple(pieces)


def _amounts(row: RankRow, explanation: Explanation | None) -> list[tuple[str, int]]:
    used = row.used_peak_mb or 0
    fragments = max((row.actual_peak_mb or used) - used, 0)
    if explanation is None:
        return [("used", used), ("fragments", fragments)]
    sizes = {part.name: part.size_bytes // 2**20 for part in explanation.categories}
    amounts = [(name, sizes.get(name, 0)) for name in BAR_CATEGORIES[:-1]]
    amounts.append(("other", used - sum(mb for _, mb in amounts)))
    return [*amounts, ("fragments", fragments)]


def curve(iteration: Iteration, peak_time: int, peak_bytes: int) -> CurveChart | None:
    """None where the iteration has too few points to draw."""
    points = iteration.points
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    first, last = points[0][0], max(points[-1][0], peak_time)
    top = peak_bytes * 1.08

    def x(time: int) -> float:
        return round(WIDTH * (time - first) / (last - first), 1)

    def y(size: int) -> float:
        return round(HEIGHT * (1 - size / top), 1)

    # The upper edge runs through the highs and comes back through the lows: a busy stretch shows as a band.
    upper = " ".join(f"{x(time)},{y(high)}" for time, _, high in points)
    path = f"M0,{HEIGHT:g} L{upper} L{x(points[-1][0])},{HEIGHT:g} Z"
    return CurveChart(
        path=path,
        peak_left_percent=round(x(peak_time) / WIDTH * 100, 2),
        peak_top_percent=round(y(peak_bytes) / HEIGHT * 100, 2),
        peak_mb=peak_bytes // 2**20,
        bands=_bands(iteration, first, last),
        grid=tuple((round(y(mb * 2**20) / HEIGHT * 100, 2), mb) for mb in _grid(int(top) // 2**20)),
        label=t(
            f"Used memory over iteration {iteration.number}, from {points[0][2] // 2**20}M to the peak of "
            f"{peak_bytes // 2**20}M, {100 * (peak_time - first) / (last - first):.0f}% of the way through."
        ),
    )


_BAND_NAMES = {"forward": "F", "backward": "B", "step": "step"}


def _bands(iteration: Iteration, first: int, last: int) -> tuple[Band, ...]:
    """Forward, backward and step stretches; recomputation belongs to its backward. At most 64, else there is no room."""
    merged: list[tuple[str, int | None, int, int]] = []
    for segment in iteration.segments:
        phase = "backward" if segment.phase == "recompute" else segment.phase
        if phase not in _BAND_NAMES:
            continue
        start, end = max(segment.start, first), min(segment.end, last)
        if merged and merged[-1][:2] == (phase, segment.microbatch):
            start = merged.pop()[2]
        merged.append((phase, segment.microbatch, start, end))
    if len(merged) > 64:
        return ()
    span = last - first
    return tuple(
        Band(
            name=_BAND_NAMES[phase] + (str(microbatch) if microbatch else ""),
            phase=phase,
            x=round(100 * (start - first) / span, 2),
            width=round(max(100 * (end - start) / span, 0.2), 2),
        )
        for phase, microbatch, start, end in merged
        if end > start
    )


def _grid(top_mb: int) -> list[int]:
    """Three to five round figures below the top."""
    step = 1
    while top_mb / step > 5:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return [value for value in range(step, top_mb + 1, step) if value < top_mb * 0.97]
