"""Enumeration: every strategy is one that Megatron accepts, each once, and none of the allowed ones is missing."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from strategy_models import MODELS, read_space

from mindspeed_dryrun.devices.hardware import read_hardware
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.lower_bound import saved_mb, state_mb
from mindspeed_dryrun.estimate.operators import read_operators
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy, apply, read_strategy
from mindspeed_dryrun.estimate.time_model import estimate
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.megatron.arguments import without
from mindspeed_dryrun.megatron.flags import with_tag
from mindspeed_dryrun.megatron.model_shape import read_shape
from mindspeed_dryrun.megatron.settings import read as read_settings
from mindspeed_dryrun.search.measure import job_with
from mindspeed_dryrun.search.space import Space, strategies, why_nothing

QWEN = MODELS["qwen2.5-7b"]
_FLAGS = """
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention
    --num-query-groups 4 --swiglu --padded-vocab-size 152064 --untie-embeddings-and-output-weights --seq-length 4096
    --max-position-embeddings 4096 --global-batch-size 64 --micro-batch-size 1 --bf16 --sequence-parallel
    --tensor-model-parallel-size=2 --pipeline-model-parallel-size 4 --recompute-activations"""
ARGS = _FLAGS.split()
CALL = read_msrun_call(["--worker_num", "8", "--local_worker_num", "8", "pretrain_gpt.py", *ARGS], "/here")


def test_the_shape_is_read_from_the_arguments() -> None:
    assert read_shape(ARGS) == QWEN


@pytest.mark.parametrize("cards", [4, 8, 24, 64])
def test_every_strategy_is_accepted_and_means_what_it_says(cards: int) -> None:
    """The flags of each strategy, understood again, give the same layout, layer by layer."""
    found = strategies(QWEN, cards, Space(vpp=(1, 2, 4), cp=(1, 2), cp_algorithms=("megatron_cp_algo", "ulysses_cp_algo")))
    assert len(found) > 100
    for strategy in found[:: max(1, len(found) // 400)]:
        job = job_with(CALL, "train.sh", strategy, 8)
        p = job.parallel
        assert (p.tp, p.pp, p.dp, p.cp, p.vpp or 1) == (strategy.tp, strategy.pp, strategy.dp, strategy.cp, strategy.chunks)
        assert tuple(tuple(len(chunk) for chunk in stage) for stage in job.stage_layers) == strategy.stages
        assert job.world_size == strategy.world == cards
        assert job.distributed_optimizer == strategy.distributed_optimizer
        again = read_strategy(job.args, cards)
        assert (again.stages, again.noop_layers, again.recompute.kind) == (
            strategy.stages, strategy.noop_layers, strategy.recompute.kind,
        )  # fmt: skip
        assert again.name == strategy.name
        assert read_shape(job.args) == QWEN


def test_each_strategy_has_its_own_name() -> None:
    found = strategies(QWEN, 8, Space(vpp=(1, 2, 4), sequence_parallel=(True, False)))
    assert len({strategy.name for strategy in found}) == len(found)


@pytest.mark.parametrize("cards", [1, 2, 6, 8, 16])
def test_the_count_of_a_plain_space_is_the_count_by_hand(cards: int) -> None:
    """Even splits, no recomputation: TP × PP × DP × MBS by brute force."""
    space = Space(
        vpp=(1,), micro_batch=(1, 2, 3), recompute=(Recompute(),), blocks=False, uneven=False,
        distributed_optimizer=(False,),
    )  # fmt: skip
    expected = 0
    for tp, pp, dp, mbs in itertools.product(range(1, cards + 1), range(1, cards + 1), range(1, cards + 1), (1, 2, 3)):
        fits = tp * pp * dp == cards and tp <= 8 and 28 % tp == 0 and 4 % tp == 0 and 28 % pp == 0
        expected += fits and 64 % (dp * mbs) == 0
    assert len(strategies(QWEN, cards, space)) == expected


def test_a_split_that_does_not_divide_is_filled_with_noop_layers() -> None:
    found = strategies(QWEN, 8, Space(tp=(1,), pp=(8,), vpp=(1,)))
    assert all(sum(map(sum, strategy.stages)) == 28 for strategy in found)
    assert any(strategy.stages == ((3,), (4,), (4,), (4,), (4,), (4,), (4,), (1,)) for strategy in found)
    even = strategies(QWEN, 8, Space(tp=(1,), pp=(8,), vpp=(1,), uneven=False))
    assert even == []


def test_interleaved_chunks_lose_their_layer_at_the_output_first() -> None:
    found = [s for s in strategies(QWEN, 8, Space(tp=(2,), pp=(4,), vpp=(4,), micro_batch=(1,))) if s.recompute.kind == "none"]
    assert [strategy.stages for strategy in found] == [((1, 2, 2, 2), (1, 2, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1))]
    assert found[0].noop_layers == (1, 3, 5, 31)
    assert "--num-layers 32 --noop-layers 1,3,5,31 --num-layers-per-virtual-pipeline-stage 2" in " ".join(found[0].arguments())


def test_the_strategy_of_the_lab() -> None:
    words = ["--num-layers", "32", "--noop-layers", "2,3,5,8", "--num-layers-per-virtual-pipeline-stage", "2"]
    strategy = read_strategy([*ARGS, *words], 8)
    assert [sum(stage) for stage in strategy.stages] == [7, 6, 7, 8]
    assert strategy.noop_layers == (2, 3, 5, 8)
    assert strategy.conversion_arguments() == (
        "--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "4",
        "--num-layers-per-virtual-pipeline-stage", "2", "--noop-layers", "2,3,5,8",
    )  # fmt: skip


def test_microbatches_in_flight_follow_the_schedules() -> None:
    plain = Strategy(tp=1, pp=4, dp=1, cp=1, micro_batch=1, stages=((7,),) * 4)
    assert [plain.in_flight(stage, 64) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert plain.in_flight(0, 2) == (2,)
    interleaved = Strategy(tp=1, pp=4, dp=1, cp=1, micro_batch=1, stages=((2, 2),) * 4)
    # 2 (PP - stage - 1) + (chunks - 1) PP passes ahead, and one more.
    assert [sum(interleaved.in_flight(stage, 64)) for stage in range(4)] == [11, 9, 7, 5]
    assert interleaved.in_flight(0, 64) == (7, 4)


def test_the_flags_of_the_script_give_way() -> None:
    rest = without(ARGS, with_tag("strategy"))
    assert "--tensor-model-parallel-size=2" not in rest and "--recompute-activations" not in rest
    assert "--sequence-parallel" not in rest and "--bf16" in rest
    strategy = Strategy(
        tp=1,
        pp=2,
        dp=4,
        cp=1,
        micro_batch=2,
        stages=((14,), (14,)),
        recompute=Recompute("block", 3),
        sequence_parallel=False,
        distributed_optimizer=True,
    )
    text = " ".join(apply(ARGS, strategy))
    assert text.count("--tensor-model-parallel-size") == 1
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers 3" in text


def test_recomputed_layers_of_a_stage_take_turns_over_its_chunks() -> None:
    """MindSpeed's --enable-recompute-layers-per-pp-rank: layer i of chunk c is recomputed if i x chunks + c < N."""
    for chunks in ((4,), (2, 2), (3, 3, 3), (1, 2, 2, 2)):
        for number in range(1, sum(chunks)):
            places = [sum(layer * len(chunks) + chunk < number for layer in range(layers)) for chunk, layers in enumerate(chunks)]
            assert _stage(chunks, Recompute("stage", number)).recomputed(0) == tuple(places)
    assert _stage((2, 1), Recompute("full", 1)).recomputed(0) == (2, 1)
    assert _stage((2, 1), Recompute()).recomputed(0) == (0, 0)
    assert _stage((3, 1), Recompute("block", 2)).recomputed(0) == (2, 1)
    assert _stage((3, 1), Recompute("block", 2)).recomputed_noop(0) == (0, 1)


