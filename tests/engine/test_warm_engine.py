"""Warm ranks with the real MindSpore count what cold ones count, to the megabyte."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import accuracy
import pytest
from simulated_rank import AS_SHOWN

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.engines.packages import packages_folder
from mindspeed_dryrun.launch.executors import SharedPlaces
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
SPEC = RunSpec(trainer="embedded")
EXAMPLE = ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run"),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPlaces]:
    with SharedPlaces(2) as made:
        yield made


def figures(report: Report) -> list[tuple[int, str, int | None, int | None, int | None]]:
    return [(rank.rank, rank.status, rank.used_peak_mb, rank.actual_peak_mb, rank.iterations) for rank in report.ranks]


def results(out: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(out.glob("ranks/*/result.json"))]


def test_the_example_counts_the_same_and_takes_less(shared: SharedPlaces, tmp_path: Path) -> None:
    job = read_job(EXAMPLE, SPEC)
    cold = dry_run_job(job, tmp_path / "cold", SPEC, Execution(cold=True))
    warm = dry_run_job(job, tmp_path / "warm", SPEC, Execution(shared=shared))
    assert figures(warm) == figures(cold)
    with_fragments = (57257, 50018) if AS_SHOWN else [rank.actual_peak_mb for rank in cold.ranks]
    assert figures(warm) == [(0, "ok", 55389, with_fragments[0], 2), (2, "ok", 48436, with_fragments[1], 2)]
    assert {str(result["start"]) for result in results(tmp_path / "warm")} == {"warm"}
    seconds = [sum(float(str(r["cpu_seconds"])) for r in results(tmp_path / name)) for name in ("warm", "cold")]
    assert seconds[0] < 0.6 * seconds[1], "a warm rank imports nothing"


@pytest.mark.parametrize("name", ["vpp", "hybrid", "reuse fp32", "recomputed stage by stage"])
def test_other_jobs_count_the_same(shared: SharedPlaces, tmp_path: Path, name: str) -> None:
    """One server for all of them: nothing of a job is left in it for the next."""
    job = accuracy.job_of(accuracy.CASES[name])
    cold = dry_run_job(job, tmp_path / "cold", SPEC, Execution(cold=True))
    warm = dry_run_job(job, tmp_path / "warm", SPEC, Execution(shared=shared))
    assert figures(warm) == figures(cold)
    assert {str(result["start"]) for result in results(tmp_path / "warm")} == {"warm"}
    logs = [(tmp_path / kind / "ranks" / "00000" / "worker.log").read_text() for kind in ("cold", "warm")]
    for sign in ("Falling back to Torch optimizers", "This is simulation mode", "iteration 2/2", "Used peak memory"):
        assert [log.count(sign) for log in logs] in ([1, 1], [2, 2]), sign


def test_allocations_are_recorded_in_a_warm_rank_too(shared: SharedPlaces, tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, explain=True)
    warm = dry_run_job(read_job(EXAMPLE, spec), tmp_path / "warm", spec, Execution(shared=shared))
    assert figures(warm)[0][2] == 55389 and {str(result["start"]) for result in results(tmp_path / "warm")} == {"warm"}
    for rank in (0, 2):
        rows = tmp_path / "warm" / "ranks" / f"{rank:05d}" / f"rank_{rank}" / "memory_block.csv"
        assert rows.stat().st_size > 100_000


def test_a_layout_that_was_counted_before_is_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = packages_folder()
    monkeypatch.setenv("MINDSPEED_DRYRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "packages").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    (tmp_path / "cache" / "packages" / folder.name).symlink_to(folder)
    monkeypatch.delenv("MINDSPEED_DRYRUN_NO_CACHE")
    command = ["launch", str(EXAMPLE), "--trainer", "embedded", "--json", "--out"]
    found = []
    for name, extra in (("first", []), ("second", []), ("third", ["--no-cache"])):
        assert main([*command, str(tmp_path / name), *extra]) == 0
        found.append(json.loads(capsys.readouterr().out))
    starts = [str(results(tmp_path / name)[0]["start"]) for name in ("first", "second", "third")]
    assert starts == ["warm", "cache", "warm"]
    assert [report["ranks"][0]["used_peak_mb"] for report in found] == [55389] * 3
    assert ["reused" in str(report["notes"]) for report in found] == [False, True, False]
