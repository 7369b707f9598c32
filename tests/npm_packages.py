"""Packages of the npm registry that tests need, fetched once into pytest's cache, whoever of its workers asks first."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from mindspeed_dryrun.cache import make_once


def npm_package(config: pytest.Config, name: str) -> Path:
    """The unpacked package. Skips the test where it cannot be had."""
    if not shutil.which("npm"):
        pytest.skip(f"{name} is not here: npm is not installed")
    return (
        make_once(Path(str(config.cache.mkdir("npm"))) / name.replace("/", "-"), lambda folder: _fetch(name, folder)) / "package"
    )


def _fetch(name: str, folder: Path) -> None:
    done = subprocess.run(["npm", "pack", name, "--silent"], cwd=folder, capture_output=True, text=True, check=False)
    packed = next(folder.glob("*.tgz"), None)
    if done.returncode or packed is None:
        pytest.skip(f"{name} could not be fetched: {done.stderr.strip()[:200]}")
    with tarfile.open(packed) as archive:
        archive.extractall(folder)
