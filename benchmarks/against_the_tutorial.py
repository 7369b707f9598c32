"""The tutorial's way against ours: the same job, the same trainer, one machine, one run; prints a Markdown table of ratios.

    python benchmarks/against_the_tutorial.py [--script examples/pretrain_qwen25_7b_32k_ms.sh] [--sample-ranks N] [--sample-microbatches N]

The tutorial's way: upstream's msrun starts every rank, all microbatches of three iterations are run, launches are
asynchronous, GLOG_v=1. Ours: `launch` as it is. Both run the embedded trainer, so that only the way differs.

`--sample-ranks` and `--sample-microbatches` run a part of the tutorial's way and scale it up; the table says so. For microbatches two
counts are run, so that start-up is not scaled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measuring import measure

from mindspeed_dryrun.engines import packages
from mindspeed_dryrun.engines.mindspore.engine import choose_engine
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.run import read_job
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.worker_log import read_worker_log

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 3


@dataclass
class Cost:
    """What a way of doing it took."""

    wall_s: float
    cpu_s: float
    log_mb: float
    host_mb: float
    peaks: dict[int, tuple[int | None, int | None]]

    def plus(self, other: Cost, factor: float) -> Cost:
        """This cost and `factor` times the difference to another one."""

        def grow(a: float, b: float) -> float:
            return a + factor * (b - a)

        return Cost(
            grow(self.wall_s, other.wall_s),
            grow(self.cpu_s, other.cpu_s),
            grow(self.log_mb, other.log_mb),
            other.host_mb,
            other.peaks,
        )


def tutorial_way(job: Job, ranks: int, microbatches: int, folder: Path) -> Cost:
    """`ranks` workers through upstream's msrun, started as the tutorial starts them."""
    folder.mkdir(parents=True)
    # msrun wants a file to start; the patches that the trainer needs are the same for both ways.
    (folder / "pretrain.py").write_text(
        "import sys\nfrom mindspeed_dryrun.rank.worker import main\nsys.exit(main(['mindspeed_dryrun.rank.trainer', *sys.argv[1:]]))\n"
    )
    (folder / "patches.json").write_text(json.dumps(catalogue.compile()))
    activation = {
        "mode": "rank",
        "world_size": job.world_size,
        "trainer": "embedded",
        "patches": str(folder / "patches.json"),
    }
    batch = microbatches * job.micro_batch * job.parallel.dp
    args = override_args(job.args, ["--train-iters", str(ITERATIONS), "--global-batch-size", str(batch)])
    # Without our library that keeps threads from spinning: the tutorial has none.
    environ = dataclasses.replace(choose_engine(), pause=None).environment(os.environ)
    environ |= {"GLOG_v": "1", "MS_DRY_RUN": "1"}
    environ.pop("MS_DEV_LAUNCH_BLOCKING")
    environ[config.VARIABLE] = json.dumps(activation)
    environ["PYTHONPATH"] = os.pathsep.join([*packages.engine_path(), str(ROOT), environ["PYTHONPATH"]])
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    command = ["msrun", f"--worker_num={job.world_size}", f"--local_worker_num={ranks}", "--master_port=8118", "--log_dir=msrun_log",
               "--join=True", "--sim_level=1", str(folder / "pretrain.py"), *args]  # fmt: skip
    wall, cpu, host = measure(command, environ, folder)
    logs = sorted((folder / "msrun_log").glob("worker_*.log"))
    peaks = {}
    for path in logs:
        log = read_worker_log(path)
        peaks[int(re.findall(r"\d+", path.name)[0])] = (log.used_peak_mb, log.actual_peak_mb)
    return Cost(wall, cpu, sum(path.stat().st_size for path in logs) / 2**20, host, peaks)


def our_way(script: Path, sets: list[str], folder: Path) -> Cost:
    """`launch`, with nothing but the script."""
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "mindspeed_dryrun.launch",
        str(script),
        "--trainer",
        "embedded",
        "--out",
        str(folder / "record"),
    ]
    for item in sets:
        command += ["--set", item]
    wall, cpu, host = measure(command, {**os.environ, "PYTHONPATH": str(ROOT)}, folder)
    report = json.loads((folder / "record" / "report.json").read_text())
    peaks = {rank: (item["used_peak_mb"], item["actual_peak_mb"]) for item in report["ranks"] for rank in item["represents"]}
    logs = (folder / "record").glob("ranks/*/worker.log")
    return Cost(wall, cpu, sum(path.stat().st_size for path in logs) / 2**20, host, peaks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, default=ROOT / "examples/pretrain_qwen25_7b_32k_ms.sh")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="NAME=VALUE")
    parser.add_argument("--sample-ranks", type=int, help="run so many ranks of the tutorial's way and scale up")
    parser.add_argument("--sample-microbatches", type=int, help="run so many microbatches, and twice as many, and scale up")
    args = parser.parse_args()
    job = read_job(args.script, RunSpec(sets=dict(item.split("=", 1) for item in args.sets)))
    folder = Path(tempfile.mkdtemp(prefix="against-the-tutorial-"))
    try:
        ours = our_way(args.script, args.sets, folder / "ours")
        ranks = args.sample_ranks or min(job.world_size, 8)
        said = []
        if args.sample_microbatches:
            few = tutorial_way(job, ranks, args.sample_microbatches, folder / "few")
            more = tutorial_way(job, ranks, 2 * args.sample_microbatches, folder / "more")
            tutorial = few.plus(more, (job.microbatches - args.sample_microbatches) / args.sample_microbatches)
            said.append(f"from {args.sample_microbatches} and {2 * args.sample_microbatches} of {job.microbatches} microbatches")
        else:
            tutorial = tutorial_way(job, ranks, job.microbatches, folder / "all")
        if ranks < job.world_size:
            factor = job.world_size / ranks
            tutorial.cpu_s, tutorial.wall_s, tutorial.log_mb = (
                value * factor for value in (tutorial.cpu_s, tutorial.wall_s, tutorial.log_mb)
            )
            said.append(f"from {ranks} of {job.world_size} ranks")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{args.script.name} {' '.join(args.sets)}: {job.world_size} ranks, {job.microbatches} microbatches, {len(os.sched_getaffinity(0))} cores"
    )
    print(f"The tutorial's way {'extrapolated ' + ' and '.join(said) if said else 'in full'}.\n")
    print("| | tutorial's way | ours | ratio |", "|---|---|---|---|", sep="\n")
    for name, theirs, mine in (
        ("CPU time, s", tutorial.cpu_s, ours.cpu_s),
        ("wall time, s", tutorial.wall_s, ours.wall_s),
        ("log, MB", tutorial.log_mb, ours.log_mb),
        ("peak host memory, MB", tutorial.host_mb, ours.host_mb),
    ):
        if said and name.startswith("wall"):
            continue  # of a sample that shares its cores with nobody; scaled up it means nothing
        print(f"| {name} | {theirs:,.1f} | {mine:,.2f} | {theirs / max(mine, 1e-3):,.0f} × |")
    for rank in sorted(tutorial.peaks):
        print(f"| rank {rank}, used / with fragments | {_pair(tutorial.peaks[rank])} | {_pair(ours.peaks[rank])} | |")
    same = all(ours.peaks[rank][0] == peak[0] for rank, peak in tutorial.peaks.items())
    print(f"\nUsed peaks are {'equal' if same else 'NOT equal'} on every rank that both ran.")
    return 0 if same else 1


def _pair(peaks: tuple[int | None, int | None]) -> str:
    return " / ".join(f"{value}M" for value in peaks)


if __name__ == "__main__":
    sys.exit(main())
