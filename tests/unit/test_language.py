"""Reports in Chinese: no message without its translation, the same figures, the same JSON."""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import report_samples

from mindspeed_dryrun import language
from mindspeed_dryrun.report import as_json, render, view

PACKAGE = Path(language.__file__).parent


@pytest.fixture(autouse=True)
def english_afterwards() -> Iterator[None]:
    yield
    language.set_language("en")


def messages() -> set[str]:
    """Every message that is given to `t`, also by way of a name."""
    found = set(view.RANK_HEAD)
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        named = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "t" and node.args:
                said = named.get(node.args[0].id) if isinstance(node.args[0], ast.Name) else node.args[0]
                if isinstance(said, ast.Constant):
                    found.add(said.value)
    return found


def test_no_message_is_without_its_chinese_and_none_is_left_over() -> None:
    assert messages() == set(language.CHINESE)


@pytest.mark.parametrize("english", language.CHINESE)
def test_a_translation_has_the_same_values(english: str) -> None:
    def fields(text: str) -> set[str | None]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}

    assert fields(english) == fields(language.CHINESE[english])


@pytest.mark.parametrize("name", report_samples.SAMPLES)
@pytest.mark.parametrize("format", ["table", "markdown"])
def test_the_figures_are_the_same_and_json_does_not_change(name: str, format: str) -> None:
    report = report_samples.SAMPLES[name]()
    english, data = render(report, format), as_json.render(report)
    language.set_language("zh")
    chinese = render(report, format)
    assert chinese != english
    assert sorted(re.findall(r"\d+M\b", chinese)) == sorted(re.findall(r"\d+M\b", english))
    assert as_json.render(report) == data and json.loads(data)


def test_the_columns_stay_aligned() -> None:
    language.set_language("zh")
    head, *rows = [
        line
        for line in render(report_samples.fits(), "table").splitlines()
        if "已用峰值" in line or "55389M  " in line or "48436M  " in line
    ]
    assert {language.width(line) for line in [head, *rows]} == {language.width(head)} and len(rows) == 2


@pytest.mark.parametrize(("value", "expected"), [("zh_CN.UTF-8", "zh"), ("en_US.UTF-8", "en"), ("C", "en")])
def test_the_locale_is_the_default(value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", value)
    assert language.from_locale() == expected
