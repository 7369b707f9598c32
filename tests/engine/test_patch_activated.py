"""An activated shell with the real engine: msrun is a dry run, Python processes are in simulation, and then no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]


def shell(script: str, folder: Path) -> str:
    kept = ("PATH", "HOME", "MINDSPEED_DRYRUN_PACKAGES", "MINDSPEED_DRYRUN_CACHE", "XDG_CACHE_HOME")
    environ = {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_unmodified_script_is_a_dry_run_until_deactivate(tmp_path: Path) -> None:
    output = shell(
        f"""
        set -e
        mkdir logs
        . {ROOT}/launch/activate.sh --plan-only --trainer embedded
        bash {ROOT}/examples/pretrain_llama31_8b_ms.sh
        cat logs/*
        dryrun_off
        case $(command -v msrun) in */launch/shim/*) exit 1;; esac
        [ -z "${{MINDSPEED_DRYRUN+x}}${{MS_SIMULATION_LEVEL+x}}" ] && echo deactivated
        """,
        tmp_path,
    )
    assert "rank 0  stage 0  stands for 0-7" in output
    assert output.splitlines()[-1] == "deactivated"


def test_a_python_process_that_imports_mindspore_is_in_simulation_and_patched(tmp_path: Path) -> None:
    program = (
        "import mindspore, sys; from mindspeed_dryrun.rank import patcher; print('PATCHED', patcher.applied_names()); "
        "mindspore.set_device('Ascend'); x = mindspore.mint.zeros((1024, 1024)) + 1; print('VALUE', x.asnumpy().max())"
    )
    output = shell(
        f'set -e; . {ROOT}/launch/activate.sh; PYTHONPATH=$PYTHONPATH:{ROOT} {sys.executable} -c "{program}"', tmp_path
    )
    assert "mindspore-grouped-matmul" in output
    assert "VALUE 0.0" in output  # every value that comes from a simulated device is 0
