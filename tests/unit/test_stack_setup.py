"""`setup --stack`: trees of one release and the packages they import, in a folder of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch import releases, stack


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """Three repositories with the branches of 2.3.0."""
    for tree, reference in releases.named("2.3.0").references.items():
        folder = tmp_path / "upstream" / tree
        (folder / releases.TREES[tree]).mkdir(parents=True)
        (folder / releases.TREES[tree] / "__init__.py").touch()
        (folder / "setup.py").write_text("__version__ = '2.3.0'\n")
        git(folder, "init", "-q", "-b", "main")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "first")
        git(folder, "branch", reference)
    return tmp_path / "upstream"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """What would be installed: package indexes are not for unit tests."""
    calls: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(stack, "missing_packages", lambda folder: ["networkx", "peft==0.7.1"])
    monkeypatch.setattr(stack, "_install", lambda folder, names: calls.append((folder, list(names))))
    return calls


def prepared(upstream: Path, into: Path, **options: object) -> Path:
    return stack.prepare(releases.named("2.3.0"), into, say=lambda text: None, **options)  # type: ignore[arg-type]


def test_trees_are_cloned_at_their_branches(upstream: Path, tmp_path: Path, installed: list[tuple[Path, list[str]]]) -> None:
    into = prepared(upstream, tmp_path / "stack", base_url=upstream.as_uri() + "/")
    assert releases.missing_trees(into) == [] and releases.release_of(into) == "2.3.0"
    assert installed == [(into / stack.PYTHON, ["networkx", "peft==0.7.1"])]
    assert list((into / "MindSpeed" / "mindspeed" / "__pycache__").iterdir()), "a rank would compile it each time"
    prepared(upstream, into, base_url="file:///nowhere")  # what is there is not fetched again


def test_a_v_in_front_asks_for_the_tags(upstream: Path, tmp_path: Path, installed: list[tuple[Path, list[str]]]) -> None:
    tagged = releases.named("v2.3.0")
    assert tagged.references == {
        "MindSpeed-LLM": "v2.3.0",
        "MindSpeed": "v2.3.0_core_r0.12.1",
        "Megatron-LM": "core_v0.12.1",
    }
    for tree, reference in tagged.references.items():
        if tree != "Megatron-LM":  # at its tag already
            (upstream / tree / "of_the_tag.txt").touch()
            git(upstream / tree, "add", "-A")
            git(upstream / tree, "commit", "-qm", "second")
            git(upstream / tree, "tag", reference)
    into = stack.prepare(tagged, tmp_path / "stack", base_url=upstream.as_uri(), say=lambda text: None)
    assert (into / "MindSpeed-LLM" / "of_the_tag.txt").exists() and (into / "MindSpeed" / "of_the_tag.txt").exists()
    assert releases.named("v26.1.0").references["MindSpeed"] == "26.1.0_core_r0.12.1", "MindSpeed has no tag of it"
    with pytest.raises(UsageError, match="no release vmaster"):
        releases.named("vmaster")


def test_a_branch_that_is_not_there_is_an_error_and_leaves_nothing(upstream: Path, tmp_path: Path) -> None:
    with pytest.raises(DryRunError, match=r"Could not clone .*MindSpeed-LLM at 26\.1\.0"):
        stack.prepare(releases.named("26.1.0"), tmp_path / "stack", base_url=upstream.as_uri(), say=lambda text: None)
    assert not (tmp_path / "stack" / "MindSpeed-LLM").exists()


@pytest.mark.usefixtures("installed")
def test_trees_that_are_there_are_used_in_place(upstream: Path, tmp_path: Path) -> None:
    into = prepared(upstream, tmp_path / "stack", source=upstream)
    assert (into / "MindSpeed").resolve() == upstream / "MindSpeed"
    assert not (upstream / "MindSpeed" / "mindspeed" / "__pycache__").exists(), "trees of somebody else's stay as they are"
    with pytest.raises(UsageError, match=r"holds release 2\.3\.0, not 26\.1\.0"):
        stack.prepare(releases.named("26.1.0"), tmp_path / "other", source=upstream)
    with pytest.raises(UsageError, match="has no MindSpeed-LLM"):
        prepared(upstream, tmp_path / "third", source=tmp_path)


@pytest.mark.parametrize("missing", [[], ["networkx"]])
def test_packages_that_are_there_are_used_in_place_and_never_added_to(
    upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list[tuple[Path, list[str]]], missing: list[str]
) -> None:
    (upstream / stack.PYTHON).mkdir()
    monkeypatch.setattr(stack, "missing_packages", lambda folder: missing)
    into = prepared(upstream, tmp_path / "stack", source=upstream)
    assert (into / stack.PYTHON).is_symlink() is not bool(missing)
    assert installed == ([(into / stack.PYTHON, missing)] if missing else [])


def test_pytorch_is_never_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    record: Callable[..., None] = lambda command, *rest: commands.append(command)  # noqa: E731
    monkeypatch.setattr(stack, "_run", record)
    stack._install(tmp_path, ["networkx", "peft==0.7.1"])
    plain, alone = commands
    assert "networkx" in plain and "--no-deps" not in plain
    assert "peft==0.7.1" in alone and "--no-deps" in alone


@pytest.mark.parametrize("words", [["--stack", "26.1.0"], ["--into", "x"], ["--from", "x"], ["--stack", "1.0", "--into", "x"]])
def test_wrong_use_is_refused(words: list[str]) -> None:
    assert main(["setup", *words]) == 2


def test_on_torch_npu_transformers_is_the_one_that_upstream_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "MindSpeed-LLM").mkdir()
    (tmp_path / "MindSpeed-LLM" / "requirements.txt").write_text("numpy\ntransformers==5.2.0\ntransformers_stream_generator\n")
    there = {"torch_npu": False}
    monkeypatch.setattr(stack.importlib.util, "find_spec", lambda name: object() if there.get(name) else None)
    assert stack.requirements(tmp_path)["transformers"] == stack.PACKAGES["transformers"]
    there["torch_npu"] = True
    assert stack.requirements(tmp_path)["transformers"] == "transformers==5.2.0"
    assert "transformers==5.2.0" in stack.missing_packages(tmp_path)
    assert stack.requirements()["transformers"] == stack.PACKAGES["transformers"]
