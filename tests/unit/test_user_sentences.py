"""A wrong value in a file of the user's, or in a record, is a sentence of ours, in both languages; never pydantic's or PyYAML's."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import report_samples
import yaml
from pydantic import Field, TypeAdapter, ValidationError
from test_hostile_records import job_file

from mindspeed_dryrun import language, schema, yaml_file
from mindspeed_dryrun.devices.hardware import HardwareFile
from mindspeed_dryrun.devices.real_runs import RealRun, read_runs
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.model import RankReport, Report
from mindspeed_dryrun.record.run_spec import JobFile, PlannedRank
from mindspeed_dryrun.record.store import read_json_of_user
from mindspeed_dryrun.schema import read_as
from mindspeed_dryrun.search.search_file import SearchFile
from mindspeed_dryrun.sweep.calibration_rows import RowsFile
from mindspeed_dryrun.sweep.sweep_file import SweepFile

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Inner:
    """A part of a file."""

    a: int


class Colour(Enum):
    """Two names."""

    RED = "red"
    BLUE = "blue"


# core type of pydantic, a declaration of it, a value, pydantic's type of the error, our sentence
WRONG: list[tuple[str, Any, Any, str, str]] = [
    ("str", str, [1], "string_type", "x.yaml: 'k' must be text, not a list."),
    ("str", str, b"\x80", "string_unicode", "x.yaml: 'k' must be text that UTF-8 can hold, not b'\\x80'."),
    ("int", int, None, "int_type", "x.yaml: 'k' must be a whole number, not an empty value."),
    ("int", int, "four", "int_parsing", "x.yaml: 'k' must be a whole number, not 'four'."),
    ("int", int, "9" * 5000, "int_parsing_size", f"x.yaml: 'k' must be a smaller whole number, not '{'9' * 59}…."),
    ("int", int, 1.5, "int_from_float", "x.yaml: 'k' must be a whole number, not 1.5."),
    ("int", int, float("inf"), "finite_number", "x.yaml: 'k' must be a finite number, not inf."),
    ("float", float, {}, "float_type", "x.yaml: 'k' must be a number, not a mapping."),
    ("float", float, "fast", "float_parsing", "x.yaml: 'k' must be a number, not 'fast'."),
    (
        "float",
        Annotated[float, Field(allow_inf_nan=False)],
        float("nan"),
        "finite_number",
        "x.yaml: 'k' must be a finite number, not nan.",
    ),
    ("float gt", Annotated[float, Field(gt=0)], -1, "greater_than", "x.yaml: 'k' must be above 0.0, not -1."),
    ("float ge", Annotated[float, Field(ge=1)], 0, "greater_than_equal", "x.yaml: 'k' must be at least 1.0, not 0."),
    ("float lt", Annotated[float, Field(lt=1)], 2, "less_than", "x.yaml: 'k' must be below 1.0, not 2."),
    ("float le", Annotated[float, Field(le=1)], 2, "less_than_equal", "x.yaml: 'k' must be at most 1.0, not 2."),
    ("bool", bool, [], "bool_type", "x.yaml: 'k' must be true or false, not a list."),
    ("bool", bool, "perhaps", "bool_parsing", "x.yaml: 'k' must be true or false, not 'perhaps'."),
    ("list", list[int], 3, "list_type", "x.yaml: 'k' must be a list, not 3."),
    ("list", list[int], [1, "b"], "int_parsing", "x.yaml: 'k 2' must be a whole number, not 'b'."),
    ("tuple", tuple[int, ...], "text", "tuple_type", "x.yaml: 'k' must be a list, not 'text'."),
    ("tuple", tuple[int, int], [1], "missing", "x.yaml: 'k 2' is missing."),
    ("tuple", tuple[int, int], [1, 2, 3], "too_long", "x.yaml: 'k' must have at most 2 items, not 3."),
    ("list", Annotated[list[int], Field(min_length=2)], [1], "too_short", "x.yaml: 'k' must have at least 2 items, not 1."),
    ("dict", dict[str, int], [1], "dict_type", "x.yaml: 'k' must be a mapping of keys to values, not a list."),
    ("dict", Mapping[str, int], 7, "dict_type", "x.yaml: 'k' must be a mapping of keys to values, not 7."),
    ("dataclass", Inner, 7, "dataclass_type", "x.yaml: 'k' must be a mapping of keys to values, not 7."),
    ("dataclass", Inner, {}, "missing", "x.yaml: 'k.a' is missing."),
    ("dataclass", Inner, {1: 2, "a": 1}, "invalid_key", "x.yaml: 'k' must have keys that are text, not 1."),
    ("dict", dict[str, int], {1: 2}, "string_type", "x.yaml: 'k' must have keys that are text, not 1."),
    ("enum", Colour, "green", "enum", "x.yaml: 'k' must be one of red, blue, not 'green'."),
    ("literal", Literal["red", "blue"], "green", "literal_error", "x.yaml: 'k' must be one of red, blue, not 'green'."),
    ("literal", Literal["red", "blue"], ["red"], "literal_error", "x.yaml: 'k' must be one of red, blue, not a list."),
]

# Core types without an error of their own: what they hold has it.
NEUTRAL = {"nullable", "default", "definitions", "definition-ref", "model", "model-fields", "model-field", "function-before",
           "no-info", "dataclass-args", "dataclass-field"}  # fmt: skip


def instances() -> dict[str, tuple[Any, Any]]:
    """Every declaration that a file is read as, with a file that is right."""
    search = yaml.safe_load((ROOT / "examples" / "searches" / "qwen25_7b_8cards.yaml").read_text(encoding="utf-8"))
    sweep = yaml.safe_load((ROOT / "examples" / "sweeps" / "qwen25_7b_lab.yaml").read_text(encoding="utf-8"))
    product = yaml.safe_load((ROOT / "examples" / "sweeps" / "product.yaml").read_text(encoding="utf-8"))
    rows = yaml.safe_load((ROOT / "examples" / "searches" / "lab_rows.yaml").read_text(encoding="utf-8"))
    devices = ROOT / "mindspeed_dryrun" / "devices"
    report = report_samples.fits().to_json()
    return {
        "search": (SearchFile, search),
        "sweep": (SweepFile, sweep),
        "product": (SweepFile, product),
        "rows": (RowsFile, rows),
        "hardware": (HardwareFile, yaml.safe_load((devices / "ascend910b-64g.yaml").read_text(encoding="utf-8"))),
        "real runs": (list[RealRun], yaml.safe_load((devices / "real_runs.yaml").read_text(encoding="utf-8"))),
        "report": (Report, report),
        "rank": (RankReport, report["ranks"][0]),
        "job": (JobFile, job_file().to_json()),
        "plan": (PlannedRank, {"rank": 0, "represents": [0]}),
        "groups": (dict[str, tuple[int, ...]], {"tp": [0, 1]}),
    }


INSTANCES = instances()
BAD = (
    None,
    True,
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "text",
    "9" * 5000,
    b"\x80",
    [],
    [None],
    ["text"],
    {},
    {1: 2},
    {"x": {}},
)


def core_types(part: Any) -> Iterator[str]:
    """The types in a core schema of pydantic; one with a limit has the limit's name behind it."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            limits = sorted(part.keys() & {"gt", "ge", "lt", "le", "min_length", "max_length", "pattern", "multiple_of"})
            yield " ".join([part["type"], *limits])
        for item in part.values():
            yield from core_types(item)
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from core_types(item)


