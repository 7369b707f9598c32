"""The environment of an activated shell, and the shell commands that make it and take it back. Pure functions."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from mindspeed_dryrun.rank.activation import SHIM, VARIABLE, Activation

MARK = "(dryrun) "
SITE = Path(__file__).parents[1] / "rank" / "site"
# The function that leaves: not `deactivate`, which is a virtual environment's. It needs no program and no PATH.
LEAVE = "dryrun_off"
# Shell code shared by both verbs; the name is long so that it meets nobody's own.
_KEEP = "_mindspeed_dryrun_keep_"


def before_activation(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as it was before `activate`; the same where nothing is activated."""
    saved = _saved(environ)
    if saved is None:
        return dict(environ)
    result = {name: value for name, value in environ.items() if name not in saved and name != VARIABLE}
    result.update({name: value for name, value in saved.items() if value is not None})
    return result


def activated(base: Mapping[str, str], engine: Mapping[str, str], activation: Activation) -> dict[str, str | None]:
    """What changes in the shell: variable → new value, or None where it is unset. `engine` is a rank's environment."""
    changes: dict[str, str | None] = {name: value for name, value in engine.items() if base.get(name) != value}
    changes.update({name: None for name in base if name not in engine})
    changes["MS_DRY_RUN"] = "1"
    changes["PATH"] = _first(SHIM, engine.get("PATH", os.defpath))
    changes["PYTHONPATH"] = _first(SITE, engine.get("PYTHONPATH", ""))
    saved = {name: base.get(name) for name in sorted(changes)}
    return {**changes, **dataclasses.replace(activation, mode="activate", saved=saved).to_env()}


def activate_commands(changes: Mapping[str, str | None], base: Mapping[str, str], prompt: bool = True) -> list[str]:
    """For `eval` in sh, bash or zsh. Variables of the shell that are not exported are kept as such."""
    lines = []
    for name in sorted(changes):
        if name not in base and name != VARIABLE:
            lines.append(f'if [ -z "${{{_KEEP}{name}+x}}" ] && [ -n "${{{name}+x}}" ] && [ -z "${{{VARIABLE}+x}}" ]; '
                         f'then {_KEEP}{name}="${name}"; fi')  # fmt: skip
    for name, value in sorted(changes.items()):
        lines.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    if prompt:
        lines.append(f'case "${{PS1-{MARK}}}" in *"{MARK}"*) ;; *) PS1="{MARK}$PS1" ;; esac')
    after = {**base, **{name: value for name, value in changes.items() if value is not None}}
    lines.append(f"{LEAVE}() {{\n" + "\n".join(deactivate_commands(after)) + "\n}")
    return [*lines, "hash -r 2>/dev/null || :"]


def deactivate_commands(environ: Mapping[str, str]) -> list[str]:
    """Every variable as it was: the old value, unset, or a shell variable that is not exported.

    A PATH that has changed since (a virtual environment was entered or left) only loses what is ours.
    """
    lines = []
    for name, value in (_saved(environ) or {}).items():
        if name == "PATH" and value is not None:
            ours = shlex.quote(f"{SHIM}{os.pathsep}")
            lines.append(
                f'if [ "$PATH" = {shlex.quote(environ.get("PATH", ""))} ]; then PATH={shlex.quote(value)}; '
                f"else case $PATH in *{ours}*) PATH=${{PATH%%{ours}*}}${{PATH#*{ours}}} ;; esac; fi; export PATH"
            )
            continue
        if value is not None:
            lines.append(f"export {name}={shlex.quote(value)}")
            continue
        keep = _KEEP + name
        lines.append(f'unset {name}; if [ -n "${{{keep}+x}}" ]; then {name}="${keep}"; unset {keep}; fi')
    lines.append(f"unset {VARIABLE}")
    lines.append(f'case "${{PS1-}}" in *"{MARK}"*) PS1="${{PS1%%"{MARK}"*}}${{PS1#*"{MARK}"}}" ;; esac')
    return [*lines, f"unset -f {LEAVE} 2>/dev/null || :", "hash -r 2>/dev/null || :"]


def is_activated(environ: Mapping[str, str]) -> bool:
    """Whether this environment is an activated shell's."""
    return _saved(environ) is not None


def _saved(environ: Mapping[str, str]) -> dict[str, str | None] | None:
    found = Activation.from_env(environ)
    return dict(found.saved) if found.mode == "activate" else None


def _first(folder: Path | str, rest: str) -> str:
    return os.pathsep.join(part for part in (str(folder), rest) if part)
