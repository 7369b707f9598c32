"""The record is whole at every moment, holds one job, and is shared by launches that do not share ranks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from report_samples import job as sample_job
from report_samples import job_file

from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.megatron.layout import Parallel
from mindspeed_dryrun.record import store
from mindspeed_dryrun.record.run_spec import JobFile, RunSpec
from mindspeed_dryrun.record.store import Record, write_json

ROOT = Path(__file__).resolve().parents[2]


def job(fingerprint: str = "1", ranks: tuple[int, ...] = (0, 1), **fields: object) -> JobFile:
    return job_file(fingerprint, tuple((rank, (rank,)) for rank in ranks), **fields)


def result(record: Record, rank: int, status: str = "ok") -> None:
    record.rank_folder(rank).mkdir(parents=True)
    write_json(record.rank_folder(rank) / "result.json", {"rank": rank, "status": status})


def test_the_same_job_continues_and_ok_ranks_are_done(tmp_path: Path) -> None:
    record = Record.create(tmp_path / "out", job())
    result(record, 0)
    result(record, 1, "failed")
    again = Record.create(tmp_path / "out", job(notes=("new",)))
    assert again.ranks_done() == {0}
    assert set(again.results()) == {0, 1}
    assert again.job().notes == ("new",)


def test_another_job_is_refused_with_what_changed(tmp_path: Path) -> None:
    summary = sample_job("a.sh", 4, Parallel(dp=4), "script", "--seq-length", "4096")
    Record.create(tmp_path, job(job=summary))
    before = (tmp_path / "job.json").read_bytes()
    changed = job("2", job=dataclasses.replace(summary, trainer_args=("--seq-length", "8192")))
    with pytest.raises(UsageError, match=r"another job \(trainer arguments differ: --seq-length 4096 → 8192\)"):
        Record.create(tmp_path, changed)
    with pytest.raises(UsageError, match="world_size 4, now 8"):
        Record.create(tmp_path, job("2", job=dataclasses.replace(summary, world_size=8)))
    with pytest.raises(UsageError, match="HCCL_BUFFSIZE unset, now 100"):
        Record.create(tmp_path, job("2", job=summary, environment={"HCCL_BUFFSIZE": "100"}))
    explained = job("2", job=summary, spec=RunSpec(explain=True), environment={"MS_ALLOC_CONF": "memory_tracker:True"})
    with pytest.raises(UsageError, match=r"another job \(it was made without --explain\)"):  # not a variable of the engine's
        Record.create(tmp_path, explained)
    assert (tmp_path / "job.json").read_bytes() == before


def test_folders_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not empty and holds no dry run"):
        Record.create(tmp_path, job())
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        Record.create(tmp_path / "thesis.tex", job())
    with pytest.raises(UsageError, match=r"no job\.json"):
        Record.open(tmp_path)


def test_launches_of_one_job_join_their_plans(tmp_path: Path) -> None:
    record = Record.create(tmp_path / "out", job(ranks=(0, 1)))
    result(record, 0)
    with record.claimed([1]):  # another launch is running rank 1
        Record.create(tmp_path / "out", job(ranks=(2, 3)))
    assert [task.rank for task in record.job().plan] == [0, 1, 2, 3]
    # nobody runs 1, 2 and 3 any more: a later launch with another choice of ranks does not wait for them
    Record.create(tmp_path / "out", job(ranks=(3,)))
    assert [task.rank for task in record.job().plan] == [0, 3]


def test_claims_hold_between_processes_and_end_with_them(tmp_path: Path) -> None:
    record = Record.create(tmp_path / "out", job())
    program = (
        "import sys; from pathlib import Path; from mindspeed_dryrun.record.store import Record\n"
        "with Record(Path(sys.argv[1])).claimed([1, 4000]): print('mine', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(record.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert other.stdout and other.stdout.readline() == b"mine\n"
    with record.claimed([0, 2, 3999]), record.locked():
        pass
    with pytest.raises(DryRunError, match="Another launch is running rank 1 "), record.claimed([0, 1]):
        pass
    other.kill()
    other.wait()
    with record.claimed([0, 1]):
        pass


def test_a_claim_outlives_a_short_lock_of_the_same_process(tmp_path: Path) -> None:
    record = Record.create(tmp_path / "out", job())
    with record.claimed([1]):
        with record.locked():
            pass
        with pytest.raises(DryRunError, match="rank 1"), record.claimed([1]):
            pass


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "job.json", {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(DryRunError, match="No space left on device"):
        write_json(tmp_path / "job.json", {"a": 2})
    assert json.loads((tmp_path / "job.json").read_text()) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["job.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        record = Record.create(disk / "out", job())
        (disk / "ballast").write_bytes(b"x" * 100_000)
        with pytest.raises(DryRunError, match="Cannot write"):
            record.write_json("report.json", {"x": "y" * 300_000})
        with pytest.raises(DryRunError, match="Cannot write"):
            record.write_json("job.json", {"x": "y" * 300_000})
        assert record.job().fingerprint == "1"
        assert not list(record.path.glob("**/*.tmp"))
        assert not (record.path / "report.json").exists()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_half_written_files_are_not_read(tmp_path: Path) -> None:
    record = Record.create(tmp_path, job())
    record.rank_folder(0).mkdir()
    (record.rank_folder(0) / ".result.json.12345678.tmp").write_text('{"status": "ok"')
    assert record.results() == {}
    (record.rank_folder(0) / "result.json").write_text('{"status": "ok"')
    assert record.ranks_done() == set()


def test_a_damaged_job_names_a_way_out_that_every_verb_has(tmp_path: Path) -> None:
    """`report` and `compare` read records, too, and have no --out."""
    record = Record.create(tmp_path, job())
    (record.path / "job.json").write_text('{"schema_version": 2, "job"')
    with pytest.raises(UsageError, match=r"is damaged and cannot be read: remove its folder, or name another one\.$"):
        Record.open(tmp_path).job()
