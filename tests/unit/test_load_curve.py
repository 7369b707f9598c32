"""The curve of the peak against the imbalance of experts."""

from __future__ import annotations

import dataclasses

from report_samples import fits

from mindspeed_dryrun.launch.load_curve import climb
from mindspeed_dryrun.record.model import LoadPeak, Report, Status
from mindspeed_dryrun.report import view


def test_the_load_at_which_a_job_stops_fitting_is_closed_in() -> None:
    asked: dict[float, bool] = {}

    def answer(factor: float) -> bool:
        asked[factor] = factor < 2.4
        return asked[factor]

    climb(answer, (1.25, 1.5, 2.0, 3.0, 4.0))
    assert 4.0 not in asked
    largest, smallest = max(load for load in asked if asked[load]), min(load for load in asked if not asked[load])
    assert 0 < smallest - largest <= 0.13


def test_a_failed_rank_ends_the_curve() -> None:
    asked: list[float] = []
    climb(asked.append, (1.25, 1.5))
    assert asked == [1.25]


def peak(load: float, used: int, status: Status) -> LoadPeak:
    return LoadPeak(load=load, rank=12, status=status, used_peak_mb=used, actual_peak_mb=used)


def test_the_report_charts_the_peak_and_says_where_it_stops_fitting() -> None:
    loads = (peak(1, 40000, Status.OK), peak(1.5, 50000, Status.OK), peak(2, 60000, Status.OOM))
    report = dataclasses.replace(fits(), loads=loads)
    lines = view.load_lines(report)
    assert [line.count("█") for line in lines[1:4]] == [20, 25, 30]
    assert lines[-1] == "The job stops fitting between 1.5 and 2 times an even load."
    assert view.load_lines(dataclasses.replace(report, loads=loads[:2]))[-1].startswith("The job fits up to 1.5 times")
    assert Report.from_json(report.to_json()) == report
