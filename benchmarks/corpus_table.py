"""Every dense pretraining call of a corpus of msrun calls, embedded, at full size: peak, seconds and host memory of each rank.

    python benchmarks/corpus_table.py tests/corpus/msrun_calls.jsonl [--only llama2,qwen3] [--ranks auto] [--out DIR]

The corpus has one JSON object per line: `script`, and `argv` as msrun received it. Prints Markdown. Calls that the
embedded trainer refuses stand in the table with the reason. `--ranks ends` runs the first and the last stage only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.rank_classes import rank_classes
from mindspeed_dryrun.launch.run import Execution, dry_run_job
from mindspeed_dryrun.record.run_spec import RunSpec


def dense(call: dict[str, Any]) -> bool:
    """Pretraining without experts."""
    return Path(call["script"]).name.startswith("pretrain_") and "--num-experts" not in call["argv"]


def layout(job: Job) -> str:
    sizes = [f"{name.upper()}{size}" for name, size in vars(job.parallel).items() if size and size > 1]
    return " ".join(sizes) or "one rank"


def rows(job: Job, out: Path, ranks: str, jobs: int) -> list[str]:
    if ranks == "ends":
        classes = rank_classes(job)
        ranks = ",".join(str(rank) for rank in sorted({classes[0].rank, classes[-1].rank}))
    report = dry_run_job(job, out, RunSpec(ranks=ranks, trainer="embedded"), Execution(jobs=jobs))
    name = Path(job.script).stem
    return [
        f"| {name} | {job.world_size} | {layout(job)} | {rank.rank} | {rank.status} | {rank.used_peak_mb} | "
        f"{rank.actual_peak_mb} | {rank.seconds:.0f} | {rank.host_rss_mb} |" + (f" {rank.error}" if rank.error else "")
        for rank in report.ranks
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--only", default="", help="parts of script names, with commas between them")
    parser.add_argument("--ranks", default="auto", help="auto, all, ends or a list")
    parser.add_argument(
        "--out", type=Path, help="folder for the records (default: a temporary one); finished ranks are used again"
    )
    parser.add_argument("--jobs", type=int, default=1, help="ranks at once")
    options = parser.parse_args()
    calls = [json.loads(line) for line in options.corpus.read_text(encoding="utf-8").splitlines()]
    wanted = [call for call in calls if dense(call) and any(part in call["script"] for part in options.only.split(","))]
    print("| script | ranks | layout | rank | status | used MB | with fragments MB | seconds | host MB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for call in wanted:
            name = Path(call["script"]).stem
            try:
                job = understand(read_msrun_call(call["argv"], scratch), call["script"])
                print("\n".join(rows(job, (options.out or Path(scratch)) / name, options.ranks, options.jobs)), flush=True)
            except DryRunError as error:
                print(f"| {name} | | | | refused | | | | {error} |", flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
