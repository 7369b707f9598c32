"""Whenever a signal comes, no process, no temporary folder and no traceback is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_dryrun import temporary

ROOT = Path(__file__).resolve().parents[2]
# `sleep` would be stood in for; ./nap is the same program.
SCRIPT = """
trap '' TERM INT HUP
( exec ./nap 600 ) &
setsid ./nap 600 &
./nap 600
"""


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mindspeed_dryrun", *words],
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


def eventually(condition, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home" / "tmp").mkdir(parents=True)
    shutil.copy(shutil.which("sleep") or "", tmp_path / "home" / "nap")
    return tmp_path / "home"


VERBS = {
    "launch": ("launch", "train.sh"),
    "sweep": ("sweep", "sweep.yaml", "--out", "record"),
    "search": ("search", "search.yaml"),
    "studio": ("studio", "train.sh", "--no-browser"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_during_the_capture_leaves_nothing(home: Path, verb: str, number: signal.Signals) -> None:
    if verb == "studio":
        pytest.importorskip("starlette")
    (home / "train.sh").write_text(SCRIPT)
    (home / "sweep.yaml").write_text("script: train.sh\nvariants: [{name: one}, {name: two}]\n")
    (home / "search.yaml").write_text(
        "script: train.sh\nhardware: ascend910b-64g\ncluster: {nodes: 1, cards_per_node: 4}\nbudget: 58G\n"
    )
    launcher = start(home, *VERBS[verb])
    assert eventually(lambda: sum("nap" in words for words in processes_in(home)) >= 3), "the script did not start"
    os.kill(launcher.pid, number)
    said = launcher.communicate(timeout=30)[0]
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said and ("Interrupted" in said or number == signal.SIGKILL)
    assert eventually(lambda: processes_in(home) == []), processes_in(home)
    assert eventually(lambda: list((home / "tmp").iterdir()) == []), list((home / "tmp").iterdir())


KILLED_AT = """
import os, subprocess, sys
from pathlib import Path
from mindspeed_dryrun import temporary
from mindspeed_dryrun.launch import script
place, name = {"script": script, "subprocess": subprocess}[sys.argv[1]], sys.argv[2]
calls, first = [], getattr(place, name)
def dying(*words, **options):
    calls.append(name)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    return first(*words, **options)
setattr(place, name, dying)
script.capture(Path("train.sh"))
"""


@pytest.mark.parametrize(
    ("place", "name", "time"),
    [
        ("subprocess", "Popen", 1),  # before there is a folder
        ("script", "_environment", 1),  # the folder is there and empty
        ("script", "write_programs", 1),
        ("script", "_run", 1),  # it is filled
        ("subprocess", "Popen", 2),  # the guard is about to be started
        ("script", "check_interrupted", 1),  # the script runs
        ("script", "_lines", 1),  # it is over
        ("script", "_without_places", 1),
    ],
)
def test_a_kill_at_any_point_of_the_capture_leaves_no_folder(home: Path, place: str, name: str, time: int) -> None:
    (home / "train.sh").write_text("msrun --worker_num 2 pretrain_gpt.py\n")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT, place, name, str(time)],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp")},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, "it was not reached"
    assert eventually(lambda: list((home / "tmp").iterdir()) == []), list((home / "tmp").rglob("*"))
    assert eventually(lambda: processes_in(home) == []), processes_in(home)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_watches_the_capture_is_killed(home: Path, number: signal.Signals) -> None:
    (home / "train.sh").write_text(SCRIPT)
    launcher = start(home, "launch", "train.sh")
    assert eventually(lambda: sum("nap" in words for words in processes_in(home)) >= 3), "the script did not start"
    guard = next(pid for pid in below(launcher.pid) if "guard.py" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(guard, number)
    said = launcher.communicate(timeout=30)[0]
    assert launcher.returncode == 1 and "The process that watches the script was killed" in said, said
    assert eventually(lambda: processes_in(home) == []), processes_in(home)
    assert eventually(lambda: list((home / "tmp").iterdir()) == []), list((home / "tmp").iterdir())


def test_the_folder_goes_when_its_keeper_was_killed(home: Path) -> None:
    (home / "train.sh").write_text(SCRIPT)
    launcher = start(home, "launch", "train.sh")
    assert eventually(lambda: sum("nap" in words for words in processes_in(home)) >= 3), "the script did not start"
    folder = str(next((home / "tmp").iterdir()))
    keepers = [pid for pid, words in commands().items() if "keeper" in words and folder in words]
    assert keepers
    for pid in keepers:
        os.kill(pid, signal.SIGKILL)
    launcher.terminate()
    launcher.communicate(timeout=30)
    assert launcher.returncode == 143
    assert list((home / "tmp").iterdir()) == []


IN_A_FINALIZER = """
import os, sys
from mindspeed_dryrun import commands
class Last:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
def run():
    last = Last()
    del last
    return 0
sys.exit(commands.status_of(run))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_inside_a_finalizer_is_not_lost(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.SIG_DFL){IN_A_FINALIZER}", str(int(number))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr and "Interrupted" in done.stderr


def below(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def commands() -> dict[int, list[str]]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").split("\0")
    return found


@pytest.mark.parametrize("after_s", [0.03, 0.06, 0.1, 0.15, 0.2, 0.3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_moments_prints_no_traceback(home: Path, number: signal.Signals, after_s: float) -> None:
    (home / "train.sh").write_text(SCRIPT)
    launcher = start(home, "launch", "train.sh")
    time.sleep(after_s)
    launcher.send_signal(number)
    said = launcher.communicate(timeout=30)[0]
    # Before the first line of ours runs, Python itself decides what to print.
    assert "mindspeed_dryrun" not in said or "Traceback" not in said, said
    assert launcher.returncode in (128 + number, -number, 1 if "Traceback" in said else 128 + number)
    assert eventually(lambda: processes_in(home) == []), processes_in(home)
    assert eventually(lambda: list((home / "tmp").iterdir()) == []), list((home / "tmp").rglob("*"))


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_a_folder_is_made_and_removed_without_a_path(home: Path, path: str) -> None:
    program = "from mindspeed_dryrun.temporary import temporary_folder\nwith temporary_folder() as f: print(f.is_dir())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp")},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n", done.stderr
    assert list((home / "tmp").iterdir()) == []


def test_a_launcher_that_ends_before_it_hears_of_its_folder_leaves_none(home: Path) -> None:
    """The keeper says that the folder is made to nobody: that must not end it before it has removed the folder."""
    folder = home / "tmp" / "mindspeed-dryrun-unheard"
    nobody, write = os.pipe()
    os.close(nobody)
    keeper = subprocess.Popen(["/bin/sh", "-c", temporary._KEEPER, "keeper", str(folder)], stdin=subprocess.PIPE, stdout=write)
    os.close(write)
    assert keeper.stdin
    keeper.wait(30)
    assert eventually(folder.is_dir)
    keeper.stdin.close()
    assert eventually(lambda: not folder.exists())
