"""Reads plain data as the dataclasses that declare it, and makes their JSON Schemas. Command-line side only: pydantic."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.yaml_file import kind_of

Kind = TypeVar("Kind")
_DEEPEST = 40  # levels of nesting that anything of ours has
# pydantic's type of an error (https://docs.pydantic.dev/latest/errors/validation_errors/) → what we say of the value.
_VALUE_SENTENCES = {
    "string_type": "must be text, not {}",
    "string_unicode": "must be text that UTF-8 can hold, not {}",
    "int_type": "must be a whole number, not {}",
    "int_parsing_size": "must be a smaller whole number, not {}",
    "float_type": "must be a number, not {}",
    "finite_number": "must be a finite number, not {}",
    "bool_type": "must be true or false, not {}",
    "list_type": "must be a list, not {}",
    "dict_type": "must be a mapping of keys to values, not {}",
    "invalid_key": "must have keys that are text, not {}",
}
_LIMIT_SENTENCES = {
    "greater_than": "must be above {}, not {}",
    "greater_than_equal": "must be at least {}, not {}",
    "less_than": "must be below {}, not {}",
    "less_than_equal": "must be at most {}, not {}",
    "too_short": "must have at least {} items, not {}",
    "too_long": "must have at most {} items, not {}",
}
_LIMITS = {  # keys of an error's context
    "greater_than": ("gt", None),
    "greater_than_equal": ("ge", None),
    "less_than": ("lt", None),
    "less_than_equal": ("le", None),
    "too_short": ("min_length", "actual_length"),
    "too_long": ("max_length", "actual_length"),
}
_SAME = {  # types that ask the same of a user
    "int_parsing": "int_type",
    "int_from_float": "int_type",
    "float_parsing": "float_type",
    "bool_parsing": "bool_type",
    "tuple_type": "list_type",
    "mapping_type": "dict_type",
    "dataclass_type": "dict_type",
    "model_type": "dict_type",
}


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_as(kind: type[Kind], data: Any, where: str) -> Kind:
    """`data` as a `kind`, or a `UsageError` that names the file, the key and what is expected."""
    _refuse_depth(data, where)
    whole: Any = kind
    try:
        found: Kind = _adapter(whole).validate_python(data)
    except ValidationError as error:
        raise UsageError(_sentence(error, kind, where)) from None
    except (RecursionError, OverflowError):
        raise UsageError(f"{where} cannot be read: it is nested too deep, or a number in it is too large.") from None
    return found


def check_version(data: Any, newest: int, where: str) -> None:
    """Refuses what a newer program wrote, and what is not ours at all."""
    if not isinstance(data, dict) or not isinstance(data.get("schema_version"), int):
        raise UsageError(f"{where} is not a file of mindspeed-dryrun: it has no schema_version.")
    version = data["schema_version"]
    if not 1 <= version <= newest:
        raise UsageError(
            f"{where} has schema_version {version}, and this program reads 1 to {newest}. "
            "Use the mindspeed-dryrun that wrote it, or a newer one."
        )


def json_schema(kind: Any, title: str, version: int | None = None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a declaration, with its schema_version and what else is written beside it."""
    schema = _adapter(kind).json_schema()
    extra = {**({"schema_version": {"const": version}} if version else {}), **(more or {})}
    if extra:
        schema["properties"] = {**extra, **schema["properties"]}
        schema["required"] = [*extra, *schema.get("required", [])]
    return {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}


def _refuse_depth(data: Any, where: str) -> None:
    level = [data]
    for _ in range(_DEEPEST):
        level = [item for part in level for item in _inside(part)]
        if not level:
            return
    raise UsageError(f"{where} is nested more than {_DEEPEST} levels deep: mindspeed-dryrun did not write it.")


def _inside(part: Any) -> list[Any]:
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ()
    return [item for item in inner if isinstance(item, (dict, list, tuple))]


def _sentence(error: ValidationError, kind: Any, where: str) -> str:
    first = _first(error)
    place = _place(first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = [*getattr(kind, "model_fields", ()), *getattr(kind, "__dataclass_fields__", ())]
        near = difflib.get_close_matches(str(first["loc"][-1]), known, 1, 0.6)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}."
        return f"{where}: unknown key '{place}'; {hint}"
    if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{where}: '{place}' is missing."
    if first["type"] in ("literal_error", "enum"):
        choices = str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        return f"{where}: '{place}' must be one of {choices}, not {kind_of(first['input'])}."
    words = _words(first)
    words = f"{words[0].lower()}{words[1:]}{'' if words.endswith(('?', '.')) else '.'}"
    if words.startswith("unknown key"):
        return f"{where}: {f'{place}: ' if place else ''}{words}"
    return f"{where}: '{place}' {words}" if place else f"{where} {words}"


def _first(error: ValidationError) -> dict[str, Any]:
    """The first error; one about a key of a mapping is at the mapping."""
    first: dict[str, Any] = dict(error.errors(include_url=False)[0])
    if first["loc"][-1:] == ("[key]",):
        return {**first, "type": "invalid_key", "loc": first["loc"][:-2]}
    return {**first, "loc": first["loc"][:-1]} if first["type"] == "invalid_key" else first


def _words(error: Any) -> str:
    """What is wrong with one value, in our words; in pydantic's only where nobody has met that type yet."""
    kind = _SAME.get(error["type"], error["type"])
    if kind in _LIMITS:
        limit, actual = (error["ctx"].get(key) for key in _LIMITS[kind])
        return _LIMIT_SENTENCES[kind].format(limit, kind_of(error["input"]) if actual is None else actual)
    if kind in _VALUE_SENTENCES:
        return _VALUE_SENTENCES[kind].format(kind_of(error["input"]))
    return str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def _place(location: tuple[int | str, ...]) -> str:
    """Keys joined by points, items counted from 1: `variants 2.args`."""
    return "".join(f" {part + 1}" if isinstance(part, int) else f".{part}" for part in location).lstrip(". ")
