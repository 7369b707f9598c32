"""A/B of two reports: rank by rank, stage by stage, the worst rank, and what differs in how they were run."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dryrun.devices.device import Device
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.files import json_text
from mindspeed_dryrun.language import message, t, width
from mindspeed_dryrun.record.criteria import Criteria
from mindspeed_dryrun.record.model import EngineSummary, RankReport, Report, Status
from mindspeed_dryrun.record.store import read_json_of_user
from mindspeed_dryrun.record.summary import summarise
from mindspeed_dryrun.report import view
from mindspeed_dryrun.report.markdown import escape, pipe_table
from mindspeed_dryrun.report.text import columns


@dataclass(frozen=True, kw_only=True)
class Run:
    """One side: its label, its report, and what is known of how it was run (`flags` by name, `environment`)."""

    label: str
    report: Report
    flags: Mapping[str, str]
    environment: Mapping[str, str]
    flags_logged: bool = False  # from a log, where Megatron prints every argument, the defaults too


@dataclass(frozen=True, kw_only=True)
class RankPair:
    """Both figures of the same ranks; a figure is None where that side has none to trust."""

    name: str
    ranks: tuple[int, ...]
    stage: int | None
    a_used_mb: int | None
    b_used_mb: int | None
    a_actual_mb: int | None
    b_actual_mb: int | None

    @property
    def used_diff_mb(self) -> int | None:
        return None if self.a_used_mb is None or self.b_used_mb is None else self.b_used_mb - self.a_used_mb

    @property
    def actual_diff_mb(self) -> int | None:
        return None if self.a_actual_mb is None or self.b_actual_mb is None else self.b_actual_mb - self.a_actual_mb


@dataclass(frozen=True)
class Difference:
    """A flag, version or variable that the two runs do not share. None = not set, or not known."""

    kind: str  # "argument", "version", "environment", "job"
    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`ranks` cover every rank of both runs once; `stages` and `worst` hold the largest figures."""

    labels: tuple[str, str]
    ranks: tuple[RankPair, ...]
    stages: tuple[RankPair, ...]
    worst: RankPair
    worst_ranks: tuple[int | None, int | None]
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Scenario:
    """One row of published figures: both runs, and the difference."""

    name: str
    runs: tuple[Run, Run]
    found: Comparison


@dataclass(frozen=True)
class PublishedFigures:
    """A file of published A/B figures."""

    title: str
    scenarios: tuple[Scenario, ...]


def compare(a: Run, b: Run) -> Comparison:
    """Pure. Ranks are matched by number; one simulated rank speaks for all ranks of its class."""
    left, right = _by_rank(a.report), _by_rank(b.report)
    stages = {rank: found.stage for side in (right, left) for rank, found in side.items() if found.stage is not None}
    pairs = [_pair(str(rank), (rank,), stages.get(rank), left.get(rank), right.get(rank)) for rank in {*left, *right}]
    by_stage: dict[int, list[RankPair]] = {}
    for pair in pairs:
        if pair.stage is not None:
            by_stage.setdefault(pair.stage, []).append(pair)
    return Comparison(
        labels=(a.label, b.label),
        ranks=tuple(_fold(sorted(pairs, key=lambda pair: pair.ranks))),
        stages=tuple(_largest(message(f"stage {stage}"), group, stage) for stage, group in sorted(by_stage.items())),
        worst=_largest(message("worst rank"), pairs, None),
        worst_ranks=(a.report.worst_rank, b.report.worst_rank),
        differences=tuple(_differences(a, b)),
    )


