"""What is shown in Chinese: no message without its translation, the same figures, the same JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

import messages
import pytest
import report_samples

from mindspeed_dryrun import commands, language
from mindspeed_dryrun.language import catalogue
from mindspeed_dryrun.megatron import flags
from mindspeed_dryrun.report import render

CHINESE = catalogue.read("zh").entries


@pytest.fixture(autouse=True)
def english_afterwards() -> Iterator[None]:
    yield
    language.set_language("en")


def test_no_message_is_without_its_chinese() -> None:
    """`python tests/messages.py` prints the entries to be filled in and added to language/zh.po."""
    assert [f"{one.where}: {one.key}" for one in messages.missing()] == [], "add them to mindspeed_dryrun/language/zh.po"


def test_no_translation_is_left_over() -> None:
    """A message that was changed or removed takes its entry along."""
    assert sorted(CHINESE.keys() - messages.used()) == [], "remove them: python tests/messages.py --tidy"


def test_the_words_of_every_error_can_be_found() -> None:
    """An error whose words a function of another module computes is not seen here: mark the words with `message`."""
    assert messages.errors_without_words() == []


def test_a_message_that_is_missing_would_be_found() -> None:
    source = "def f(n):\n    hint = f' (or {n} of them)' if n else ''\n    raise UsageError(f'There are {n} ranks{hint}.')\n"
    (one,) = messages.of_module(source, "x.py")
    assert (one.key, one.fragments) == ("There are {} ranks{}.", ((1, " (or {} of them)"),))
    assert [one.key for one in messages.of_module("print(t('so'), t(f'{n} of {m:.1f}'), message('end of it'))", "x.py")] == [
        "so",
        "{} of {}",
        "end of it",
    ]


@pytest.mark.parametrize("english", CHINESE)
def test_a_translation_can_be_filled_in(english: str) -> None:
    names = catalogue.fields(english)
    values = [f"<{index}>" for index in range(len(names))]
    CHINESE[english].format(*values, **{name: value for name, value in zip(names, values, strict=True) if name})
    assert len([name for name in catalogue.fields(CHINESE[english]) if not name]) in (0, len(names))
    names_in_it = re.findall(r"--[a-z][a-z-]+|\b[A-Z]+_[A-Z_]+\b", english)
    assert [name for name in names_in_it if name not in CHINESE[english]] == []  # flags and variables are not translated


def test_a_finished_sentence_is_found_with_its_figures() -> None:
    language.set_language("zh")
    assert (
        language.t("16 attention heads are not divisible by TP 3: TP can be 1, 2, 4.")
        == "16 个注意力头不能被 TP 3 整除：TP 可以是 1, 2, 4。"
    )
    assert language.t("x.sh: --hidden-size 10 is not divisible by 3 attention heads: set --kv-channels.").startswith(
        "x.sh：--hidden-size 10 不能"
    )
    assert language.t("There is no verb lauch (did you mean launch?). `mindspeed-dryrun --help` lists them.").startswith(
        "没有子命令 lauch（是否想用 launch？）。"
    )
    assert language.t("Nobody has written this.") == "Nobody has written this."


def test_a_name_is_not_translated() -> None:
    language.set_language("zh")
    assert "'stage'" in language.t("f.yaml: unknown key 'stage'; did you mean 'stages'?")


def test_two_readers_at_once() -> None:
    with language.speaking("zh"):
        assert language.t("FITS") == "放得下"
    assert language.t("FITS") == "FITS"


@pytest.mark.parametrize(
    "words", [["--lang", "zh", "launch", "no.sh"], ["launch", "no.sh", "--lang=zh"], ["launch", "--lang", "zh", "no.sh"]]
)
def test_an_error_speaks_the_language_that_was_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(words) == 2
    assert "没有脚本 no.sh。" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["", *commands.VERBS])
def test_help_is_chinese_and_fits_the_screen(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        commands.main([*([verb] if verb else []), "--help", "--lang", "zh"])
    text = capsys.readouterr().out
    options = text.partition("选项:")[2]
    assert "用法：" in text and options
    assert [line for line in options.splitlines() if language.width(line) > 80] == []
    assert not re.search(r"^  +-.*  [a-z]+ [a-z]+ [a-z]+", text, re.MULTILINE)


@pytest.mark.parametrize("name", report_samples.SAMPLES)
@pytest.mark.parametrize("format", ["table", "markdown"])
def test_the_figures_are_the_same_and_json_does_not_change(name: str, format: str) -> None:
    report = report_samples.SAMPLES[name]()
    english, data = render(report, format), render(report, "json")
    language.set_language("zh")
    chinese = render(report, format)
    assert chinese != english
    assert sorted(re.findall(r"\d+M\b", chinese)) == sorted(re.findall(r"\d+M\b", english))
    assert render(report, "json") == data and json.loads(data)


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


def test_a_page_is_in_one_language() -> None:
    """Nothing but names, flags and figures is left in English on the Chinese page."""
    language.set_language("zh")
    report = dataclasses.replace(report_samples.fits(), notes=(), not_counted=())
    report = dataclasses.replace(
        report, ranks=tuple(dataclasses.replace(rank, why="last stage, head, 14 layers") for rank in report.ranks)
    )
    page = render(report, "html")
    assert '<html lang="zh-CN">' in page and "最后阶段，含输出层，14 层" in page
    shown = re.sub(r"<style>.*?</style>|<pre>.*?</pre>|<[^>]*>", "\n", page, flags=re.DOTALL)
    assert re.findall(r".*\b(?!dry run)[a-z]{3,} [a-z]{2,}\b.*", shown) == []


def test_a_few_words_are_not_found_in_every_sentence() -> None:
    language.set_language("zh")
    assert language.t("14 layers") == "14 层"
    assert language.t("an embedding and 14 layers") == "an embedding and 14 layers"


def test_only_words_differ_between_the_pages() -> None:
    """Classes, anchors and numbers are the same, so that both languages look alike."""
    pages = []
    for name in ("en", "zh"):
        language.set_language(name)
        pages.append(render(report_samples.fits(), "html"))
    english, chinese = (re.findall(r"\b(?:class|id|href|x1|x2|width)=\"[^\"]*\"", page) for page in pages)
    assert english == chinese and len(english) > 30


def filled(key: str, template: str) -> str:
    names = catalogue.fields(key)
    values = [f"v{index}" for index in range(len(names))]
    return template.format(*values, **{name: value for name, value in zip(names, values, strict=True) if name})


@pytest.mark.parametrize("place", ["", "examples/pretrain.sh: ", "a folder/sweep.yaml: "])
def test_no_short_message_takes_a_long_one_for_its_values(place: str) -> None:
    """`{} needs {}.` matches many a sentence; every finished sentence must come out as its own translation."""
    found = catalogue.read("zh")
    keys = [
        key
        for key in CHINESE
        if "\n" not in key and "}{" not in key and (catalogue._template(key, "x") or not catalogue.fields(key))
    ]
    if place:
        keys = [key for key in keys if key[0].isupper() and key.endswith(".")]
    assert len(keys) > 100
    shown = {
        filled(key, key): (place.replace(": ", "：") + filled(key, CHINESE[key]), found.sentence(place + filled(key, key)))
        for key in keys
    }
    assert {english: pair for english, pair in shown.items() if pair[0] != pair[1]} == {}


def test_flags_that_are_refused_say_why_in_chinese() -> None:
    with language.speaking("zh"):
        said = language.t(flags.check(["--low-memory", "--hiden-size", "3", "--optimizer", "lion"]).problem())
    assert said == (
        "内置训练程序无法运行此任务。--low-memory：会移动或缩减显存，没有建模；--optimizer：没有对 'lion' 建模（只支持 adam）；"
        "--hiden-size（是否想用 --hidden-size？）：内置训练程序不认识该参数。"
    )
