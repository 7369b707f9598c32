"""YAML files of the user: read strictly, so that a misspelt key is a sentence and not a silent default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message

_LARGEST = 2**22  # characters
_LONGEST = 60  # characters of a value that a sentence shows


# How PyYAML's own words begin → what we say. Its words, which name no way out, stay for what is not listed.
_YAML_SENTENCES = {
    "mapping values are not allowed": "a second ':' stands where a value was read; put the value into quotes",
    "could not find expected ':'": "a ':' is missing behind a key, or a quote was not closed",
    "expected <block end>": "the indentation differs from the lines above, or a '-' is missing",
    "did not find expected": "a bracket, a quote or a comma is missing",
    "expected ',' or": "a bracket or a comma is missing",
    "found character '\\t'": "a tab indents the line; indent with spaces",
    "found character": "a value begins with a character that needs quotes",
    "found undefined alias": "an alias (*) has no anchor (&) of its name; put the value into quotes",
    "found unexpected end of stream": "a quote was not closed",
    "found unknown escape": "a backslash in double quotes begins an unknown escape; use single quotes",
    "found unexpected": "a bracket or a quote was not closed",
    "could not determine a constructor": "a tag (!) is not known here; put the value into quotes",
    "found unhashable key": "a key is a list or a mapping; put it into quotes",
    "special characters are not allowed": "it holds control characters",
    "expected the node content": "a value is missing, or a bracket stands where none is expected",
}


# For files that come with the program: ten times as fast. A user's file is read by the one whose errors are worded here.
_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_own(path: Path) -> Any:
    """What a file of this package holds."""
    return yaml.load(path.read_text(encoding="utf-8"), _FAST)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in `path`; anything else is a `UsageError` that names the file (and the line, where YAML knows it)."""
    data = load_yaml(path)
    if not isinstance(data, dict):
        raise UsageError(f"{path} must be a mapping of keys to values, not {kind_of(data)}.")
    return data


def load_yaml(path: Path) -> Any:
    """What is in `path`, whatever it is."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST + 1)  # /dev/zero never ends
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file.") from error
    if len(text) > _LARGEST:
        raise UsageError(f"{path} is too large for a YAML file of settings.")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: `2021-13-01`, which looks like a date
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {_problem(error)}.") from error


def _problem(error: Exception) -> str:
    """What is wrong with the text, in our words where we have some."""
    if isinstance(error, RecursionError):
        return message("it is nested too deep")
    if not isinstance(error, yaml.YAMLError):
        return message("a value looks like a date and is none; put it into quotes")
    said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "")
    return next((ours for begin, ours in _YAML_SENTENCES.items() if said.startswith(begin)), said) or message("it cannot be read")


def kind_of(value: Any) -> str:
    """In a few words, for a sentence."""
    if value is None:
        return message("an empty value")
    if isinstance(value, (list, tuple)):
        return message("a list")
    if isinstance(value, Mapping):
        return message("a mapping")
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
