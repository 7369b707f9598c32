"""Short runs and rank classes change no figure: shown with the real MindSpore and the embedded trainer.

Used peaks must be equal to the megabyte. Peaks with fragments may move a little with the number of microbatches, and how
much is bounded here.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from mindspeed_dryrun.engines.packages import packages_folder
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.run import Execution, dry_run_job
from mindspeed_dryrun.record.model import RankReport
from mindspeed_dryrun.record.run_spec import RunSpec

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run"),
]

MODEL = (
    "--hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --padded-vocab-size 32000 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights "
    "--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope --use-flash-attn "
    "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 "
    "--no-gradient-accumulation-fusion --lr 1e-5 --use-mcore-models --train-iters 5"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Fragments move by this share of the peak at most between a short and a full run.
FRAGMENTS = 0.03


def job(world: int, layers: int, batch: int, extra: str) -> Job:
    text = f"--worker_num {world} pretrain_gpt.py --num-layers {layers} --global-batch-size {batch} {MODEL} {extra}"
    return understand(read_msrun_call(text.split(), "/", dict(os.environ)), "x.sh")


def run(found: Job, out: Path, **options: str) -> dict[int, RankReport]:
    report = dry_run_job(found, out, RunSpec(trainer="embedded", **options), Execution(jobs=1))  # type: ignore[arg-type]
    assert all(rank.status == "ok" for rank in report.ranks), [rank.error for rank in report.ranks]
    return {rank.rank: rank for rank in report.ranks}


def pp(size: int, chunk: int | None = None) -> str:
    virtual = f" --num-layers-per-virtual-pipeline-stage {chunk}" if chunk else ""
    return f"--pipeline-model-parallel-size {size}{virtual}"


@pytest.mark.parametrize("recompute", ["", RECOMPUTE], ids=["", "recompute"])
@pytest.mark.parametrize(
    ("world", "layers", "extra"),
    [(1, 8, ""), (2, 8, pp(2)), (3, 9, pp(3)), (4, 8, pp(4)), (2, 8, pp(2, 2)), (4, 8, pp(4, 1)), (4, 16, pp(4, 1))],
    ids=["PP1", "PP2", "PP3", "PP4", "PP2 VPP2", "PP4 VPP2", "PP4 VPP4"],
)
def test_short_runs_reach_the_peak(tmp_path: Path, world: int, layers: int, extra: str, recompute: str) -> None:
    found = job(world, layers, 24, f"{extra} {recompute}")
    short = run(found, tmp_path / "short", microbatches="auto")
    full = run(found, tmp_path / "full", microbatches="all")
    assert {rank: item.used_peak_mb for rank, item in short.items()} == {rank: item.used_peak_mb for rank, item in full.items()}
    for rank, item in full.items():
        assert item.actual_peak_mb == pytest.approx(short[rank].actual_peak_mb, rel=FRAGMENTS)


@pytest.mark.parametrize(
    ("world", "layers", "extra"),
    [
        (4, 4, "--tensor-model-parallel-size 2 --sequence-parallel " + pp(2)),
        (4, 4, "--use-distributed-optimizer"),
        (4, 4, f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --seq-length 128 {RECOMPUTE}"),
        (4, 5, "--num-layer-list 2,3 --use-distributed-optimizer " + pp(2)),
        (4, 8, "--noop-layers 7 --tensor-model-parallel-size 2 --sequence-parallel " + pp(2, 2)),
        (4, 4, "--context-parallel-size 4 --context-parallel-algo megatron_cp_algo"),
        (4, 4, "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --tensor-model-parallel-size 2"),
    ],
    ids=["TP2 PP2", "DP4 shared", "DP4 shared, small", "PP2 uneven", "VPP no-op", "ring CP4", "Ulysses CP2 TP2"],
)
def test_ranks_of_a_class_are_equal(tmp_path: Path, world: int, layers: int, extra: str) -> None:
    found = job(world, layers, 16, extra)
    every = run(found, tmp_path / "all", ranks="all")
    classes = run(found, tmp_path / "auto", ranks="auto")
    for item in classes.values():
        peaks = {rank: every[rank].used_peak_mb for rank in item.represents}
        assert set(peaks.values()) == {item.used_peak_mb}, peaks


def test_communicators_are_those_that_the_engine_lists(tmp_path: Path) -> None:
    ranks = run(job(4, 4, 4, f"{pp(2)} --tensor-model-parallel-size 2 --sequence-parallel"), tmp_path / "record")
    for rank, report in ranks.items():
        folder = tmp_path / "record" / "ranks" / f"{rank:05d}" / f"rank_{rank}" / "execute_order"
        with (folder / "comm_execute_order.csv").open(newline="") as stream:
            listed = {row["group"]: len(row["comm_rank"].split()) for row in csv.DictReader(stream)}
        assert listed and {item.group: item.size for item in report.communicators} == listed
        assert {item.buffer_mb for item in report.communicators} == {400}
