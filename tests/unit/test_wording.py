"""What a person reads is plain English: a list of words stays out, and an error is a sentence."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(
    r"\b(mend(s|ed|ing)?|wants?|is no (folder|file|directory)|differences? to|so many|last words|nothing beats|take its time with care|stage by stage, the best)\b",
    re.IGNORECASE,
)
READ = sorted(
    file
    for pattern in (
        "mindspeed_dryrun/**/*.py",
        "mindspeed_dryrun/**/*.html",
        "patches/*.yaml",
        "launch/**/*",
        "examples/**/*",
        "docs/*.md",
        "*.md",
    )
    for file in ROOT.glob(pattern)
    if file.is_file() and "__pycache__" not in file.parts
)
YOU_WANT = re.compile(r"\byou want to\b")  # the reader may want something; a program never does
PROGRAMS = ("compare ", "git ", "msrun ", "npu-smi ", "torchrun ", "torch_npu ")  # names keep their small letter
ERRORS = {"UsageError", "DryRunError"}


def found_in(text: str) -> list[str]:
    lines = YOU_WANT.sub("", text.replace("difference from", "")).splitlines()
    return [line.strip() for line in lines if WORDS.search(line) and "*mend" not in line]


def test_the_word_list_is_absent() -> None:
    assert len(READ) > 150
    assert {
        str(file.relative_to(ROOT)): lines
        for file in READ
        if (lines := found_in(file.read_text(encoding="utf-8", errors="replace")))
    } == {}


@pytest.mark.parametrize(
    "line", ["how to mend it", "the kernel wants pairs", "x is no folder", "the difference to the engine's figure"]
)
def test_the_list_is_seen(line: str) -> None:
    assert found_in(line)


def literal_ends(node: ast.expr) -> tuple[str, str] | None:
    """The first and the last words of a message where both are written out; None where one is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, node.value
    if isinstance(node, ast.JoinedStr) and node.values:
        first, last = node.values[0], node.values[-1]
        begin = first.value if isinstance(first, ast.Constant) else "A"
        end = last.value if isinstance(last, ast.Constant) else "."
        return str(begin), str(end)
    return None


def raised(file: Path) -> list[tuple[int, str, str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ERRORS and call.args]
    return [(call.lineno, *ends) for call in named if (ends := literal_ends(call.args[0]))]


def test_an_error_is_a_sentence() -> None:
    """A capital letter (or a flag, or a name in quotes) in front, a full stop behind; a command to type may end it as well."""
    wrong = []
    for file in sorted((ROOT / "mindspeed_dryrun").rglob("*.py")):
        for line, begin, end in raised(file):
            if (re.match(r"[a-z]", begin) and not begin.startswith(PROGRAMS)) or not re.search(
                r"[.?…)`]\s*$|: (--)?[a-z].*$|=DIR$", end
            ):
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {begin[:40]} … {end[-40:]}")
    assert wrong == []
