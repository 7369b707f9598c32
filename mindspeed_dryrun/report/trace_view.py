"""Operator times of a trace as a table of 80 columns."""

from __future__ import annotations

from mindspeed_dryrun.language import t
from mindspeed_dryrun.record.trace import Trace
from mindspeed_dryrun.report import view
from mindspeed_dryrun.report.text import columns


def render(trace: Trace, most: int = 25) -> str:
    """The operators that took most time first; the rest in one line."""
    shown, rest = trace.operators[:most], trace.operators[most:]
    body = [
        [
            view.shorten(view.clean(item.name), 36),
            str(item.calls),
            f"{item.total_us / 1000:.3f}",
            view.percent(item.total_us, trace.total_us),
            f"{item.mean_us:.1f}",
            f"{item.longest_us:.1f}",
        ]
        for item in shown
    ]
    if rest:
        calls, total = sum(item.calls for item in rest), sum(item.total_us for item in rest)
        body.append([t(f"{len(rest)} more"), str(calls), f"{total / 1000:.3f}", view.percent(total, trace.total_us), "", ""])
    what = "device and communication operators" if trace.device_only else "all events"
    title = t(f"Operator times ({what}): {trace.total_us / 1000:.3f} ms in total")
    return "\n".join([title, *columns(["operator", "calls", "ms", "share", "mean µs", "max µs"], body, left=(0,))]) + "\n"
