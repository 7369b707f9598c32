"""The real MindSpeed-LLM, MindSpeed and Megatron-LM in a dry run, no source edited.

Run where MINDSPEED_CORE_MS_PATH names the folder with their trees, and the packages that they import are there or installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dryrun.launch.executors.rank import run_rank
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.plan import make_plan
from mindspeed_dryrun.launch.run import Execution, dry_run_job
from mindspeed_dryrun.launch.stack import missing_packages
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec

pytestmark = pytest.mark.stack
STACK = Path(os.environ.get("MINDSPEED_CORE_MS_PATH", "/nowhere"))
LLM = STACK / "MindSpeed-LLM"
ROOT = Path(__file__).resolve().parents[2]

if not LLM.is_dir():
    pytest.skip("MINDSPEED_CORE_MS_PATH does not name a folder with MindSpeed-LLM", allow_module_level=True)
if missing_packages(STACK):
    pytest.skip(
        f"the packages that MindSpeed-LLM imports are not there: {', '.join(missing_packages(STACK))}", allow_module_level=True
    )

SMALL = """
--use-mcore-models --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --seq-length 512
--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --disable-bias-linear --swiglu --normalization RMSNorm
--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --position-embedding-type rope --untie-embeddings-and-output-weights
--make-vocab-size-divisible-by 1 --padded-vocab-size 1024 --tokenizer-type PretrainedFromHF --tokenizer-name-or-path nowhere
--attention-dropout 0 --hidden-dropout 0 --train-iters 100 --lr 1e-5 --bf16 --no-masked-softmax-fusion
--no-gradient-accumulation-fusion --log-interval 1 --eval-interval 1000 --eval-iters 10 --data-path nowhere --split 100,0,0
--distributed-backend nccl --ai-framework mindspore
""".split()  # noqa: SIM905
MOE = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-permutation-async-comm --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01"
TUNE = "--stage sft --is-instruction-dataset --prompt-type llama3 --finetune --variable-seq-lengths"

FAMILIES = {
    "dense": (4, "pretrain_gpt.py", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    "vpp": (2, "pretrain_gpt.py", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "ring": (2, "pretrain_gpt.py", "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo"),
    "ulysses": (2, "pretrain_gpt.py", "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"),
    "distributed optimizer": (2, "pretrain_gpt.py", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "moe alltoall_seq": (2, "pretrain_gpt.py", f"{MOE} --moe-token-dispatcher-type alltoall_seq"),
    "moe alltoall": (2, "pretrain_gpt.py", f"{MOE} --moe-token-dispatcher-type alltoall"),
    "moe allgather": (2, "pretrain_gpt.py", f"{MOE} --moe-token-dispatcher-type allgather"),
    "full fine-tuning": (2, "posttrain_gpt.py", f"{TUNE} --pipeline-model-parallel-size 2"),
    "lora": (2, "posttrain_gpt.py", f"{TUNE} --pipeline-model-parallel-size 2 --lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_proj"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Upstream's trees are the same after every test, down to `__pycache__` and compiled helpers."""
    before = _files()
    yield
    assert _files() == before


def _files() -> dict[str, int]:
    trees = [STACK / name for name in ("MindSpeed-LLM", "MindSpeed", "Megatron-LM")]
    files = [file for tree in trees for file in tree.rglob("*") if ".git" not in file.parts]
    return {str(file): file.lstat().st_mtime_ns for file in files if not file.is_dir()}


def dry_run(tmp_path: Path, world: int, program: str, args: list[str], **options: Any) -> Report:
    call = read_msrun_call(["--worker_num", str(world), "--local_worker_num", str(world), program, *args], str(LLM))
    options = {"trainer": "script", "ranks": "0"} | options
    return dry_run_job(understand(call, "test.sh"), tmp_path / "record", RunSpec(**options), Execution(jobs=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_of_each_family_trains(family: str, tmp_path: Path) -> None:
    world, program, flags = FAMILIES[family]
    saves = [
        "--save",
        str(tmp_path / "saved"),
        "--save-interval",
        "1",
        "--tensorboard-dir",
        str(tmp_path / "tensorboard"),
    ]
    report = dry_run(tmp_path, world, program, [*SMALL, *flags.split(), *saves])
    rank = report.ranks[0]
    assert rank.status == "ok", rank.error
    assert rank.used_peak_mb and rank.used_peak_mb > 10
    progress = (tmp_path / "record" / "ranks" / "00000" / "progress.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["phase"] == "iteration" for line in progress) == 2
    assert not (tmp_path / "saved").exists() and not (tmp_path / "tensorboard").exists()


def test_a_rank_that_trained_nothing_has_failed(tmp_path: Path) -> None:
    """Without the patch of the data flags post-training ends well and prints a figure: it must not count."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "package: mindspeed_llm\npatches:\n"
        "  - {name: mindspeed-llm-do-train, target: 'mindspeed_llm.training.training:update_save_checkpoint_chmod', skip: true}\n"
    )
    world, program, flags = FAMILIES["full fine-tuning"]
    report = dry_run(tmp_path, world, program, [*SMALL, *flags.split()], patch_files=[str(mine)])
    assert report.ranks[0].status == "failed"


def test_more_imbalance_is_more_memory(tmp_path: Path, engine: Any) -> None:
    world, program, flags = FAMILIES["moe alltoall_seq"]
    call = read_msrun_call(["--worker_num", str(world), program, *SMALL, *flags.split()], str(LLM))
    used = []
    for factor in (1.0, 2.0):
        plan = make_plan(understand(call, "test.sh"), RunSpec(ranks="0", trainer="script", moe_load=f"hot:{factor}"), engine)
        task = plan.tasks[0]
        record = tmp_path / str(factor)
        record.mkdir()
        (record / "patches.json").write_text(json.dumps(list(plan.patches)))
        result = run_rank(task, record)
        assert result is not None and result.status == "ok", result
        used.append(result.used_peak_mb or 0)
    assert used[1] > used[0]


TUTORIAL = "examples/mindspore/qwen25/pretrain_qwen25_7b_32k_ms.sh"
# Measured with upstream patched by hand, used peak in M of the first and the last stage.
FIGURES = [
    ([], {0: 55389, 2: 48436}),
    (
        ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
        {0: 34946, 2: 37813},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "figures"), FIGURES, ids=["no recomputation", "full recomputation"])
def test_the_tutorials_script_gives_the_tutorials_figures(extra: list[str], figures: dict[int, int], tmp_path: Path) -> None:
    sets = [word for name in ("TP=2", "PP=2", "SEQ_LEN=10240", "NPUS_PER_NODE=4") for word in ("--set", name)]
    command = [
        sys.executable,
        "-m",
        "mindspeed_dryrun",
        "launch",
        str(LLM / TUTORIAL),
        *sets,
        "--out",
        str(tmp_path / "record"),
    ]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--jobs", "1", "--json", "--", *extra],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["job"]["trainer"] == "script"
    assert {rank["rank"]: rank["used_peak_mb"] for rank in report["ranks"]} == figures
