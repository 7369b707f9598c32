"""Jobs: what the arguments say, and what Megatron would refuse, with the numbers and the way out."""

from __future__ import annotations

import pytest

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.megatron.arguments import override_args

QWEN = (
    "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention "
    "--num-query-groups 4 --seq-length 4096 --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 64 --bf16"
)


def job(world: int = 8, extra: str = "", program: str = "pretrain_gpt.py", base: str = QWEN) -> Job:
    call = read_msrun_call(["--worker_num", str(world), program, *base.split()], "/here")
    return understand(call, "train.sh", extra.split())


def test_the_layout() -> None:
    found = job(16, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2")
    p = found.parallel
    assert (p.tp, p.pp, p.cp, p.dp, p.ep, p.vpp) == (2, 2, 2, 2, 1, None)
    assert (found.microbatches, found.seq_length, found.num_layers, found.kind) == (32, 4096, 28, "pretrain")
    assert [[len(chunk) for chunk in stage] for stage in found.stage_layers] == [[14], [14]]


def test_virtual_stages_with_noop_layers_as_in_the_lab() -> None:
    found = job(8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 32 --noop-layers 2,3,5,8 "
                   "--num-layers-per-virtual-pipeline-stage 2")  # fmt: skip
    assert found.parallel.vpp == 4
    assert found.stage_layers[1] == ((), (10, 11), (18, 19), (26, 27))  # layers 2 and 3 are no-ops
    assert [sum(len(chunk) for chunk in stage) for stage in found.stage_layers] == [7, 6, 7, 8]


def test_dualpipev_runs_back() -> None:
    found = job(2, "--pipeline-model-parallel-size 2 --schedules-method dualpipev")
    assert found.stage_layers == (
        (tuple(range(7)), tuple(range(21, 28))),
        (tuple(range(7, 14)), tuple(range(14, 21))),
    )


def test_num_layer_list() -> None:
    found = job(4, "--pipeline-model-parallel-size 4 --num-layer-list 6,7,8,7")
    assert [len(stage[0]) for stage in found.stage_layers] == [6, 7, 8, 7]


def test_a_drawn_pipeline_is_read_as_it_is_drawn() -> None:
    found = job(2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*7|(t|)*1,t*12|t*8mL")
    assert found.parallel.vpp == 2
    assert [[len(chunk) for chunk in stage] for stage in found.stage_layers] == [[7, 12], [1, 8]]
    assert found.stage_layers[1] == ((7,), tuple(range(20, 28)))
    flat = job(2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*13|t*15L")
    assert flat.parallel.vpp is None and [len(stage[0]) for stage in flat.stage_layers] == [13, 15]


@pytest.mark.parametrize(
    ("world", "extra", "sentences"),
    [
        (8, "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
         ["28 layers", "PP 4", "add 4 no-op layers to reach 32", "--num-layers 32 --noop-layers 28,29,30,31"]),
        (8, "--pipeline-model-parallel-size 8", ["28 layers", "PP 8", "4 no-op layers", "--num-layer-list 3,3,3,3,4,4,4,4"]),
        (8, "--tensor-model-parallel-size 8", ["28 attention heads", "TP 8", "1, 2, 4, 7, 14, 28"]),
        (8, "--tensor-model-parallel-size 7", ["World size 8", "TP 7 × PP 1 × CP 1 = 7"]),
        (8, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", ["World size 8", "= 16", "at least 16 ranks"]),
        (8, "--global-batch-size 60", ["60", "DP 8 × micro batch 1 = 8", "56 or 64"]),
        (8, "--micro-batch-size 3", ["64", "DP 8 × micro batch 3 = 24", "48 or 72"]),
        (2, "--tensor-model-parallel-size 2 --num-query-groups 3", ["3 query groups", "TP 2"]),
        (4, "--pipeline-model-parallel-size 4 --num-layer-list 7,7,14", ["3 stages", "PP is 4"]),
        (4, "--pipeline-model-parallel-size 4 --num-layer-list 7,7,7,8", ["29 layers", "28"]),
        (4, "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*9|t*10|t*9L", ["3 parts", "PP 4"]),
        (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*9|t*9L", ["18 layers", "28"]),
        (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t*999|)*99999999999999L", ["longer than"]),
        (4, "--pipeline-model-parallel-size 4 --layerwise-disaggregated-training", ["torchrun calls of all nodes", "bash EDGE & bash CLOUD & wait"]),
        (8, "--noop-layers 30", ["layer 30", "0 to 27"]),
        (8, "--num-layers-per-virtual-pipeline-stage 2", ["need a pipeline"]),
        (4, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 7 --global-batch-size 6",
         ["6 microbatches", "multiple of PP 4", "--global-batch-size 8"]),
        (8, "--seq-length 65536", ["65536", "32768"]),
        (8, "--context-parallel-size 8 --seq-length 4104", ["4104", "16"]),
        (8, "--context-parallel-size 8 --context-parallel-algo ulysses_cp_algo", ["28 attention heads", "Ulysses 8"]),
        (8, "--expert-model-parallel-size 8", ["needs --num-experts"]),
        (8, "--expert-model-parallel-size 8 --num-experts 12", ["12 experts", "EP 8"]),
        (8, "--fp16", ["--fp16 and --bf16"]),
        (8, "--overlap-param-gather", ["--use-distributed-optimizer"]),
        (8, "--recompute-granularity full", ["--recompute-method"]),
        (8, "--hidden-size 3585 --ffn-hidden-size 18944", ["3585", "28 attention heads"]),
        (8, "--num-layers many", ["--num-layers expects a whole number and got 'many'"]),
        (8, "--micro-batch-size 0", ["--micro-batch-size is 0"]),
        (8, "--tensor-mo 4", ["--tensor-mo abbreviates --tensor-model-parallel-size", "in full"]),
        (8, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0", ["--recompute-num-layers is 0"]),
        (8, "--recompute-granularity full --recompute-method uniform", ["needs --recompute-num-layers"]),
        (2, "--tensor-model-parallel-size 2 --padded-vocab-size 1025", ["1025", "TP 2", "1026"]),
        (8, "--num-experts 4 --moe-router-topk 5", ["--moe-router-topk 5", "--num-experts 4"]),
        (8, "--num-experts 0", ["--num-experts is 0"]),
        (8, "--ffn-hidden-size 0", ["--ffn-hidden-size is 0"]),
        (4, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 0", ["per-virtual-pipeline-stage is 0"]),
        (8, "--pipeline-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 2 --use-tp-pp-dp-mapping",
         ["--use-tp-pp-dp-mapping", "expert TP 1 × EP 2", "TP 1 × CP 1"]),
    ],
)  # fmt: skip
def test_refusals_have_numbers_and_a_remedy(world: int, extra: str, sentences: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        job(world, extra)
    for sentence in sentences:
        assert sentence in str(error.value)


def test_the_remedies_work() -> None:
    vpp = "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    assert job(8, vpp + " --num-layers 32 --noop-layers 28,29,30,31").parallel.vpp == 4
    assert job(8, "--pipeline-model-parallel-size 8 --num-layer-list 3,3,3,3,4,4,4,4").parallel.pp == 8
    assert job(8, "--global-batch-size 56").microbatches == 7


@pytest.mark.parametrize(
    ("world", "extra", "sentence"),
    [
        (8, "--num-layers 1000000000", "at most 10000 layers"),
        (1 << 30, "--global-batch-size 1073741824", "at most 1048576"),
    ],
)
def test_a_slip_of_the_finger_does_not_fill_the_memory(world: int, extra: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        job(world, extra)


def test_missing_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="lack --seq-length, --micro-batch-size"):
        job(base="--num-layers 2 --hidden-size 64 --num-attention-heads 4")


@pytest.mark.parametrize(
    ("program", "extra", "kind"),
    [
        ("pretrain_gpt.py", "", "pretrain"),
        ("posttrain_gpt.py", "--stage sft", "sft"),
        ("posttrain_gpt.py", "--stage dpo", "dpo"),
        ("posttrain_gpt.py", "--stage sft --lora-r 8", "lora"),
        ("my_train.py", "", "train"),
    ],
)
def test_kinds(program: str, extra: str, kind: str) -> None:
    assert job(8, extra, program).kind == kind


def test_a_program_that_is_not_megatrons_is_taken_as_it_is() -> None:
    found = understand(read_msrun_call(["--worker_num", "4", "tiny.py", "--width", "8"], "/here"), "tiny.sh")
    assert (found.kind, found.world_size, found.is_megatron) == ("program", 4, False)


def test_overrides_replace_in_place_and_extend() -> None:
    args = ["--a", "1", "--b", "--c", "2", "3", "--a", "4"]
    assert override_args(args, ["--c", "5", "--d", "--a", "9"]) == ("--a", "9", "--b", "--c", "5", "--d")
    with pytest.raises(UsageError, match="'5' after -- is not a flag"):
        override_args(args, ["5"])


def test_a_careful_reader_speaks_up() -> None:
    notes = job(8, "--num-experts 8 --expert-model-parallel-size 8").notes
    assert any("no --moe-ffn-hidden-size" in note for note in notes)
    assert any("balanced" in note for note in notes)
