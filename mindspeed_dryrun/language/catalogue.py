"""A message catalogue: a gettext PO file whose keys are English templates, and finished sentences found by their template."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LONGEST = 20_000  # characters of a sentence to be looked up: what is longer is a log, not a message
_FEW_LETTERS = 8
_FILE = re.compile(r"/\S*$|\.(sh|ya?ml|json|csv|log|py)$")
_DEEPEST = 4  # a sentence may hold another one as a value


@dataclass(kw_only=True)
class _Template:
    """A message with values: `anchor`, its longest words, is looked for before the pattern is tried."""

    key: str
    translation: str
    anchor: str
    length: int
    _pattern: re.Pattern[str] | None = None

    def values(self, sentence: str) -> tuple[str, ...] | None:
        """What stands before a tail (else nothing), then what each field has; None where it is another sentence."""
        if self.anchor not in sentence:
            return None
        if self._pattern is None:
            head = r"(\S*)" if self.key.startswith(" ") else "()"  # ` (did you mean X?)` follows something
            self._pattern = re.compile(head + "".join(_patterns(self.key)), re.DOTALL)
        found = self._pattern.fullmatch(sentence)
        return found.groups() if found else None

    def filled(self, values: Sequence[str]) -> str:
        """The translation with what `values` found."""
        head, *rest = values
        named = {name: value for name, value in zip(fields(self.key), rest, strict=True) if name}
        return head + self.translation.format(*rest, **named)


@dataclass
class Catalogue:
    """English → one other language."""

    entries: dict[str, str]
    _exact: dict[str, str] = field(init=False)
    _templates: list[_Template] = field(init=False)

    def __post_init__(self) -> None:
        plain = [(key, text) for key, text in self.entries.items() if not fields(key)]
        self._exact = {unescaped(key): unescaped(text) for key, text in plain}
        found = [_template(key, text) for key, text in self.entries.items() if fields(key)]
        self._templates = sorted((one for one in found if one), key=lambda one: -one.length)

    def sentence(self, text: str, depth: int = 0) -> str:
        """A finished text; line by line where it is unknown as a whole."""
        if depth > _DEEPEST or len(text) > _LONGEST:
            return text
        if (found := self._exact.get(text)) is not None:
            return found
        for comma, between in (("; ", "；"), (", ", "，")):  # a list of what we said
            parts = text.split(comma)
            if len(parts) > 1 and all(self.knows(part, depth + 1) for part in parts):
                return between.join(self.sentence(part, depth + 1) for part in parts)
        if (said := self._filled(text, depth)) is not None:
            return said
        if "\n" in text:
            return "\n".join(self.sentence(line, depth + 1) for line in text.split("\n"))
        return text

    def _filled(self, text: str, depth: int) -> str | None:
        """A text that is made of a template, or of words of ours behind a place or a subject; None where it is not."""
        place, colon, rest = text.partition(": ")
        in_file = colon and _FILE.search(place)
        whole, part = self._matched(text), self._matched(rest) if in_file else None
        # A short template would take the place for a value.
        if in_file and (rest in self._exact or (part and (whole is None or part[0].length > whole[0].length))):
            return f"{place}：{self.sentence(rest, depth + 1)}"
        if whole:
            return whole[0].filled([self._value(value, depth + 1) for value in whole[1]])
        subject = re.fullmatch(r"('[^']*'|.+?(?= must )) (.+?)\.?", text)  # 'KEY' must be …, FILE must be …
        if subject and self.knows(subject[2], depth + 1):
            return f"{self._value(subject[1], depth + 1)} {self.sentence(subject[2], depth + 1)}。"
        # FILE: what is wrong with it; rank 3: what to know of it; --flag: why not
        if colon and self._is_place(place, depth + 1) and (said := self.sentence(rest, depth + 1)) != rest:
            return f"{self._value(place, depth + 1)}：{said}"
        return None

    def _matched(self, text: str) -> tuple[_Template, tuple[str, ...]] | None:
        """The template with the most words of its own that the text can be, and what it has in its fields."""
        found = ((template, template.values(text)) for template in self._templates)
        return next(((template, values) for template, values in found if values is not None), None)

    def knows(self, text: str, depth: int = 0) -> bool:
        """Is there a translation of this text?"""
        return self.sentence(text, depth) != text

    def _is_place(self, text: str, depth: int) -> bool:
        """A file, a rank, flags, or something of ours that has its Chinese."""
        name = " " not in text.removeprefix("rank ") or text.startswith("--") or _FILE.search(text)
        return bool(name) or self.knows(text, depth)

    def _value(self, text: str, depth: int) -> str:
        """A value may be words of ours, such as a second sentence. A word alone, also in a list, is a name and is left alone."""
        return self.sentence(text, depth) if any(" " in part for part in re.split("[,;] ", text)) else text


def read(language: str) -> Catalogue:
    """The catalogue beside this module."""
    return Catalogue(entries(Path(__file__).with_name(f"{language}.po").read_text(encoding="utf-8")))


def entries(po: str) -> dict[str, str]:
    """msgid → msgstr of a PO file, without its header and without what has no translation yet."""
    found: dict[str, str] = {}
    parts = {"msgid": "", "msgstr": ""}
    inside = ""
    for line in [*po.splitlines(), 'msgid ""']:
        word, _, rest = line.partition(" ")
        if word == "msgid":
            if parts["msgid"] and parts["msgstr"]:
                found[parts["msgid"]] = parts["msgstr"]
            parts = {"msgid": "", "msgstr": ""}
        if word in parts:
            inside = word
            parts[inside] += ast.literal_eval(rest)
        elif line.startswith('"'):
            parts[inside] += ast.literal_eval(line)
    return found


def fields(key: str) -> list[str]:
    """The names of a template's fields in their order; an empty name where it has none."""
    return [name for _, name, _, _ in string.Formatter().parse(key) if name is not None]


def unescaped(key: str) -> str:
    """The text that a template without fields stands for."""
    return key.replace("{{", "{").replace("}}", "}")


def _template(key: str, translation: str) -> _Template | None:
    """None where a key has nothing to be found by, such as `{}: {}`."""
    words = [literal for literal, *_ in string.Formatter().parse(key)]
    anchor = max(words, key=len)
    if sum(char.isalpha() for char in anchor) < 3:
        return None
    return _Template(key=key, translation=translation, anchor=anchor, length=sum(map(len, words)))


def _patterns(key: str) -> Iterator[str]:
    """A few words, such as `{} layers`, would be found in many a sentence: their fields take no spaces."""
    parts = list(string.Formatter().parse(key))
    few = sum(char.isalpha() for literal, *_ in parts for char in literal) < _FEW_LETTERS and not key.endswith(".")
    for literal, name, _, _ in parts:
        field = r"(\S*?)" if few and not literal.endswith(": ") else "(.*?)"
        yield re.escape(literal) + (field if name is not None else "")
