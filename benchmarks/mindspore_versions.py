"""Tries every MindSpore version in an environment of its own and prints the README's support table.

    python benchmarks/mindspore_versions.py [--python python3.11] [VERSION…]

Each takes a download of 0.4 to 0.9 GB and 2 GB of disk while it is tried. The figures are what the same programs must count on
every version: they follow from tensor sizes (see tests/engine/test_engine.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.7.0", "2.7.1", "2.7.2", "2.8.0", "2.9.0", "2.10.0")
HEAD = "import mindspore as ms\nfrom mindspore import mint, nn, ops\nms.set_device('Ascend')\n"
# name → program, expected used peak in MB (None: it only has to run)
PROGRAMS: dict[str, tuple[str, int | None]] = {
    "matmul": ("a = mint.zeros((8192, 8192)); b = mint.zeros((8192, 8192)); c = mint.matmul(a, b)", 768),
    "nn.Dense + Adam": (
        "net = nn.Dense(8192, 8192, has_bias=False)\nadam = nn.Adam(net.trainable_params())\n"
        "step = ms.value_and_grad(lambda x: net(x).sum(), None, adam.parameters)\n"
        "loss, gradients = step(mint.ones((1, 8192)))\nadam(gradients)",
        1024,
    ),
    "fused attention, RMSNorm, SwiGLU": (
        "x = [mint.ones((4096, 1, 2048), dtype=ms.bfloat16) for _ in range(3)]\n"
        "def forward(q, k, v, g):\n"
        "    out = ops.flash_attention_score(q, k, v, 16, input_layout='SBH', scalar_value=0.1)\n"
        "    return ops.swiglu(ops.rms_norm(out, g)[0], -1).sum()\n"
        "ms.grad(forward, (0, 1, 2, 3))(*x, mint.ones((2048,), dtype=ms.bfloat16))",
        None,
    ),
    "rank 777 of 1024": (
        "from mindspore.mint import distributed as dist\ndist.init_process_group(backend='hccl')\n"
        "group = dist.new_group(list(range(776, 784)))\nx = mint.zeros((8, 1024, 1024))\ndist.all_reduce(x, group=group)\n"
        "y = mint.zeros((64, 1024, 1024))\ndist.all_gather_into_tensor(y, x, group=group)\ndist.send(x, 778)\ndist.recv(x, 776)",
        288,
    ),
}
# Runs inside the environment under trial.
RUNNER = """
import io, os, subprocess, sys
from mindspeed_dryrun.engines.mindspore.engine import choose_engine
from mindspeed_dryrun.record.worker_log import read_worker_log
engine = choose_engine()
environ = engine.environment(os.environ) | {"RANK_ID": "777", "RANK_SIZE": "1024", "MS_WORKER_NUM": "1024", "DEVICE_ID": "1"}
done = subprocess.run([sys.executable, "-c", sys.argv[1]], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
log = read_worker_log(io.BytesIO(done.stdout))
sys.stderr.write(done.stdout.decode(errors="replace"))
print(done.returncode, log.used_peak_mb, log.device_total_mb, log.usable_mb)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--logs", type=Path, help="keep what each program printed in this folder")
    args = parser.parse_args()
    print(f"| MindSpore | {' | '.join(PROGRAMS)} |", f"|---|{'---|' * len(PROGRAMS)}", sep="\n", flush=True)
    for version in args.versions:
        print(f"| {version} | {' | '.join(try_version(version, args.python, args.logs))} |", flush=True)
    return 0


def try_version(version: str, python: str, logs: Path | None) -> list[str]:
    """One cell per program."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", f"{folder}/venv"], check=True)
        inside = f"{folder}/venv/bin/python"
        install = [
            inside,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            f"mindspore=={version}",
            "numpy<2",
            str(ROOT),
        ]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            return [f"no wheel for this Python ({python})"] * len(PROGRAMS)
        environ = {**os.environ, "MINDSPEED_DRYRUN_CACHE": f"{folder}/cache"}
        cells = []
        for name, (program, expected) in PROGRAMS.items():
            command = [inside, "-c", RUNNER, HEAD + program]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=folder)
            if logs:
                logs.mkdir(parents=True, exist_ok=True)
                (logs / f"{version}-{name.replace(' ', '_').replace('/', '_')}.log").write_text(done.stdout + done.stderr)
            cells.append(_cell(done.stdout.split(), expected))
        return cells


def _cell(words: list[str], expected: int | None) -> str:
    if len(words) != 4:
        return "fails: no engine"
    status, peak, _total, _usable = words
    if status.startswith("-") and peak == str(expected):
        return f"{peak}M, crash at exit"  # after the block: `launch` takes such figures, and says so
    if status != "0":
        return f"fails: exit status {status}"
    return f"{peak}M" if expected is None or peak == str(expected) else f"{peak}M, expected {expected}M"


if __name__ == "__main__":
    sys.exit(main())
