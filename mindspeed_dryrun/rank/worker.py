"""One rank of a dry run: simulation is checked to be on, patches go in, and the trainer runs as it would by itself."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import collector, patcher, progress, upstream_errors
from mindspeed_dryrun.rank.activation import ERROR_PREFIX
from mindspeed_dryrun.rank.confinement import confine
from mindspeed_dryrun.rank.engine import rank_engine

# Where the trainer's libraries keep what they would otherwise put into the user's home and temporary folders.
_CACHES = ("TMPDIR", "TORCH_EXTENSIONS_DIR", "HF_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "ASCEND_PROCESS_LOG_PATH")
# Where launchers send logs of their own (MindFormers, MindSpore, CANN): a rank writes inside its record only.
_LOG_FOLDERS = ("LOG_MF_PATH", "GLOG_log_dir", "ASCEND_WORK_PATH")


def main(argv: Sequence[str]) -> int:
    """Runs PROGRAM (a file or a module) with its arguments. 0 when it ended well, 1 with a sentence otherwise."""
    if not argv:
        print("usage: python -m mindspeed_dryrun.rank PROGRAM [ARGUMENT…]", file=sys.stderr)
        return 2
    try:
        rank_engine().check_simulation()
        stay_in_folder(config.current().scratch)
        prepare()
        progress.phase("importing")
        run_program(argv[0], argv[1:])
        finish()
    except DryRunError as error:
        say_error(str(error))
        return error.exit_status
    except Exception as error:
        for failure in patcher.failures()[:1]:  # what upstream made of an exception of ours hides it
            say_error(str(failure))
        if sentence := upstream_errors.explain(error, argv[1:]):
            say_error(sentence)
        raise
    return 0


def say_error(sentence: str) -> None:
    """Before any traceback, so that the sentence is the first error of the rank's log."""
    print(f"{ERROR_PREFIX}{sentence}", file=sys.stderr, flush=True)


def check_shell() -> None:
    """An activated shell that was left by a virtual environment's `deactivate` looks like any other: nothing starts in it."""
    if config.SHIM not in os.environ.get("PATH", "").split(os.pathsep):
        raise DryRunError(
            "This shell is activated for dry runs, but its PATH has lost their msrun (a virtual environment's deactivate does "
            "that): neither a dry run nor a training was started. Run dryrun_off, or open a new shell."
        )


def stay_in_folder(scratch: str) -> None:
    """Nothing is written outside the rank's own folder; the caches of its libraries go there as well."""
    if scratch:
        for variable in (*_CACHES, *(name for name in _LOG_FOLDERS if os.environ.get(name))):
            os.environ[variable] = os.path.join(scratch, variable.lower())
        Path(os.environ["TMPDIR"]).mkdir(parents=True, exist_ok=True)
        confine(os.path.dirname(scratch))


def prepare() -> None:
    """Patches in force, in a rank or in a process that ranks are forked from."""
    sys.dont_write_bytecode = True
    os.environ.setdefault("MS_DRY_RUN", "1")
    rank_engine().prepare()
    patcher.install(patches_for(config.current()))


def prepare_activated() -> None:
    """A Python process of an activated shell imports its framework: from here on it is a dry run, or it stops."""
    try:
        check_shell()
        rank_engine().check_simulation()
        prepare()
    except DryRunError as error:
        raise SystemExit(f"{ERROR_PREFIX}{error}") from None


def patches_for(activation: config.Activation) -> list[dict[str, Any]]:
    """The compiled catalogue of the record, cut down to this rank's trainer."""
    if not activation.patches:
        return []
    with open(activation.patches, encoding="utf-8") as stream:
        patches = json.load(stream)
    return [patch for patch in patches if activation.trainer in patch["trainers"]]


def run_program(program: str, arguments: Sequence[str]) -> None:
    """As `python PROGRAM ARGUMENTS` or `python -m PROGRAM ARGUMENTS` would."""
    sys.argv = [program, *arguments]
    original = argparse.ArgumentParser.error

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        if sentence := upstream_errors.of_a_parser(message):
            say_error(sentence)
        original(parser, message)

    argparse.ArgumentParser.error = error  # type: ignore[assignment, method-assign]
    try:
        if program.endswith(".py"):
            sys.path[0] = str(Path(program).absolute().parent)  # where `python -m` has the working directory
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise


def finish() -> None:
    """Says that the trainer came to its end; drift that upstream code swallowed on the way still fails the rank."""
    for failure in patcher.failures():
        raise failure
    patcher.check_calls(sys.argv[1:])
    told = {"patches": patcher.applied_names(), "calls": patcher.calls(), **collector.told(), **rank_engine().finish()}
    progress.phase("finished", **told)
