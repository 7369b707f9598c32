"""The real half of `launch --ab`: the same job for a few iterations on the NPUs of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from mindspeed_dryrun.engines.cann.real import npus
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.short_run import ITERATIONS, short_run
from mindspeed_dryrun.megatron.arguments import override_args, without

_ELSEWHERE = "Run the script on such a machine and compare its logs: mindspeed-dryrun compare MSRUN_LOG RECORD --labels real,dry"


def run_for_real(job: Job, out: Path) -> Path:
    """Runs the job's msrun call on this machine's NPUs, and returns the folder with its worker logs."""
    found = npus()
    if found < job.local_world_size:
        have = "no NPU" if not found else f"{found} NPUs and the job needs {job.local_world_size} on each node"
        raise UsageError(f"--ab runs the script for real as well, and this machine has {have}. {_ELSEWHERE}")
    if job.world_size > job.local_world_size:
        raise UsageError(f"--ab runs on one machine, and this job has {job.world_size} ranks on several. {_ELSEWHERE}")
    msrun = shutil.which("msrun", path=job.env.get("PATH") or os.environ.get("PATH"))
    if msrun is None:
        raise DryRunError("--ab needs the real msrun, and it is not on PATH. Activate the environment with MindSpore.")
    logs = out.absolute().with_name(out.name + "-real")  # beside the record, which holds dry ranks only
    logs.mkdir(parents=True, exist_ok=True)
    env = {**job.env, "GLOG_v": "1"}  # the memory block of a real run is an INFO line
    env.pop("MS_SIMULATION_LEVEL", None)
    done = subprocess.run(real_call(job, msrun, logs), cwd=job.cwd, env=env, check=False)
    if done.returncode:
        raise DryRunError(f"The real run failed (exit status {done.returncode}); its logs are in {logs}.")
    return logs


def real_call(job: Job, msrun: str, logs: Path) -> list[str]:
    """The job's own call, cut to a few iterations, with its logs beside the record and without saving."""
    options = {name: value for name, value in job.launcher_options.items() if name not in ("sim_level", "sim_rank_id")}
    options.update(log_dir=str(logs), join="True")
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    args = without(short_run(job, "all").args, ["--save", "--tensorboard-dir"])
    return [msrun, *words, job.program, *override_args(args, ["--train-iters", str(ITERATIONS + 1)])]
