"""Lists the patch catalogue: what each patch changes, why, what happens without it, and its state against what is installed.

States: applies · applies, version not known · target missing (upstream has moved on: a run would stop) · not installed.
Upstream trees are found as a rank finds them: PYTHONPATH, MINDSPEED_CORE_MS_PATH and the engine packages.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed_dryrun.engines.packages import engine_path
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.rank import installed

_TREES = ("MindSpeed-LLM", "MindSpeed", "Megatron-LM", "MSAdapter", "MSAdapter/msa_thirdparty", "msadapter",
          "msadapter/msa_thirdparty")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these patches, in full")
    parser.add_argument(
        "--patches", action="append", default=[], type=Path, metavar="FILE", help="a patch file of your own"
    )
    parser.add_argument("--json", action="store_true", help="print the compiled catalogue with states")


def run(args: argparse.Namespace) -> int:
    """0, or 1 when a target is missing."""
    _look_where_ranks_look()
    patches = catalogue.compile(extra=args.patches)
    known = {patch["name"] for patch in patches}
    for name in args.names:
        if name not in known:
            raise UsageError(f"There is no patch {name}; `mindspeed-dryrun patches` lists them all.")
    shown = [patch for patch in patches if not args.names or patch["name"] in args.names]
    for patch in shown:
        patch["state"] = catalogue.state(patch)
        patch["installed"] = installed.version(patch["package"])
    if args.json:
        print(json.dumps(shown, indent=1, ensure_ascii=False))
    elif args.names:
        print("\n\n".join(_in_full(patch) for patch in shown))
    else:
        print(_table(shown))
    return 1 if any(patch["state"] == "target missing" for patch in shown) else 0


def _look_where_ranks_look() -> None:
    root = os.environ.get("MINDSPEED_CORE_MS_PATH")
    folders = [str(Path(root, tree)) for tree in _TREES if Path(root, tree).is_dir()] if root else []
    try:
        folders += engine_path()
    except DryRunError:
        print("mindspeed-dryrun: the engine packages are not installed (mindspeed-dryrun setup).", file=sys.stderr)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _table(patches: list[dict[str, Any]]) -> str:
    lines, project = [], None
    width = max(len(patch["name"]) for patch in patches)
    for patch in sorted(patches, key=lambda patch: str(patch["project"])):
        if patch["project"] != project:
            project = patch["project"]
            lines += [
                "",
                f"{project} {patch['installed'] or '(not installed)'}, known on {', '.join(patch['versions'])}",
            ]
        lines.append(f"  {patch['name']:{width}}  {patch['state']}")
    return "\n".join([*lines, "", "`mindspeed-dryrun patches NAME` says what a patch does and why."]).lstrip("\n")


def _in_full(patch: dict[str, Any]) -> str:
    action = next(f"{name}: {patch[name]}" for name in catalogue.ACTIONS if name in patch)
    return "\n".join(
        [
            f"{patch['name']} ({patch['state']})",
            f"  target    {patch['target']}",
            f"  does      {action}",
            f"  why       {' '.join(str(patch.get('why', '')).split())}",
            f"  without   {' '.join(str(patch.get('without', '')).split())}",
            f"  trainers  {', '.join(patch['trainers'])}",
            f"  versions  known on {', '.join(patch['versions'])}; installed: {patch['installed'] or 'none'}",
        ]
    )
