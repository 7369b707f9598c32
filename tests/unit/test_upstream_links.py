"""Comments about upstream carry links to lines; `benchmarks/upstream_links.py` checks them where the repositories are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import upstream_links
import yaml
from upstream_links import Link, links, problem

ROOT = Path(__file__).resolve().parents[2]


def test_every_link_names_a_symbol_a_tag_and_a_line() -> None:
    found = list(links())
    assert [one for one in found if isinstance(one, str)] == []
    assert len(found) >= 150


@pytest.mark.parametrize("name", ["megatron", "mindspeed", "mindspeed_llm"])
def test_every_patch_of_upstream_carries_the_link_of_its_target(name: str) -> None:
    """The symbol of the link in front of a patch is the target's."""
    text = (ROOT / "patches" / f"{name}.yaml").read_text(encoding="utf-8")
    linked = [one.symbol for one in links() if isinstance(one, Link) and one.place.startswith(f"patches/{name}.yaml")]
    targets = [patch["target"].rpartition(":")[2].rpartition(".")[2] for patch in yaml.safe_load(text)["patches"]]
    assert linked == targets


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "upstream"
    folder.mkdir()
    (folder / "a.py").write_text("import x\n\ndef one():\n    pass\n")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"],
        ["tag", "v1.0"],
    ):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    (folder / "a.py").write_text("def one():\n    pass\n")  # what is checked out is not what the tag says
    return folder


@pytest.mark.parametrize(
    ("symbol", "tag", "path", "line", "said"),
    [
        ("one", "v1.0", "a.py", 3, ""),
        ("one", "v1.0", "a.py", 1, "line 1 of a.py has no `one`; lines 3 have it."),
        ("two", "v1.0", "a.py", 3, "lines (none) have it."),
        ("one", "v1.0", "a.py", 99, "line 99 of a.py has no `one`"),
        ("one", "v1.0", "b.py", 3, "has no b.py at v1.0."),
        ("one", "v2.0", "a.py", 3, "has no a.py at v2.0."),
    ],
)
def test_a_wrong_line_is_seen(repository: Path, symbol: str, tag: str, path: str, line: int, said: str) -> None:
    link = Link(place="x.py:1", symbol=symbol, project="o/n", tag=tag, path=path, line=line)
    found = problem(link, repository)
    assert found.endswith(said) if said.endswith(".") else said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# `one`: https://github.com/o/n/blob/main/a.py#L3", "is a branch"),
        ("# https://github.com/o/n/blob/v1.0/a.py#L3", "a link is `symbol`: URL"),
        ("# `one`: https://github.com/o/n/blob/v1.0/a.py", "a link is `symbol`: URL"),
    ],
)
def test_a_link_that_cannot_be_checked_is_seen(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mindspeed_dryrun").mkdir()
    (tmp_path / "mindspeed_dryrun" / "x.py").write_text(text + "\n")
    (found,) = links(tmp_path)
    assert isinstance(found, str) and said in found


def test_the_command_fails_for_a_project_that_was_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert upstream_links.main([]) == 1
    assert upstream_links.main(["--missing-is-fine"]) == 0
    assert "NVIDIA/Megatron-LM: " in capsys.readouterr().out
