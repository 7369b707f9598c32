"""The peak against the imbalance of experts: every rank class again, at growing loads, in records of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.plan import Plan
from mindspeed_dryrun.launch.run import Execution, plan_job, run_plan, shared_execution
from mindspeed_dryrun.megatron import moe_load
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import LOADS, build_report

FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""A rank has all tokens at as many times an even load as there are ranks with different experts."""
CLOSE = 0.1
"""How close the largest load that fits and the smallest that does not are brought together."""


def check(job: Job, spec: RunSpec) -> None:
    """Refuses what has no such curve."""
    if not job.arguments.has("--num-experts"):
        raise UsageError("--moe-curve is for mixtures of experts: this script has no --num-experts.")
    if job.parallel.ep == 1:
        raise UsageError("--moe-curve is for expert parallelism: with EP 1 a rank has all experts, whatever their load.")
    if not moe_load.parse(spec.moe_load).is_even:
        raise UsageError("--moe-curve starts from an even load: leave out --moe-load and --moe-imbalance.")


def count_loads(plan: Plan, out: Path, report: Report, execution: Execution) -> Report:
    """Counts at one load after the other until the job no longer fits, then between the last two. Returns the report with it."""
    if not report.fits:
        return report
    spec = dataclasses.replace(plan.spec, check_classes=0, explain=False)
    with shared_execution(plan, execution) as shared:

        def fits(factor: float) -> bool | None:
            load = f"{factor:g}"
            busier = plan_job(plan.job, dataclasses.replace(spec, moe_load=f"hot:{load}"), shared)
            return run_plan(busier, out / LOADS / load, shared).fits

        climb(fits, [factor for factor in FACTORS if factor <= plan.job.parallel.ep])
    report = build_report(out)
    Record.open(out).write_json("report.json", report.to_json())
    return report


def climb(fits: Callable[[float], bool | None], factors: Sequence[float]) -> None:
    """Asks for one factor after the other, then for the half of where the answer changes. None, a failed rank, ends it."""
    fitting = 1.0
    for factor in factors:
        answer = fits(factor)
        if answer is None:
            return
        if not answer:
            break
        fitting = factor
    else:
        return
    while factor - fitting > CLOSE:
        middle = round((fitting + factor) / 2, 2)
        answer = fits(middle)
        if answer is None:
            return
        fitting, factor = (middle, factor) if answer else (fitting, middle)
