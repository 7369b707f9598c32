"""From ranks to a verdict: what a report says follows from the record alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import CRITERIA, ENGINE, job, job_file

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron.layout import Parallel
from mindspeed_dryrun.record.model import RankReport, Report, Status, Verdict
from mindspeed_dryrun.record.store import Record, write_json
from mindspeed_dryrun.record.summary import build_report, report_from_logs, summarise
from mindspeed_dryrun.report.view import headline


def rank(number: int, used: int | None = 500, actual: int | None = 600, status: str = "ok", **fields: object) -> RankReport:
    figures = {"used_peak_mb": used, "actual_peak_mb": actual, "device_total_mb": 65536, "usable_mb": 61430}
    return RankReport(rank=number, represents=(number,), stage=0, status=Status(status), **{**figures, **fields})  # type: ignore[arg-type]


def verdict(*ranks: RankReport, budget_mb: int = 58166) -> Report:
    return summarise(None, ENGINE, ranks, dataclasses.replace(CRITERIA, budget_mb=budget_mb))


def test_the_worst_rank_decides() -> None:
    report = verdict(rank(0, 34946, 35711), rank(2, 37813, 40298))
    assert (report.worst_rank, report.used_peak_mb, report.actual_peak_mb) == (2, 37813, 40298)
    assert (report.verdict, report.budget_mb, report.margin_mb) == (Verdict.FITS, 58166, 58166 - 40298)


def test_what_lies_between_the_real_card_and_the_simulated_one_does_not_fit() -> None:
    assert verdict(rank(0, 58000, 58167)).exit_status == 3 and verdict(rank(0, 58000, 61000)).fits is False


def test_barely_is_less_than_real_runs_were_seen_to_need() -> None:
    needed = math.ceil(0.0127 * 57500)
    assert verdict(rank(0, 57000, 57500), budget_mb=57500 + needed).verdict is Verdict.FITS
    report = verdict(rank(0, 57000, 57500), budget_mb=57500 + needed - 1)
    assert (report.verdict, report.fits, report.exit_status, report.needed_mb) == (Verdict.BARELY, True, 0, needed)


@pytest.mark.parametrize(("margin", "status"), [("2%", 3), ("1%", 0), ("1G", 3), ("900M", 0), ("910M", 3)])
def test_a_margin_that_is_asked_for_makes_ci_fail(margin: str, status: int) -> None:
    report = summarise(None, ENGINE, [rank(0, 55389, 57257)], dataclasses.replace(CRITERIA, margin=margin))
    assert report.exit_status == status and report.fits is True


def test_oom_is_decided_with_fragments_and_anew_for_each_budget() -> None:
    report = verdict(rank(0, 500, 600), rank(1, 590, 595), budget_mb=599)
    assert [item.status for item in report.ranks] == ["oom", "ok"]
    assert report.fits is False and report.worst_rank == 0
    assert [item.status for item in verdict(*report.ranks, budget_mb=600).ranks] == ["ok", "ok"]


@pytest.mark.parametrize("status", ["failed", "timeout"])
def test_a_failed_rank_is_shown_and_leaves_the_verdict_open(status: str) -> None:
    report = verdict(rank(0), rank(1, 70000, 71000, status, error="x"))
    assert len(report.ranks) == 2 and report.fits is None
    assert report.worst_rank == 0, "a failed rank's figures decide nothing"
    assert verdict(rank(0, 70000, 71000), rank(1, None, None, status)).fits is False


def test_a_real_out_of_memory_stays_one_whatever_the_budget() -> None:
    report = verdict(rank(0, 500, 600, "oom", error="RuntimeError: Out of memory"), budget_mb=10000)
    assert report.ranks[0].status == "oom" and report.fits is False


def test_nothing_is_no_verdict() -> None:
    report = verdict()
    assert (report.worst_rank, report.fits, report.margin_mb, report.exit_status) == (None, None, None, 1)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4), st.sampled_from(["ok", "failed"])), max_size=8),
    st.integers(1, 10**6),
)
def test_fits_means_every_rank_ran_and_none_exceeds_the_budget(figures: list[tuple[int, int, str]], budget: int) -> None:
    ranks = [rank(i, used, used + more, status) for i, (used, more, status) in enumerate(figures)]
    report = verdict(*ranks, budget_mb=budget)
    counted = [item for item in ranks if item.status == "ok"]
    assert (report.fits is True) == (bool(ranks) and counted == ranks and all(item.actual_peak_mb <= budget for item in ranks))  # type: ignore[operator]
    assert report.actual_peak_mb == max(
        (item.actual_peak_mb for item in counted if item.actual_peak_mb is not None), default=None
    )
    assert Report.from_json(report.to_json()) == report


def a_record(path: Path, plan: tuple[tuple[int, tuple[int, ...]], ...], **fields: object) -> Record:
    return Record.create(path, job_file(plan=plan, **fields))


def put(record: Record, report: RankReport, **extra: object) -> None:
    record.rank_folder(report.rank).mkdir(parents=True, exist_ok=True)
    write_json(record.rank_folder(report.rank) / "result.json", {**dataclasses.asdict(report), **extra})


def test_operators_that_may_lift_the_peak_are_named(tmp_path: Path) -> None:
    record = a_record(tmp_path, ((0, (0,)), (1, (1,))), job=job("a.sh", 2, Parallel(), "script"))
    put(record, rank(0), workspace_room={"aclnnTopk": 30 << 20, "aclnnSort": 10 << 30})
    put(record, rank(1), workspace_room={"aclnnTopk": (20 << 20) + 1, "aclnnBatchMatMul": 0})
    notes = [note for note in build_report(tmp_path).notes if "too LOW" in note]
    assert len(notes) == 1 and notes[0].endswith("not counted: aclnnBatchMatMul 0M, aclnnTopk 21M")


def test_what_only_the_garbage_collector_frees_is_told(tmp_path: Path) -> None:
    record = a_record(tmp_path, ((0, (0,)), (1, (1,))), job=job("a.sh", 2, Parallel(), "script"))
    put(record, rank(0))
    put(record, rank(1), collected_mb=192)
    notes = [note for note in build_report(tmp_path).notes if "garbage collector" in note]
    assert len(notes) == 1 and "up to 192M" in notes[0] and "(rank 1)" in notes[0]


def test_what_waits_for_the_garbage_collector_at_the_end_makes_the_peak_too_low(tmp_path: Path) -> None:
    record = a_record(tmp_path, ((0, (0,)), (1, (1,))), job=job("a.sh", 2, Parallel(), "script"))
    put(record, rank(0), uncollected_mb=39216)
    put(record, rank(1))
    (note,) = [note for note in build_report(tmp_path).notes if "too LOW" in note]
    assert "up to 39216M wait" in note and "(rank 0)" in note


@pytest.mark.parametrize(("waiting", "verdict"), [(1, Verdict.FITS), (100, Verdict.BARELY)])
def test_a_job_that_leaves_memory_to_the_collector_never_simply_fits(tmp_path: Path, waiting: int, verdict: Verdict) -> None:
    criteria = dataclasses.replace(CRITERIA, budget_mb=2000)
    record = a_record(tmp_path, ((0, (0,)),), job=job("a.sh", 1, Parallel(), "script"), criteria=criteria)
    put(record, rank(0, used=1000, actual=1400), uncollected_mb=waiting)
    report = build_report(tmp_path)
    assert (report.verdict, report.uncollected_mb) == (verdict, waiting)
    assert ("100M wait for Python's garbage collector at its end" in headline(report).sentence) is (waiting == 100)


def test_a_report_from_the_record_alone(tmp_path: Path) -> None:
    record = a_record(
        tmp_path,
        ((0, (0, 1)), (2, (2, 3))),
        job=job("a.sh", 4, Parallel(tp=2, pp=2), "script", "-x"),
        criteria=dataclasses.replace(CRITERIA, budget_mb=700),
        not_counted=("workspace",),
        notes=("hello",),
    )
    put(record, rank(0), note="crashed in the tear-down")
    report = build_report(tmp_path)
    assert report.job and (report.job.script, report.job.parallel.pp, report.job.trainer_args) == ("a.sh", 2, ("-x",))
    assert (report.budget_mb, report.not_counted, report.engine) == (700, ("workspace",), ENGINE)
    assert report.fits is None, "rank 2 is not there yet"
    assert report.notes[:2] == ("hello", "rank 0: crashed in the tear-down") and "not run: rank 2" in report.notes[2]
    put(record, rank(2))
    report = build_report(tmp_path)
    assert report.fits is True
    assert [(item.rank, item.represents, item.stage, item.why) for item in report.ranks] == [
        (0, (0, 1), 0, "w"),
        (2, (2, 3), 1, "w"),
    ]


def test_every_rank_is_stood_for_once_when_launches_with_other_choices_share_a_record(tmp_path: Path) -> None:
    record = a_record(tmp_path, ((0, (0, 1, 2)), (3, (3, 2))))
    for number in (0, 1, 3):
        put(record, rank(number))
    report = build_report(tmp_path)
    assert [item.represents for item in report.ranks] == [(0, 2), (1,), (3,)]


BLOCK = (
    "Device MOC memory size: 65536M\nMindSpore Used memory size: 59392M\nMindSpore memory base address: 0xffffe9dc1407\n"
    "Used peak memory usage (without fragments): {}M\nActual peak memory usage (with fragments): {}M\n"
)


def test_a_folder_of_real_logs(tmp_path: Path) -> None:
    logs = tmp_path / "msrun_log"
    logs.mkdir()
    (logs / "worker_0.log").write_text("[INFO] hello\n" + BLOCK.format(55405, 57400) * 2)
    (logs / "worker_10.log").write_text(BLOCK.format(55000, 57000)[:-30])
    (logs / "worker_2.log").write_text("RuntimeError: Device(id:0) out of memory\n" + BLOCK.format(50000, 58000))
    (logs / "worker_3.log").write_text(
        "Traceback (most recent call last):\n  File\nValueError: no data\n" + BLOCK.format(18286, 19000)
    )
    (logs / "worker_4.log").write_text("")
    (logs / "scheduler.log").write_text(BLOCK.format(1, 1))
    for folder in (tmp_path, logs):
        report = report_from_logs(folder)
        assert [item.rank for item in report.ranks] == [0, 2, 3, 4, 10]
        assert [item.status for item in report.ranks] == ["ok", "oom", "failed", "failed", "failed"]
        assert report.ranks[2].error == "ValueError: no data"
        assert "no memory block" in (report.ranks[3].error or "")
        assert "inside the memory block" in (report.ranks[4].error or "")
        assert (report.worst_rank, report.actual_peak_mb, report.budget_mb, report.fits) == (2, 58000, 59392, False)


def test_one_log_file(tmp_path: Path) -> None:
    (tmp_path / "worker_7.log").write_text(BLOCK.format(5, 6))
    report = report_from_logs(tmp_path / "worker_7.log")
    assert [(item.rank, item.used_peak_mb) for item in report.ranks] == [(7, 5)] and report.fits is True


def test_a_run_that_ended_well_may_have_logged_exceptions(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\n  File\nImportError: optional\n iteration   3/   3 | x\n" + BLOCK.format(5, 6)
    (tmp_path / "worker_7.log").write_text(text)
    assert report_from_logs(tmp_path).ranks[0].status == "ok"


def test_neither_record_nor_logs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a dry run"):
        report_from_logs(tmp_path)
