"""Runs a user's script, as it is, up to the `msrun` it calls, and reads the call.

bash does the expanding: the script runs in the user's working directory with our `msrun` first on PATH. It is run to
learn its call and not for its effects: programs that write, delete, copy, stop or connect are stood in for (`stand_ins.py`),
redirections into files go to /dev/null (`shim/capture.bash`), and where the kernel has Landlock nothing outside a
temporary folder can be written at all (`rank/confinement.py`).

`--set` changes a temporary copy. The copy is sourced by a bash whose `$0` is the script, so that `$0`, `$1`, `dirname "$0"` and
the working directory are the script's own; BASH_SOURCE, which bash would set to the copy, is renamed in the copy to a
variable that holds the script's path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError, check_interrupted
from mindspeed_dryrun.launch.executors import guard
from mindspeed_dryrun.launch.msrun_call import MsrunCall, read_msrun_call
from mindspeed_dryrun.launch.stand_ins import SHIM, write_programs
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import confinement
from mindspeed_dryrun.rank.confinement import kernel_confines

TIME_LIMIT_S = 60.0
_TICK_S = 0.2
_LINGER_S = 5.0  # for what the script left running: `msrun … &`, and no wait
# What the stand-ins note: other launchers, steps left out, and what is not on this machine.
_LISTS = ("launchers", "skipped", "absent")
_OURS = ("BASH_ENV", "__dryrun_bin", "__dryrun_places", "__dryrun_user_env", config.VARIABLE, "TMPDIR", "SHLVL", "_", "OLDPWD")


@dataclass(frozen=True)
class Assignment:
    """`NAME=value` in a script: where the value starts and ends in its text."""

    name: str
    start: int
    end: int


def capture(
    script: Path,
    sets: Mapping[str, str] | None = None,
    script_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> MsrunCall:
    """The one msrun call of a script, run with `env` exported. `UsageError` if it makes none, two, or fails before."""
    if not script.is_file():
        raise UsageError(f"there is no script {script}.")
    with _temporary_folder() as folder:
        command = ["bash", str(script), *script_args]
        exported: dict[str, str] = dict(env or {})
        if sets:
            text = script.read_text(encoding="utf-8", errors="surrogateescape")
            exported |= {name: value for name, value in sets.items() if _default_in_environment(text, name)}
            copy = folder / "script.sh"
            copy.write_text(set_variables(text, sets, script), encoding="utf-8", errors="surrogateescape")
            command = ["bash", "-c", f'__dryrun_source=("$0"); . {shlex.quote(str(copy))}', str(script), *script_args]
        calls, status, output = _run(command, folder, _environment(folder, exported))
        launchers, skipped, absent = (_lines(folder / name) for name in _LISTS)
        calls = [_without_places(call, str(folder / "places")) for call in calls]
    if not calls:
        raise UsageError(_why_no_call(script, status, output, launchers))
    if len(calls) > 1:
        raise UsageError(
            f"{script} calls msrun {len(calls)} times; a dry run wants one job: keep one call, or split the script."
        )
    call = read_msrun_call(calls[0]["argv"], calls[0]["cwd"], _script_environment(calls[0]["env"]))
    notes = list(call.notes)
    if absent:
        notes.append(f"not on this machine, and taken to be on that of the training: {', '.join(dict.fromkeys(absent))}")
    if skipped:
        notes.append(f"steps of the script around msrun were left out: {', '.join(dict.fromkeys(skipped))}")
    return replace(call, notes=tuple(notes))


def set_variables(text: str, sets: Mapping[str, str], script: Path | str) -> str:
    """The script with every assignment of the named variables replaced, and BASH_SOURCE meaning the script."""
    found = list(assignments(text))
    names = dict.fromkeys(item.name for item in found)
    for name in sets:
        if name not in names and not _default_in_environment(text, name):
            listed = ", ".join(names) or "none at all"
            raise UsageError(f"{script} has no assignment {name}=… to set. It assigns: {listed}.")
    for item in sorted(found, key=lambda item: item.start, reverse=True):
        if item.name in sets:
            text = text[: item.start] + shlex.quote(sets[item.name]) + text[item.end :]
    return re.sub(r"\bBASH_SOURCE\b", "__dryrun_source", text)


def assignments(text: str) -> Iterator[Assignment]:
    """The assignments of a script, in order: words `NAME=…` where bash expects a command (or after export, local, …)."""
    position, expects_command, heredocs = 0, True, list[str]()
    while position < len(text):
        char = text[position]
        if char == "\n":
            position, expects_command = position + 1, True
            while heredocs:
                position = _after_heredoc(text, position, heredocs.pop(0))
        elif char in " \t" or text.startswith("\\\n", position):
            position += 2 if char == "\\" else 1
        elif char == "#":
            position = _line_end(text, position)
        elif char in ";&|()":
            position, expects_command = position + 1, True
        elif text.startswith("<<", position) and not text.startswith("<<<", position):
            start = position + (3 if text.startswith("<<-", position) else 2)
            while text[start : start + 1] in (" ", "\t"):
                start += 1
            position = _word_end(text, start)
            heredocs.append(re.sub(r"[\\'\"]", "", text[start:position]))
        elif char in "<>":
            position += 1
        else:
            end = _word_end(text, position)
            word = text[position:end]
            match = re.match(r"[A-Za-z_]\w*(?==)", word)
            if expects_command and match:
                yield Assignment(match[0], position + match.end() + 1, end)
            elif expects_command and word not in _BEFORE_COMMANDS and not word.startswith("-"):
                expects_command = False
            position = max(end, position + 1)


_BEFORE_COMMANDS = frozenset(
    [
        "if",
        "then",
        "else",
        "elif",
        "while",
        "until",
        "do",
        "{",
        "!",
        "time",
        "export",
        "declare",
        "typeset",
        "local",
        "readonly",
    ]
)


def _word_end(text: str, position: int) -> int:
    """Where the shell word at `position` ends: quotes, escapes and nested parentheses belong to it."""
    closing: list[str] = []
    previous = ""
    while position < len(text):
        char = text[position]
        if closing and closing[-1] == "'":
            if char == "'":
                closing.pop()
        elif char == "\\":
            position += 1
        elif (closing and closing[-1] == '"' and char == '"') or (closing and closing[-1] == "`" and char == "`"):
            closing.pop()
        elif char in '"`' or (char == "'" and not (closing and closing[-1] == '"')):
            closing.append(char)
        elif char in "({" and ((previous in "$<>=" and previous) or (closing and closing[-1] in ")}" and char == "(")):
            closing.append(")" if char == "(" else "}")
        elif closing and char == closing[-1]:
            closing.pop()
        elif not closing and char in " \t\n;&|()<>":
            break
        previous = char
        position += 1
    return min(position, len(text))


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _after_heredoc(text: str, position: int, end_word: str) -> int:
    while position < len(text):
        end = _line_end(text, position)
        line, position = text[position:end], min(end + 1, len(text))
        if line.strip("\t") == end_word:
            break
    return position


def _default_in_environment(text: str, name: str) -> bool:
    """`: "${TP:=8}"` assigns too, unless the environment has the variable."""
    return re.search(r"\$\{" + re.escape(name) + r":?=", text) is not None


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder that goes with the `with`; a signal cannot come between its making and the promise to remove it."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        folder = tempfile.TemporaryDirectory(prefix="mindspeed-dryrun-", ignore_cleanup_errors=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    with folder as name:
        yield Path(name)


def _environment(folder: Path, exported: Mapping[str, str]) -> dict[str, str]:
    programs = folder / "bin"
    write_programs(programs)
    for name in ("calls", *_LISTS):
        (folder / name).touch()
    env = {**os.environ, **exported}
    env.update(
        {
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "__dryrun_bin": str(programs),
            "__dryrun_places": str(folder / "places"),
            "__dryrun_user_env": os.environ.get("BASH_ENV", ""),
            "BASH_ENV": str(SHIM / "capture.bash"),
            "TMPDIR": str(folder),
            config.VARIABLE: json.dumps({"mode": "capture", "file": str(folder / "calls"), "python": sys.executable}),
        }
    )
    return env


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[list[dict[str, Any]], int | None, str]:
    """Runs bash and all that it starts to the end, or to the time limit; (calls, exit status, output).

    The guard ends the whole tree, and removes the folder, however this process ends.
    """
    if kernel_confines():
        command = [sys.executable, "-I", "-S", confinement.__file__, str(folder), *command]
    limits = f"{TIME_LIMIT_S}+{_LINGER_S}"
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, limits, str(os.getpid()), str(folder), *command],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin and process.stdout
    said, more = b"", b"..."
    with process:
        try:
            while more:
                check_interrupted()
                if select.select([process.stdout], [], [], _TICK_S)[0]:
                    more = os.read(process.stdout.fileno(), 1 << 16)
                    said += more
        finally:
            process.stdin.close()  # the guard ends the tree
            process.stdout.read()  # until it has
    outcome = json.loads(said.splitlines()[-1]) if said else {}
    calls = [json.loads(line) for line in _lines(folder / "calls")]
    status = outcome.get("exit_status") if outcome.get("ended") == "exit" else None
    return calls, status, log.read_text(encoding="utf-8", errors="replace")


def _why_no_call(script: Path, status: int | None, output: str, launchers: Sequence[str]) -> str:
    said = [line.strip() for line in output.splitlines() if line.strip()]
    last = f" Its last words: {said[-1]}" if said else ""
    if launchers:
        return f"{script} starts its workers with {launchers[0]}, not with msrun: it is not a MindSpore script."
    if status is None:
        return f"{script} did not reach msrun within {TIME_LIMIT_S:.0f} s.{last}"
    if status != 0:
        return f"{script} failed before it called msrun (exit status {status}).{last}"
    return f"{script} never calls msrun.{last}"


def _script_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment msrun would have had: the user's and the script's exports, without ours."""
    result = {name: value for name, value in env.items() if name not in _OURS}
    programs = env.get("__dryrun_bin", "")
    folders = [part for part in env.get("PATH", "").split(os.pathsep) if part != programs]
    result["PATH"] = os.pathsep.join(folders)
    for name in ("TMPDIR", "BASH_ENV"):
        if name in os.environ:
            result[name] = os.environ[name]
    return result


def _without_places(call: dict[str, Any], places: str) -> dict[str, Any]:
    """The call with folders that are not here under their own names (see `cd` in capture.bash)."""

    def own(text: str) -> str:
        return text.replace(places, "")

    return {
        "argv": [own(word) for word in call["argv"]],
        "cwd": own(call["cwd"]) or "/",
        "env": {name: value if name in _OURS else own(value) for name, value in call["env"].items()},
    }


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if line]
