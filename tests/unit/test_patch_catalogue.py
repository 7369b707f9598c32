"""The catalogue: what a patch file may say, how a user's own joins in, and states without importing upstream."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.launch import releases


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_built_in_catalogue_compiles_to_json_and_says_why() -> None:
    patches = catalogue.compile()
    assert json.loads(json.dumps(patches)) == patches
    assert {"msadapter-init-process-group", "mindspeed-llm-do-train", "megatron-train-step"} <= {p["name"] for p in patches}
    for patch in patches:
        assert patch["why"] and patch["without"] and patch["versions"], patch["name"]


def test_every_handler_of_the_catalogue_exists_and_needs_only_the_standard_library() -> None:
    for patch in catalogue.compile():
        if "handler" in patch:
            module, _, name = patch["handler"].partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_a_users_patch_is_added_and_replaces_ours_of_the_same_name(tmp_path: Path) -> None:
    mine = write(
        tmp_path / "fork.yaml",
        "package: my_fork\nversions: [1.0]\npatches:\n"
        "  - {name: mine, target: 'my_fork.train:main', skip: true}\n"
        "  - {name: megatron-train-step, target: 'my_fork.train:step', skip: true}\n",
    )
    patches = {patch["name"]: patch for patch in catalogue.compile(extra=[mine])}
    assert patches["mine"]["package"] == "my_fork" and patches["mine"]["versions"] == ["1.0"]
    assert patches["megatron-train-step"]["target"] == "my_fork.train:step"
    assert len(patches) == len(catalogue.compile()) + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("patches: 3", "no list"),
        ("patches: [{target: 'a:b', skip: true}]", "no name"),
        ("patches: [{name: x, target: 'a.b', skip: true}]", "module:attribute"),
        ("patches: [{name: x, target: 'a:b', hide: true}]", "module:attribute"),
        ("patches: [{name: x, target: 'a:b'}]", "exactly one of"),
        ("patches: [{name: x, target: 'a:b', skip: true, set: 1}]", "exactly one of"),
        ("patches: [{name: x, target: 'a:b', handler: nowhere}]", "module:function"),
        ("patches: [{name: x, target: 'a:b', skip: true, trainers: [mine]}]", "trainers"),
        ("patches: [{name: x, target: 'a:b', skip: true, colour: red}]", "unknown field colour"),
        ("patches: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        catalogue.compile([write(tmp_path / "wrong.yaml", text)])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot read"):
        catalogue.compile([tmp_path / "none.yaml"])


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "state_fork" / "inner"
    package.mkdir(parents=True)
    write(
        package / "train.py",
        "raise ImportError('must not be imported')\nclass T:\n    def go(self): ...\ndef f(): ...\n",
    )
    write(tmp_path / "setup.py", "__version__ = '3.1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def state(target: str, **fields: object) -> str:
        return catalogue.state({"package": "state_fork", "target": target, "versions": ["3.1"], **fields})

    assert state("state_fork.inner.train:f") == "applies"
    assert state("state_fork.inner.train:T.go") == "applies"
    assert state("state_fork.inner.train:f", versions=["3.0"]) == "applies, version not known"
    assert state("state_fork.inner.train:g") == "target missing"
    assert state("state_fork.other:f") == "target missing"
    assert state("nowhere.train:f", package="nowhere") == "not installed"
    assert "state_fork" not in sys.modules


def test_every_place_names_the_same_versions_of_mindspore() -> None:
    from packaging.specifiers import SpecifierSet

    known = next(patch["versions"] for patch in catalogue.compile() if patch["package"] == "mindspore")
    assert tuple(known) == releases.MINDSPORE_VERSIONS
    project = Path(__file__).parents[2]
    extra = re.search(r'"mindspore([^"]+)"', (project / "pyproject.toml").read_text())
    assert extra and list(SpecifierSet(extra.group(1)).filter(known)) == known
    script = (project / "tests" / "engine_versions.sh").read_text()
    assert f"versions=({' '.join(known[1:])})" in script  # the first is the default run's
    default = (project / "launch" / "environment.sh").read_text()
    assert f"MINDSPORE=${{MINDSPORE:-{known[0]}}}" in default
    assert {release.mindspore for release in releases.RELEASES.values()} <= set(known)


def test_plans_made_at_once_do_not_see_each_others_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep plans in threads: one that is done must not take the folders of another off the path."""
    wrong = []

    def slow(patch: dict[str, Any]) -> None:
        time.sleep(0.005)
        if sys.path[0] != patch["folder"] or any(name in sys.path for name in patch["others"]):
            wrong.append(list(sys.path[:3]))

    monkeypatch.setattr(catalogue, "drift", slow)
    folders = [f"/folder/{number}" for number in range(4)]

    def plan(folder: str) -> str | None:
        others = [name for name in folders if name != folder]
        return catalogue.first_drift([{"trainers": ["script"], "folder": folder, "others": others}] * 5, "script", [folder])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(plan, folders)) == [None] * 4
    assert not wrong
