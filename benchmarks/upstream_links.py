"""Checks every link to a line of upstream: the file is there at that tag, and the line holds the symbol that is named before it.

    python benchmarks/upstream_links.py NVIDIA/Megatron-LM=DIR Ascend/MindSpeed=DIR … [--missing-is-fine]

A link stands at the end of a comment, after the symbol: # `symbol`: https://HOST/OWNER/NAME/blob/TAG/PATH#Lnumber
DIR is a git repository (a clone or a mirror) that has the tags, or, for projects that come as wheels, the site-packages folder of
that very version. Exit status 1 if a line is another one; it says where the symbol is now.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("mindspeed_dryrun/**/*.py", "patches/*.yaml")
_BLOB = re.compile(r"https://[\w.]+/[\w.-]+/[\w.-]+/blob/\S+")
_LINK = re.compile(
    r"`(?P<symbol>[^`]+)`: https://[\w.]+/(?P<project>[\w.-]+/[\w.-]+)/blob/(?P<tag>[^/\s]+)/(?P<path>\S+)#L(?P<line>\d+)$"
)
_TAG = re.compile(r"(core_)?v\d")
# Where the package lies in its repository; in the wheel it is at the top.
_IN_WHEEL = {"mindspore/mindspore": "mindspore/python/", "pytorch/pytorch": ""}


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link, and where it stands."""

    place: str
    symbol: str
    project: str
    tag: str
    path: str
    line: int


def links(root: Path = ROOT) -> Iterator[Link | str]:
    """Every link below `root`; a text says what is wrong with one that cannot be checked."""
    for pattern in PLACES:
        for file in sorted(root.glob(pattern)):
            for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if not _BLOB.search(text):
                    continue
                place, found = f"{file.relative_to(root)}:{number}", _LINK.search(text)
                if not found:
                    yield f"{place}: a link is `symbol`: URL#Lnumber at the end of its line."
                elif not _TAG.match(found["tag"]):
                    yield f"{place}: {found['tag']} is a branch, whose lines move; name a tag."
                else:
                    parts = found.groupdict()
                    yield Link(place=place, line=int(parts.pop("line")), **parts)


@functools.cache
def source(folder: Path, project: str, tag: str, path: str) -> tuple[str, ...] | None:
    """The lines of a file at a tag; None where it is not there."""
    if (folder / ".git").exists() or (folder / "HEAD").exists():
        done = subprocess.run(["git", "-C", str(folder), "show", f"{tag}:{path}"], capture_output=True, check=False)
        return tuple(done.stdout.decode(errors="replace").splitlines()) if done.returncode == 0 else None
    file = folder / path.removeprefix(_IN_WHEEL.get(project, ""))
    return tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else None


def problem(link: Link, folder: Path) -> str:
    """What is wrong with a link; empty where its line holds the symbol."""
    lines = source(folder, link.project, link.tag, link.path)
    if lines is None:
        return f"{link.place}: {link.project} has no {link.path} at {link.tag}."
    if 0 < link.line <= len(lines) and link.symbol in lines[link.line - 1]:
        return ""
    now = [str(number) for number, line in enumerate(lines, 1) if link.symbol in line]
    return (
        f"{link.place}: line {link.line} of {link.path} has no `{link.symbol}`; lines {', '.join(now[:8]) or '(none)'} have it."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is wrong, and how many links of each project are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("projects", nargs="*", metavar="OWNER/NAME=DIR")
    parser.add_argument("--missing-is-fine", action="store_true", help="do not fail for projects that no DIR was given for")
    args = parser.parse_args(argv)
    folders = {name: Path(folder) for name, _, folder in (item.partition("=") for item in args.projects)}
    problems, right, unchecked = [], Counter[str](), Counter[str]()
    for link in links():
        if isinstance(link, str):
            problems.append(link)
        elif link.project not in folders:
            unchecked[link.project] += 1
        elif found := problem(link, folders[link.project]):
            problems.append(found)
        else:
            right[link.project] += 1
    print("\n".join([*problems, *(f"{name}: {count} links are right" for name, count in sorted(right.items()))]))
    for name, count in sorted(unchecked.items()):
        print(f"{name}: {count} links were not checked")
    return int(bool(problems) or (bool(unchecked) and not args.missing_is_fine))


if __name__ == "__main__":
    sys.exit(main())
