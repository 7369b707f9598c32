"""`launch --ab`, the only code that touches real NPUs: on a host whose NPUs and msrun are stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.real_run import real_call, run_for_real
from mindspeed_dryrun.launch.run import read_job
from mindspeed_dryrun.record.run_spec import RunSpec

SCRIPT = """#!/bin/bash
export MS_SIMULATION_LEVEL=1
msrun --worker_num {world} --local_worker_num 2 --sim_level 1 --log_dir mine pretrain_gpt.py --tensor-model-parallel-size 2 \\
 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 \\
 --global-batch-size 4 --train-iters 2000 --padded-vocab-size 1024 --bf16 --use-flash-attn --save ckpt --tensorboard-dir tb
"""
# What a real rank logs at its end, for two ranks; and what it was started with.
MSRUN = """#!{python}
import json, os, sys
logs = sys.argv[sys.argv.index("--log_dir") + 1]
json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, open(os.path.join(logs, "call.json"), "w"))
for rank in range(2):
    with open(os.path.join(logs, f"worker_{{rank}}.log"), "w") as log:
        log.write("Actual peak memory usage (with fragments): 1200M\\nActual peak memory usage (without fragments): 1100M\\n")
        log.write(" iteration        3/       3 | elapsed time per iteration (ms): 900.0 |\\n")
sys.exit({status})
"""


def _script(folder: Path, world: int = 2) -> Path:
    path = folder / "train.sh"
    path.write_text(SCRIPT.format(world=world))
    return path


def _job(folder: Path, world: int = 2) -> Job:
    return read_job(_script(folder, world), RunSpec(trainer="embedded"))


@pytest.fixture
def host(tmp_path: Path, mocker: MockerFixture) -> Path:
    """Eight NPUs, and an msrun that leaves the logs of two ranks."""
    import sys

    mocker.patch("mindspeed_dryrun.launch.real_run.npus", return_value=8)
    msrun = tmp_path / "bin" / "msrun"
    msrun.parent.mkdir()
    msrun.write_text(MSRUN.format(python=sys.executable, status=0))
    msrun.chmod(0o755)
    mocker.patch.dict(os.environ, {"PATH": f"{msrun.parent}{os.pathsep}{os.environ['PATH']}"})
    return msrun


def test_the_real_call_is_short_saves_nothing_and_is_not_simulated(tmp_path: Path, host: Path) -> None:
    logs = run_for_real(_job(tmp_path), tmp_path / "record")
    assert logs == tmp_path / "record-real" and (logs / "worker_1.log").is_file()
    call = json.loads((logs / "call.json").read_text())
    assert "MS_SIMULATION_LEVEL" not in call["env"] and call["env"]["GLOG_v"] == "1"
    argv = call["argv"]
    assert argv[argv.index("--train-iters") + 1] == "3" and argv[argv.index("--join") + 1] == "True"
    assert not {"--save", "--tensorboard-dir", "--sim_level"} & set(argv)
    assert argv[argv.index("--global-batch-size") + 1] == "4", "every microbatch runs"


def test_the_script_is_left_as_it_was(tmp_path: Path, host: Path) -> None:
    job = _job(tmp_path)
    before = list(job.args)
    real_call(job, "msrun", tmp_path)
    assert list(job.args) == before


@pytest.mark.parametrize(
    ("npus", "world", "sentence"),
    [(0, 2, "this machine has no NPU"), (1, 2, "1 NPUs and the job needs 2"), (8, 4, "4 ranks on several")],
)
def test_what_cannot_be_run_here_is_refused_before_anything_starts(
    tmp_path: Path, mocker: MockerFixture, npus: int, world: int, sentence: str
) -> None:
    mocker.patch("mindspeed_dryrun.launch.real_run.npus", return_value=npus)
    started = mocker.patch("subprocess.run")
    job = _job(tmp_path, world)
    started.reset_mock()
    with pytest.raises(UsageError, match=sentence):
        run_for_real(job, tmp_path / "record")
    started.assert_not_called()
    assert not (tmp_path / "record-real").exists()


def test_no_msrun_is_a_sentence(tmp_path: Path, host: Path, mocker: MockerFixture) -> None:
    job = _job(tmp_path)
    mocker.patch("shutil.which", return_value=None)
    with pytest.raises(DryRunError, match="real msrun"):
        run_for_real(job, tmp_path / "record")


def test_a_failed_real_run_names_its_logs(tmp_path: Path, host: Path) -> None:
    host.write_text(host.read_text().replace("sys.exit(0)", "sys.exit(7)"))
    with pytest.raises(DryRunError, match=r"exit status 7.*record-real"):
        run_for_real(_job(tmp_path), tmp_path / "record")


def test_on_a_host_without_npus_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(_script(tmp_path)), "--ab", "--out", str(tmp_path / "record"), "--trainer", "embedded"]) == 2
    assert "--ab runs the script for real as well" in capsys.readouterr().err
