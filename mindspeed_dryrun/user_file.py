"""The files that a user writes (YAML), declared once with pydantic: what is checked, and what their JSON Schemas say.

An empty value counts as an absent one. A misspelt key is a sentence with a suggestion and not a silent default.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator

from mindspeed_dryrun.language import message
from mindspeed_dryrun.schema import read_as
from mindspeed_dryrun.yaml_file import kind_of, read_yaml


class UserFile(BaseModel):
    """A mapping of known keys: a file, or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, BaseModel):
            return data
        if not isinstance(data, Mapping):
            raise ValueError(f"must be a mapping of keys to values, not {kind_of(data)}")
        for key in data:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, 1, 0.6)
                hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key '{key}'; {hint}")
        return {key: value for key, value in data.items() if value is not None}


File = TypeVar("File", bound=UserFile)


def read_file(kind: type[File], path: Path) -> File:
    """The file at `path`, or a `UsageError` that names the key."""
    return read_as(kind, read_yaml(path), str(path))


def _text(value: Any) -> str:
    """A YAML scalar as a shell would see it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError(f"must be text or a number, not {kind_of(value)}")


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"must be a whole number of at least 1, not {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _TOO_MUCH:
        raise ValueError(f"must be a number above 0, not {value!r}")
    return float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"takes true, false or a list of both, not {value!r}")
    return value


_TOO_MUCH = 1e30  # no figure of a user's comes near; infinity and figures that are no float end here


def figure(value: Any) -> tuple[float, float, float]:
    """One number, or three in rising order."""
    values = value if isinstance(value, (list, tuple)) else [value]
    good = all(isinstance(item, (int, float)) and not isinstance(item, bool) and 0 < item < _TOO_MUCH for item in values)
    if not good or len(values) not in (1, 3) or sorted(values) != list(values):
        raise ValueError("must be one number above 0, or three in rising order [low, typical, high]")
    low, typical, high = values if len(values) == 3 else [values[0]] * 3
    return float(low), float(typical), float(high)


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of arguments, not {kind_of(value)}")
    return tuple(_text(item) for item in value)


def mapping_or(sentence: str) -> Callable[[Any], Any]:
    """Refuses what is not a mapping with the sentence."""

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(sentence)
        return {str(key): item for key, item in value.items()}

    return check


def _as_list(value: Any) -> Any:
    found = value if isinstance(value, (list, tuple)) else [value]
    if not found:
        raise ValueError("is an empty list; leave the key out or name at least one value")
    return found


_SCALAR = {"type": ["string", "number", "boolean"]}
_NUMBER = {"type": "number", "exclusiveMinimum": 0}
_COUNT = {"type": "integer", "minimum": 1}


def _some(item: dict[str, Any]) -> dict[str, Any]:
    """The schema of one value or a list of them."""
    return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]}


Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_SCALAR)]
Count = Annotated[int, BeforeValidator(_count), WithJsonSchema(_COUNT)]
Number = Annotated[float, BeforeValidator(_number), WithJsonSchema(_NUMBER)]
Figure = Annotated[
    tuple[float, float, float],
    BeforeValidator(figure),
    WithJsonSchema({"anyOf": [_NUMBER, {"type": "array", "items": _NUMBER, "minItems": 3, "maxItems": 3}]}),
]
# Arguments, as one string or a list.
Words = Annotated[
    tuple[str, ...], BeforeValidator(_words), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _SCALAR}]})
]
# Environment or script variables.
Variables = Annotated[dict[str, Text], BeforeValidator(mapping_or(message("must be a mapping of names to values")))]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_list), WithJsonSchema(_some(_SCALAR))]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_as_list), WithJsonSchema(_some(_COUNT))]
Switches = Annotated[
    tuple[Annotated[bool, BeforeValidator(_switch)], ...], BeforeValidator(_as_list), WithJsonSchema(_some({"type": "boolean"}))
]


def names_of(*known: str) -> Any:
    """One of these names, or a list of them."""

    def check(value: Any) -> tuple[str, ...]:
        names = [str(item) for item in _as_list(value)]
        for name in names:
            if name not in known:
                raise ValueError(f"'{name}' is not one of {', '.join(known)}")
        return tuple(dict.fromkeys(names))

    return Annotated[tuple[str, ...], BeforeValidator(check), WithJsonSchema(_some({"enum": list(known)}))]
