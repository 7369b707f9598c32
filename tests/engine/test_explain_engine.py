"""explain on what MindSpore's tracker really writes: the sums are the engine's, 18 bytes a parameter are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_qwen25_7b_32k_ms.sh"
pytestmark = pytest.mark.engine


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mindspeed_dryrun", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200, check=False)


def explained(tmp_path: Path, ranks: str, *arguments: str) -> dict[int, dict[str, object]]:
    """Launches the example with the tracker on and explains each rank."""
    words = [
        "launch",
        str(SCRIPT),
        "--trainer",
        "embedded",
        "--ranks",
        ranks,
        "--explain",
        "--out",
        "record",
        "--jobs",
        "1",
    ]
    done = run(*words, "--", *arguments, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: some rank classes were not run
    found = {}
    for rank in map(int, ranks.split(",")):
        said = run("explain", "record", "--rank", str(rank), "--format", "json", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        found[rank] = json.loads(said.stdout)["ranks"][0]
        report = json.loads((tmp_path / "record" / "report.json").read_text())
        engine = next(item["used_peak_mb"] for item in report["ranks"] if item["rank"] == rank)
        assert sum(found[rank]["categories"].values()) // 2**20 == engine
        assert found[rank]["difference_mb"] == 0
    return found


def test_a_small_qwen(tmp_path):
    """Both stages of a four-layer model of Qwen's width: weights, gradients and states are told apart by themselves."""
    small = ["--num-layers", "4", "--seq-length", "1024", "--max-position-embeddings", "1024"]
    found = explained(tmp_path, "0,2", *small)
    for rank in found.values():
        assert rank["bytes_per_parameter"] == pytest.approx(18, abs=0.01)
        weights = rank["categories"]["weights"]
        assert rank["parameters"] == pytest.approx(weights / 2, rel=0.001)
        assert rank["categories"]["gradients"] == pytest.approx(2 * weights, rel=0.001)
        assert rank["categories"]["optimizer"] == pytest.approx(6 * weights, rel=0.001)
    page = (tmp_path / "record" / "report.html").read_text()
    assert "18.00 bytes" in page and page.count('role="img"') == 3


def test_the_qwen25_7b_example(tmp_path):
    """The published job: its first stage holds 14 layers and two microbatches at the peak."""
    (rank,) = explained(tmp_path, "0").values()
    assert rank["bytes_per_parameter"] == pytest.approx(18, abs=0.005)
    assert (rank["phase"], rank["microbatch"]) == ("backward", 1)
    layers = [part for part in rank["activations_by_layer"] if part["name"].isdigit()]
    assert len(layers) == 14 and len({part["bytes"] for part in layers[:13]}) == 1
    assert [part["name"] for part in rank["activations_by_microbatch"]] == ["1", "2"]


# MindSpore's profiler writes the same file on every device; a CPU is what is everywhere.
PROFILED = """
import numpy
import mindspore
from mindspore import ops
from mindspore.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

mindspore.set_device("CPU")
steps = schedule(wait=0, warmup=0, active=3, repeat=1, skip_first=0)
with profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=tensorboard_trace_handler("prof")) as profiler:
    for _ in range(3):
        square = mindspore.Tensor(numpy.ones((64, 64), numpy.float32))
        ops.relu(ops.matmul(square, square)).asnumpy()
        profiler.step()
"""


def test_a_trace_that_mindspores_own_profiler_wrote(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROFILED], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    (trace,) = tmp_path.rglob("trace_view.json")
    assert done.returncode == 0, done.stderr
    events = [event for event in json.loads(trace.read_text()) if event["ph"] == "X"]
    said = run("explain", str(trace), cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    total = sum(float(event["dur"]) for event in events) / 1000
    assert f"{total:.3f} ms in total" in said.stdout
    calls = {line.split()[0]: line.split()[1] for line in said.stdout.splitlines()[2:]}
    assert calls == {"MatMul": "3", "ReLU": "3"}
