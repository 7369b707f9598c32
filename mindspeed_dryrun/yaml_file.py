"""YAML files of the user: read strictly, so that a misspelt key is a sentence and not a silent default."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
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
        raise UsageError(f"{path} must be a mapping of keys to values, not {_kind(data)}.")
    return data


class Section:
    """One mapping of a user's file. Every reader names its key; `done` refuses the keys that nobody asked for."""

    def __init__(self, data: Any, where: str, known: Iterable[str]):
        if not isinstance(data, Mapping):
            raise UsageError(f"{where} must be a mapping of keys to values, not {_kind(data)}.")
        self.data, self.where, self.known = data, where, tuple(known)
        for key in data:
            if key not in self.known:
                near = difflib.get_close_matches(str(key), self.known, 1, 0.6)
                hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(self.known)}."
                raise UsageError(f"{where}: unknown key '{key}'; {hint}")

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UsageError(f"{self.where}: '{key}' must be text, not {_kind(value)}.")
        return str(value)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        return whole(self._get(key, default), f"{self.where}: '{key}'", least)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UsageError(f"{self.where}: '{key}' must be a number above 0, not {value!r}.")
        return float(value)

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """A list; a single value is a list of one."""
        value = self._get(key, default)
        found = list(value) if isinstance(value, (list, tuple)) else [value]
        if not found:
            raise UsageError(f"{self.where}: '{key}' is an empty list; leave the key out or name at least one value.")
        return found

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(sorted({whole(item, f"{self.where}: '{key}'", 1) for item in self.items(key)}))

    def booleans(self, key: str) -> tuple[bool, ...]:
        found = self.items(key)
        if not all(isinstance(item, bool) for item in found):
            raise UsageError(f"{self.where}: '{key}' takes true, false or a list of both, not {found!r}.")
        return tuple(dict.fromkeys(found))

    def variables(self, key: str) -> dict[str, str]:
        """`{NAME: value}` as environment or script variables; an absent key is none."""
        value = self.data.get(key) or {}
        if not isinstance(value, Mapping):
            raise UsageError(f"{self.where}: '{key}' must be a mapping of names to values, not {_kind(value)}.")
        return {str(name): scalar(item, f"{self.where}: '{key}: {name}'") for name, item in value.items()}

    def words(self, key: str) -> tuple[str, ...]:
        """Arguments, as one string or a list; an absent key is none."""
        value = self.data.get(key)
        if value is None:
            return ()
        if isinstance(value, str):
            return tuple(value.split())
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: '{key}' must be a string or a list of arguments, not {_kind(value)}.")
        return tuple(scalar(item, f"{self.where}: '{key}'") for item in value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise UsageError(f"{self.where}: '{key}' is missing.")
            return default
        return value


def scalar(value: Any, where: str) -> str:
    """A YAML scalar as a shell would see it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise UsageError(f"{where} must be text or a number, not {_kind(value)}.")


def whole(value: Any, where: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{where} must be a whole number of at least {least}, not {value!r}.")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list"
    return f"{value!r}"
