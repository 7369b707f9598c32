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

import json
import os
import select
import shlex
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError, UsageError, check_interrupted
from mindspeed_dryrun.launch import script_text
from mindspeed_dryrun.launch.captured_call import CapturedCall
from mindspeed_dryrun.launch.no_call import TIME_LIMIT_S, check_calls, why_no_call
from mindspeed_dryrun.launch.nodes import may_be_one_job, one_job
from mindspeed_dryrun.launch.read_call import read_call
from mindspeed_dryrun.launch.stand_ins import SHIM, write_programs
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import confinement, guard
from mindspeed_dryrun.rank.confinement import kernel_confines
from mindspeed_dryrun.temporary import temporary_folder

_TICK_S = 0.2
_LINGER_S = 5.0  # for what the script left running: `msrun … &`, and no wait
# What the stand-ins note: other launchers, steps left out, what is not on this machine, variables that were set, and files that
# the script reads after it would have written them: those that are not there, and those that are.
_LISTS = ("launchers", "skipped", "absent", "set", "lost", "stale")
_OURS = ("BASH_ENV", config.VARIABLE, guard.MARK, "TMPDIR", "SHLVL", "_", "OLDPWD")
_OUR_PREFIX = "__dryrun_"


def capture(
    script: Path,
    sets: Mapping[str, str] | None = None,
    script_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> CapturedCall:
    """The launcher call of a script, run with `env` exported; the calls of all nodes of one job are one.

    `UsageError` if it makes none, or calls of two jobs, or fails before.
    """
    if not script.is_file():
        raise UsageError(f"There is no script {script}.")
    text, sets = script.read_bytes().decode("utf-8", "surrogateescape"), sets or {}
    script_text.check_for_bash(text, script)
    elsewhere = {name: value for name, value in sets.items() if name not in script_text.assigned_names(text)}
    exported = dict(env or {}) | {name: value for name, value in elsewhere.items() if script_text.has_default(text, name)}
    changed = script_text.quiet_blocks(script_text.set_variables(text, sets))
    with temporary_folder() as folder:
        command = ["bash", str(script), *script_args]
        if changed != text:
            copy = folder / "script.sh"
            copy.write_text(script_text.for_a_copy(changed), encoding="utf-8", errors="surrogateescape")
            command = ["bash", "-c", f'__dryrun_source=("$0"); . {shlex.quote(str(copy))}', str(script), *script_args]
        ended = _run(command, folder, _environment(folder, exported, elsewhere))
        noted = {name: list(dict.fromkeys(_lines(folder / name))) for name in _LISTS}
        calls = [_without_places(call, str(folder / "places")) for call in ended.calls]
    if not calls:
        raise why_no_call(script, ended.status, ended.output, noted)
    check_calls(script, calls, noted)
    for name in elsewhere:
        if name not in noted["set"] and name not in exported:
            raise script_text.not_assigned(text, name, script)
    found = [read_call(call["program"], call["argv"], call["cwd"], _script_environment(call["env"])) for call in calls]
    call = one_job(script, found)
    notes = list(call.notes)
    if noted["stale"]:
        notes.append(
            f"the script writes {', '.join(noted['stale'])} and reads it again: what was in it before is what counts here"
        )
    if noted["absent"]:
        notes.append(f"not on this machine, and taken to be on that of the training: {', '.join(noted['absent'])}")
    if noted["skipped"]:
        notes.append(f"steps of the script around {call.launcher} were left out: {', '.join(noted['skipped'])}")
    return replace(call, notes=tuple(notes))


def _environment(folder: Path, exported: Mapping[str, str], elsewhere: Mapping[str, str]) -> dict[str, str]:
    """The script's environment. `elsewhere` are the variables to be set where a file that it sources assigns them."""
    programs = folder / "bin"
    for name in ("calls", *_LISTS):
        (folder / name).touch()
    ours = {
        "__dryrun_bin": str(programs),
        "__dryrun_places": str(folder / "places"),
        "BASH_ENV": str(SHIM / "capture.bash"),
        "TMPDIR": str(folder),
        guard.MARK: uuid.uuid4().hex,
        **config.Activation(mode="capture", file=str(folder / "calls"), python=sys.executable).to_env(),
    }
    write_programs(programs, ours)
    env = {**os.environ, **exported, **{f"__dryrun_set_{name}": value for name, value in elsewhere.items()}, **ours}
    env |= {
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "__dryrun_sets": " ".join(elsewhere),
        "__dryrun_user_env": os.environ.get("BASH_ENV", ""),
    }
    return env


@dataclass(frozen=True)
class _Ended:
    """A script that was run: the launcher calls that it made, its exit status (None at the time limit), its output."""

    calls: list[dict[str, Any]]
    status: int | None
    output: str


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> _Ended:
    """Runs bash and all that it starts to the end, or to the time limit.

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
    said, more, seen = b"", b"...", 0
    with process:
        try:
            while more:
                check_interrupted()
                if select.select([process.stdout], [], [], _TICK_S)[0]:
                    more = os.read(process.stdout.fileno(), 1 << 16)
                    said += more
                if len(lines := _lines(folder / "calls")) > seen:
                    seen = len(lines)
                    if seen > 1 and not may_be_one_job(lines):  # refused in any case: a loop may go on for ever
                        break
        finally:
            process.stdin.close()  # the guard ends the tree
            said += process.stdout.read()  # until it has
            outcome = json.loads(said.splitlines()[-1]) if said else {}
            if "ended" not in outcome:
                guard.end_marked(env[guard.MARK])
    calls = [json.loads(line) for line in _lines(folder / "calls")]
    if outcome.get("ended") not in ("exit", "timeout") and len(calls) < 2:
        raise DryRunError("The process that watches the script was killed, most likely for lack of host memory. Run it again.")
    status = outcome["exit_status"] if outcome.get("ended") == "exit" else None
    return _Ended(calls, status, log.read_text(encoding="utf-8", errors="replace"))


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
