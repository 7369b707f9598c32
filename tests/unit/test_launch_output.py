"""What `launch` prints when the record's disk gives out, and when no rank came to its end."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from report_samples import fits

from mindspeed_dryrun.advise import report_page
from mindspeed_dryrun.commands import explain, launch
from mindspeed_dryrun.errors import DryRunError


@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_at_the_page_still_shows_the_figures(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(record: Path) -> Path:
        raise DryRunError("Cannot write report.html: No space left on device.")

    monkeypatch.setattr(report_page, "write_page", full)
    with pytest.raises(DryRunError, match="No space left"):
        launch._print_report(fits(), tmp_path, argparse.Namespace(json=as_json, explain=False, junit=None))
    assert str(fits().actual_peak_mb) in capsys.readouterr().out


@pytest.mark.parametrize(("worst", "explained"), [(0, 1), (None, 0)])
def test_ranks_that_all_failed_are_not_explained(
    worst: int | None, explained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Path] = []
    monkeypatch.setattr(explain, "show_explanation", shown.append)
    monkeypatch.setattr(report_page, "write_page", lambda record: record)
    report = dataclasses.replace(fits(), worst_rank=worst)
    launch._print_report(report, tmp_path, argparse.Namespace(json=False, explain=True, junit=None))
    assert len(shown) == explained
