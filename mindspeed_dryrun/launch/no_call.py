"""Why a script that was run made no launcher call that can be dry-run, and the way out, in a sentence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.captured_call import TORCHRUN
from mindspeed_dryrun.launch.stand_ins import REMOTE

TIME_LIMIT_S = 60.0
_SCRIPT_BYTES = 1 << 20  # of a script that another one names


def check_calls(script: Path, calls: Sequence[Mapping[str, Any]], noted: Mapping[str, Sequence[str]]) -> None:
    """`UsageError` where two calls cannot be of one job, or one is not the script's on the machine of the training."""
    if len(calls) > 1 and any(call["program"] != TORCHRUN for call in calls):
        raise more_than_once(script, calls[0]["program"])
    if damaged := [word for call in calls for word in call["argv"] if "\r" in word]:
        raise UsageError(
            f"The {calls[0]['program']} call of {script} has Windows line ends in its words ({damaged[0].strip()}): "
            "a file that the script reads has them. Convert it: sed -i 's/\\r$//' FILE"
        )
    if noted["lost"]:
        raise _lost(script, noted["lost"])
    if parts := [word for word in noted["absent"] if word.startswith("-") or word.endswith(".py")]:
        raise UsageError(
            f"{script} runs {parts[0]} as a command of its own: the line before it does not end in \\, "
            "or a space or a comment follows it."
        )


def more_than_once(script: Path, launcher: str) -> UsageError:
    """The sentence about calls of several jobs."""
    return UsageError(f"{script} calls {launcher} more than once, and a dry run is of one job: keep one call.")


def why_no_call(script: Path, status: int | None, output: str, noted: Mapping[str, Sequence[str]]) -> UsageError:
    """The sentence about a script that called neither msrun nor torchrun."""
    said = [line.strip() for line in output.splitlines() if line.strip() and "__dryrun" not in line]
    last = message(f" Its last output was: {said[-1]}") if said else ""
    launchers = noted["launchers"]
    if launchers and launchers[0] in REMOTE:
        return UsageError(
            f"{script} starts its workers on other machines with {launchers[0]}, and calls neither msrun nor torchrun. "
            "Give the script that runs on one node."
        )
    if launchers:
        return UsageError(
            f"{script} starts its workers with {launchers[0]}, not with msrun or torchrun: this launcher is not known."
        )
    if status is None:
        return UsageError(f"{script} reached neither msrun nor torchrun within {TIME_LIMIT_S:.0f} s.{last}")
    if noted["lost"]:
        return _lost(script, noted["lost"])
    if status != 0:
        return UsageError(f"{script} failed before it called msrun or torchrun (exit status {status}).{last}")
    named = _launching_scripts(script)
    if named:
        return UsageError(
            f"{script} calls neither msrun nor torchrun here: it starts other scripts, some only where their data is. "
            f"Give one of these: {', '.join(named)}."
        )
    if noted["skipped"]:
        return UsageError(
            f"{script} calls neither msrun nor torchrun. It runs {noted['skipped'][0]}: "
            "if that is the training, start it with msrun or torchrun."
        )
    if noted["absent"]:
        return UsageError(f"{script} calls neither msrun nor torchrun. Not on this machine: {', '.join(noted['absent'])}.")
    return UsageError(f"{script} calls neither msrun nor torchrun.{last}")


def _lost(script: Path, files: Sequence[str]) -> UsageError:
    return UsageError(
        f"{script} writes {files[0]} and reads it before it calls msrun or torchrun, and a dry run of a script writes nothing. "
        "Run the lines that write it yourself, once, and start again."
    )


def _launching_scripts(script: Path) -> list[str]:
    """Files that the script's text names, from its own folder or one above it, and that call a launcher themselves."""
    found: dict[Path, str] = {}
    for word in re.findall(r"[\w./-]+/[\w.-]+|[\w.-]+\.sh", script.read_text(encoding="utf-8", errors="replace")):
        for folder in () if word.startswith("/") else script.absolute().parents[:6]:
            path = folder / word
            with contextlib.suppress(OSError):
                if path.is_file() and path.resolve() != script.resolve() and path.stat().st_size < _SCRIPT_BYTES:
                    text = path.read_text(encoding="utf-8", errors="replace")
                    if re.search(r"\b(torchrun|msrun|torch\.distributed\.(launch|run))\b", text):
                        found.setdefault(path.resolve(), word)
    return sorted(found.values())
