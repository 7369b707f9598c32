"""The command line's parser: its help and its errors in the language of the run, wrapped by the width of what is shown."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message, t, wrapped

_ARGPARSE_SENTENCES = (
    "usage: ",
    "positional arguments",
    "options",
    "show this help message and exit",
    "show program's version number and exit",
)  # argparse's own words, which it takes from Python's catalogue


class Parser(argparse.ArgumentParser):
    """Wrong use is a `UsageError`: one sentence, as everywhere."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(_sentence(self.prog, message))


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps help by columns: Chinese has no spaces to break at, and its characters take two."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(text, width, indent) if "\n" in text else "\n".join(wrapped(text, width))

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, t("usage: ") if prefix is None else prefix)


def translate_help(parser: argparse.ArgumentParser) -> None:
    """Titles, description and the help of every option, in place."""
    parser.description = t(parser.description) if parser.description else None
    parser.epilog = t(parser.epilog) if parser.epilog else None
    for group in parser._action_groups:
        group.title = t(group.title) if group.title else None
    for action in parser._actions:
        if action.help and action.help != argparse.SUPPRESS:
            action.help = t(action.help)
        for choice in getattr(action, "_choices_actions", ()):
            choice.help = t(choice.help)


def _sentence(program: str, problem: str) -> str:
    verb = program.partition(" ")[2]
    name = f"mindspeed-dryrun {verb}".strip()
    if found := re.fullmatch(r"the following arguments are required: (.*)", problem):
        return message(f"{found[1].partition(', ')[0]} is missing. `{name} --help` explains it.")
    if found := re.fullmatch(r"argument (\S+): invalid choice: (.+?) \(choose from (.*)\)", problem):
        return message(f"{found[1]} cannot be {found[2]}: choose from {found[3]}.")
    if found := re.fullmatch(r"argument (\S+): expected (?:one|at least one) argument", problem):
        return message(f"{found[1]} needs a value.")
    if found := re.fullmatch(r"argument (\S+): invalid \S+ value: (.+)", problem):
        return message(f"{found[1]} cannot be {found[2]}: a number is expected.")
    return f"{problem[0].upper()}{problem[1:].rstrip('.')}. " + message(f"`{name} --help` lists its options.")
