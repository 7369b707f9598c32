"""A script that calls torchrun once for each node of one job: nodes may have different sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mindspeed_dryrun.engines.cann.stand_in import StandIn
from mindspeed_dryrun.engines.torch_npu.engine import TorchEngine
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.launch.captured_call import CapturedCall
from mindspeed_dryrun.launch.job import Job, changed, understand
from mindspeed_dryrun.launch.nodes import may_be_one_job, one_job
from mindspeed_dryrun.launch.plan import make_plan
from mindspeed_dryrun.launch.rank_classes import rank_classes
from mindspeed_dryrun.launch.run import job_file, job_of_record
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.launch.torchrun_call import read_torchrun_call
from mindspeed_dryrun.megatron.model_shape import read_shape
from mindspeed_dryrun.rank.activation import Activation
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.search.measure import job_with

SCRIPT = Path("train.sh")
NODE = "--nproc_per_node {0} --nnodes {1} --node_rank {2} --master_addr localhost --master_port 6000 posttrain_gpt.py "
ARGS = (
    "--num-layers 28 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --stage sft "
    "--micro-batch-size 1 --global-batch-size 8 --layerwise-disaggregated-training --num-virtual-stages-per-pipeline-rank 2 "
)


def calls(*sizes: int, args: str = ARGS, nodes: int = 0) -> list[CapturedCall]:
    return [
        read_torchrun_call((NODE.format(size, nodes or len(sizes), number) + args).split(), "/here")
        for number, size in enumerate(sizes)
    ]


def job(*sizes: int, extra: str) -> Job:
    return understand(one_job(SCRIPT, calls(*sizes, args=ARGS + extra)), "train.sh")


def test_scripts_of_all_nodes_are_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cloud").write_text(f"DATA=\ntorchrun {NODE.format(3, 2, 1)} --tp 1 --data-path $DATA \\\n --load cloud\n")
    (tmp_path / "edge").write_text(f"torchrun {NODE.format(1, 2, 0)} --tp 1 --data-path data --load edge | tee logs/x.log\n")
    (tmp_path / "all.sh").write_text("bash cloud &\nsleep 5\nbash edge &\nwait\n")
    call = capture(Path("all.sh"))
    assert (call.node_sizes, call.world_size) == ((1, 3), 4)
    assert call.program_args == ("--tp", "1", "--data-path", "data", "--load", "edge")
    assert "one job of 2 nodes with 1, 3 ranks" in call.notes[0]


def test_a_loop_over_the_nodes_is_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.sh").write_text("for i in 0 1 2; do\n  torchrun --nnodes 3 --nproc_per_node 8 --node_rank $i p.py\ndone\n")
    call = capture(Path("x.sh"))
    assert (call.node_sizes, call.world_size) == ((8, 8, 8), 24)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("torchrun --nnodes 2 --node_rank 0 a.py\ntorchrun --nnodes 2 --node_rank 1 b.py\n", "more than once"),
        ("torchrun a.py --x 1\ntorchrun a.py --x 2\n", "more than once"),
        ("while true; do torchrun --nnodes 2 --node_rank 1 a.py; sleep 1; done\n", "more than once"),
        ("torchrun --nnodes 2 --node_rank 0 a.py\ntorchrun --nnodes 2 --node_rank 1 --master_port 7 a.py\n", "more than once"),
        ("msrun --worker_num 2 --node_rank 0 a.py\ntorchrun --nnodes 2 --node_rank 1 a.py\n", "msrun more than once"),
        ("for i in 0 2; do torchrun --nnodes 3 --node_rank $i a.py; done\n", r"2 of the 3 nodes.*\(--node_rank 0, 2\)"),
        ("for i in 0 1; do torchrun --nnodes 2 --node_rank $i a.py --seed $i; done\n", "different values of --seed"),
        ("for i in 0 1; do TASK_QUEUE_ENABLE=$i torchrun --nnodes 2 --node_rank $i a.py; done\n", "of TASK_QUEUE_ENABLE"),
    ],
)
def test_calls_that_are_not_one_job_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.sh").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        capture(Path("x.sh"))


def test_a_call_that_is_still_being_written_is_waited_for() -> None:
    line = json.dumps({"program": "torchrun", "argv": ["--nnodes", "2", "--node_rank", "0", "a.py"], "cwd": "/", "env": {}})
    assert may_be_one_job([line, line[:20]])
    assert not may_be_one_job([line, line])


def places(found: Job) -> list[tuple[int, int, int]]:
    return [(at.pp, at.dp, at.tp) for at in map(found.layout.place, range(found.world_size))]


def test_the_edge_has_both_ends() -> None:
    found = job(1, 3, extra="--pipeline-model-parallel-size 4 --num-layer-list 2,8,8,8,2")
    assert found.stage_layers == (
        ((0, 1), (26, 27)), (tuple(range(2, 10)), ()), (tuple(range(10, 18)), ()), (tuple(range(18, 26)), ()),
    )  # fmt: skip
    assert (found.parallel.dp, found.microbatches, found.num_layers) == (1, 8, 28)
    assert places(found) == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert [item.why for item in rank_classes(found)][:2] == [
        "first stage, embedding and head, 4 layers in 2 chunks", "middle stage, 8 layers in 2 chunks",
    ]  # fmt: skip
    assert found.layout.kind_of_group(range(4)) == "pp"


def test_tp_is_the_size_of_a_node() -> None:
    extra = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layer-list 2,8,8,8,2"
    found = job(1, 2, 2, 2, extra=extra)
    assert places(found) == [(0, 0, 0), (1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1), (3, 0, 0), (3, 0, 1)]
    assert [item.represents for item in rank_classes(found)] == [(0,), (1,), (2,), (3,), (4,), (5,), (6,)]
    assert [found.layout.kind_of_group(ranks) for ranks in ((1, 2), (0, 2, 4, 6))] == ["tp", "pp"]
    told = [Activation.from_env(task.env).late_streams for task in make_plan(found, RunSpec(), None).tasks]
    assert told == [True] + 6 * [False], "what the edge sends waits for the cloud"


def test_the_cloud_may_have_data_parallel_ranks_where_the_edge_has_none() -> None:
    extra = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layer-list 2,24,2"
    for edge in (1, 2):
        found = job(edge, 2, 2, extra=extra)
        assert places(found)[edge:] == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
        assert (found.parallel.dp, found.microbatches) == (2, 4)
        assert [item.represents for item in rank_classes(found)][-2:] == [(edge, edge + 2), (edge + 1, edge + 3)]
        assert found.layout.kind_of_group((edge, edge + 2)) == "dp"


@pytest.mark.parametrize(
    ("sizes", "extra", "sentence"),
    [
        ((4,), "--pipeline-model-parallel-size 4 --num-layer-list 2,8,8,8,2", "torchrun calls of all nodes are needed"),
        ((1, 3), "--pipeline-model-parallel-size 4 --num-layer-list 7,7,7,7", "5 numbers.* 28 layers, and it has 4"),
        ((1, 3), "--pipeline-model-parallel-size 4", "it has 0 that add up to 0"),
        ((1, 3), "--pipeline-model-parallel-size 1", "PP is 1"),
        ((1, 4), "--pipeline-model-parallel-size 4 --num-layer-list 2,8,8,8,2", "cloud's 4 ranks.* 3 stages = 3"),
        ((1, 6), "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layer-list 2,8,8,8,2", "edge's 1 ranks"),
        ((2, 4), "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layer-list 2,24,2", "nodes of 2, 4 ranks"),
        ((3, 4), "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layer-list 2,24,2", "TP 3"),
    ],
)  # fmt: skip
def test_what_upstream_cannot_run_is_refused(sizes: tuple[int, ...], extra: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        job(*sizes, extra=extra)


def test_each_rank_gets_the_size_of_its_own_node() -> None:
    found = job(1, 3, extra="--pipeline-model-parallel-size 4 --num-layer-list 2,8,8,8,2")
    plan = make_plan(found, RunSpec(ranks="all"), TorchEngine("2.13.0", StandIn(Path("/cann"))))
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    assert [[task.env[name] for name in names] for task in plan.tasks] == [
        ["0", "0", "1", "0", "2", "4"], ["1", "0", "3", "1", "2", "4"], ["2", "1", "3", "1", "2", "4"], ["3", "2", "3", "1", "2", "4"],
    ]  # fmt: skip
    assert json.loads(plan.tasks[1].env["MINDSPEED_DRYRUN"])["nodes"] == [1, 3]
    assert changed(found, ["--seed", "7"]).nodes == (1, 3)
    other = make_plan(dataclasses.replace(found, node_sizes=(2, 2)), plan.spec, plan.engine)
    assert other.fingerprint != plan.fingerprint
    assert job_of_record(job_file(plan)).nodes == (1, 3)


def test_no_model_knows_the_u_shaped_pipeline() -> None:
    with pytest.raises(UsageError, match="do not know the U-shaped pipeline"):
        read_shape(ARGS.split())


def test_a_strategy_on_other_cards_has_equal_nodes() -> None:
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 8 --micro-batch-size 1"
    call = one_job(SCRIPT, calls(2, 2, args=words))
    strategy = Strategy(tp=1, pp=1, dp=8, cp=1, micro_batch=1, stages=((4,),))
    assert job_with(call, "train.sh", strategy, cards_per_node=4).nodes == (4, 4)


def test_a_job_of_equal_nodes_has_them_too() -> None:
    call = read_torchrun_call(["--nproc_per_node", "8", "--nnodes", "2", "p.py"], "/here")
    assert understand(call, "train.sh").nodes == (8, 8)
