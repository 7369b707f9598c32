"""Say where the example scripts, sweeps and searches are, or copy them into a folder of yours.

mindspeed-dryrun examples               the folder, and what is in it
mindspeed-dryrun examples DIR           copy them to DIR, which must not exist
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from mindspeed_dryrun.errors import DryRunError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="copy the examples to this new folder")


def run(args: argparse.Namespace) -> int:
    found = examples_folder()
    if args.folder is not None:
        try:
            shutil.copytree(found, args.folder)
        except FileExistsError:
            raise UsageError(f"{args.folder} exists. Name a folder that does not.") from None
        except (OSError, shutil.Error) as error:
            raise DryRunError(f"Cannot copy the examples to {args.folder}: {error}.") from None
        found = args.folder
    print(found)
    for path in sorted(found.rglob("*")):
        if path.is_file():
            print(f"    {path.relative_to(found)}")
    return 0


def examples_folder() -> Path:
    """The examples of this installation: inside the package, or `examples/` of a source checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "examples", package.parent / "examples"):
        if folder.is_dir():
            return folder
    raise UsageError("The examples are missing from this installation; install mindspeed-dryrun again.")
