"""Cold ranks against warm ones: what they cost, and that they count the same. Prints a Markdown table.

    python benchmarks/warm.py                 every row
    python benchmarks/warm.py 1 2 18          some of them: 1, 2, 18, again, sweep, search

Each row is one command, run with --cold and without, on nobody's earlier results (--no-cache). CPU time is that of the whole
process tree. `again` is the second job of a process whose server is running: what the studio, a sweep or a search pays.
"""

from __future__ import annotations

import compileall
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import measure

from mindspeed_dryrun.launch.executors import SharedPlaces, host
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.record.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh"
LAUNCH = ["launch", str(EXAMPLE), "--trainer", "embedded"]
ROWS = {
    "1": ("1 rank", [*LAUNCH, "--ranks", "0"]),
    "2": ("the example, 2 ranks", LAUNCH),
    "18": ("18 ranks", [*LAUNCH, "--set", "NPUS_PER_NODE=8", "--set", "NNODES=4", "--ranks", "0-17"]),
    "sweep": ("the lab's sweep, 6 variants", ["sweep", str(ROOT / "examples" / "sweeps" / "qwen25_7b_lab.yaml")]),
    "search": ("search on 8 cards", ["search", str(ROOT / "examples" / "searches" / "qwen25_7b_8cards.yaml")]),
}
Figures = list[tuple[str, int, int | None, int | None]]


def figures(folder: Path) -> Figures:
    """Every rank of every record below a folder."""
    found: Figures = []
    for file in sorted(folder.rglob("report.json")):
        ranks: list[dict[str, Any]] = json.loads(file.read_text())["ranks"]
        name = str(file.parent.relative_to(folder))
        found += [(name, rank["rank"], rank["used_peak_mb"], rank["actual_peak_mb"]) for rank in ranks]
    return found


def row(label: str, command: list[str], folder: Path) -> str:
    measured, counted = {}, {}
    for kind, extra in (("cold", ["--cold"]), ("warm", [])):
        words = [sys.executable, "-m", "mindspeed_dryrun", *command, "--no-cache", "--out", str(folder / kind), *extra]
        measured[kind] = measure(words, {**os.environ, "PYTHONPATH": str(ROOT)}, folder)
        counted[kind] = figures(folder / kind)
    same = "equal" if counted["cold"] and counted["cold"] == counted["warm"] else "DIFFERENT"
    (cold, cold_cpu, _), (warm, warm_cpu, _) = measured["cold"], measured["warm"]
    ranks = len(counted["warm"])
    return f"| {label} | {ranks} | {cold_cpu:.1f} | {warm_cpu:.1f} | {cold:.1f} | {warm:.1f} | {same} |"


def again(folder: Path) -> str:
    """The example a second time, the server being there: wall time of the job, CPU time of launcher and ranks."""
    spec = RunSpec(trainer="embedded")
    walls, cpus, counted = [], [], []
    with SharedPlaces(host.usable_cores()) as shared:
        for number in range(6):
            before, began = _own_cpu(), time.monotonic()
            report = dry_run_job(read_job(EXAMPLE, spec), folder / str(number), spec, Execution(shared=shared))
            walls.append(time.monotonic() - began)
            results = [json.loads(file.read_text()) for file in (folder / str(number)).glob("ranks/*/result.json")]
            cpus.append(_own_cpu() - before + sum(result["cpu_seconds"] for result in results))
            counted.append([(rank.used_peak_mb, rank.actual_peak_mb) for rank in report.ranks])
    same = "equal" if all(item == counted[0] for item in counted) else "DIFFERENT"
    middle = sorted(zip(walls[1:], cpus[1:], strict=True))[2]
    return f"| the example again, server running | {len(counted[0])} | | {middle[1]:.1f} | | {middle[0]:.1f} | {same} |"


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    print(
        "| job | ranks | CPU s, cold | CPU s, warm | wall s, cold | wall s, warm | figures |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    compileall.compile_dir(ROOT / "mindspeed_dryrun", quiet=1)  # as an installation does
    wanted = sys.argv[1:] or ["1", "2", "again", "18", "sweep", "search"]
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            print(again(Path(folder)) if name == "again" else row(*ROWS[name], Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
