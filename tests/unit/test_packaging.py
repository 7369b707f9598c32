"""What the wheel holds: every file of the package, and the patch catalogue."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_the_catalogue(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "mindspeed_dryrun", "patches"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name.replace("patches/", "mindspeed_dryrun/catalogue/", 1) if name.startswith("patches/") else name for name in tracked.stdout.split()}
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())
