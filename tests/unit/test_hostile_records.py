"""A record, a folder or a log may come from anybody: none of them makes the reader run, write or calculate something."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from report_samples import fits
from test_executor_local import task

from mindspeed_dryrun.commands import explain
from mindspeed_dryrun.engines import packages
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch.executors.rank import run_rank
from mindspeed_dryrun.record.model import EngineSummary
from mindspeed_dryrun.record.run_spec import JobDetails, JobFile
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.report import as_csv


@pytest.mark.parametrize("formula", ["=cmd|' /C calc'!A0", "+1+1", "-2", "@SUM(A1)"])
def test_a_spreadsheet_does_not_calculate_an_error_line(formula: str) -> None:
    report = fits()
    broken = dataclasses.replace(report.ranks[0], error=formula)
    text = as_csv.render(dataclasses.replace(report, ranks=(broken,)))
    assert next(csv.DictReader(io.StringIO(text)))["error"] == f"'{formula}"


@pytest.mark.parametrize("link", ["ranks", "ranks/00000"])
def test_links_inside_a_record_are_not_followed(tmp_path: Path, link: str) -> None:
    victim, record = tmp_path / "victim", tmp_path / "record"
    (victim / "00000").mkdir(parents=True)
    (victim / "worker.log").write_text("precious")
    (victim / "00000" / "worker.log").write_text("precious")
    place = record / link
    place.parent.mkdir(parents=True)
    place.symlink_to(victim)
    with pytest.raises(DryRunError, match="is a symbolic link"):
        run_rank(task("train(); block()"), record)
    assert all(file.read_text() == "precious" for file in victim.rglob("worker.log"))


def test_the_lock_of_a_record_creates_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(DryRunError), Record(tmp_path / "record").locked():
        pass
    assert not (tmp_path / "made").exists()


def job_file() -> JobFile:
    summary = fits().job
    assert summary
    details = JobDetails(cwd="/somebody/elses", program="pretrain.py")
    return JobFile(
        version="0", fingerprint="0", job=summary, details=details, engine=EngineSummary(name="mindspore", version="2.7.1")
    )


@pytest.mark.parametrize(("answer", "runs"), [("y\n", True), ("\n", False), ("", False), (None, False)])
def test_trying_a_record_asks_first(monkeypatch: pytest.MonkeyPatch, answer: str | None, runs: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return answer is not None

    monkeypatch.setattr("sys.stdin", Terminal(answer or ""))
    if runs:
        explain._agree(job_file(), yes=False)
    else:
        with pytest.raises(UsageError, match=r"Add --yes|Nothing was run"):
            explain._agree(job_file(), yes=False)
    explain._agree(job_file(), yes=True)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_packages_that_others_can_write_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    monkeypatch.setenv(packages.VARIABLE, str(tmp_path))
    (tmp_path / "msa_thirdparty" / "torch").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "msa_thirdparty", tmp_path / "msa_thirdparty" / "torch"):
        folder.chmod(0o755)
    assert packages.engine_path()
    (tmp_path / "msa_thirdparty" / "torch").chmod(mode)
    with pytest.raises(DryRunError, match="can be written by other users"):
        packages.engine_path()