def changed(data: Any) -> Iterator[Any]:
    """The data with one value replaced by each bad one, left out, or beside a key that nobody knows."""
    if isinstance(data, dict):
        yield {**data, "no_such_key": 1}
        for key, value in data.items():
            yield {name: item for name, item in data.items() if name != key}
            for other in (*BAD, *changed(value)):
                yield {**data, key: other}
    elif isinstance(data, list):
        for index, value in enumerate(data[:2]):
            for other in (*BAD, *changed(value)):
                yield [*data[:index], other, *data[index + 1 :]]


def english_left(sentence: str) -> list[str]:
    """English words behind the first colon that are no name: neither quoted nor joined with `_`."""
    said = re.sub(r"b?'[^']*'|b?\"[^\"]*\"|\[[^\]]*\]|\b[a-z]\w*_\w+\b", "", sentence.partition("：")[2] or sentence)
    return re.findall(r"\b[a-z]{2,} [a-z]{2,}\b", said)


@pytest.mark.parametrize(
    ("core", "kind", "value", "error", "sentence"), WRONG, ids=lambda item: item if isinstance(item, str) else ""
)
def test_a_wrong_value_is_our_sentence(core: str, kind: Any, value: Any, error: str, sentence: str) -> None:
    file = dataclasses.make_dataclass("file", [("k", kind)])
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(file).validate_python({"k": value})
    assert raised.value.errors()[0]["type"] == error  # the sentence is about the error that it says
    with pytest.raises(UsageError) as said:
        read_as(file, {"k": value}, "x.yaml")
    assert str(said.value) == sentence
    with language.speaking("zh"):
        chinese = language.t(sentence)
    assert chinese != sentence and english_left(chinese) == []