def _stage(chunks: tuple[int, ...], recompute: Recompute) -> Strategy:
    return Strategy(tp=1, pp=1, dp=1, cp=1, micro_batch=1, stages=(chunks,), recompute=recompute)


def test_a_search_offers_every_number_of_recomputed_layers_of_a_stage() -> None:
    space = Space(tp=(2,), pp=(4,), vpp=(2,), micro_batch=(1,), recompute=(), uneven=False)
    shape = dataclasses.replace(QWEN, layers=32)
    found = strategies(shape, 8, space)
    assert sorted(sum(item.recomputed(0)) for item in found) == list(range(1, 8))
    stage = next(item for item in found if item.recompute == Recompute("stage", 3))
    assert stage.name.endswith("VPP2 stage-3")
    words = stage.arguments()
    assert "--enable-recompute-layers-per-pp-rank" in words and words[words.index("--recompute-num-layers") + 1] == "3"
    assert read_strategy([*without(ARGS, with_tag("strategy")), *words], 8).recompute == stage.recompute
    assert "--enable-recompute-layers-per-pp-rank" not in without(words, with_tag("strategy"))
    plain = strategies(shape, 8, dataclasses.replace(space, vpp=(1,)))
    assert {item.recompute.kind for item in plain} == {"block"}


def test_what_the_model_of_a_layer_does_not_hold_for() -> None:
    """A flag by which a layer keeps less takes the activations out of the lower bound."""
    plain, less = read_shape(ARGS), read_shape([*ARGS, "--recompute-activation-function"])
    strategy = Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((7,),) * 4)
    assert plain.full_activations and not less.full_activations
    assert saved_mb(plain, strategy, 0) > 0 == saved_mb(less, strategy, 0)
    assert state_mb(plain, strategy, 0) == state_mb(less, strategy, 0)


