"""A script's text, as far as a dry run looks at it: its assignments, and the redirections of its blocks. Pure.

bash does the expanding; nothing here says what a script does. Words are found as bash finds them: quotes, escapes, nested
parentheses, here-documents and comments are what they are to bash.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.errors import UsageError, did_you_mean

_BEFORE_COMMANDS = frozenset(
    ["if", "then", "else", "elif", "while", "until", "do", "{", "!", "time", "export", "declare", "typeset", "local", "readonly"]
)
_BLOCK_ENDS = frozenset(["}", "done", "fi", "esac"])
_REDIRECTION = re.compile(r"&>>?|>&|>>|>\||>|<>|<&|<<<|<<-?|<")


def check_for_bash(text: str, script: Path | str) -> None:
    """`UsageError` for a file that bash cannot run, or would run as something else."""
    if "\r\n" in text:
        raise UsageError(f"{script} has Windows line ends, which bash cannot run. Convert it: sed -i 's/\\r$//' {script}")
    if "\0" in text:
        raise UsageError(f"{script} is not a text file: give the shell script that calls msrun or torchrun.")
    first = text.partition("\n")[0]
    if first.startswith("\ufeff") and not first.startswith("\ufeff#"):
        raise UsageError(
            f"{script} begins with a byte order mark, so bash cannot run its first line. "
            f"Remove it: sed -i '1s/^\\xef\\xbb\\xbf//' {script}"
        )
    if interpreter := re.match(
        r"\ufeff?#!\s*(?:\S*/env\s+(?:-\S+\s+)*)?(?:\S*/)?(zsh|fish|t?csh|ksh|python[\d.]*|perl)\b", first
    ):
        raise UsageError(
            f"{script} is written for {interpreter[1]}, and a dry run reads scripts with bash. "
            "Give a bash script that calls msrun or torchrun; if bash runs this one, change its first line to #!/bin/bash."
        )
    if Path(script).suffix == ".py":
        raise UsageError(f"{script} is a Python program: give the shell script that starts it with msrun or torchrun.")


@dataclass(frozen=True)
class Assignment:
    """`NAME=value` in a script: where the value starts and ends in its text."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Word:
    """A shell word. `redirects` is the operator before it; `commands` where bash expects a command; `after_block` after `}`."""

    start: int
    end: int
    commands: bool
    redirects: str = ""
    after_block: bool = False


def assignments(text: str) -> Iterator[Assignment]:
    """The assignments of a script, in order: words `NAME=…` where bash expects a command (or after export, local, …)."""
    for word in words(text):
        match = re.match(r"[A-Za-z_]\w*(?==)", text[word.start : word.end])
        if word.commands and match and not word.redirects:
            yield Assignment(match[0], word.start + match.end() + 1, word.end)


def assigned_names(text: str) -> list[str]:
    """Names that a script assigns, in order, each once."""
    return list(dict.fromkeys(item.name for item in assignments(text)))


def set_variables(text: str, sets: Mapping[str, str]) -> str:
    """The script with every assignment of the named variables replaced."""
    for item in sorted(assignments(text), key=lambda item: item.start, reverse=True):
        if item.name in sets:
            text = text[: item.start] + shlex.quote(sets[item.name]) + text[item.end :]
    return text


def assign_variables(text: str, sets: Mapping[str, str], script: Path | str) -> str:
    """`set_variables`, with a `UsageError` for a variable that this very text does not assign."""
    for name in sets:
        if name not in assigned_names(text) and not has_default(text, name):
            raise not_assigned(text, name, script)
    return set_variables(text, sets)


def not_assigned(text: str, name: str, script: Path | str) -> UsageError:
    """The sentence about a variable that cannot be set."""
    names = assigned_names(text)
    listed = ", ".join(names) or "no variables"
    return UsageError(f"{script} has no assignment {name}=… to set{did_you_mean(name, names)}. It assigns: {listed}.")


def has_default(text: str, name: str) -> bool:
    """`: "${TP:=8}"` assigns too, unless the environment has the variable."""
    return re.search(r"\$\{" + re.escape(name) + r":?=", text) is not None


def quiet_blocks(text: str) -> str:
    """The script with the files that whole blocks write to (`{ …; } > log`) replaced by /dev/null."""
    for word in sorted(words(text), key=lambda word: word.start, reverse=True):
        target = text[word.start : word.end]
        writes = word.after_block and ">" in word.redirects and target
        if not writes or target.startswith(("/dev/", ">(")) or (word.redirects == ">&" and re.fullmatch(r"\d+-?|-", target)):
            continue
        text = text[: word.start] + "/dev/null" + text[word.end :]
    return text


def for_a_copy(text: str) -> str:
    """The script as it must read where a copy of it is sourced: BASH_SOURCE means the script."""
    return re.sub(r"\bBASH_SOURCE\b", "__dryrun_source", text)


def words(text: str) -> Iterator[Word]:
    """The words of a script, here-documents and comments left out."""
    position, commands, block, redirects, heredocs = 0, True, False, "", list[str]()
    while position < len(text):
        char = text[position]
        if char == "\n":
            position, commands, block, redirects = position + 1, True, False, ""
            while heredocs:
                position = _after_heredoc(text, position, heredocs.pop(0))
        elif char in " \t" or text.startswith("\\\n", position):
            position += 2 if char == "\\" else 1
        elif char == "#":
            position = _line_end(text, position)
        elif (match := _REDIRECTION.match(text, position)) and not text.startswith(("<(", ">("), position):
            position, redirects = match.end(), match[0]
        elif char in ";&|()":
            position, commands, block, redirects = position + 1, True, char == ")", ""
        else:
            end = max(_word_end(text, position), position + 1)
            word = text[position:end]
            if redirects.startswith("<<") and redirects != "<<<":
                heredocs.append(re.sub(r"[\\'\"]", "", word))
            yield Word(start=position, end=end, commands=commands, redirects=redirects, after_block=block)
            if not redirects and not (block and word.isdigit()):  # `} 2> log`
                block = commands and word in _BLOCK_ENDS
                commands = commands and (word in _BEFORE_COMMANDS or word.startswith("-") or _is_assignment(word))
            position, redirects = end, ""


def _is_assignment(word: str) -> bool:
    return re.match(r"[A-Za-z_]\w*=", word) is not None


def _word_end(text: str, position: int) -> int:
    """Where the shell word at `position` ends: quotes, escapes and nested parentheses belong to it."""
    closing: list[str] = []  # what each open quote or bracket ends with, the innermost last
    previous = ""
    if text.startswith(("<(", ">("), position):  # a process that stands for a file
        previous, position = text[position], position + 1
    while position < len(text):
        char, inside = text[position], closing[-1] if closing else ""
        if char == "\\" and inside != "'":
            position += 1
        elif char == inside:
            closing.pop()
        elif opened := _opened(char, inside, previous):
            closing.append(opened)
        elif not inside and char in " \t\n;&|()<>":
            break
        previous = char
        position += 1
    return min(position, len(text))


def _opened(char: str, inside: str, previous: str) -> str:
    """What ends the quote or the bracket that `char` opens; empty where it opens none. `inside` ends the one around it."""
    if inside == "'":
        return ""
    if char in '"`' or (char == "'" and inside != '"'):
        return char
    if char == "(" and (inside in (")", "}") or (previous and previous in "$<>=")):
        return ")"
    return "}" if char == "{" and previous and previous in "$<>=" else ""


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
