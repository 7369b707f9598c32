"""How long explain takes on a large memory_block.csv, against `wc -l` and against the straightforward pandas way.

    python benchmarks/explain_speed.py [--gigabytes 2] [--file PATH] [--no-pandas] [--cold]

Writes a synthetic file of a made-up training program (tests/tracker_file.py), then runs each way in a process of its
own and prints wall time, CPU time and the largest resident memory. The file is removed at the end unless --file names
one. All three read the same file from the page cache, or with --cold each of them from the disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

EXPLAIN = """
import sys
from pathlib import Path
from mindspeed_dryrun.report.explain import explain
found = explain(Path(sys.argv[1]))
print(f"{found.rows} rows, peak {found.peak_bytes / 2**20:.1f}M, {found.when}")
"""
# What one would write first: all rows, all events sorted, the running sum, the blocks alive at its largest.
PANDAS = """
import sys
import pandas as pd
rows = pd.read_csv(sys.argv[1], index_col=False)
size = rows["size"]
ended = rows["end_time_stamp"] < 2**63 - 1
events = pd.concat([
    pd.DataFrame({"time": rows["start_time_stamp"], "order": 1, "delta": size}),
    pd.DataFrame({"time": rows["end_time_stamp"][ended], "order": 0, "delta": -size[ended]}),
]).sort_values(["time", "order"])
used = events["delta"].cumsum()
at = events["time"].iloc[used.argmax()]
alive = rows[(rows["start_time_stamp"] <= at) & (rows["end_time_stamp"] > at)]
alive.groupby(["type", "node_name", "python_stack"])["size"].sum()
print(f"{len(rows)} rows, peak {used.max() / 2**20:.1f}M, {len(alive)} blocks alive")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--file", type=Path, help="use this file; it is written if it does not exist")
    parser.add_argument("--no-pandas", action="store_true", help="pandas needs about three times the file in memory")
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache before each way")
    args = parser.parse_args()
    path = args.file or Path(tempfile.mkdtemp()) / "memory_block.csv"
    if not path.exists():
        write(path, int(args.gigabytes * 2**30))
    size = path.stat().st_size
    print(f"{size / 2**30:.2f} GiB, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(f"{'way':<14}{'wall s':>9}{'CPU s':>9}{'max RSS MB':>13}   result")
    ways = [("wc -l", ["wc", "-l", str(path)]), ("explain", [sys.executable, "-c", EXPLAIN, str(path)])]
    if not args.no_pandas:
        ways.append(("pandas", [sys.executable, "-c", PANDAS, str(path)]))
    for name, command in [("(warm-up)", ["cat", str(path)]), *ways]:
        if args.cold:
            drop_from_page_cache(path)
        wall, cpu, rss, output = measure(command)
        if name != "(warm-up)":
            print(f"{name:<14}{wall:>9.2f}{cpu:>9.2f}{rss:>13.0f}   {output}")
    if not args.file:
        path.unlink()
        path.parent.rmdir()
    return 0


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write(path: Path, size: int) -> None:
    """A program of 28 layers; its last iteration is repeated until the file is large enough."""
    from tracker_file import HEADER, Program

    program = Program(layers=28, microbatches=8, in_flight=4).run()
    once = sum(map(len, program.lines()))
    last = sum(len(line) for index, line in enumerate(program.lines()) if index >= program.iteration_starts[-1])
    with path.open("w", encoding="utf-8") as file:
        file.write(HEADER)
        file.writelines(program.lines(repeat_last=max(0, (size - once) // last + 1)))


def measure(command: list[str]) -> tuple[float, float, float, str]:
    """Wall seconds, CPU seconds, largest RSS in MB and the last line of output of one process."""
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    quiet = command[0] == "cat"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL if quiet else output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - start
        output.seek(0)
        lines = output.read().split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    if os.waitstatus_to_exitcode(status):
        said = f"failed: {said}"
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, said.replace(command[-1], "").strip()


if __name__ == "__main__":
    sys.exit(main())
