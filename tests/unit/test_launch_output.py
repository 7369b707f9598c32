"""What `launch` prints when the record's disk gives out."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from report_samples import fits

from mindspeed_dryrun.advise import report_page
from mindspeed_dryrun.commands import launch
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
