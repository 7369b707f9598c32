"""A real trial of the engine: one simulated rank of a large job multiplies two matrices, and the peak must be right."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import mindspeed_dryrun
from mindspeed_dryrun.doctor.checks import Check
from mindspeed_dryrun.engines.mindspore.engine import STAND_IN, choose_engine
from mindspeed_dryrun.engines.torch_npu.engine import choose_torch_engine
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.record.worker_log import read_worker_log
from mindspeed_dryrun.temporary import temporary_folder

# Two inputs and one output of 8192 × 8192 in float32.
EXPECTED_MB = 3 * 8192 * 8192 * 4 // 2**20
PROGRAM = """
import mindspore
mindspore.set_device("Ascend")
left = mindspore.mint.zeros((8192, 8192), dtype=mindspore.float32)
right = mindspore.mint.zeros((8192, 8192), dtype=mindspore.float32)
product = mindspore.mint.matmul(left, right)
"""


TORCH_PROGRAM = """
from mindspeed_dryrun.rank.torch_npu import rank
rank.check_simulation()
rank.prepare()
import torch, torch_npu
left, right = (torch.zeros(8192, 8192, device="npu") for _ in range(2))
product = left @ right
print("COUNTED", torch.npu.memory_allocated() >> 20, flush=True)
"""


def torch_trial() -> Check:
    """The same on torch_npu, whose allocator pads each block by a few bytes."""
    started, wanted = time.monotonic(), f"{EXPECTED_MB}M counted"
    try:
        engine = choose_torch_engine()
    except DryRunError as error:
        return Check(name="torch_npu trial", found="no engine", wanted=wanted, state="wrong", fix=str(error))
    environ = engine.environment(os.environ) | engine.place(0, (1,)) | {"PYTHONDONTWRITEBYTECODE": "1"}
    root = str(Path(mindspeed_dryrun.__file__).parents[1])
    environ["PYTHONPATH"] = os.pathsep.join(part for part in (root, environ.get("PYTHONPATH", "")) if part)
    with temporary_folder() as folder:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_PROGRAM], env=environ, cwd=folder, check=False, capture_output=True, text=True
        )
    counted = next((line.split()[1] for line in done.stdout.splitlines() if line.startswith("COUNTED")), None)
    seconds = time.monotonic() - started
    if counted == str(EXPECTED_MB):
        found = f"{counted}M counted by {engine.title} on the {engine.cann} CANN in {seconds:.1f} s"
        return Check(name="torch_npu trial", found=found, wanted=wanted, state="ok")
    said = [line for line in done.stderr.splitlines() if line.strip()]
    found = f"{counted}M counted" if counted else f"failed: {said[-1] if said else f'exit status {done.returncode}'}"
    return Check(
        name="torch_npu trial",
        found=found,
        wanted=wanted,
        state="wrong",
        fix="pip install --force-reinstall 'mindspeed-dryrun[torch]'",
    )


def engine_trial() -> Check:
    """Runs the program on the engine that dry runs would use and compares its peak with what the sizes say."""
    started = time.monotonic()
    wanted = f"{EXPECTED_MB}M counted"
    try:
        engine = choose_engine()
    except DryRunError as error:
        return Check(name="Engine trial", found="no engine", wanted=wanted, state="wrong", fix=str(error))
    environ = engine.environment(os.environ) | {"RANK_ID": "0", "RANK_SIZE": "8", "PYTHONDONTWRITEBYTECODE": "1"}
    with temporary_folder() as folder:
        command = [sys.executable, "-c", PROGRAM]
        out, err = subprocess.PIPE, subprocess.STDOUT
        done = subprocess.run(command, env=environ, cwd=folder, check=False, stdout=out, stderr=err)
        log = read_worker_log(io.BytesIO(done.stdout))
    seconds = time.monotonic() - started
    below = message("the stand-in CANN") if engine.cann == STAND_IN else f"CANN {engine.cann}"
    found = f"{log.used_peak_mb}M counted by {engine.title} on {below} in {seconds:.1f} s"
    if done.returncode == 0 and log.used_peak_mb == EXPECTED_MB:
        return Check(name="Engine trial", found=found, wanted=wanted, state="ok")
    if log.used_peak_mb is None:
        found = f"failed: {log.first_error or f'exit status {done.returncode}'}"
    return Check(
        name="Engine trial",
        found=found,
        wanted=wanted,
        state="wrong",
        fix="see the table of MindSpore versions in docs/versions.md",
    )
