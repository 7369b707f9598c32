"""A trainer's argument list, read as argparse reads it, and edits to it. The one parser of the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mindspeed_dryrun.errors import UsageError


@dataclass(frozen=True)
class Arguments:
    """The words of a command line, with look-ups by flag (`--num-layers`). The last of two equal flags counts."""

    words: tuple[str, ...]

    @cached_property
    def values(self) -> Mapping[str, tuple[str, ...]]:
        """The words after each flag. Words before the first flag are left out."""
        return {name: tuple(words) for name, words in pairs(self.words) if name}

    def has(self, name: str) -> bool:
        """The flag is there, with or without a value."""
        return name in self.values

    def has_any(self, names: Iterable[str]) -> bool:
        """At least one of the flags is there."""
        return any(name in self.values for name in names)

    def text(self, name: str, default: str | None = None) -> str | None:
        """The flag's value. argparse would refuse a flag whose value is missing, and so does this."""
        if name not in self.values:
            return default
        if not self.values[name]:
            raise UsageError(f"{name} has no value: the variable that should provide it is empty.")
        return self.values[name][0]

    def number(self, name: str, default: int | None = None) -> int | None:
        """The flag's value as a whole number."""
        value = self.text(name)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            raise UsageError(f"{name} expects a whole number and got '{value}'.") from None

    def positive(self, name: str, default: int) -> int:
        """The flag's value as a whole number above 0."""
        value = self.number(name, default)
        if value is None or value < 1:
            raise UsageError(f"{name} is {value}: it must be at least 1.")
        return value

    def numbers(self, name: str) -> list[int]:
        """The flag's value as whole numbers with commas between; empty where the flag is not there."""
        text = self.text(name) or ""
        try:
            return [int(item) for item in text.split(",") if item.strip()]
        except ValueError:
            raise UsageError(f"{name} expects whole numbers with commas between and got '{text}'.") from None


def pairs(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`[(flag, words after it), …]` in order; words before the first flag come under the empty name."""
    result: list[tuple[str, list[str]]] = []
    for word in words:
        if is_flag(word):
            name, equals, value = word.partition("=")
            result.append((name, [value] if equals else []))
        elif result:
            result[-1][1].append(word)
        else:
            result.append(("", [word]))
    return result


def is_flag(word: str) -> bool:
    """`--anything`; a negative number is a value."""
    return word.startswith("--") and len(word) > 2


def join(items: Iterable[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    """The inverse of `pairs`."""
    return tuple(word for name, words in items for word in ([name] if name else []) + list(words))


def without(words: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The arguments without these flags and their values."""
    gone = set(names)
    return join((name, values) for name, values in pairs(words) if name not in gone)


def override_args(words: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """`overrides` replace flags of the same name in their place and extend the list with those that are new."""
    new = dict(pairs(overrides))
    if "" in new:
        raise UsageError(f"'{new[''][0]}' after -- is not a flag: trainer arguments start with --.")
    result: list[tuple[str, Sequence[str]]] = []
    placed: set[str] = set()
    for name, values in pairs(words):
        if name in new:
            if name not in placed:
                result.append((name, new[name]))
            placed.add(name)
        else:
            result.append((name, values))
    result += [(name, values) for name, values in new.items() if name not in placed]
    return join(result)
