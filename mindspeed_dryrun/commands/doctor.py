"""Say what is installed, what will be used, what is wrong and the command that fixes it; ends with a trial of the engine.

Exit status 0 if dry runs work here, 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from mindspeed_dryrun.doctor.checks import Check, all_checks
from mindspeed_dryrun.doctor.trial import engine_trial, torch_trial
from mindspeed_dryrun.language import padded, t

_MARK_SENTENCES = {"ok": "ok", "note": "note", "absent": "-", "wrong": "WRONG"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json` for programs."""
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints every check as it is made."""
    checks: list[Check] = []
    for check in _all():
        checks.append(check)
        if not args.json:
            _print(check)
    wrong = [check for check in checks if check.state == "wrong"]
    if args.json:
        print(json.dumps({"ok": not wrong, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        print("\n" + t("Dry runs work here." if not wrong else f"{len(wrong)} problem(s) to fix before dry runs work here."))
    return 1 if wrong else 0


def _all() -> Iterator[Check]:
    states: dict[str, str] = {}
    for check in all_checks():
        states[check.name] = check.state
        yield check
    if states.get("MindSpore") != "absent":
        yield engine_trial()
    if states.get("torch_npu", "absent") != "absent":
        yield torch_trial()


def _print(check: Check) -> None:
    name, found, wanted = t(check.name), t(check.found), t(f"(expected: {check.wanted})")
    print(f"{padded(t(_MARK_SENTENCES[check.state]), 6)} {padded(name, 25)} {found}  {wanted}", flush=True)
    if check.fix:
        print(f"{'':6} {'':25} → {t(check.fix)}", flush=True)
