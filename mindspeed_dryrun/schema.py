"""Reads plain data as the dataclasses that declare it, and makes their JSON Schemas. Command-line side only: pydantic."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mindspeed_dryrun.errors import UsageError

Kind = TypeVar("Kind")
_DEEPEST = 40  # levels of nesting that anything of ours has


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
    except (RecursionError, OverflowError) as error:
        raise UsageError(f"{where} cannot be read: {error}.") from None
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
    first = error.errors(include_url=False)[0]
    place = _place(first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = [*getattr(kind, "model_fields", ()), *getattr(kind, "__dataclass_fields__", ())]
        near = difflib.get_close_matches(str(first["loc"][-1]), known, 1, 0.6)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}."
        return f"{where}: unknown key '{place}'; {hint}"
    if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{where}: '{place}' is missing."
    if first["type"] == "literal_error":
        choices = str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        return f"{where}: {place} '{first['input']}' is not one of {choices}."
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = f"{message[0].lower()}{message[1:]}{'' if message.endswith(('?', '.')) else '.'}"
    if message.startswith("unknown key"):
        return f"{where}: {f'{place}: ' if place else ''}{message}"
    return f"{where}: '{place}' {message}" if place else f"{where} {message}"


def _place(location: tuple[int | str, ...]) -> str:
    """Keys joined by points, items counted from 1: `variants 2.args`."""
    return "".join(f" {part + 1}" if isinstance(part, int) else f".{part}" for part in location).lstrip(". ")
