"""What `msrun` or `torchrun` received after bash has expanded the script: the one source of truth about a job.

`msrun_call.py` and `torchrun_call.py` read the words of each launcher into this shape; what they share is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MSRUN, TORCHRUN = "msrun", "torchrun"


@dataclass(frozen=True, kw_only=True)
class CapturedCall:
    """One call of a launcher, understood. `program_args` and `options` are free of comment debris."""

    launcher: str  # "msrun" or "torchrun"
    argv: tuple[str, ...]
    cwd: str
    options: Mapping[str, str]  # the launcher's own, by name without dashes, with underscores
    world_size: int  # all ranks of all nodes
    local_world_size: int  # ranks of one node
    node_sizes: tuple[int, ...] = ()  # ranks of each node, where the script calls the launcher once for each
    program: str
    program_args: tuple[str, ...]
    dropped: tuple[str, ...] = ()  # words that cannot be arguments, with the place where they were found
    notes: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)  # the script's exports


def drop_comments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments without the debris of comments inside quoted strings, and what was dropped.

    `ARGS="--recompute-granularity full \\   # every layer"` reaches a program as the words `\\`, `#`, `every`, `layer`. A word
    that starts with `#` takes the words after it along, up to the next flag: what follows could be on the next line.
    """
    kept: list[str] = []
    dropped: list[str] = []
    debris: list[str] = []
    in_comment = False

    def flush() -> None:
        if debris:
            place = f" after {' '.join(kept[-2:])}" if kept else ""
            dropped.append(f"'{' '.join(debris)}'{place}")
            debris.clear()

    for word in argv:
        if word.startswith("#"):
            in_comment = True
            debris.append(word)
        elif (in_comment and not _ends_comment(word)) or word.strip() == "\\":
            debris.append(word)
        else:
            in_comment = False
            flush()
            kept.append(word)
    flush()
    return kept, dropped


def is_flag(word: str) -> bool:
    """Whether a word is a flag, and not a negative number."""
    return word.startswith("-") and not word[1:].isdigit()


def _ends_comment(word: str) -> bool:
    return (word.startswith("--") and len(word) > 2) or word.endswith(".py")
