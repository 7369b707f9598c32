"""A sweep: variants of one script through the same dry run, one table, one record of records."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.estimate.time_model import NEWEST, Estimate, Release, predict_time
from mindspeed_dryrun.files import write_text
from mindspeed_dryrun.language import message, t
from mindspeed_dryrun.launch.executors import Interrupted
from mindspeed_dryrun.launch.executors.local import ending_on_signals
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.run import read_job
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.store import folder_name, write_json
from mindspeed_dryrun.report import strategy_page as page
from mindspeed_dryrun.report.text import table
from mindspeed_dryrun.report.view import Headline
from mindspeed_dryrun.sweep.sweep_file import SweepPlan, Variant

# History of `sweep --json`:
# 1: first version (docs: DESIGN, "Fixed: the record").
SCHEMA_VERSION = 1


@dataclass(kw_only=True)
class VariantResult:
    """A variant with its outcome; `report` is None while it is open or when it failed before any rank ran."""

    variant: Variant
    report: Report | None = None
    error: str | None = None
    seconds: float = 0.0
    estimate: Estimate | None = None

    @property
    def status(self) -> str:
        """`ok`, `oom`, `failed`, `timeout`, or `open` when the sweep was interrupted before it."""
        if self.report is None:
            return "failed" if self.error else "open"
        found = {rank.status for rank in self.report.ranks}
        for status in ("failed", "timeout", "oom"):
            if status in found:
                return status
        return "ok" if found else "failed"

    @property
    def said(self) -> str:
        """In a few words, for the progress."""
        if self.report and self.report.used_peak_mb is not None:
            return message(f"{self.report.used_peak_mb}M used, {self.report.actual_peak_mb}M with fragments")
        return self.status

    def to_json(self) -> dict[str, Any]:
        """The fixed shape, and beside it what else is known."""
        report = self.report.to_json() if self.report else {}
        return {
            "name": self.variant.name,
            "set": dict(self.variant.sets),
            "args": list(self.variant.args),
            "env": dict(self.variant.env),
            "status": self.status,
            "used_peak_mb": report.get("used_peak_mb"),
            "actual_peak_mb": report.get("actual_peak_mb"),
            "fits": report.get("fits"),
            "worst_rank": report.get("worst_rank"),
            "ranks": report.get("ranks", []),
            "seconds": round(self.seconds, 1),
            "error": self.error,
            "predicted": self.estimate.figures() if self.estimate else None,
        }


def variant_job(script: Path, variant: Variant) -> Job:
    """The variant's job."""
    return read_job(script, RunSpec(sets=variant.sets, overrides=variant.args, env=variant.env))


def predict(job: Job, hardware: Hardware | None, release: Release = NEWEST) -> Estimate | None:
    """The time model's word on a job; None without hardware, or for a job that it does not model."""
    if hardware is None:
        return None
    try:
        return predict_time(job.args, job.world_size, hardware, release)
    except DryRunError:
        return None


# Runs a job in a record whose folder's name starts with the given path.
DryRun = Callable[[Job, Path], Report]


