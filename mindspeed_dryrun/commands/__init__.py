"""The command line: one module per verb; this file only finds the verb and prints errors as sentences."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from mindspeed_dryrun import __version__
from mindspeed_dryrun.commands.help import Formatter, Parser, translate_help
from mindspeed_dryrun.errors import (
    DryRunError,
    Interrupted,
    UsageError,
    check_interrupted,
    did_you_mean,
    exit_status_after,
    received,
)
from mindspeed_dryrun.language import LANGUAGES, set_language, t
from mindspeed_dryrun.terminal import plain, protect_streams

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
    "examples": "say where the example scripts are, or copy them",
    "schema": "print the JSON Schemas of the tool's files",
}

_LANG_HELP = "output language (default: from the locale)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. 0 all fits · 3 something does not fit · 1 a rank failed · 2 wrong use."""
    words = list(sys.argv[1:] if argv is None else argv)
    set_language(_asked_for(words))
    return status_of(lambda: _run_verb(words))


def _run_verb(words: list[str]) -> int:
    # argparse cannot hold apart what a script gets and what its trainer gets: `launch SCRIPT [ARG…] [-- TRAINER ARGS…]`
    dashes = words.index("--") if "--" in words else len(words)
    words, after_dashes = words[:dashes], words[dashes + 1 :]
    parser = Parser(
        prog="mindspeed-dryrun",
        description="Dry-run MindSpeed-LLM training scripts: every rank's peak memory, without an NPU.",
        epilog="`mindspeed-dryrun VERB --help` explains a verb. Exit status: 0 all simulated ranks fit, "
        "3 at least one does not fit, 1 a rank failed or timed out, 2 wrong use.",
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"mindspeed-dryrun {__version__}")
    parser.add_argument("--lang", dest="lang_before", choices=LANGUAGES, help=_LANG_HELP)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    named = [word for last, word in itertools.pairwise(["", *words]) if last != "--lang" and not word.startswith("-")]
    wanted = named[0] if named else None
    if wanted is not None and wanted not in VERBS:
        raise UsageError(f"There is no verb {wanted}{did_you_mean(wanted, VERBS)}. `mindspeed-dryrun --help` lists them.")
    options: list[str] = []
    for verb, summary in VERBS.items():
        if verb == wanted:
            module = importlib.import_module(f"mindspeed_dryrun.commands.{verb}")
            sub = verbs.add_parser(verb, help=summary, description=module.__doc__, formatter_class=Formatter)
            module.add_arguments(sub)
            sub.add_argument("--lang", choices=LANGUAGES, help=_LANG_HELP)
            sub.set_defaults(run=module.run)
            translate_help(sub)
            options = [name for action in sub._actions for name in action.option_strings]
        else:
            verbs.add_parser(verb, help=summary, add_help=False)
    translate_help(parser)
    args, unknown = parser.parse_known_args(words, argparse.Namespace(after_dashes=after_dashes))
    if unknown:
        raise UsageError(_unknown(wanted or "", unknown[0].partition("=")[0], options))
    return int(args.run(args))


def _asked_for(words: Sequence[str]) -> str | None:
    """The language that the command line names: known before it is parsed, for help and for what is wrong with it."""
    own = list(words)[: list(words).index("--")] if "--" in words else list(words)
    said = [after for word, after in itertools.pairwise(own) if word == "--lang"]
    said += [word.partition("=")[2] for word in own if word.startswith("--lang=")]
    return said[-1] if said and said[-1] in LANGUAGES else None


def _unknown(verb: str, word: str, options: Sequence[str]) -> str:
    """What to say about a word that the verb does not take."""
    from mindspeed_dryrun.megatron.flags import FLAGS

    if verb == "launch" and word in FLAGS:
        return f"{word} is the trainer's: put it after `--`, as in `launch SCRIPT -- {word} …`."
    hint = did_you_mean(word, options)
    if word.startswith("-"):
        return f"{verb} has no option {word}{hint}. `mindspeed-dryrun {verb} --help` lists its options."
    return f"{verb} takes no argument {word}{hint}. `mindspeed-dryrun {verb} --help` lists its options."


def status_of(run: Callable[[], int]) -> int:
    """What a person can cause or ask for ends in a sentence and an exit status, not in a traceback."""
    protect_streams()
    try:
        with _ending_on_signals():
            status = run()
            sys.stdout.flush()  # here, where a full disk is still a sentence
            check_interrupted()
        return status
    except DryRunError as error:
        print(f"mindspeed-dryrun: {plain(t(str(error)))}", file=sys.stderr)
        return error.exit_status
    except OSError as error:  # of a path that nobody foresaw: too long, a loop of links, not ours to read
        if error.filename is None:
            raise
        print(f"mindspeed-dryrun: {plain(t(f'Cannot use {error.filename}: {error.strerror}.'))}", file=sys.stderr)
        return DryRunError.exit_status
    except KeyboardInterrupt as stop:
        print(f"mindspeed-dryrun: {t(str(stop) or 'Interrupted.')}", file=sys.stderr)
        return exit_status_after(stop)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does: temporary folders go, processes end. What is ignored (nohup) stays so."""

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # it came inside a `__del__`; `received` has it
            hook(unraisable)

    def unwind(number: int, frame: object) -> None:
        for again in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_IGN)  # the tidying up is not interrupted
        received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, unwind)
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    except Exception:
        if received:  # what Python (`__set_name__`) or a library made of it on the way
            raise Interrupted(received[0]) from None
        raise
    finally:
        received.clear()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def importing_meanwhile(*modules: str) -> Iterator[None]:
    """Imports these modules beside what is done here. One that cannot be imported is left to whoever needs it."""

    def load() -> None:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)

    thread = threading.Thread(target=load, name="imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()