def beyond(found: Comparison, limit: str) -> list[str]:
    """Sentences for every rank whose used peaks differ by more than `2%` or `500M`, or cannot be compared."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|M)?", limit.strip())
    if not match:
        raise UsageError(f"--max-diff '{limit}' is neither a percentage (2%) nor megabytes (500M).")
    number, unit = float(match[1]), match[2] or "%"
    sentences = []
    for pair in found.ranks:
        ranks = f"rank {view.ranges(pair.ranks)}"
        if pair.used_diff_mb is None:
            sentences.append(message(f"{ranks}: there is no figure on {_missing(pair, found.labels)} to compare."))
            continue
        size = abs(pair.used_diff_mb) if unit == "M" else 100 * abs(pair.used_diff_mb) / max(pair.a_used_mb or 0, 1)
        if size > number:
            sentences.append(
                message(f"{ranks}: used peaks differ by {_difference(pair.used_diff_mb, pair.a_used_mb)}, more than {limit}.")
            )
    return sentences


def render_table(found: Comparison) -> str:
    """80 columns: worst rank, stages, ranks, then what differs."""
    a, b = (view.shorten(view.clean(label), 9) for label in found.labels)
    lines = _figure_lines(found, a, b)
    first, second = found.worst_ranks
    if first != second and None not in found.worst_ranks:
        lines += ["", t(f"The worst rank is {first} in {a} and {second} in {b}.")]
    words = "used: without fragments; frag.: with fragments." if len(lines[0].split()) > 6 else "Peaks without fragments."
    lines += ["", f"{t(words)} " + t(f"Differences are {b} - {a}.")]
    if found.differences:
        lines += ["", t("What differs between the runs")]
        rows = [[t(item.kind), t(item.name), item.a or "–", item.b or "–"] for item in found.differences]
        rows = [
            [view.shorten(view.clean(cell), width) for cell, width in zip(row, (11, 32, 15, 15), strict=True)] for row in rows
        ]
        lines += columns(["", "name", a, b], rows, left=(0, 1, 2, 3))
    return "\n".join(lines) + "\n"


def _figure_lines(found: Comparison, a: str, b: str) -> list[str]:
    """Large figures need room: fewer digits first, then no column for fragments."""
    head = ["", f"used {a}", f"used {b}", "difference", f"frag. {a}", f"frag. {b}", "difference"]
    pairs = (found.worst, *found.stages, *found.ranks)
    for digits, shown in ((2, 7), (1, 7), (0, 7), (1, 4)):
        lines = columns(head[:shown], [_cells(pair, digits)[:shown] for pair in pairs], left=(0,))
        if max(map(width, lines)) <= 80:
            break
    lines.insert(2 + len(found.stages), "")
    return lines


def render_markdown(found: Comparison) -> str:
    """The same as pipe tables."""
    a, b = (escape(view.clean(label)) for label in found.labels)
    head = ["", f"used {a}", f"used {b}", "difference", f"with fragments {a}", f"with fragments {b}", "difference"]
    lines = pipe_table(head, [_cells(pair) for pair in (found.worst, *found.stages, *found.ranks)], left=(0,))
    if found.differences:
        rows = [
            [escape(view.clean(cell)) for cell in (t(item.kind), t(item.name), item.a or "–", item.b or "–")]
            for item in found.differences
        ]
        lines += ["", t("What differs between the runs") + ":", "", *pipe_table(["", "name", a, b], rows, left=(0, 1, 2, 3))]
    return "\n".join(lines) + "\n"


def render_json(found: Comparison) -> str:
    """`{"schema_version": 1, "labels": […], "worst": {…}, "stages": […], "ranks": […], "differences": […]}`."""

    def plain(pair: RankPair) -> dict[str, Any]:
        return {
            "name": pair.name,
            "ranks": list(pair.ranks),
            "stage": pair.stage,
            "used_peak_mb": [pair.a_used_mb, pair.b_used_mb],
            "actual_peak_mb": [pair.a_actual_mb, pair.b_actual_mb],
            "used_diff_mb": pair.used_diff_mb,
            "actual_diff_mb": pair.actual_diff_mb,
        }

    data = {
        "schema_version": 1,
        "labels": list(found.labels),
        "worst": plain(found.worst),
        "worst_ranks": list(found.worst_ranks),
        "stages": [plain(pair) for pair in found.stages],
        "ranks": [plain(pair) for pair in found.ranks],
        "differences": [{"kind": d.kind, "name": d.name, "a": d.a, "b": d.b} for d in found.differences],
    }
    return json_text(data)


def read_published(path: Path) -> PublishedFigures:
    """A file of published A/B figures, each scenario compared."""
    data = read_json_of_user(path)
    try:
        labels = (str(data["labels"][0]), str(data["labels"][1]))
        found = []
        for pair in data["pairs"]:
            a, b = (
                Run(label=label, report=_one_rank(pair[side]), flags={}, environment={})
                for label, side in zip(labels, ("a", "b"), strict=True)
            )
            found.append(Scenario(str(pair["scenario"]), (a, b), compare(a, b)))
        return PublishedFigures(str(data["title"]), tuple(found))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        raise UsageError(
            f"{path} is not a file of A/B figures: it needs a title, two labels, and pairs with a scenario and the sides a and b."
        ) from None


def render_published(path: Path) -> str:
    """The published table, 80 columns: for each scenario both runs and the difference."""
    published = read_published(path)
    body = []
    for scenario in published.scenarios:
        for name, run in zip((scenario.name, ""), scenario.runs, strict=True):
            rank = run.report.ranks[0]
            figures = (rank.device_total_mb, rank.usable_mb, rank.used_peak_mb, rank.actual_peak_mb)
            body.append([name, view.clean(run.label), *(view.mb(value) for value in figures)])
        worst = scenario.found.worst
        used = _difference(worst.used_diff_mb, worst.a_used_mb)
        body.append(["", t("difference"), "", "", used, _difference(worst.actual_diff_mb, worst.a_actual_mb)])
    head = ["scenario", "run", "device", "usable", "used peak", "with fragments"]
    return "\n".join([*textwrap.wrap(view.clean(published.title), 80), "", *columns(head, body, left=(0, 1))]) + "\n"


def _one_rank(figures: Mapping[str, int]) -> Report:
    rank = RankReport(
        rank=0,
        represents=(0,),
        stage=None,
        status=Status.OK,
        used_peak_mb=figures["used_peak_mb"],
        actual_peak_mb=figures["actual_peak_mb"],
        device_total_mb=figures["device_total_mb"],
        usable_mb=figures["usable_mb"],
    )
    device = Device(
        name="", title="the device", total_mb=figures["device_total_mb"], usable_mb=figures["usable_mb"], source="published"
    )
    return summarise(None, EngineSummary(), [rank], Criteria(device=device, budget_mb=device.usable_mb))


def _by_rank(report: Report) -> dict[int, RankReport]:
    found: dict[int, RankReport] = {}
    for rank in report.ranks:
        for number in rank.represents or (rank.rank,):
            found.setdefault(number, rank)
        found[rank.rank] = rank
    return found


def _pair(name: str, ranks: tuple[int, ...], stage: int | None, a: RankReport | None, b: RankReport | None) -> RankPair:
    # A rank that failed printed a figure that means nothing.
    a, b = (side if side is not None and not side.status.broken else None for side in (a, b))
    return RankPair(
        name=name,
        ranks=ranks,
        stage=stage,
        a_used_mb=a.used_peak_mb if a else None,
        b_used_mb=b.used_peak_mb if b else None,
        a_actual_mb=a.actual_peak_mb if a else None,
        b_actual_mb=b.actual_peak_mb if b else None,
    )


def _fold(pairs: Iterable[RankPair]) -> list[RankPair]:
    groups: dict[RankPair, list[int]] = {}
    for pair in pairs:
        groups.setdefault(dataclasses.replace(pair, name="", ranks=()), []).extend(pair.ranks)
    return [
        dataclasses.replace(figures, name=f"rank {view.shorten(view.ranges(ranks), 14)}", ranks=tuple(ranks))
        for figures, ranks in groups.items()
    ]


def _largest(name: str, pairs: Sequence[RankPair], stage: int | None) -> RankPair:
    def top(values: Iterable[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return RankPair(
        name=name,
        ranks=tuple(rank for pair in pairs for rank in pair.ranks),
        stage=stage,
        a_used_mb=top(pair.a_used_mb for pair in pairs),
        b_used_mb=top(pair.b_used_mb for pair in pairs),
        a_actual_mb=top(pair.a_actual_mb for pair in pairs),
        b_actual_mb=top(pair.b_actual_mb for pair in pairs),
    )


def _cells(pair: RankPair, digits: int = 2) -> list[str]:
    return [
        t(pair.name),
        view.mb(pair.a_used_mb),
        view.mb(pair.b_used_mb),
        _difference(pair.used_diff_mb, pair.a_used_mb, digits),
        view.mb(pair.a_actual_mb),
        view.mb(pair.b_actual_mb),
        _difference(pair.actual_diff_mb, pair.a_actual_mb, digits),
    ]


def _difference(diff: int | None, base: int | None, digits: int = 2) -> str:
    if diff is None:
        return "–"
    return f"{diff:+d}M" + (f" {100 * diff / base:+.{digits}f}%" if base else "")


def _missing(pair: RankPair, labels: tuple[str, str]) -> str:
    sides = [label for label, figure in zip(labels, (pair.a_used_mb, pair.b_used_mb), strict=True) if figure is None]
    return " and ".join(f"side {view.clean(side)}" for side in sides)


def _differences(a: Run, b: Run) -> Iterable[Difference]:
    first, second = a.report, b.report
    for name in ("name", "version", "cann", "level"):
        yield from _unequal("engine", name, getattr(first.engine, name), getattr(second.engine, name))
    yield from _unequal("job", message("device memory"), _device(first), _device(second))
    if first.job and second.job:
        yield from _unequal("job", "script", first.job.script, second.job.script)
        yield from _unequal("job", "trainer", first.job.trainer, second.job.trainer)
        yield from _unequal("job", message("world size"), first.job.world_size, second.job.world_size)
        yield from _unequal("job", "layout", view.parallel_words(first.job), view.parallel_words(second.job))
    if a.flags and b.flags:
        names = {*a.flags, *b.flags}
        if a.flags_logged != b.flags_logged:
            names = set(b.flags if a.flags_logged else a.flags)
        for name in sorted(names):
            yield from _unequal("argument", name, _logged(a, name), _logged(b, name))
    if a.environment and b.environment:
        for name in sorted({*a.environment, *b.environment}):
            yield from _unequal("environment", name, a.environment.get(name), b.environment.get(name))


def _logged(run: Run, name: str) -> str | None:
    value = run.flags.get(name)
    if run.flags_logged:
        return {"True": "set", "False": None, "None": None}.get(value or "None", value)
    return value


def _device(report: Report) -> str | None:
    """As the engine saw it."""
    found = [rank.device_total_mb for rank in report.ranks if rank.device_total_mb is not None]
    return f"{min(found)}M" if found else None


def _unequal(kind: str, name: str, a: object, b: object) -> Iterable[Difference]:
    if a != b:
        yield Difference(kind, name, None if a is None else str(a), None if b is None else str(b))
