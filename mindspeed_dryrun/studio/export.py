"""A try to take along: as a script that runs, as a sweep file of all tries, or as its report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mindspeed_dryrun.launch.exported_script import with_arguments
from mindspeed_dryrun.studio.choices import Subject
from mindspeed_dryrun.studio.session import Try


def as_script(subject: Subject, one: Try) -> str:
    """The user's script with the try's variables and arguments; a dry run of it gives the same figures."""
    return with_arguments(
        subject.text,
        verb="studio",
        comment=[one.name],
        replaced=one.choice.flags,
        arguments=one.choice.overrides,
        sets=one.choice.sets,
        launcher=subject.launcher,
        script=subject.script,
    )


def as_sweep(subject: Subject, tries: Iterable[Try]) -> str:
    """A sweep file (JSON is YAML) of every try that takes no flag out of the script: a sweep can only add."""
    variants = [
        {"name": f"{one.number} {one.name}", "set": dict(one.choice.sets), "args": list(one.choice.overrides)}
        for one in tries
        if not _takes_out(subject, one)
    ]
    return json.dumps({"script": str(subject.script.absolute()), "variants": variants}, indent=2) + "\n"


def _takes_out(subject: Subject, one: Try) -> bool:
    plain = subject.job(type(one.choice)(sets=one.choice.sets))
    return any(plain.arguments.has(name) for name in one.choice.removed)


def as_report(one: Try) -> Path | None:
    """The page of its record, written if it is not there yet."""
    from mindspeed_dryrun.advise.report_page import write_page

    return write_page(one.record) if one.record else None
