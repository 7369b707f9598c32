"""What is printed reaches any terminal: every encoding, no escape sequences from files, and readers that leave early."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import sys
from typing import Any

from mindspeed_dryrun.errors import DryRunError

# For terminals that cannot show them (GBK, Latin-1, ASCII).
_PLAIN = {
    "▶": ">", "–": "-", "—": "-", "·": "|", "…": "...", "→": "->", "←": "<-", "×": "x", "≤": "<=", "≥": ">=", "±": "+-",
    "§": "", "█": "#", "░": ".", "▲": "^", "▼": "v", "✓": "ok", "✗": "x", "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip
_HANDLER = "mindspeed_dryrun.plain"
# Control characters, and what turns the direction of a line; line ends, tabs, and the colours of our tables are left alone.
_OURS = r"\x1b\[(?:0|1;3[123])m"
_CONTROL = re.compile(rf"({_OURS})|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Text from a file or a process, safe for a terminal: control characters are shown, not obeyed."""
    return _CONTROL.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", text)


def protect_streams() -> None:
    """stdout and stderr of this process, from here on. Streams that a test put there stay as they are."""
    codecs.register_error(_HANDLER, _replaced)
    _open_what_is_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            setattr(sys, name, Screen(stream, cleans=name == "stdout"))


def _open_what_is_closed() -> None:
    """A shell's `>&-` would hand the number of stdout to the next file that is opened, and a child would write into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(nowhere := os.open(os.devnull, os.O_RDWR), number)
            if nowhere != number:
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


class Screen(io.TextIOWrapper):
    """A stream that goes on when its reader has gone: `| head` must not change the exit status."""

    def __init__(self, stream: io.TextIOWrapper, cleans: bool) -> None:
        stream.flush()
        self.cleans = cleans  # the live view on stderr moves the cursor; what it shows is cleaned before
        self.wrapped = stream  # would close the descriptor if it were collected
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=_HANDLER,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )

    def write(self, text: str) -> int:
        """As usual; the length of what was asked for."""
        with self._survives():
            super().write(plain(text) if self.cleans else text)
        return len(text)

    def flush(self) -> None:
        """As usual."""
        with self._survives():
            super().flush()

    @contextlib.contextmanager
    def _survives(self) -> Any:
        try:
            yield
        except BrokenPipeError:
            self._mute()
        except OSError as error:
            self._mute()
            raise DryRunError(f"Cannot write the output: {error.strerror}.") from None

    def _mute(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    return "".join(_PLAIN.get(char, "?") for char in found), error.end
