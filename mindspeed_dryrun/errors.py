"""Errors that are sentences for the person at the keyboard; each carries its exit status."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

from mindspeed_dryrun.language import message

# What Linux says of a file; an error quotes it, and `t` finds its Chinese here.
SYSTEM_SENTENCES = (
    "No such file or directory",
    "Permission denied",
    "Is a directory",
    "Not a directory",
    "File exists",
    "File name too long",
    "No space left on device",
    "Disk quota exceeded",
    "Read-only file system",
    "Input/output error",
    "Too many open files",
    "Too many levels of symbolic links",
    "Text file busy",
    "Argument list too long",
    "Address already in use",
)


class DryRunError(Exception):
    """Something a user can cause or fix. Printed as one sentence, without a traceback."""

    exit_status = 1


class UsageError(DryRunError):
    """Wrong use: a script, flag, file or value that cannot be what was meant."""

    exit_status = 2


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` where a known word is close, else nothing: to be put after what is not known."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return message(f" (did you mean {close[0]}?)") if close else ""


received: list[int] = []  # signals that asked this process to end


def check_interrupted() -> None:
    """Raises what a signal raised before, for loops that wait: Python drops an exception that comes inside a `__del__`."""
    if received:
        raise Interrupted(received[0])


class Interrupted(KeyboardInterrupt):
    """The user or the system ended the program with a signal.

    Not a `DryRunError`: whoever goes on after a failed run must not go on after this.
    """

    def __init__(self, number: int, advice: str = "") -> None:
        super().__init__(message(f"Interrupted ({signal.Signals(number).name}).{advice and ' ' + advice}"))
        self.exit_status = 128 + number


def exit_status_after(stop: KeyboardInterrupt) -> int:
    """128 and the signal, as a shell reports it; Python's own exception is Ctrl-C's."""
    return stop.exit_status if isinstance(stop, Interrupted) else 128 + signal.SIGINT
