"""Runs a user's script, as it is, up to the `msrun` or `torchrun` it calls, and reads the call.

bash does the expanding: the script runs in the user's working directory with our launchers first on PATH. It is run to
learn its call and not for its effects: programs that write, delete, copy, stop or connect are stood in for (`stand_ins.py`),
redirections into files go to /dev/null (`shim/capture.bash`, `script_text.py`), and where the kernel has Landlock nothing
outside a temporary folder can be written at all (`rank/confinement.py`).

`--set` and redirected blocks change a temporary copy. The copy is sourced by a bash whose `$0` is the script, so that `$0`,
`$1`, `dirname "$0"` and the working directory are the script's own; BASH_SOURCE, which bash would set to the copy, is renamed
in the copy to a variable that holds the script's path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError, UsageError, check_interrupted
from mindspeed_dryrun.launch import script_text
from mindspeed_dryrun.launch.captured_call import CapturedCall
from mindspeed_dryrun.launch.read_call import read_call
from mindspeed_dryrun.launch.stand_ins import REMOTE, SHIM, write_programs
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import confinement, guard
from mindspeed_dryrun.rank.confinement import kernel_confines
from mindspeed_dryrun.temporary import temporary_folder

TIME_LIMIT_S = 60.0
_TICK_S = 0.2
_SCRIPT_BYTES = 1 << 20  # of a script that another one names
_LINGER_S = 5.0  # for what the script left running: `msrun … &`, and no wait
# What the stand-ins note: other launchers, steps left out, what is not on this machine, and variables that were set.
_LISTS = ("launchers", "skipped", "absent", "set")
_OURS = ("BASH_ENV", config.VARIABLE, guard.MARK, "TMPDIR", "SHLVL", "_", "OLDPWD")
_OUR_PREFIX = "__dryrun_"


def capture(
    script: Path,
    sets: Mapping[str, str] | None = None,
    script_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> CapturedCall:
    """The one launcher call of a script, run with `env` exported. `UsageError` if it makes none, two, or fails before."""
    if not script.is_file():
        raise UsageError(f"There is no script {script}.")
    text, sets = script.read_bytes().decode("utf-8", "surrogateescape"), sets or {}
    if "\r\n" in text:
        raise UsageError(f"{script} has Windows line ends, which bash cannot run. Convert it: sed -i 's/\\r$//' {script}")
    elsewhere = {name: value for name, value in sets.items() if name not in script_text.assigned_names(text)}
    exported = dict(env or {}) | {name: value for name, value in elsewhere.items() if script_text.has_default(text, name)}
    changed = script_text.quiet_blocks(script_text.set_variables(text, sets))
    with temporary_folder() as folder:
        command = ["bash", str(script), *script_args]
        if changed != text:
            copy = folder / "script.sh"
            copy.write_text(script_text.for_a_copy(changed), encoding="utf-8", errors="surrogateescape")
            command = ["bash", "-c", f'__dryrun_source=("$0"); . {shlex.quote(str(copy))}', str(script), *script_args]
        calls, status, output = _run(command, folder, _environment(folder, exported, elsewhere))
        launchers, skipped, absent, found = (_lines(folder / name) for name in _LISTS)
        calls = [_without_places(call, str(folder / "places")) for call in calls]
    if not calls:
        raise UsageError(_why_no_call(script, status, output, launchers))
    if len(calls) > 1:
        raise UsageError(f"{script} calls {calls[0]['program']} {len(calls)} times, and a dry run is of one job: keep one call.")
    for name in elsewhere:
        if name not in found and name not in exported:
            raise script_text.not_assigned(text, name, script)
    call = read_call(calls[0]["program"], calls[0]["argv"], calls[0]["cwd"], _script_environment(calls[0]["env"]))
    notes = list(call.notes)
    if absent:
        notes.append(f"not on this machine, and taken to be on that of the training: {', '.join(dict.fromkeys(absent))}")
    if skipped:
        notes.append(f"steps of the script around {call.launcher} were left out: {', '.join(dict.fromkeys(skipped))}")
    return replace(call, notes=tuple(notes))


def _environment(folder: Path, exported: Mapping[str, str], elsewhere: Mapping[str, str]) -> dict[str, str]:
    """The script's environment. `elsewhere` are the variables to be set where a file that it sources assigns them."""
    programs = folder / "bin"
    write_programs(programs)
    for name in ("calls", *_LISTS):
        (folder / name).touch()
    env = {**os.environ, **exported, **{f"__dryrun_set_{name}": value for name, value in elsewhere.items()}}
    env.update(
        {
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "__dryrun_bin": str(programs),
            "__dryrun_places": str(folder / "places"),
            "__dryrun_sets": " ".join(elsewhere),
            "__dryrun_user_env": os.environ.get("BASH_ENV", ""),
            "BASH_ENV": str(SHIM / "capture.bash"),
            "TMPDIR": str(folder),
            guard.MARK: uuid.uuid4().hex,
            **config.Activation(mode="capture", file=str(folder / "calls"), python=sys.executable).to_env(),
        }
    )
    return env


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[list[dict[str, Any]], int | None, str]:
    """Runs bash and all that it starts to the end, or to the time limit; (calls, exit status, output).

    The guard ends the whole tree, however this process ends.
    """
    if kernel_confines():
        command = [sys.executable, "-I", "-S", confinement.__file__, str(folder), *command]
    limits = f"{TIME_LIMIT_S}+{_LINGER_S}"
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, limits, *command],
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
            said += process.stdout.read()  # until it has
            outcome = json.loads(said.splitlines()[-1]) if said else {}
            if "ended" not in outcome:
                guard.end_marked(env[guard.MARK])
    if outcome.get("ended") not in ("exit", "timeout"):
        raise DryRunError("The process that watches the script was killed, most likely for lack of host memory. Run it again.")
    calls = [json.loads(line) for line in _lines(folder / "calls")]
    status = outcome["exit_status"] if outcome["ended"] == "exit" else None
    return calls, status, log.read_text(encoding="utf-8", errors="replace")


def _why_no_call(script: Path, status: int | None, output: str, launchers: Sequence[str]) -> str:
    said = [line.strip() for line in output.splitlines() if line.strip() and "__dryrun" not in line]
    last = f" Its last output was: {said[-1]}" if said else ""
    if launchers and launchers[0] in REMOTE:
        return (
            f"{script} starts its workers on other machines with {launchers[0]}, and calls neither msrun nor torchrun. "
            "Give the script that runs on one node."
        )
    if launchers:
        return f"{script} starts its workers with {launchers[0]}, not with msrun or torchrun: this launcher is not known."
    if status is None:
        return f"{script} reached neither msrun nor torchrun within {TIME_LIMIT_S:.0f} s.{last}"
    if status != 0:
        return f"{script} failed before it called msrun or torchrun (exit status {status}).{last}"
    named = _launching_scripts(script)
    if named:
        return (
            f"{script} calls neither msrun nor torchrun here: it starts other scripts, some only where their data is. "
            f"Give one of these: {', '.join(named)}."
        )
    return f"{script} calls neither msrun nor torchrun.{last}"


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


def _script_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment the launcher would have had: the user's and the script's exports, without ours."""
    result = {name: value for name, value in env.items() if name not in _OURS and not name.startswith(_OUR_PREFIX)}
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
        "program": call["program"],
        "argv": [own(word) for word in call["argv"]],
        "cwd": own(call["cwd"]) or "/",
        "env": {name: value if name.startswith(_OUR_PREFIX) else own(value) for name, value in call["env"].items()},
    }


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if line]
