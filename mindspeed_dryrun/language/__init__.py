"""The language of what a person reads. Figures, flags and the keys and texts of JSON are the same in all languages.

`t` translates where something is shown. A sentence that is made elsewhere (an error, a note in a record, a line from a rank)
stays English until then, so that files read the same everywhere; it is found by its template, `t(f"{count} ranks failed.")` too.
"""

from __future__ import annotations

import contextlib
import contextvars
import locale
import os
import re
import textwrap
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_dryrun.language.catalogue import Catalogue

LANGUAGES = ("en", "zh")
_of_process = "en"
_of_request: contextvars.ContextVar[str | None] = contextvars.ContextVar("language", default=None)
_catalogues: dict[str, Catalogue] = {}
_CHINESE, _CLOSING = r"\u2e80-\uffef", r"\u3001\u3002\uff0c\uff1a\uff1b\uff09"  # no line starts with the latter
_PIECE = re.compile(rf"\s+|[^\s{_CHINESE}]+[{_CLOSING}]?|[{_CHINESE}][{_CLOSING}]*")


def t(text: str, **values: object) -> str:
    """The text in the language of this run: a template with its values, or a finished English text."""
    found = _catalogue()
    if values:
        return (found.entries.get(text, text) if found else text).format(**values)
    return found.sentence(text) if found else text


def message(text: str) -> str:
    """The text as it is. Marks words that `t` will meet, where the test for missing Chinese could not find them."""
    return text


def current() -> str:
    """`en` or `zh`."""
    return _of_request.get() or _of_process


def set_language(name: str | None) -> None:
    """`zh` or `en`; without a name the locale's."""
    global _of_process
    _of_process = name or from_locale()


@contextlib.contextmanager
def speaking(name: str) -> Iterator[None]:
    """Another language in this context only: requests of two readers may run at the same time."""
    token = _of_request.set(name)
    try:
        yield
    finally:
        _of_request.reset(token)


def from_locale() -> str:
    """Chinese where the environment says so, else English."""
    said = next((value for key in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(key))), None)
    return "zh" if (said or locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"


def width(text: str) -> int:
    """Columns that a terminal gives the text: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def padded(text: str, columns: int) -> str:
    """The text with spaces behind it, at least this wide."""
    return text + " " * (columns - width(text))


def wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """Lines of at most this many columns, all but the first indented; Chinese breaks between any two characters."""
    if text.isascii() or width(text) == len(text):
        return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=True) or [""]
    lines, line = [], ""
    for piece in _PIECE.findall(text):
        if line.strip() and width(line + piece.rstrip()) > columns:
            lines.append(line.rstrip())
            line = indent
        line += piece if line.strip() else piece.lstrip()
    return [*lines, line.rstrip()]


def _catalogue() -> Catalogue | None:
    """None in English, which is its own key."""
    name = current()
    if name == "en":
        return None
    if name not in _catalogues:
        from mindspeed_dryrun.language.catalogue import read

        _catalogues[name] = read(name)
    return _catalogues[name]
