"""An edge and a cloud of upstream's own layerwise disaggregated training, small, on torch_npu: every rank trains to the end."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_npu_tests import MARKS

STACK = Path(os.environ.get("MINDSPEED_CORE_MS_PATH", "/nowhere"))
pytestmark = [*MARKS, pytest.mark.stack]
if not (STACK / "MindSpeed-LLM/mindspeed_llm/core/layerwise_disaggregated_training/utils.py").is_file():
    pytest.skip("MINDSPEED_CORE_MS_PATH names no MindSpeed-LLM of 26.1.0 or later", allow_module_level=True)

ROOT = Path(__file__).parents[2]
ARGS = (
    "--layerwise-disaggregated-training --num-virtual-stages-per-pipeline-rank 2 --use-mcore-models --num-layers 4 "
    "--hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 "
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8 --padded-vocab-size 1024 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--use-flash-attn --attention-dropout 0 --hidden-dropout 0 --train-iters 5 --lr 1e-6 --bf16 --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --finetune --stage sft --is-instruction-dataset --no-pad-to-seq-lengths --prompt-type qwen "
    "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path absent --transformer-impl local --distributed-backend nccl "
)


@pytest.mark.parametrize(
    ("tp", "pp", "layers", "sizes", "lengths"),
    [
        (1, 3, "1,1,1,1", (1, 2), (64,)),
        (2, 2, "1,2,1", (1, 2), (64, 256)),  # TP 1 on the edge, TP 2 on the cloud
        (2, 2, "1,2,1", (2, 2, 2), (64,)),  # DP 2 on the cloud
    ],
)
def test_every_rank_of_an_edge_and_a_cloud_trains(
    tmp_path: Path, tp: int, pp: int, layers: str, sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --num-layer-list {layers}"
    starts = []
    for number, size in enumerate(sizes):
        meeting = f"--nnodes {len(sizes)} --node_rank {number} --nproc_per_node {size} --master_addr localhost --master_port 6000"
        data = "--data-path /data/alpaca" if number == 0 else "--data-path "
        (tmp_path / f"node{number}").write_text(f"torchrun {meeting} posttrain_gpt.py {ARGS} {layout} {data}\n")
        starts.append(f"bash node{number} &\n")
    (tmp_path / "train.sh").write_text("".join([*starts, "wait\n"]))
    peaks = []
    for tokens in lengths:
        record = tmp_path / f"record{tokens}"
        command = [sys.executable, "-m", "mindspeed_dryrun.launch", "train.sh", "--jobs", "1", "--out", str(record)]
        command += ["--sample-length", str(tokens)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        ranks = json.loads((record / "report.json").read_text())["ranks"]
        assert ranks and {rank["status"] for rank in ranks} == {"ok"}, done.stdout + done.stderr
        results = [json.loads((record / f"ranks/{rank['rank']:05d}/result.json").read_text()) for rank in ranks]
        peaks.append([result["allocator"][-1]["max_allocated"] for result in results])
    # The cloud learns from the edge how long samples are.
    assert all(one < other for shorter, longer in itertools.pairwise(peaks) for one, other in zip(shorter, longer, strict=True))
