"""Ranks that were counted before are put back, and only those: whatever decides a figure is part of the key."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_samples import job_file

from mindspeed_dryrun.launch import rank_cache
from mindspeed_dryrun.launch.plan import RankTask
from mindspeed_dryrun.launch.rank_cache import RankCache
from mindspeed_dryrun.launch.trainers import EMBEDDED
from mindspeed_dryrun.record.model import EngineSummary
from mindspeed_dryrun.record.store import Record
from mindspeed_dryrun.record.summary import build_report


def a_plan(**changes: Any) -> Any:
    summary = EngineSummary("mindspore", changes.get("mindspore", "2.7.1"), "stand-in", changes.get("level", 1))
    return SimpleNamespace(engine=SimpleNamespace(summary=summary), patches=changes.get("patches", ({"name": "one"},)))


def a_task(rank: int = 0, **changes: Any) -> RankTask:
    task = RankTask(
        rank=rank,
        represents=(rank, rank + 1),
        stage=0,
        why="first stage",
        argv=("python", "-m", "mindspeed_dryrun.rank", EMBEDDED, "--num-layers", "28"),
        env={"MS_SIMULATION_LEVEL": "1", "TERM": "xterm", "MINDSPEED_DRYRUN": '{"progress": "{record}/x"}'},
        timeout_s=60,
        iterations=2,
    )
    return dataclasses.replace(task, **changes)


def a_record(path: Path, *tasks: RankTask, status: str = "ok", note: str | None = None) -> Record:
    """A record in which these ranks have been run."""
    record = Record.create(path, job_file())
    for task in tasks:
        folder = record.rank_folder(task.rank)
        (folder / "rank_0").mkdir(parents=True)
        (folder / "worker.log").write_text("the log")
        (folder / "rank_0" / "memory_block.csv").write_text("a,b\n" * 1000)
        result = {"rank": task.rank, "represents": [0], "stage": 9, "status": status, "used_peak_mb": 55389, "note": note}
        (folder / "result.json").write_text(json.dumps({**result, "start": "warm", "seconds": 1.5}))
    return record


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankCache:
    monkeypatch.setenv("MINDSPEED_DRYRUN_CACHE", str(tmp_path / "cache"))
    return RankCache(a_plan())


def test_a_counted_rank_is_put_back_and_says_so(cache: RankCache, tmp_path: Path) -> None:
    task = a_task()
    first = a_record(tmp_path / "first", task)
    cache.keep([task], first.path)
    second = a_record(tmp_path / "second")
    asked = a_task(represents=(0, 1, 2, 3), stage=1)
    assert cache.restore(asked, second.path)
    report = build_report(second.path).ranks[0]
    assert (report.status, report.used_peak_mb) == ("ok", 55389)
    assert any("rank 0: counted on 20" in note and "--no-cache" in note for note in build_report(second.path).notes)
    assert (second.rank_folder(0) / "rank_0" / "memory_block.csv").read_text() == "a,b\n" * 1000
    result = json.loads((second.rank_folder(0) / "result.json").read_text())
    assert (result["start"], result["represents"], result["stage"]) == ("cache", [0, 1, 2, 3], 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 1},
        {"argv": ("python", "-m", "mindspeed_dryrun.rank", EMBEDDED, "--num-layers", "29")},
        {"argv": ("python3", "-m", "mindspeed_dryrun.rank", EMBEDDED, "--num-layers", "28")},
        {"env": {**a_task().env, "MS_DEV_ANYTHING": "1"}},
        {"env": {**a_task().env, "MINDSPEED_DRYRUN": '{"moe_load": "hot:1.5"}'}},
        {"iterations": 3},
    ],
)
def test_another_rank_is_counted(cache: RankCache, tmp_path: Path, changes: dict[str, Any]) -> None:
    cache.keep([a_task()], a_record(tmp_path / "first", a_task()).path)
    second = a_record(tmp_path / "second")
    assert not cache.restore(a_task(**changes), second.path) and not list(second.path.glob("ranks/*"))
    assert cache.restore(a_task(env={**a_task().env, "TERM": "dumb", "SSH_TTY": "/dev/pts/1"}), second.path)


def test_another_engine_version_patch_or_source_is_counted(cache: RankCache, monkeypatch: pytest.MonkeyPatch) -> None:
    own = cache.key(a_task())
    assert own and own == RankCache(a_plan()).key(a_task())
    others = [a_plan(mindspore="2.8.0"), a_plan(level=0), a_plan(patches=({"name": "two"},))]
    keys = {RankCache(plan).key(a_task()) for plan in others}
    monkeypatch.setattr(rank_cache, "rank_source", lambda: "changed")
    keys.add(RankCache(a_plan()).key(a_task()))
    monkeypatch.undo()
    monkeypatch.setattr("mindspeed_dryrun.__version__", "99")
    keys.add(RankCache(a_plan()).key(a_task()))
    assert len(keys) == 5 and own not in keys


def test_the_scripts_own_trainer_is_not_kept(cache: RankCache, tmp_path: Path) -> None:
    task = a_task(argv=("python", "-m", "mindspeed_dryrun.rank", "/home/me/pretrain_gpt.py"))
    cache.keep([task], a_record(tmp_path / "first", task).path)
    assert cache.key(task) is None and not list(cache.folder.glob("*"))


@pytest.mark.parametrize(("status", "note"), [("failed", None), ("timeout", None), ("ok", "crashed in the tear-down")])
def test_only_whole_results_are_kept(cache: RankCache, tmp_path: Path, status: str, note: str | None) -> None:
    cache.keep([a_task()], a_record(tmp_path / "first", a_task(), status=status, note=note).path)
    assert not cache.restore(a_task(), a_record(tmp_path / "second").path)


def test_the_oldest_go_when_it_grows(cache: RankCache, tmp_path: Path) -> None:
    tasks = [a_task(rank) for rank in range(6)]
    record = a_record(tmp_path / "first", *tasks)
    for age, task in enumerate(tasks):
        cache.keep([task], record.path)
        os.utime(cache.folder / f"{cache.key(task)}.zip", (age, age))
    second = a_record(tmp_path / "second")
    assert cache.restore(tasks[0], second.path), "used just now"
    cache.trim(most=3)
    assert [cache.restore(task, second.path) for task in tasks] == [True, False, False, False, True, True]
    cache.trim(limit_mb=0)
    assert not list(cache.folder.glob("*.zip"))


def test_a_damaged_or_hostile_entry_is_a_miss(cache: RankCache, tmp_path: Path) -> None:
    task = a_task()
    cache.keep([task], a_record(tmp_path / "first", task).path)
    entry = cache.folder / f"{cache.key(task)}.zip"
    assert entry.stat().st_mode & 0o077 == 0
    whole = entry.read_bytes()
    second = a_record(tmp_path / "second")
    for damaged in (whole[: len(whole) // 2], b"", b"PK" + bytes(100)):
        entry.write_bytes(damaged)
        assert not cache.restore(task, second.path)
    with zipfile.ZipFile(entry, "w") as archive:
        archive.writestr("result.json", json.dumps({"counted": 0, "status": "ok"}))
        archive.writestr("../../outside", "x")
    assert not cache.restore(task, second.path)
    assert not (tmp_path / "second" / "outside").exists() and not list(second.path.glob("ranks/*"))


def test_a_folder_that_others_can_write_is_not_used(cache: RankCache, tmp_path: Path) -> None:
    cache.folder.mkdir(parents=True)
    cache.folder.chmod(0o777)
    cache.keep([a_task()], a_record(tmp_path / "first", a_task()).path)
    assert not list(cache.folder.glob("*"))


def test_it_is_switched_off_by_option_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rank_cache.NO_CACHE)
    assert rank_cache.open_cache(a_plan(), True) and not rank_cache.open_cache(a_plan(), False)
    monkeypatch.setenv(rank_cache.NO_CACHE, "1")
    assert not rank_cache.open_cache(a_plan(), True)
