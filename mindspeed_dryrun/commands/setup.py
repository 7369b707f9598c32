"""Prepare what dry runs need: the engine packages, the stand-in CANN and, with --stack, the real upstream stack.

MSAdapter and megatron-core go into a private folder, and the stand-in CANN is made where no CANN is installed. Nothing of the
environment changes: a PyTorch that is installed stays what it is. `launch` names this command where the packages are missing,
and makes the stand-in by itself.

    mindspeed-dryrun setup
    mindspeed-dryrun setup --stack 26.1.0 --into DIR                    # clones MindSpeed-LLM, MindSpeed and Megatron-LM
    mindspeed-dryrun setup --stack v26.1.0 --into DIR                   # at their tags, which stand still
    mindspeed-dryrun setup --stack 26.1.0 --into DIR --base-url URL     # from URL/MindSpeed-LLM and so on
    mindspeed-dryrun setup --stack 26.1.0 --into DIR --from TREES       # trees that are there already
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from mindspeed_dryrun.engines import packages
from mindspeed_dryrun.engines.back_ends import NAMES, engine_for
from mindspeed_dryrun.engines.protocol import Engine
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import t
from mindspeed_dryrun.launch import releases, stack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The stack's options; without them only the engine is prepared."""
    known = ", ".join(releases.RELEASES)
    parser.add_argument("--stack", metavar="RELEASE", help=f"a release of MindSpeed-LLM: {known}; v2.2.0 and so on for its tag")
    parser.add_argument("--into", type=Path, metavar="DIR", help="folder for the stack")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="use the trees in this folder")
    parser.add_argument("--base-url", metavar="URL", help="clone URL/MindSpeed-LLM, URL/MindSpeed and URL/Megatron-LM")


def run(args: argparse.Namespace) -> int:
    """Prepares everything a dry run needs."""
    if bool(args.stack) != bool(args.into) or ((args.source or args.base_url) and not args.stack):
        raise UsageError("A stack needs both --stack RELEASE and --into DIR.")
    if args.stack:
        folder = stack.prepare(releases.named(args.stack), args.into.absolute(), source=args.source, base_url=args.base_url)
        print(t(f"Stack {args.stack}: {folder}"))
    engine = _engine()
    print(t(f"Engine: {engine.title} on {'the ' if engine.cann == 'stand-in' else ''}{engine.cann} CANN"))
    if engine.name == NAMES["mindspore"]:
        print(t(f"Engine packages: {packages.install()}"))
    if args.stack:
        print(t(f"Use it: export {stack.CORE_MS}={folder}"))
    return 0


def _engine() -> Engine:
    """MindSpore's; torch_npu's where only that is installed."""
    try:
        return engine_for("mindspore")
    except DryRunError as error:
        with contextlib.suppress(DryRunError):
            return engine_for("torch")
        raise error
