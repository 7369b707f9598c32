"""YAML files of the user: read strictly, so that a misspelt key is a sentence and not a silent default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mindspeed_dryrun.errors import UsageError

_LARGEST = 2**22  # characters


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in `path`; anything else is a `UsageError` that names the file (and the line, where YAML knows it)."""
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
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: `2021-13-01`, which looks like a date
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {getattr(error, 'problem', None) or 'cannot be read'}.") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must be a mapping of keys to values, not {kind_of(data)}.")
    return data


def kind_of(value: Any) -> str:
    """In a few words, for a sentence."""
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list"
    return f"{value!r}"
