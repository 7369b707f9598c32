"""What the wheel holds: every file of the package, the patch catalogue and the examples; who may install it."""

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


def test_the_wheel_holds_the_package_the_catalogue_the_devices_and_the_examples(wheel: Path) -> None:
    inside = {
        "patches/": "mindspeed_dryrun/catalogue/",
        "examples/": "mindspeed_dryrun/examples/",
        "mindspeed_dryrun/": "mindspeed_dryrun/",
    }
    tracked = subprocess.run(["git", "ls-files", *inside], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wanted = {inside[name.partition("/")[0] + "/"] + name.partition("/")[2] for name in tracked}
    assert (
        "mindspeed_dryrun/devices/ascend910b-64g.yaml" in wanted
        and "mindspeed_dryrun/examples/pretrain_llama31_8b_ms.sh" in wanted
    )
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


def test_the_installed_examples_can_be_found_and_copied(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "mindspeed_dryrun", "examples"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    said = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[0] == str(tmp_path / "site" / "mindspeed_dryrun" / "examples")
    subprocess.run([*command, "mine"], cwd=tmp_path, env=environ, capture_output=True, check=True)
    assert (tmp_path / "mine" / "sweeps" / "product.yaml").is_file()
    again = subprocess.run([*command, "mine"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "mine exists." in again.stderr


def test_another_python_is_refused_with_a_sentence(wheel: Path) -> None:
    program = "import sys; sys.version_info = (3, 12, 1); from mindspeed_dryrun.__main__ import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("mindspeed-dryrun runs on Python 3.10 and 3.11, and this is Python 3.12: ")
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        assert "Requires-Python: <3.12,>=3.10" in archive.read(metadata).decode()


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.sh")), ids=lambda path: path.stem)
def test_an_example_makes_every_folder_that_it_redirects_into(script: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("msrun", "torchrun"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "No such file" not in done.stderr, done.stderr