class Sweep:
    """Runs the variants, several at once, and keeps `sweep.json` and `sweep.html` up to date after each.

    `at_once` bounds the variants that are under way; how many ranks run is the executor's business. `on_row` hears of each
    variant that is done, and of how many were before it.
    """

    def __init__(
        self,
        plan: SweepPlan,
        folder: Path,
        dry_run: DryRun,
        on_row: Callable[[int, VariantResult], None] = lambda *_: None,
        at_once: int = 1,
        stop: threading.Event | None = None,
    ):
        self.plan, self.folder, self.dry_run, self.on_row = plan, folder, dry_run, on_row
        self.rows = [VariantResult(variant=variant) for variant in plan.variants]
        self.at_once = at_once
        self.stop = stop or threading.Event()
        self.interrupted: KeyboardInterrupt | None = None

    def run(self) -> list[VariantResult]:
        """Every variant; one that cannot run has its sentence in the table and does not stop the others."""
        with ending_on_signals(self.stop) as caught, ThreadPoolExecutor(self.at_once) as pool:
            try:
                self._run_rows(pool)
            except KeyboardInterrupt as stop:  # of this thread, or of a row's, which is not told of signals
                self.interrupted = Interrupted(caught[0]) if caught else stop
                self.stop.set()
                pool.shutdown(cancel_futures=True)
        self.save()
        return self.rows

    def _run_rows(self, pool: ThreadPoolExecutor) -> None:
        waiting = {pool.submit(self._run_row, row, job): row for row in self.rows if (job := self._job_of(row))}
        done = len(self.rows) - len(waiting)
        for future in as_completed(waiting):
            future.result()
            self.on_row(done, waiting[future])
            done += 1
            self.save()

    def _job_of(self, row: VariantResult) -> Job | None:
        try:
            return variant_job(self.plan.script, row.variant)
        except DryRunError as error:
            row.error = str(error)
            return None

    def _run_row(self, row: VariantResult, job: Job) -> None:
        if self.stop.is_set():
            raise Interrupted(signal.SIGINT)
        started = time.monotonic()
        try:
            row.estimate = predict(job, self.plan.hardware, self.plan.release)
            row.report = self.dry_run(job, self.folder / "variants" / folder_name(row.variant.name))
            first = next((rank.error for rank in row.report.ranks if rank.error), None)
            row.error = first if row.status in ("failed", "timeout") else None
        except DryRunError as error:
            row.error = str(error)
        finally:
            row.seconds = time.monotonic() - started

    def save(self) -> None:
        """Writes the record of records."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "sweep.json", to_json(self.rows))
        write_text(self.folder / "sweep.html", to_html(self.plan, self.rows))


def to_json(rows: Sequence[VariantResult]) -> dict[str, Any]:
    """What `sweep --json` prints."""
    return {"schema_version": SCHEMA_VERSION, "variants": [row.to_json() for row in rows if row.status != "open"]}


def exit_status(rows: Sequence[VariantResult]) -> int:
    """1 where one failed, timed out or was not reached, else 3 where one does not fit, else 0."""
    found = {row.report.exit_status if row.report else 1 for row in rows}
    return next((status for status in (1, 3) if status in found), 0)


_VERDICT_SENTENCES = {"ok": "fits", "oom": "too big", "failed": "failed", "timeout": "timed out", "open": "not run"}


def _cells(rows: Sequence[VariantResult]) -> tuple[list[str], list[list[str]]]:
    timed = any(row.estimate for row in rows)
    header = ["variant", "used", "with fragments", "by stage: used/with fragments", "worst rank"]
    header += ["s/iteration", "TFLOP/s/card"] if timed else []
    body = []
    for row in rows:
        report = row.report
        cells = [row.variant.name]
        if report and report.used_peak_mb is not None:
            cells += [f"{report.used_peak_mb}M", f"{report.actual_peak_mb}M", _by_stage(report), str(report.worst_rank)]
        else:
            cells += ["-", "-", "-", "-"]
        if timed:
            guess = row.estimate
            cells += [
                f"{guess.iteration_s:.2f} ({guess.low_s:.1f}-{guess.high_s:.1f})" if guess else "-",
                f"{guess.tflops_per_card:.0f}" if guess else "-",
            ]
        body.append([*cells, f"{row.seconds:.0f}", t(_VERDICT_SENTENCES[row.status])])
    return [*header, message("seconds"), "verdict"], body


def to_text(plan: SweepPlan, rows: Sequence[VariantResult]) -> str:
    """The table, and below it a sentence for every variant that has no figures."""
    header, body = _cells(rows)
    lines = [table(header, body)]
    lines += [f"{row.variant.name}: {t(row.error)}" for row in rows if row.error]
    if any(row.estimate for row in rows) and plan.hardware:
        lines.append(t(_time_note(plan.hardware, plan.release)))
    return "\n".join(lines)


def _time_note(hardware: Hardware, release: Release) -> str:
    note = f"Times are predicted for {hardware.name} ({hardware.trust}); memory is counted by the engine."
    if release < NEWEST:
        note += "\n" + message(
            f"TFLOP/s are as MindSpeed-LLM {release[0]}.{release[1]} logs them: no-op layers and all of the attention matrix "
            "count."
        )
        note += "\n" + message("Between variants with and without no-op layers compare the seconds.")
    return note


def to_html(plan: SweepPlan, rows: Sequence[VariantResult]) -> str:
    """The same with a chart."""
    drawn = [
        (row.variant.name, row.report.used_peak_mb, row.report.actual_peak_mb) if row.report else (row.variant.name, None, None)
        for row in rows
    ]
    budgets = [row.report.budget_mb for row in rows if row.report and row.report.budget_mb]
    budget_mb = plan.budget_mb or max(budgets, default=None)
    header, body = _cells(rows)
    marks = ["good" if row.status == "ok" else "bad" if row.status != "open" else "" for row in rows]
    notes = []
    if any(row.estimate for row in rows) and plan.hardware:
        notes = t(_time_note(plan.hardware, plan.release)).splitlines()
    sections = [
        page.PageSection(title="Peak memory", bars=page.bars(drawn, budget_mb), budget=budget_mb),
        page.PageSection(title="Variants", table=page.Table(header, body, 1, marks), text=notes),
    ]
    problems = [f"{row.variant.name}: {t(row.error)}" for row in rows if row.error]
    if problems:
        sections.append(page.PageSection(title="Problems", code=problems))
    return page.render(t(f"Sweep of {plan.script.name}"), _verdict(rows), sections)


def _verdict(rows: Sequence[VariantResult]) -> Headline:
    count = Counter(row.status for row in rows)
    said = ", ".join(f"{count[status]} {t(words)}" for status, words in _VERDICT_SENTENCES.items() if count[status])
    known = [(row.report.actual_peak_mb, row.variant.name) for row in rows if row.report and row.report.actual_peak_mb]
    least = t(f" The least memory: {min(known)[1]} with {min(known)[0]}M.") if known else ""
    word, tone = {0: ("ALL FIT", "good"), 3: ("NOT ALL FIT", "bad")}.get(exit_status(rows), ("NOT ALL COUNTED", "warn"))
    return Headline(t(word), tone, t(f"{len(rows)} variants: {said}.") + least)


def _by_stage(report: Report) -> str:
    return " ".join(f"{peak.used_mb}/{peak.actual_mb}" for peak in report.stage_peaks.values())
