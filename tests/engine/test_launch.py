"""`launch` on real bash scripts with the real MindSpore: whatever happens to a rank, the record is whole and nothing is left.

The trainer is a small plain MindSpore program with Megatron's flags, so that a rank takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine

TRAINER = """
import os, signal, sys, time
from mindspeed_dryrun.rank import progress
rank, mode = int(os.environ["RANK_ID"]), os.environ.get("TINY_MODE", "")
unlucky = rank == int(os.environ.get("TINY_RANK", "1"))
if mode == "hang early" and unlucky:
    time.sleep(1000)
import mindspore
from mindspore import Tensor, mint
progress.phase("building")
kept = [mint.zeros((1024, 1024, 16 * (rank + 1)), dtype=mindspore.float32)]
if mode == "raise" and unlucky:
    raise ValueError("this rank has no luck")
if mode == "hang" and unlucky:
    import subprocess
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    time.sleep(1000)
if mode == "kill" and unlucky:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "fill" and unlucky:
    while True:
        print("x" * 1000)
open("left_by_the_trainer.txt", "w").write("here")
if mode == "overwrite" and unlucky:
    open(os.environ["TINY_CKPT"], "w").write("lost")
if mode == "save":
    mindspore.save_checkpoint([{"name": "w", "data": Tensor([1.0])}], os.environ["TINY_CKPT"])
for done in range(1, 3):
    mint.add(kept[0], kept[0])
    if mode == "nothing" and unlucky:
        break
    progress.iteration(done, 2)
"""
SCRIPT = """#!/bin/bash
WORKERS=2
PP=2
mkdir -p logs
msrun --worker_num $WORKERS --local_worker_num 2 --node_rank 0 --log_dir msrun_log pretrain_gpt.py \\
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 \\
    --global-batch-size 64 --pipeline-model-parallel-size $PP --vocab-size 1000 --save ckpt --load ckpt --data-path data \\
    2>&1 | tee logs/train.log
