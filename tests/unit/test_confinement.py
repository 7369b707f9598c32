"""A confined process writes below its own folder only, by Python's doing and, where it can, by the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dryrun.launch import trainers
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.rank.confinement import kernel_confines

ROOT = Path(__file__).resolve().parents[2]
PROLOGUE = """
import os, shutil, subprocess, sys
from pathlib import Path
from mindspeed_dryrun.rank import confinement
if sys.argv[1] == "old":
    confinement._version = lambda: -1
confinement.confine(os.getcwd())
user = Path(sys.argv[2])
def refused(action):
    try:
        action()
    except PermissionError as error:
        return "writes below its record only" in str(error)
    return False
"""
# Each must leave the user's folder as it is.
ATTEMPTS = [
    "open(user / 'weights', 'w')",
    "open(user / 'weights', 'r+b')",
    "open(user / 'new', 'a')",
    "os.open(user / 'new', os.O_CREAT | os.O_WRONLY)",
    "os.remove(user / 'weights')",
    "os.rename(user / 'weights', 'mine')",
    "os.rename('mine', user / 'weights')",
    "os.symlink('x', user / 'link')",
    "os.link('mine', user / 'hard')",
    "os.mkdir(user / 'folder')",
    "os.makedirs(user / 'a' / 'b')",
    "shutil.rmtree(user)",
    "shutil.copy('mine', user / 'weights')",
    "os.truncate(user / 'weights', 0)",
    "os.chmod(user / 'weights', 0)",
    "os.utime(user / 'weights', (0, 0))",
    "(Path('to_user') / 'weights').write_text('x')",
]


def run(program: str, kernel: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    user, record = tmp_path / "user", tmp_path / "record"
    user.mkdir()
    record.mkdir()
    (user / "weights").write_text("precious")
    (record / "mine").write_text("mine")
    (record / "to_user").symlink_to(user)
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + program, kernel, str(user)],
        cwd=record,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert [item.name for item in user.iterdir()] == ["weights"]
    assert (user / "weights").read_text() == "precious" and (user / "weights").stat().st_mtime > 0
    return done


@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_files_of_the_user_stay_as_they_are(attempt: str, kernel: str, tmp_path: Path) -> None:
    done = run(f"sys.exit(0 if refused(lambda: {attempt}) else 1)", kernel, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not kernel_confines(), reason="this kernel has no Landlock")
def test_other_programs_and_libraries_are_held_back_as_well(tmp_path: Path) -> None:
    program = """
import ctypes
libc = ctypes.CDLL(None)
path = str(user / "weights").encode()
assert libc.unlink(path) == -1 and libc.creat(path, 0o644) == -1 and libc.truncate(path, 0) == -1
assert subprocess.run(["sh", "-c", f"echo x > {user}/weights; rm -f {user}/weights"]).returncode != 0
"""
    done = run(program, "new", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_its_own_folder_and_shared_memory_work(kernel: str, tmp_path: Path) -> None:
    program = """
from multiprocessing import shared_memory
os.makedirs("a/b"); Path("a/b/file").write_text("x"); os.rename("a/b/file", "a/file"); shutil.rmtree("a")
os.remove("to_user")
block = shared_memory.SharedMemory(create=True, size=1 << 16); block.close(); block.unlink()
print("out", file=open("/dev/null", "w"))
assert (user / "weights").read_text() == "precious"
subprocess.run(["touch", "inside"], check=True)
"""
    done = run(program, kernel, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("confines", [True, False])
def test_a_kernel_that_cannot_confine_is_mentioned(confines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(trainers, "kernel_confines", lambda: confines)
    call = read_msrun_call(["--worker_num", "2", "train.py"], str(tmp_path), {})
    notes = trainers.choose_trainer(understand(call, "train.sh")).notes
    assert any("no Landlock" in note for note in notes) is not confines
