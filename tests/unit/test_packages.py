"""MSAdapter's wheel carries a top-level `torch`: no command of ours may let it near the user's environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mindspeed_dryrun import cache
from mindspeed_dryrun.engines import packages
from mindspeed_dryrun.errors import DryRunError


def _tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix != ".pyc" and path.is_file()}


def test_setup_leaves_the_environment_and_a_pytorch_in_it_as_they_were(tmp_path: Path) -> None:
    """A fresh cache: MSAdapter and megatron-core are really fetched from the package index."""
    mine = tmp_path / "site"
    (mine / "torch").mkdir(parents=True)
    (mine / "torch" / "__init__.py").write_text("__version__ = 'mine'\n")
    site = Path(sysconfig.get_path("purelib"))
    before, names = _tree(mine), sorted(path.name for path in site.iterdir())
    environ = {**os.environ, cache.VARIABLE: str(tmp_path / "cache"), "PYTHONPATH": str(mine)}
    environ.pop(packages.VARIABLE, None)
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_dryrun", "setup"], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode and "package index" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    assert _tree(mine) == before
    assert sorted(path.name for path in site.iterdir()) == names
    (folder,) = (tmp_path / "cache" / "packages").glob("cp*[!k]")
    assert (folder / "msa_thirdparty" / "torch").is_dir() and (folder / "megatron" / "core").is_dir()
    assert list((folder / "megatron" / "core" / "__pycache__").glob("parallel_state.*.pyc")), "ranks would compile it each time"
    shown = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], env=environ, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "mine"


def test_packages_that_are_not_there_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packages.VARIABLE, str(tmp_path))
    with pytest.raises(DryRunError, match="Run: mindspeed-dryrun setup"):
        packages.engine_path()


def test_an_index_that_cannot_be_reached_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(packages.VARIABLE, raising=False)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(DryRunError, match=r"Could not install msadapter.*package index"):
        packages.install(say=lambda _: None)
    assert not packages.packages_folder().exists()
