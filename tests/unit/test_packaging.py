"""What the wheel holds: every file of the package, and the patch catalogue."""

from __future__ import annotations

import json
import os
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


@pytest.mark.slow
def test_the_wheel_runs_the_example_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    """Installed into an empty environment and called from another folder: the plan, the cards and the catalogue are all there."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    subprocess.run([str(home / "bin" / "pip"), "install", "-q", str(wheel)], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = elsewhere / "train.sh"
    script.write_text((ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh").read_text(encoding="utf-8"), encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        command = [str(home / "bin" / "mindspeed-dryrun"), *words]
        return subprocess.run(command, cwd=elsewhere, env=environ, capture_output=True, text=True, check=True).stdout

    assert "58166M" in run("device")
    assert "mindspore-grouped-matmul" in run("patches")
    assert json.loads(run("launch", "train.sh", "--plan-only", "--json"))["job"]["world_size"] == 4