@pytest.mark.parametrize("name", INSTANCES)
def test_every_type_that_a_declaration_uses_has_its_sentences(name: str) -> None:
    kind, _ = INSTANCES[name]
    used = set(core_types(TypeAdapter(kind).core_schema))
    assert used - NEUTRAL - {core for core, *_ in WRONG} == set()


@pytest.mark.parametrize("name", INSTANCES)
def test_no_damaged_file_says_a_word_of_pydantics(name: str) -> None:
    """Every value of a right file, replaced by wrong ones; an error that none of our sentences knows would show."""
    kind, right = INSTANCES[name]
    right = json.loads(json.dumps(right))  # tuples as files have them
    read_as(kind, copy.deepcopy(right), "x.yaml")
    said = set()
    for data in changed(right):
        try:
            read_as(kind, data, "x.yaml")
        except UsageError as error:
            said.add(str(error))
    assert len(said) >= 3
    assert [sentence for sentence in said if re.search(r"[Ii]nput |[Vv]alid |[Uu]nable|instance of|Value error", sentence)] == []
    with language.speaking("zh"):
        wrong = {sentence: chinese for sentence in said if (chinese := language.t(sentence)) == sentence or english_left(chinese)}
    assert wrong == {}


def test_an_unknown_error_keeps_its_own_words() -> None:
    """A newer pydantic may have types that nobody here has met."""
    assert schema._words({"type": "brand_new", "msg": "Input should be nice", "input": 1}) == "should be nice"


NOT_YAML = {
    "a: b: c": "a second ':'",
    "a: 'b\nc: 1": "a quote was not closed",
    "a: [1, 2\nb: 3": "a bracket or a comma is missing",
    "a: {b: 1\nc: 2": "a bracket or a comma is missing",
    "a:\n  b: 1\n c: 2": "the indentation differs",
    "a: 1\nb\nc: 2": "a ':' is missing",
    "a:\n\t- 1": "a tab indents the line",
    "a: @b": "a value begins with a character",
    "a: *b": "an alias (*)",
    'a: "\\q"': "a backslash",
    "a: !b c": "a tag (!)",
    "a: 2021-13-01": "looks like a date",
    "? [1]\n: 2": "a key is a list",
    "a: \x07": "control characters",
    "[" * 3000: "nested too deep",
}


@pytest.mark.parametrize("text", NOT_YAML, ids=range(len(NOT_YAML)))
def test_what_is_not_yaml_is_said_in_our_words(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        yaml_file.read_yaml(tmp_path / "x.yaml")
    said = str(raised.value)
    assert "is not YAML: " in said and NOT_YAML[text] in said
    with language.speaking("zh"):
        assert "不是 YAML：" in language.t(said) and english_left(language.t(said).partition("YAML")[2]) == []


def test_a_file_that_cannot_be_opened_says_so_in_chinese(tmp_path: Path) -> None:
    for read, name in ((yaml_file.read_yaml, "none.yaml"), (read_json_of_user, "none.json")):
        with pytest.raises(UsageError) as raised:
            read(tmp_path / name)
        with language.speaking("zh"):
            assert language.t(str(raised.value)).endswith("没有这个文件或目录。")


def test_a_json_file_that_is_none_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{\n"a": 1,\n}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"x\.json line 3 is not JSON\."):
        read_json_of_user(tmp_path / "x.json")


def test_a_file_of_real_runs_that_is_no_list(tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").write_text("a: 1", encoding="utf-8")
    with pytest.raises(UsageError, match=r"runs\.yaml must be a list, not a mapping\.") as raised:
        read_runs(tmp_path / "runs.yaml")
    with language.speaking("zh"):
        assert language.t(str(raised.value)).endswith("runs.yaml 必须是列表，而不是 映射。")


def test_names_are_not_translated_in_a_sentence() -> None:
    """A user must write `failed`, in any language."""
    with language.speaking("zh"):
        assert "ok, oom, failed, timeout" in language.t("x.yaml: 'status' must be one of ok, oom, failed, timeout, not 'so'.")
