"""The documents: every link leads somewhere, every command line is one that the program accepts, no stale figure."""

from __future__ import annotations

import argparse
import importlib
import itertools
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
from mindspeed_dryrun.language import LANGUAGES, catalogue

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
    if "--lang" in rest and rest[rest.index("--lang") + 1] in LANGUAGES:  # every verb takes it, in any place
        del rest[rest.index("--lang") : rest.index("--lang") + 2]
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


TRANSLATED = sorted(page.name.removesuffix(".zh.md") for page in (ROOT / "docs").glob("*.zh.md"))
HEADING = re.compile(r"^(#+) ", re.MULTILINE)


def bare(page: str) -> str:
    """Without blocks of commands, where # begins a comment."""
    return re.sub(r"^```.*?^```", "", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_chinese_page_has_what_the_english_one_has(name: str) -> None:
    """The same headings in depth, the same number of rows in each table, of questions and of pictures."""
    english, chinese = bare(f"{name}.md"), bare(f"{name}.zh.md")
    assert TRANSLATED == ["faq", "troubleshooting", "tutorial", "verbs"]
    assert HEADING.findall(chinese) == HEADING.findall(english)
    for part in (r"^\*\*.+?\*\*", r"^!\[", r"^\| "):
        counts = [
            [len(re.findall(part, section, re.MULTILINE)) for section in re.split(r"^#+ ", text, flags=re.MULTILINE)]
            for text in (english, chinese)
        ]
        assert counts[0] == counts[1], part


def test_the_verbs_page_has_every_verb() -> None:
    titles = " ".join(re.findall(r"^## (.*)$", bare("verbs.md"), re.MULTILINE)).replace(",", "").split()
    assert [verb for verb in VERBS if verb not in titles] == []


@pytest.mark.parametrize("page", ["troubleshooting.md", "troubleshooting.zh.md"])
def test_the_sentences_that_troubleshooting_explains_are_said(page: str) -> None:
    """Each is a message of the program, in the page's language; an ellipsis stands for a value."""
    entries = catalogue.read("zh").entries
    known = [text.replace("\n", " ") for text in (entries.values() if ".zh." in page else entries)]
    tables = re.findall(r"^\| (?:sentence|提示) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", bare(page), re.MULTILINE)
    rows = [re.split(r"(?<!\\) \| ", row)[0].removeprefix("| ") for table in tables for row in table.splitlines()]
    assert len(rows) > 25

    def is_said(row: str) -> bool:
        pattern = ".*?".join(re.escape(piece.strip()) for piece in row.split("…") if piece.strip())
        return any(re.search(pattern, text) for text in known)

    assert [row for row in rows if not is_said(row)] == []


def test_what_contributing_shows_is_here() -> None:
    """Its commands are the tests themselves: the files, the tools and the markers that they name exist."""
    blocks = "\n".join(FENCE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    words = [word for line in blocks.splitlines() for word in shlex.split(line, comments=True)]
    files = [word for word in words if "/" in word and not word.startswith(".venv/")]
    tools = [word.removeprefix(".venv/bin/") for word in words if word.startswith(".venv/bin/")]
    markers = [after for word, after in itertools.pairwise(words) if word == "-m" and after != "pytest"]
    assert files and [word for word in files if not (ROOT / word).exists()] == []
    assert tools and [name for name in tools if not (Path(sys.executable).parent / name).exists()] == []
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert markers and [name for name in markers if f'"{name}: ' not in declared] == []
