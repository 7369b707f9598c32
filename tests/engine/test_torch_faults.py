"""Faults on the torch_npu engine: a rank that breaks is told, nothing keeps running, nothing is written outside the record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch_npu_tests import MARKS

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
TOY = """
import os, subprocess, sys, time
import torch, torch_npu
from mindspeed_dryrun.rank import progress
torch.npu.set_device(0)
weight = torch.zeros(1024, 1024, device="npu")
fault = os.environ["TOY_FAULT"]
if fault == "raise":
    raise ValueError("the router lost a token")
if fault == "kill":
    os.kill(os.getpid(), 9)
if fault == "hang":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.environ["TOY_MARK"]])
    progress.iteration(1, 2)
    time.sleep(600)
if fault == "write outside":
    torch.save({"weight": weight}, os.environ["TOY_FILE"])
if fault == "write":
    torch.save({"weight": weight}, "relative.pt")
    os.makedirs("checkpoints", exist_ok=True)
    torch.save({"weight": weight}, "checkpoints/model.pt")
progress.iteration(1, 1)
"""


def start(folder: Path, fault: str, *options: str, **environ: str) -> subprocess.Popen[str]:
    if not folder.joinpath("toy.py").exists():  # written again it would be other code, and another job
        folder.joinpath("toy.py").write_text(TOY)
        folder.joinpath("train.sh").write_text("torchrun --nproc_per_node 2 toy.py --width 8\n")
    command = [sys.executable, "-m", "mindspeed_dryrun.launch", "train.sh", "--out", "record", "--ranks", "0", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TOY_FAULT": fault, "TOY_MARK": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= environ
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rank_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(folder.joinpath("record", "report.json").read_text())["ranks"][0]
    return found


def running(mark: str) -> list[str]:
    """Processes whose command line or working folder names the test's own folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, place = entry.joinpath("cmdline").read_bytes().decode(errors="replace"), str((entry / "cwd").readlink())
        except OSError:
            continue
        if words and (mark in words or place.startswith(mark)):
            found.append(words)
    return found


@pytest.mark.parametrize(("fault", "words"), [("raise", "the router lost a token"), ("kill", "SIGKILL")])
def test_a_rank_that_breaks_has_failed_and_says_why(tmp_path: Path, fault: str, words: str) -> None:
    process = start(tmp_path, fault)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert rank_of(tmp_path)["status"] == "failed" and words in rank_of(tmp_path)["error"], output


def test_a_rank_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    process = start(tmp_path, "hang", "--timeout", "60")
    output, _ = process.communicate(timeout=300)
    assert (process.returncode, rank_of(tmp_path)["status"]) == (1, "timeout"), output
    assert running(str(tmp_path)) == []


def wait_for_an_iteration(folder: Path) -> None:
    progress = folder / "record" / "ranks" / "00000" / "progress.jsonl"
    limit = time.monotonic() + 240
    while not (progress.is_file() and "iteration" in progress.read_text()) and time.monotonic() < limit:
        time.sleep(0.2)
    assert len(running(str(folder))) > 1


def test_ctrl_c_leaves_no_process_and_the_same_launch_continues(tmp_path: Path) -> None:
    process = start(tmp_path, "hang")
    wait_for_an_iteration(tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert running(str(tmp_path)) == []
    again = start(tmp_path, "none")
    output, _ = again.communicate(timeout=300)
    assert rank_of(tmp_path)["status"] == "ok", output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_survives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "hang")
    wait_for_an_iteration(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    limit = time.monotonic() + 30  # after SIGKILL the rank's own guard ends it
    while running(str(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.2)
    assert running(str(tmp_path)) == []


def test_a_file_outside_the_record_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.write_text("the user's")
    process = start(tmp_path, "write outside", TOY_FILE=str(file))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and file.read_text() == "the user's", output
    assert "A dry run writes below its record only" in rank_of(tmp_path)["error"]


def test_a_real_cann_is_never_shadowed(tmp_path: Path) -> None:
    """Whatever says that there is one: nothing is started, and the sentence names it."""
    cann = tmp_path / "Ascend"
    cann.joinpath("lib64").mkdir(parents=True)
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        process = start(tmp_path, "none", **{name: str(cann)})
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and f"There is a real CANN at {cann}" in " ".join(output.split()), output
        assert not tmp_path.joinpath("record").exists()


def test_what_a_trainer_writes_stays_in_the_record(tmp_path: Path) -> None:
    process = start(tmp_path, "write")
    output, _ = process.communicate(timeout=300)
    assert rank_of(tmp_path)["status"] == "ok", output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record", "toy.py", "train.sh"]
    assert list(tmp_path.joinpath("record").rglob("relative.pt"))
