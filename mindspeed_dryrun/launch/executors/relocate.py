"""A rank's task, carried from the machine that planned it to the one that runs it. Pure, but for `survey`.

What belongs to a machine is replaced: its Python, its stand-in or real CANN, this package, the engine packages, its
home and temporary folders. What the user names (the trainer's folder, exported variables) is taken to be the same on
every machine, as on any training cluster.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mindspeed_dryrun
from mindspeed_dryrun.engines import packages
from mindspeed_dryrun.engines.protocol import Engine
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank.engine import TORCH_NPU

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.plan import RankTask

_LISTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_HOST = ("HOME", "HOSTNAME", "LOGNAME", "PWD", "OLDPWD", "SHELL", "TMPDIR", "USER", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where one machine has what a rank needs."""

    python: str
    package: str  # the folder that holds mindspeed_dryrun
    packages: str  # the folder that holds MSAdapter and megatron-core
    version: str
    framework: str | None  # None where no engine is needed
    cann: str | None
    engine: Mapping[str, str]  # what the engine adds to an empty environment


def survey(task: RankTask) -> Machine:
    """This machine, with the engine that the task needs made ready on it."""
    level = task.env.get("MS_SIMULATION_LEVEL")
    engine: Engine | None = None
    if level is not None or config.Activation.from_env(task.env).engine == TORCH_NPU:
        from mindspeed_dryrun.engines.back_ends import engine_for

        engine = engine_for("mindspore", int(level)) if level is not None else engine_for("torch")
    return Machine(
        python=sys.executable,
        package=str(Path(mindspeed_dryrun.__file__).parents[1]),
        packages=str(packages.packages_folder()),
        version=mindspeed_dryrun.__version__,
        framework=engine.title if engine else None,
        cann=engine.cann if engine else None,
        engine=engine.environment({}) if engine else {},
    )


def prepare_packages(task: RankTask, here: Machine, there: Machine) -> Machine:
    """`there` with the engine packages, if the task uses them: the planner's folder where it is shared, else its own."""
    if here.packages not in task.env.get("PYTHONPATH", "").split(os.pathsep) or Path(there.packages).is_dir():
        return there
    if Path(here.packages).is_dir():
        return dataclasses.replace(there, packages=here.packages)
    packages.install(lambda text: None)
    return there


def check_same(here: Machine, there: Machine, host: str) -> None:
    """Figures of one record come from one engine; `DryRunError` names the machine that has another."""
    for name in ("version", "framework", "cann"):
        mine, other = getattr(here, name), getattr(there, name)
        if mine != other:
            what = {"version": "mindspeed-dryrun", "framework": "the framework", "cann": "CANN"}[name]
            raise DryRunError(
                f"{host} has {what} {other}, the launching machine {mine}: one record needs one engine. "
                "Install the same versions on every machine."
            )


def relocated(task: RankTask, here: Machine, there: Machine, own: Mapping[str, str]) -> RankTask:
    """The task as it must read on another machine, whose own environment is `own`."""
    moves = {here.packages: there.packages, here.package: there.package}
    programs = {str(Path(here.python).parent): str(Path(there.python).parent)}
    env = {}
    for name, value in task.env.items():
        if name in _LISTS:
            env[name] = _path_list(value, here.engine.get(name, ""), there.engine.get(name, ""), moves)
        elif name in here.engine and here.engine[name] == value:
            if name in there.engine:
                env[name] = there.engine[name]
        elif name not in _HOST:
            env[name] = _moved(value, moves)
    env.update({name: own[name] for name in _HOST if name in own and name not in ("PWD", "OLDPWD")})
    env.update({name: value for name, value in there.engine.items() if name not in env})
    path = [programs.get(entry, entry) for entry in env.get("PATH", "").split(":")]
    env["PATH"] = ":".join(dict.fromkeys(entry for entry in (*path, *own.get("PATH", "").split(":")) if entry))
    program = there.python if task.argv[0] == here.python else _moved(task.argv[0], moves)
    return dataclasses.replace(task, env=env, argv=(program, *(_moved(word, moves) for word in task.argv[1:])))


def _path_list(value: str, here: str, there: str, moves: Mapping[str, str]) -> str:
    """The engine's entries are exchanged where they stand; others are moved one by one."""
    gone, result, placed = set(here.split(":")) if here else set(), [], not there
    for entry in value.split(":"):
        if entry in gone:
            if not placed:
                result += there.split(":")
                placed = True
        elif entry:
            result.append(_moved(entry, moves))
    return ":".join(result if placed else [*there.split(":"), *result])


def _moved(word: str, moves: Mapping[str, str]) -> str:
    for old, new in moves.items():
        if word == old or word.startswith(old + "/"):
            return new + word[len(old) :]
    return word
