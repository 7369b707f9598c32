"""Advice as text of 80 columns: computed figures, and measured ones where they were tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_dryrun.advise.levers import Lever
from mindspeed_dryrun.language import t, wrapped
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.report import view
from mindspeed_dryrun.report.text import columns


def render(
    levers: Sequence[Lever], now_mb: int, stage: int | None = None, tried: Mapping[str, Report | str] | None = None
) -> str:
    """One line per lever, then the commands. `tried` holds the report of a lever's dry run, or why there is none.

    What is computed is the explained rank's peak; measured beside it is that of its stage, and of the new worst rank.
    """
    if not levers:
        return ""
    head = ["what to change", "computed", "saves"]
    if tried is not None:
        head += ["measured", "worst rank"]
    body = []
    for lever in levers:
        cells = [view.shorten(t(lever.name), 35), view.mb(lever.used_peak_mb), view.mb(lever.saves_mb)]
        if tried is not None:
            cells += _measured(tried.get(lever.name), stage)
        body.append(cells)
    lines = [t(f"What to change (used peak of this rank now: {now_mb}M)"), *columns(head, body, left=(0,)), ""]
    for lever in levers:
        # A command stays on one line, however long: it is there to be copied.
        lines += [*wrapped(f"{t(lever.name)}: {t(lever.why)}", 80), f"  {view.clean(lever.command)}"]
        result = (tried or {}).get(lever.name)
        if isinstance(result, str):
            lines.append("  " + t(f"could not be tried: {view.clean(result)}"))
        elif result is not None and _broken(result):
            lines += [f"  {problem}" for problem in view.errors(view.rows(result), most=1)]
    return "\n".join(lines) + "\n"


def _measured(result: Report | str | None, stage: int | None) -> list[str]:
    if not isinstance(result, Report) or _broken(result) or result.used_peak_mb is None:
        return ["–", t("failed")]
    same = [rank.used_peak_mb for rank in result.ranks if rank.stage == stage and rank.used_peak_mb is not None]
    return [view.mb(max(same, default=None)), f"{view.mb(result.used_peak_mb)} ({result.worst_rank})"]


def _broken(report: Report) -> bool:
    return any(rank.status.broken for rank in report.ranks)
