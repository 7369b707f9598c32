"""A table of searches from what they printed.

    for name in deepseek_v3_512cards deepseek_v3_1024cards qwen3_30b_a3b_16cards; do
        { time mindspeed-dryrun search examples/searches/$name.yaml --out out-$name --jobs 2 --no-cache; } > $name.log 2>&1
    done
    python benchmarks/large_searches.py *.log [--write docs/search_results.md]

Each log is one whole search from a fresh folder with bash's `time` behind it. `--write` puts the table between the two markers of a page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_COUNTS = re.compile(
    r"(?P<considered>\d+) strategies considered, (?P<struck>\d+) struck out by the lower bound, (?P<predicted>\d+) predicted, "
    r"(?P<passed>\d+) passed over by prediction, (?P<small>\d+) small and (?P<full>\d+) full dry runs \((?P<ranks>\d+) ranks\)"
)
_FIT = re.compile(r"the fit behind the choice is off by (?P<median>[\d.]+)% \(median\) and (?P<worst>[\d.]+)%")
_BEST = re.compile(r"^1 +(?P<best>TP\d.*?)  +(?P<peak>\d+M) +\S+ +(?P<seconds>[\d.]+) ", re.MULTILINE)
_TIME = re.compile(r"^(real|user|sys)\s+(\d+)m([\d.]+)s", re.MULTILINE)
HEAD = [
    "search", "considered", "struck out", "predicted", "passed over", "dry runs, small + full", "ranks", "wall time", "CPU time",
    "fit, median and worst", "best", "peak",
]  # fmt: skip
MARKERS = "<!-- large searches -->", "<!-- end of large searches -->"


def row(log: Path) -> list[str]:
    """One line of the table; a log without its figures is an error."""
    text = log.read_text(encoding="utf-8")
    counts, fit, best = _COUNTS.search(text), _FIT.search(text), _BEST.search(text)
    times = {name: 60 * int(minutes) + float(seconds) for name, minutes, seconds in _TIME.findall(text)}
    if not (counts and fit and best and len(times) == 3):
        raise SystemExit(f"{log} is not the log of a whole search with `time` behind it.")
    wall, cpu = divmod(round(times["real"]), 60), round(times["user"] + times["sys"])
    return [
        f"`{log.stem}`", counts["considered"], counts["struck"], counts["predicted"], counts["passed"],
        f"{counts['small']} + {counts['full']}", counts["ranks"], f"{wall[0]} min {wall[1]} s", f"{cpu} s",
        f"{fit['median']} %, {fit['worst']} %", best["best"], best["peak"],
    ]  # fmt: skip


def table(logs: Sequence[Path]) -> str:
    """All of them as Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *(row(log) for log in logs)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, help="a page with the two markers")
    options = parser.parse_args(argv)
    text = table(options.logs)
    if options.write is None:
        print(text, end="")
        return 0
    page = options.write.read_text(encoding="utf-8")
    before, rest = page.split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    options.write.write_text(f"{before}{MARKERS[0]}\n{text}{MARKERS[1]}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
