"""The documents: every link leads somewhere, every command line is one that the program accepts, no stale figure."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_dryrun.commands import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
PREFIXES = (["mindspeed-dryrun"], ["python", "-m", "mindspeed_dryrun"])
PLACEHOLDERS = {"VERB"}  # `mindspeed-dryrun VERB --help` speaks of all of them


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def command_lines(text: str) -> Iterator[list[str]]:
    """The words after `mindspeed-dryrun` of every command line: of shell blocks, and of what is set in code in a sentence."""
    blocks = "\n".join(FENCE.findall(text)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in blocks.splitlines()]
    lines += [code.replace("\\|", "|") for code in INLINE.findall(FENCE.sub("", text))]
    for line in lines:
        if "[" in line or "…" in line or ("|" in line.partition("--")[2] and "$(" not in line):  # grammar, not a command
            continue
        for part in re.split(r"&&|;|\$\(|\|", line):
            try:
                words = shlex.split(part.replace(')"', "").strip('" '), comments=True)
            except ValueError:
                continue
            yield from words_after_program(words)


def words_after_program(words: list[str]) -> Iterator[list[str]]:
    while words and "=" in words[0]:  # NAME=VALUE in front of a command
        words = words[1:]
    if words[:3] == ["python", "-m", "mindspeed_dryrun.launch"]:
        yield ["launch", *words[3:]]
    for prefix in PREFIXES:
        if words[: len(prefix)] == prefix and len(words) > len(prefix):
            yield words[len(prefix) :]
    # In a sentence a verb may also be an ordinary word: `report` alone is not a command line.
    if len(words) > 1 and words[0] in VERBS and (words[1].startswith("-") or "/" in words[1] or words[1].isupper()):
        yield words


def accepted(words: list[str]) -> bool:
    """The real parser of the verb takes these words."""
    verb, *rest = words
    if verb in PLACEHOLDERS or verb.startswith("--") or "--help" in rest:
        return verb in PLACEHOLDERS or verb in VERBS or verb == "--version"
    if verb not in VERBS:
        return False
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"mindspeed_dryrun.commands.{verb}").add_arguments(parser)
    rest = rest[: rest.index("--")] if "--" in rest else rest
    # `launch --explain` in a sentence names an option; the words that it leaves out are filled in.
    return any(parses(parser, [*rest, *more]) for more in ([], ["X"], ["X", "X"]))


def parses(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    try:
        parser.parse_args(words)
    except (argparse.ArgumentError, SystemExit):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_line_is_accepted_by_the_program(page: Path) -> None:
    lines = list(command_lines(page.read_text(encoding="utf-8")))
    assert [line for line in lines if not accepted(line)] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_the_files_that_a_command_line_names_exist(page: Path) -> None:
    named = [
        word
        for line in command_lines(page.read_text(encoding="utf-8"))
        for word in line
        if word.startswith(("examples/", "launch/"))
    ]
    assert [word for word in named if not (ROOT / word).exists()] == []


def test_the_readers_of_command_lines_see_them() -> None:
    """A test that finds nothing would pass for ever."""
    readme = list(command_lines((ROOT / "README.md").read_text(encoding="utf-8")))
    assert ["launch", "examples/pretrain_qwen25_7b_32k_ms.sh"] in readme
    assert len(readme) >= 8
    assert not accepted(["launch", "SCRIPT", "--no-such-option"])


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_page_takes_what_the_simulation_believes_for_a_budget(page: Path) -> None:
    assert not re.search(r"budget\s+of 61430M|61430M budget", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_page_has_a_figure_that_was_never_filled_in(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert re.findall(r"\|\s*([A-Z]+(?:_[A-Z]+)+|TODO|TBD)\s*\|", prose) == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every page is in the navigation, and every link and anchor leads somewhere."""
    pytest.importorskip("material")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    assert {"index.html", "tutorial", "tutorial.zh"} <= {path.name for path in tmp_path.iterdir()}


def test_the_tests_that_the_reliability_page_names_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "tests").rglob("test_*.py"))
    points = json.loads((root / "docs" / "reliability" / "points.json").read_text(encoding="utf-8"))
    assert [item["point"] for item in points] == list(range(1, 19))
    assert [name for item in points for name in item["tests"] if f"def {name}(" not in source] == []
