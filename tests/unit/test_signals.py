"""Whenever a signal comes, no process, no temporary folder and no traceback is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
trap '' TERM INT HUP
( trap '' TERM INT HUP; exec -a in_the_background bash -c 'while :; do read -t 1 < <(:) || :; done' ) &
setsid bash -c 'while :; do read -t 1 < <(:) || :; done' &
: > {ready}
while :; do read -t 1 < <(:) || :; done
"""


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mindspeed_dryrun.launch", *words],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_in(home: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(entry.joinpath("cwd").readlink()).startswith(str(home)):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def eventually(condition, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home" / "tmp").mkdir(parents=True)
    return tmp_path / "home"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_during_the_capture_leaves_nothing(home: Path, number: signal.Signals) -> None:
    (home / "train.sh").write_text("sleep() { :; }\n" + SCRIPT.format(ready="/dev/null"))
    launcher = start(home, "train.sh")
    assert eventually(lambda: len(processes_in(home)) >= 4), "the script did not start"
    os.kill(launcher.pid, number)
    said = launcher.communicate(timeout=30)[0]
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said and ("Interrupted" in said or number == signal.SIGKILL)
    assert eventually(lambda: processes_in(home) == []), processes_in(home)
    assert eventually(lambda: list((home / "tmp").iterdir()) == []), list((home / "tmp").iterdir())


@pytest.mark.parametrize("after_s", [0.03, 0.06, 0.1, 0.15, 0.2, 0.3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_moments_prints_no_traceback(home: Path, number: signal.Signals, after_s: float) -> None:
    (home / "train.sh").write_text(SCRIPT.format(ready="/dev/null"))
    launcher = start(home, "train.sh")
    time.sleep(after_s)
    launcher.send_signal(number)
    said = launcher.communicate(timeout=30)[0]
    # Before the first line of ours runs, Python itself decides what to print.
    assert "mindspeed_dryrun" not in said or "Traceback" not in said, said
    assert launcher.returncode in (128 + number, -number, 1 if "Traceback" in said else 128 + number)
    assert eventually(lambda: processes_in(home) == []), processes_in(home)
    assert eventually(lambda: list((home / "tmp").iterdir()) == []), list((home / "tmp").rglob("*"))
