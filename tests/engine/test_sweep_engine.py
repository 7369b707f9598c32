"""sweep and search through the real engine, on a model that takes seconds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.engines.packages import engine_path
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.launch.run import Execution
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.search.measure import DryRuns

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine

SCRIPT = """#!/bin/bash
TP=1
PP=1
msrun --worker_num 2 --local_worker_num 2 pretrain_gpt.py --use-mcore-models --num-layers 4 --hidden-size 1024 \\
    --ffn-hidden-size 2816 --num-attention-heads 8 --group-query-attention --num-query-groups 4 --seq-length 2048 \\
    --max-position-embeddings 2048 --padded-vocab-size 32000 --untie-embeddings-and-output-weights --swiglu \\
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --use-flash-attn --use-fused-rmsnorm \\
    --use-fused-swiglu --use-fused-rotary-pos-emb --attention-dropout 0.0 --hidden-dropout 0.0 --micro-batch-size 1 \\
    --global-batch-size 8 --train-iters 10 --lr 1e-5 --bf16 --no-gradient-accumulation-fusion --no-masked-softmax-fusion \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    try:
        engine_path()
    except DryRunError as error:
        pytest.skip(str(error))
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_a_sweep_counts_and_continues(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three variants: recomputation needs less, a bad one has its sentence; the second run runs nothing again."""
    plan = tmp_path / "sweep.yaml"
    variants = [
        {"name": "plain", "set": {"TP": 2}},
        {
            "name": "again",
            "set": {"TP": 2},
            "args": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        },
        {"name": "bad", "set": {"TP": 3}},
    ]
    plan.write_text(yaml.safe_dump({"script": "train.sh", "budget": "8G", "variants": variants}))
    out = tmp_path / "out"
    words = ["sweep", str(plan), "--out", str(out), "--trainer", "embedded", "--jobs", "1", "--json"]
    assert main(words) == 1
    data = json.loads(capsys.readouterr().out)
    found = {variant["name"]: variant for variant in data["variants"]}
    assert [found[name]["status"] for name in ("plain", "again", "bad")] == ["ok", "ok", "failed"]
    assert 500 < found["again"]["used_peak_mb"] < found["plain"]["used_peak_mb"] < 8192
    assert "divisible" in found["bad"]["error"]
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert len(stamps) == 2
    assert main(words) == 1
    assert {path: path.stat().st_mtime_ns for path in out.rglob("result.json")} == stamps
    assert json.loads((out / "sweep.json").read_text())["variants"][0]["used_peak_mb"] == found["plain"]["used_peak_mb"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_ended_keeps_what_is_done(script: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Ended while variants are under way: status 128 + the signal, a table of what is known, no process left, and it continues."""
    plan = tmp_path / "sweep.yaml"
    plan.write_text(yaml.safe_dump({"script": "train.sh", "variants": [{"name": f"PP{n}", "set": {"PP": n}} for n in (1, 2)]}))
    words = ["sweep", str(plan), "--out", str(tmp_path / "out"), "--trainer", "embedded", "--jobs", "1"]
    command = [sys.executable, "-m", "mindspeed_dryrun", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr and process.stdout
    first = process.stderr.readline()  # a variant is done, the next one is under way
    assert first.startswith("[1/2] PP"), first
    process.send_signal(number)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Interrupted" in said and "not run" in shown, (shown, said)
    assert str(tmp_path) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert main(words) == 0


def test_a_search_verifies_its_winner(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two cards: the winner fits, was dry-run at full size, and the script that is written makes exactly its job."""
    plan = tmp_path / "search.yaml"
    plan.write_text(
        yaml.safe_dump(
            {
                "script": "train.sh",
                "hardware": "ascend910b-64g",
                "cluster": {"nodes": 1, "cards_per_node": 2},
                "budget": "2G",
                "winners": 1,
                "space": {"recompute": ["none", "full"], "micro_batch": [1, 2], "vpp": 1, "split": "even"},
            }
        )
    )
    out = tmp_path / "out"
    status = main(["search", str(plan), "--out", str(out), "--trainer", "embedded", "--jobs", "1"])
    text = capsys.readouterr().out
    assert status == 0, text
    data = json.loads((out / "strategy.json").read_text())
    assert 0 < data["memory"]["actual_peak_mb"] <= 2048
    call = capture(out / "train.sh")
    assert call.world_size == 2 and set(data["trainer_args"]) <= set(call.program_args)
    assert "struck out by the lower bound" in text
    assert "listed by the engine" in text and "may be off by as much" not in text
    for stage in data["communication"]:
        assert stage["engine_mb"] == pytest.approx(stage["model_mb"], rel=0.02, abs=2)


def test_some_stages_first_and_then_the_others(script: Path, tmp_path: Path) -> None:
    """A search looks at the worst stages of a doubtful strategy; when it wants all of them, those are not run again."""
    measure = DryRuns(capture(script), str(script), 2, tmp_path / "runs", RunSpec(trainer="embedded"), Execution(jobs=1))
    strategy = Strategy(tp=1, pp=2, dp=1, cp=1, micro_batch=1, stages=((2,), (2,)), sequence_parallel=False)
    first = measure(strategy, [1])
    assert first.error is None and list(first.stages) == [1] and first.ranks == 1
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    whole = measure(strategy)
    assert list(whole.stages) == [0, 1] and whole.ranks == 2 and whole.stages[1] == first.stages[1]
    assert whole.record == first.record and all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_the_labs_table_from_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5-7B on eight cards. The figures are those of MindSpeed-LLM 2.2.0 in the same layouts (benchmarks/accuracy.py)."""
    try:
        engine_path()
    except DryRunError as error:
        pytest.skip(str(error))
    plan = ROOT / "examples" / "sweeps" / "qwen25_7b_lab.yaml"
    assert main(["sweep", str(plan), "--out", str(tmp_path / "lab"), "--trainer", "embedded", "--json"]) == 0
    used = {row["name"]: row["used_peak_mb"] for row in json.loads(capsys.readouterr().out)["variants"]}
    assert used["TP2PP4+VPP"] > used["TP2PP4"] > used["TP4PP2"] > used["TP4PP2+recompute"], "the lab's order"
    assert [used[name] for name in ("TP2PP4", "TP4PP2", "TP4PP2+recompute")] == [27784, 21204, 17387]
    assert [used[name] for name in ("TP2PP2+ring 16k", "TP2PP2+Ulysses 16k")] == [50849, 51633]
