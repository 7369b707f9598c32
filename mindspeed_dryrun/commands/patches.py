"""List the patch catalogue: what each patch changes, why, what happens without it, and its state against what is installed.

States: applies · applies, version not known · target missing (upstream has moved on: a run would stop) · not needed (this release
does without) · not installed. Upstream trees are found as a rank finds them: PYTHONPATH, MINDSPEED_CORE_MS_PATH and the engine
packages. `--release` shows the patches of one release of MindSpeed-LLM, whatever is installed. `--check DIR` reads a checkout of
upstream, without MindSpore, and says what has moved against the releases that work; `--record` notes the checkout as one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_dryrun.engines.packages import engine_path
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.launch import releases
from mindspeed_dryrun.launch.stack import CORE_MS
from mindspeed_dryrun.rank import installed

_TREES = ("MindSpeed-LLM", "MindSpeed", "Megatron-LM", "MSAdapter", "MSAdapter/msa_thirdparty", "msadapter",
          "msadapter/msa_thirdparty")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these patches, in full")
    parser.add_argument("--patches", action="append", default=[], type=Path, metavar="FILE", help="a patch file of your own")
    parser.add_argument("--release", metavar="NAME", help="the patches of one release of MindSpeed-LLM, such as 26.1.0")
    parser.add_argument("--check", type=Path, metavar="DIR", help="a folder with upstream's trees: what has moved in it?")
    parser.add_argument("--record", action="store_true", help="with --check: note what is there as known to work")
    parser.add_argument("--json", action="store_true", help="print the compiled catalogue with states")


def run(args: argparse.Namespace) -> int:
    """0, or 1 when a target is missing or, with --check, when something has moved."""
    if args.record and not args.check:
        raise UsageError("--record needs --check DIR.")
    patches = catalogue.compile(extra=args.patches)
    if args.check:
        return _check(args.check, patches, args.record)
    known = {patch["name"] for patch in patches}
    for name in args.names:
        if name not in known:
            raise UsageError(f"There is no patch {name}; `mindspeed-dryrun patches` lists them all.")
    shown = [patch for patch in patches if not args.names or patch["name"] in args.names]
    _add_states(shown, args.release)
    if args.json:
        print(json.dumps(shown, indent=1, ensure_ascii=False))
    elif args.names:
        print("\n\n".join(_in_full(patch) for patch in shown))
    elif args.release:
        print(_release_table(releases.named(args.release), shown))
    else:
        print(_table(shown, lambda patch: f"{patch['installed'] or '(not installed)'}, known on {_known(patch)}"))
    return 1 if any(patch["state"] == "target missing" for patch in shown) else 0


def _add_states(patches: list[dict[str, Any]], release: str | None) -> None:
    if release is None:
        _look_where_ranks_look()
    else:
        releases.named(release)
    for patch in patches:
        patch["state"] = catalogue.state(patch) if release is None else catalogue.state_in(patch, release)
        patch["installed"] = installed.version(patch["package"]) if release is None else None


def _check(folder: Path, patches: list[dict[str, Any]], record: bool) -> int:
    from mindspeed_dryrun.launch import drift

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a directory.")
    checkout, file = drift.Checkout(folder), catalogue.signatures_file()
    recorded = drift.Recorded.read(file)
    looked = [patch for patch in patches if checkout.target(patch)]
    if not looked:
        raise UsageError(f"{folder} holds none of {', '.join(releases.TREES)}.")
    if record:
        recorded.add(checkout, patches)
        file.write_text(recorded.text(), encoding="utf-8")
    findings = drift.check(checkout, patches, recorded)
    for finding in findings:
        print(f"{finding.kind:9} {finding.name}: {finding.text}")
    print(t(f"{checkout.label}: {len(looked)} targets read, {len(findings)} to look at. docs/new_release.md says how."))
    return 1 if any(finding.breaks for finding in findings) else 0


def _look_where_ranks_look() -> None:
    root = os.environ.get(CORE_MS)
    folders = [str(Path(root, tree)) for tree in _TREES if Path(root, tree).is_dir()] if root else []
    try:
        folders += engine_path()
    except DryRunError:
        print("mindspeed-dryrun: " + t("the engine packages are not installed (mindspeed-dryrun setup)."), file=sys.stderr)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _known(patch: dict[str, Any]) -> str:
    return ", ".join(patch["versions"])


def _table(patches: list[dict[str, Any]], heading: Callable[[dict[str, Any]], str]) -> str:
    lines, project = [], None
    width = max(len(patch["name"]) for patch in patches)
    for patch in sorted(patches, key=lambda patch: str(patch["project"])):
        if patch["project"] != project:
            project = patch["project"]
            lines += ["", f"{project} {heading(patch)}"]
        lines.append(f"  {patch['name']:{width}}  {patch['state']}")
    return "\n".join([*lines, "", t("`mindspeed-dryrun patches NAME` says what a patch does and why.")]).lstrip("\n")


def _release_table(release: releases.Release, patches: list[dict[str, Any]]) -> str:
    trees = ", ".join(f"{tree} {reference}" for tree, reference in release.references.items())
    head = f"Release {release.name}: {trees}; its guide asks for MindSpore {release.mindspore}."
    return f"{head}\n\n{_table(patches, lambda patch: f'known on {_known(patch)}')}"


def _in_full(patch: dict[str, Any]) -> str:
    action = next(f"{name}: {patch[name]}" for name in catalogue.ACTIONS if name in patch)
    called = patch.get("called", "never")
    lines = [
        f"{patch['name']} ({patch['state']})",
        f"  target    {patch['target']}",
        *(f"  moved to  {target}" for target in patch.get("moved_to", ())),
        f"  does      {action}",
        f"  why       {' '.join(str(patch.get('why', '')).split())}",
        f"  without   {' '.join(str(patch.get('without', '')).split())}",
        f"  trainers  {', '.join(patch['trainers'])}",
        *([f"  must run  {called if isinstance(called, str) else ', or '.join(called)}"] if called != "never" else []),
        *([f"  since     {patch['since']}"] if patch.get("since") else []),
        f"  versions  known on {_known(patch)}; installed: {patch['installed'] or 'none'}",
    ]
    return "\n".join(lines)
