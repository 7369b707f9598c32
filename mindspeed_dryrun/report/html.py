"""`report.html`: one self-contained page. No script, no network; whatever comes from a log or a script is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, Environment, PackageLoader, StrictUndefined

from mindspeed_dryrun import __version__
from mindspeed_dryrun.language import current, t
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import JobFile
from mindspeed_dryrun.report import charts, view
from mindspeed_dryrun.report.explain import Explanation


def page(
    report: Report,
    job_file: JobFile | None = None,
    explained: Mapping[int, Explanation] | None = None,
    levers: Sequence[Any] = (),
) -> str:
    """The page of a report. `levers` are proposals with name, saves_mb, used_peak_mb, why and command."""
    explained = explained or {}
    rows = view.rows(report)
    drawn = charts.bars(rows, explained, report.budget_mb)
    shown = explanation_to_show(report, explained)
    return from_template(
        "report.html",
        report=report,
        verdict=view.headline(report),
        title=Path(report.job.script).name if report.job else t("worker logs"),
        rows=rows,
        worst=view.worst(report),
        errors=view.errors(rows, most=50),
        bars=drawn,
        legend=list(dict.fromkeys(piece.name for bar in drawn for piece in bar.pieces)),
        explained=shown,
        curve=charts.curve(shown.iteration, shown.peak_time, shown.peak_bytes) if shown else None,
        levers=levers,
        job=job_file,
        layout=view.parallel_words(report.job) if report.job else "",
        engine=view.engine_words(report),
        time=view.time_words(report.time),
        device=view.device_words(report),
        outside=view.outside_words(report),
        loads=view.load_lines(report),
    )


def from_template(name: str, **values: Any) -> str:
    """A template of `templates/`, everything in it escaped."""
    language = {"zh": "zh-CN"}.get(current(), "en")
    return environment(TEMPLATES).get_template(name).render(version=__version__, language=language, **values)


TEMPLATES = PackageLoader("mindspeed_dryrun.report", "templates")


def environment(loader: BaseLoader) -> Environment:
    """What templates can use. Everything that is put into one is escaped."""
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader)
    made.filters.update(clean=view.clean, mb=lambda size_bytes: f"{size_bytes / 2**20:.0f}M")
    made.globals.update(t=t, plural=view.plural, mb=view.mb, ranges=view.ranges, percent=view.percent, shorten=view.shorten)
    return made


def explanation_to_show(report: Report, explained: Mapping[int, Explanation]) -> Explanation | None:
    """Of the worst rank, or of any that was tracked."""
    if report.worst_rank is not None and report.worst_rank in explained:
        return explained[report.worst_rank]
    return next(iter(explained.values()), None)