def test_reading_a_space() -> None:
    space = read_space({"tp": [2, 4], "recompute": ["none", "block 2"], "split": "even"}, {"max_pp": 4}, 8, "f.yaml")
    assert (space.tp, space.max_tp, space.max_pp, space.uneven, space.blocks) == ((2, 4), 8, 4, False, False)
    assert space.recompute == (Recompute("none"), Recompute("block", 2))


@pytest.mark.parametrize(
    ("space", "limits", "sentence"),
    [
        ({"pt": 2}, {}, "unknown key 'pt'"),
        ({"micro_batches": 2}, {}, "did you mean 'micro_batch'"),
        ({"tp": [8]}, {"max_tp": 4}, "nothing is left to search"),
        ({"pp": 0}, {}, "whole number of at least 1"),
        ({"pp": [True]}, {}, "whole number"),
        ({"tp": []}, {}, "empty list"),
        ({"recompute": "sometimes"}, {}, "is not none, selective, full, block, block N, stage N or per_stage"),
        ({"split": "odd"}, {}, "is not one of even, uneven"),
        ({"cp_algorithm": "star"}, {}, "is not one of ring, ulysses"),
        ({"sequence_parallel": "yes"}, {}, "takes true, false"),
        ({}, {"max_dp": 2}, "unknown key 'max_dp'"),
        ("tp", {}, "must be a mapping"),
    ],
)
def test_a_space_that_cannot_be_meant(space: object, limits: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_space(space, limits, 8, "f.yaml")


def test_why_a_space_is_empty() -> None:
    assert "query groups" in why_nothing(QWEN, 8, Space(tp=(8,)))
    assert "Widen" in why_nothing(QWEN, 8, Space(tp=(4,), pp=(8,)))


@pytest.mark.parametrize(
    ("drop", "add", "sentence"),
    [
        ("--hidden-size 3584", "", "does not set --hidden-size"),
        ("--padded-vocab-size 152064", "", "neither --padded-vocab-size nor --vocab-size"),
        ("", "--num-experts 8 --moe-layer-freq [1]*3", "is what a prediction understands"),
        ("--seq-length 4096", "--seq-length long", "expects a whole number"),
    ],
)
def test_a_script_that_cannot_be_searched(drop: str, add: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_shape(" ".join(ARGS).replace(drop, "", 1 if drop else 0).split() + add.split())


def test_a_layout_that_does_not_divide(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="World size 8 is not divisible by TP 3"):
        read_strategy(["--tensor-model-parallel-size", "3"], 8)
    with pytest.raises(UsageError, match="29 layers cannot be divided"):
        read_strategy(["--pipeline-model-parallel-size", "2", "--num-layers", "29"], 2)


def test_understand_agrees_on_the_world() -> None:
    job = understand(CALL, "train.sh")
    assert read_strategy(job.args, job.world_size).dp == job.parallel.dp


@pytest.mark.parametrize("more", ["--swiglu --vocab-size 32001", "--gelu-tanh --padded-vocab-size 50304", "--vocab-size 32001"])
def test_search_and_trainer_agree_on_derived_sizes(more: str) -> None:
    """The width of the MLP, its gate and the padded vocabulary have one source."""
    words = (
        "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
        f"--micro-batch-size 1 --global-batch-size 8 --use-flash-attn --attention-dropout 0 --bf16 {more}"
    ).split()
    found, settings = read_shape(words), read_settings(words, 0, 1)
    assert (found.ffn, found.vocab, found.head_dim) == (settings.ffn_size, settings.padded_vocab, settings.kv_size)
    assert found.gated == (settings.swiglu or settings.gelu_tanh)


def test_seq1f1b_holds_pieces_and_fills_the_pipeline_with_them() -> None:
    """(pieces + PP - 1) / pieces microbatches on the first stage (MindSpeed-LLM 2.3, docs/mindspore/features/seq1f1b.md); its
    bound is that of the states alone."""
    plain = Strategy(tp=1, pp=8, dp=1, cp=1, micro_batch=1, stages=((3,), *((4,),) * 6, (1,)))
    options = ("--enable-seq1f1b", "--seq1f1b-splits", "4")
    pieces = dataclasses.replace(plain, options=options)
    assert plain.in_flight(0, 32) == (8,) and plain.in_flight(7, 32) == (1,)
    assert pieces.in_flight(0, 32) == (2.75,) and pieces.in_flight(7, 32) == (1,)
    assert dataclasses.replace(plain, options=options[:1]).in_flight(0, 32) == (2.75,)
    assert read_operators(options).sequence_pieces == 4
    shape = read_shape([*ARGS, *options])
    assert not shape.full_activations
    hardware = read_hardware("ascend910b-64g")
    bubbles = [estimate(shape, plain, hardware, operators=read_operators(words)).bubble_s for words in ((), options)]
    assert bubbles[1] == pytest.approx(bubbles[0] / 4, rel=0.1)
