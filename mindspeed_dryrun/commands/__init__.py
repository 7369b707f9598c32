"""The command line: one module per verb; this file only finds the verb and prints errors as sentences."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from mindspeed_dryrun import __version__
from mindspeed_dryrun.errors import DryRunError

# verb → one line of help. Each module has `add_arguments(parser)` and `run(args) -> exit status`, and its docstring
# is the verb's long help. Modules are imported only when their verb is used: `--version` must not load rich or yaml.
VERBS = {
    "launch": "dry-run a training script and show every rank's peak memory",
    "report": "summarise a record, or any folder of msrun worker logs",
    "compare": "compare two records or log folders, rank by rank",
    "explain": "say what fills the memory at the peak, and what to change",
    "sweep": "run variants of one script into one table",
    "search": "find the best parallel strategy under a memory budget",
    "studio": "open a local page to change a job and see the answer at once",
    "calibrate": "fit the time model to your own training logs",
    "device": "list the cards that a verdict can be about, or read one from real logs",
    "doctor": "say what is installed, what will be used, what is wrong and how to fix it",
    "patches": "list the patch catalogue and its state against what is installed",
    "activate": "print the environment that makes every msrun of this shell a dry run",
    "deactivate": "print the commands that undo activate",
    "setup": "install the engine packages into their private folder",
    "schema": "print the JSON Schemas of our files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. 0 all fits · 3 something does not fit · 1 a rank failed · 2 wrong use."""
    words = list(sys.argv[1:] if argv is None else argv)
    # argparse cannot hold apart what a script gets and what its trainer gets: `launch SCRIPT [ARG…] [-- TRAINER ARGS…]`
    dashes = words.index("--") if "--" in words else len(words)
    words, after_dashes = words[:dashes], words[dashes + 1 :]
    parser = argparse.ArgumentParser(
        prog="mindspeed-dryrun",
        description="Dry-run MindSpeed-LLM training scripts: every rank's peak memory, without an NPU.",
        epilog="`mindspeed-dryrun VERB --help` explains a verb. Exit status: 0 all simulated ranks fit, "
        "3 at least one does not fit, 1 a rank failed or timed out, 2 wrong use.",
    )
    parser.add_argument("--version", action="version", version=f"mindspeed-dryrun {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    wanted = next((word for word in words if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        if verb == wanted:
            module = importlib.import_module(f"mindspeed_dryrun.commands.{verb}")
            sub = verbs.add_parser(
                verb, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
        else:
            verbs.add_parser(verb, help=summary, add_help=False)
    args = parser.parse_args(words, argparse.Namespace(after_dashes=after_dashes))
    try:
        return status_of(lambda: int(args.run(args)))
    except BrokenPipeError:
        return 0


def status_of(run: Callable[[], int]) -> int:
    """What a person can cause or ask for ends in a sentence and an exit status, not in a traceback."""
    try:
        return run()
    except DryRunError as error:
        print(f"mindspeed-dryrun: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt as stop:
        print(f"mindspeed-dryrun: {stop if str(stop) else 'interrupted'}", file=sys.stderr)
        return int(getattr(stop, "exit_status", 130))
