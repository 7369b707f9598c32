"""When a patch must have been called by the end of a run: a patch that applies and is never reached is drift, too.

A condition is words that must all hold for the trainer's arguments; one condition of a list is enough:

    --flag            the flag is there
    !--flag           it is not
    --flag=value      it has this value
    --flag>1          its value is above 1 (a flag that is absent counts as 1)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron.arguments import Arguments

ALWAYS = "--micro-batch-size"  # every Megatron job has it; a plain MindSpore program has not
_WORD = re.compile(r"(!?)(--[a-z0-9-]+)(?:(=|>)(\S+))?")


@dataclass(frozen=True)
class Called:
    """The conditions of one patch; none at all where nothing requires it to be called."""

    conditions: tuple[str, ...]

    @classmethod
    def read(cls, value: object) -> Called:
        """`always`, `never` or a list of conditions, as the catalogue has it."""
        if value in ("always", "never"):
            return cls((ALWAYS,) if value == "always" else ())
        conditions = tuple(str(item) for item in value) if isinstance(value, list) else ()
        if not conditions or not all(_WORD.fullmatch(word) for item in conditions for word in item.split()):
            raise UsageError("`called` must be always, never or a list of conditions on flags.")
        return cls(conditions)

    def asked_for(self, arguments: Arguments) -> bool:
        """Whether these arguments make the call necessary."""
        return any(all(_holds(word, arguments) for word in item.split()) for item in self.conditions)


def _holds(word: str, arguments: Arguments) -> bool:
    match = _WORD.fullmatch(word)
    assert match, word
    absent, name, operator, value = match.groups()
    if absent:
        return not arguments.has(name)
    words = arguments.values.get(name, ())
    if operator == "=":
        return words[:1] == (value,)
    if operator == ">":
        number = words[0] if words else "1"
        return number.isdigit() and int(number) > int(value)
    return arguments.has(name)


def sentence(patch: Mapping[str, Any], called: Called) -> str:
    """What to say of a patch that was not called."""
    when = "every run" if called.conditions == (ALWAYS,) else f"a run with {' or '.join(called.conditions)}"
    return message(
        f"Patch {patch['name']} was never called, although {when} must call it: upstream no longer goes through "
        f"{patch['target']}, so what was counted is not known. Write a patch for this release and pass it with --patches."
    )