"""


class Home:
    """A user's working directory with a script and a trainer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "train.sh").write_text(SCRIPT)
        (path / "pretrain_gpt.py").write_text(TRAINER)
        (path / "ckpt").mkdir()
        (path / "ckpt" / "weights").write_text("precious")
        self.out = path.parent / "out"
        self.before = self.tree()

    def tree(self) -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in self.path.rglob("*") if file.is_file()}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "mindspeed_dryrun.launch", "train.sh", "--out", str(self.out), "--jobs", "2", *words]

    def environment(self, **env: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **env}

    def launch(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), cwd=self.path, env=self.environment(**env), capture_output=True, text=True, timeout=600
        )

    def start(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*words),
            cwd=self.path,
            env=self.environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # tests that run in the background inherit an ignored Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "report.json").read_text()))

    def processes(self) -> list[psutil.Process]:
        """Processes that run somewhere below: ranks, their children, the launcher."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and str(self.path.parent) in process.cwd():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_for_rank(self, phase: str, seconds: float = 240) -> None:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            for file in self.out.glob("ranks/*/progress.jsonl"):
                if f'"{phase}"' in file.read_text():
                    return
            time.sleep(0.2)
        raise AssertionError(f"no rank reached {phase}")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    (tmp_path / "home").mkdir()
    result = Home(tmp_path / "home")
    yield result
    limit = time.monotonic() + 15
    while result.processes() and time.monotonic() < limit:
        time.sleep(0.2)
    left = result.processes()
    names = [str(process) for process in left]
    for process in left:
        process.kill()
    assert not left, f"left running: {names}"
    assert result.tree() == result.before
    strangers = [item.name for item in tmp_path.iterdir() if item.name not in ("home", "out", "disk")]
    assert not strangers


def ranks(report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {rank["rank"]: rank for rank in report["ranks"]}


def test_all_ranks(home: Home) -> None:
    done = home.launch("--ranks", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    report = home.report()
    assert report["job"]["world_size"] == 2 and report["job"]["trainer"] == "script"
    found = ranks(report)
    assert [found[rank]["status"] for rank in (0, 1)] == ["ok", "ok"]
    assert found[1]["used_peak_mb"] == 2 * found[0]["used_peak_mb"] == 256
    assert report["worst_rank"] == 1 and report["fits"] is True
    assert "checkpoint" not in " ".join(report["not_counted"])
    assert (home.out / "ranks" / "00001" / "left_by_the_trainer.txt").exists()
    assert (home.out / "report.html").exists() and "256" in done.stdout


def test_chosen_ranks_and_json(home: Home) -> None:
    done = home.launch("--ranks", "1", "--json")
    assert done.returncode == 1, "the other class was not looked at: there is no verdict about the job"
    data = json.loads(done.stdout)
    assert data["verdict"] == "unknown" and data["fits"] is None
    assert [(rank["rank"], rank["represents"], rank["stage"]) for rank in data["ranks"]] == [(1, [1], 1)]


def test_a_set_variable_and_an_override_reach_the_ranks(home: Home) -> None:
    done = home.launch("--set", "WORKERS=4", "--partial", "--ranks", "3", "--", "--seq-length", "32")
    assert done.returncode == 0, done.stdout + done.stderr
    job = json.loads((home.out / "job.json").read_text())
    assert job["job"]["world_size"] == 4 and job["job"]["parallel"]["dp"] == 2
    assert "32" in job["plan"][0]["argv"] and job["details"]["seq_length"] == 32


def test_over_the_budget(home: Home) -> None:
    done = home.launch("--budget", "200M")
    assert done.returncode == 3, done.stdout + done.stderr
    found = ranks(home.report())
    assert (found[0]["status"], found[1]["status"]) == ("ok", "oom")


def test_a_rank_that_raises_does_not_stop_the_others(home: Home) -> None:
    done = home.launch(TINY_MODE="raise")
    assert done.returncode == 1
    found = ranks(home.report())
    assert found[0]["status"] == "ok" and found[0]["used_peak_mb"] == 128
    assert found[1]["status"] == "failed" and "this rank has no luck" in found[1]["error"]


def test_a_rank_cannot_overwrite_files_of_the_user(home: Home) -> None:
    done = home.launch("--ranks", "1", TINY_MODE="overwrite", TINY_CKPT=str(home.path / "ckpt" / "weights"))
    assert done.returncode == 1
    error = ranks(home.report())[1]["error"]
    assert "A dry run writes below its record only" in error and "ckpt/weights" in error  # the fixture compares the files


def test_a_checkpoint_is_not_saved(home: Home) -> None:
    done = home.launch(TINY_MODE="save", TINY_CKPT=str(home.path / "ckpt" / "weights"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_that_trains_nothing_has_failed(home: Home) -> None:
    assert home.launch("--ranks", "1", TINY_MODE="nothing").returncode == 1
    assert ranks(home.report())[1]["status"] == "failed"


def test_a_rank_that_hangs_is_ended_with_its_children(home: Home) -> None:
    done = home.launch("--timeout", "60", TINY_MODE="hang")
    assert done.returncode == 1
    found = ranks(home.report())
    assert (found[0]["status"], found[1]["status"]) == ("ok", "timeout")


def test_a_rank_that_is_killed(home: Home) -> None:
    assert home.launch("--ranks", "1", TINY_MODE="kill").returncode == 1
    assert ranks(home.report())[1]["status"] == "failed"


@pytest.mark.parametrize("phase", ["building", "importing"])
def test_ctrl_c_and_then_again(home: Home, phase: str) -> None:
    process = home.start("--ranks", "all", TINY_MODE="hang" if phase == "building" else "hang early")
    home.wait_for_rank(phase)
    if phase == "building":
        limit = time.monotonic() + 240
        while not (home.out / "ranks/00000/result.json").exists() and time.monotonic() < limit:
            time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    first = home.out / "ranks" / "00000" / "result.json"
    finished = first.stat().st_mtime_ns if first.exists() else None
    # the same launch continues: what is finished is not run again
    done = home.launch("--ranks", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [rank["status"] for rank in home.report()["ranks"]] == ["ok", "ok"]
    if finished:
        assert first.stat().st_mtime_ns == finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_survives_the_launcher(home: Home, number: signal.Signals) -> None:
    process = home.start("--ranks", "1", TINY_MODE="hang")
    home.wait_for_rank("building")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0  # the fixture looks for survivors


def test_another_job_in_the_same_folder_is_refused(home: Home) -> None:
    assert home.launch("--partial", "--ranks", "0").returncode == 0
    done = home.launch("--ranks", "0", "--", "--seq-length", "32")
    assert done.returncode == 2 and "another job" in done.stderr


def test_a_full_disk(home: Home) -> None:
    disk = home.path.parent / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        disk.rmdir()
        pytest.skip("this user may not mount a tmpfs")
    try:
        home.out = disk / "out"
        done = home.launch("--ranks", "1", TINY_MODE="fill")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr, done.stderr
        assert json.loads((home.out / "job.json").read_text())["job"]["world_size"] == 2
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_activated_msrun_dry_runs_the_script(home: Home) -> None:
    shim = ROOT / "mindspeed_dryrun" / "launch" / "shim"
    activation = {"mode": "activate", "python": sys.executable, "options": ["--out", str(home.out), "--partial", "--ranks", "0"]}
    env = home.environment(MINDSPEED_DRYRUN=json.dumps(activation), PATH=f"{shim}:{os.environ['PATH']}")
    before = home.tree()
    command = [
        "bash",
        "-c",
        "msrun" + SCRIPT.partition("msrun")[2].partition("2>&1")[0].replace("$WORKERS", "2").replace("$PP", "2"),
    ]
    done = subprocess.run(command, cwd=home.path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ranks(home.report())[0]["used_peak_mb"] == 128
    assert home.tree() == before
