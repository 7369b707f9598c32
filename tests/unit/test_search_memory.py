"""The lower bound is low, and a few small dry runs predict the rest."""

from __future__ import annotations

import dataclasses
import random

import pytest
from strategy_models import MODELS
from strategy_oracle import Oracle

from mindspeed_dryrun.estimate.lower_bound import lower_bound_mb, saved_mb, stage_parameters, state_mb
from mindspeed_dryrun.estimate.memory_model import MemoryModel, Observation
from mindspeed_dryrun.estimate.regression import LinearBelief, Prior
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy, read_strategy
from mindspeed_dryrun.search.probes import probes_for
from mindspeed_dryrun.search.space import Space, strategies

QWEN = MODELS["qwen2.5-7b"]

# MindSpeed-LLM's own dry run of Qwen2.5-7B, TP 2, PP 2, 10240 tokens (used peak of both stages).
PUBLISHED = {"none": (55389, 48436), "full": (34946, 37813)}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_bound_is_below_what_mindspeed_llm_counts(kind: str) -> None:
    shape = dataclasses.replace(QWEN, seq=10240)
    strategy = Strategy(tp=2, pp=2, dp=1, cp=1, micro_batch=1, stages=((14,), (14,)), recompute=Recompute(kind, 1))
    for stage, counted in enumerate(PUBLISHED[kind]):
        bound = state_mb(shape, strategy, stage) + saved_mb(shape, strategy, stage)
        assert 0.8 * counted < bound < counted


@pytest.mark.parametrize(("model", "cards"), [("qwen2.5-7b", 8), ("llama2-13b", 16), ("qwen2.5-0.5b", 4), ("llama3-70b", 64)])
def test_the_bound_is_below_every_count_of_the_oracle(model: str, cards: int) -> None:
    shape = MODELS[model]
    oracle = Oracle(shape)
    space = Space(vpp=(1, 2), cp=(1, 2), sequence_parallel=(True, False))
    for strategy in random.Random(1).sample(strategies(shape, cards, space), 500):
        assert lower_bound_mb(shape, strategy) <= oracle(strategy).used_mb


def test_parameters_add_up_to_the_model() -> None:
    """7.6 billion, spread over any layout, with tied tables held twice by a pipeline."""
    for strategy in (
        Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((7,),) * 4),
        Strategy(tp=1, pp=1, dp=8, cp=1, micro_batch=1, stages=((28,),)),
    ):
        total = sum(stage_parameters(QWEN, strategy, stage) for stage in range(strategy.pp)) * strategy.tp
        assert total == QWEN.layers * QWEN.layer_parameters + 2 * QWEN.vocabulary_parameters
        assert total == pytest.approx(7.6e9, rel=0.01)
    tied = MODELS["qwen2.5-0.5b"]
    assert stage_parameters(tied, Strategy(tp=1, pp=1, dp=8, cp=1, micro_batch=1, stages=((24,),)), 0) == pytest.approx(
        0.494e9, rel=0.01
    )


def test_flags_that_shrink_the_states_shrink_the_bound() -> None:
    strategy = Strategy(tp=2, pp=2, dp=2, cp=1, micro_batch=1, stages=((14,), (14,)))
    whole = state_mb(QWEN, strategy, 0)
    assert state_mb(dataclasses.replace(QWEN, shared_master=True), strategy, 0) == pytest.approx(whole * 16 / 18)
    assert state_mb(dataclasses.replace(QWEN, full_states=False), strategy, 0) == pytest.approx(whole * 2 / 18)
    assert state_mb(QWEN, dataclasses.replace(strategy, distributed_optimizer=True), 0) == pytest.approx(whole * 12 / 18)


_MORE = "--context-parallel-size 2 --context-parallel-algo"
_VPP = "--num-layers-per-virtual-pipeline-stage 2 --num-layers 32 --noop-layers 2,3,5,8"
_STAGES = (
    "--num-layers 44 --noop-layers 7,8,9,10,11,12,21,22,23,24,33,34,35,41,42,43 --use-distributed-optimizer "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3"
)
COUNTED = [  # Qwen2.5-7B: tokens, cards, TP, PP, more flags, and what MindSpeed-LLM counts on each stage (docs/accuracy.md)
    (10240, 4, 2, 2, "", (55389, 48436)),
    (10240, 4, 2, 2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", (34946, 37813)),
    (4096, 8, 2, 4, "", (27784, 20897, 18675, 22761)),
    (4096, 8, 2, 4, _VPP, (29787, 19975, 22541, 30837)),
    (4096, 8, 4, 2, "", (21204, 19651)),
    (16384, 8, 2, 2, f"{_MORE} megatron_cp_algo", (50849, 45287)),
    (16384, 8, 2, 2, f"{_MORE} ulysses_cp_algo", (51633, 45683)),
    (4096, 8, 1, 4, _STAGES, (35703, 35230, 31961, 26466)),
]


@pytest.mark.parametrize(("tokens", "cards", "tp", "pp", "more", "counted"), COUNTED)
def test_what_the_tensors_say_is_close_before_any_dry_run(
    tokens: int, cards: int, tp: int, pp: int, more: str, counted: tuple[int, ...]
) -> None:
    """The model's first guess, from the shapes alone, against what the real MindSpeed-LLM counts: within 2 %."""
    shape = dataclasses.replace(QWEN, seq=tokens)
    words = (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --micro-batch-size 1 --sequence-parallel {more}"
    )
    layers = () if "--num-layers" in words else ("--num-layers", str(QWEN.layers))
    strategy = read_strategy([*words.split(), *layers], cards)
    model = MemoryModel(shape)
    for stage, used_mb in enumerate(counted):
        assert model.stage(strategy, stage)[0] == pytest.approx(used_mb, rel=0.02)
        assert lower_bound_mb(shape, strategy) < max(counted)


def test_a_belief_learns_a_line_and_knows_what_it_does_not_know() -> None:
    belief = LinearBelief({"constant": Prior(0, 100), "slope": Prior(0, 10)}.__getitem__)
    before = belief.predict({"constant": 1, "slope": 50})[1]
    assert belief.gain({"constant": 1, "slope": 50}, {"constant": 1, "slope": 4}, 0.1) > 0
    for x in (1, 2, 4):
        belief.observe({"constant": 1, "slope": x}, 30 + 7 * x, 0.01)
    mean, spread = belief.predict({"constant": 1, "slope": 50})
    assert mean == pytest.approx(380, abs=1) and spread < 1 < before


def _learn(model: MemoryModel, oracle: Oracle, strategy: Strategy, shape: object) -> None:
    stages = dataclasses.replace(oracle.shape)
    assert shape is not None
    measured = Oracle(dataclasses.replace(stages, layers=strategy.layers))(strategy)
    model.add(
        [
            Observation(
                shape=dataclasses.replace(stages, layers=strategy.layers),
                strategy=strategy,
                stage=index,
                used_mb=peak.used_mb,
                actual_mb=peak.actual_mb,
            )
            for index, peak in measured.stages.items()
        ]
    )


def test_small_dry_runs_predict_large_ones() -> None:
    """Twelve probes of one to four layers, then a hundred strategies at full size: within 3 %, nearly all within 1 %."""
    found = strategies(QWEN, 8, Space(tp=(2, 4), vpp=(1,), recompute=(Recompute(), Recompute("full", 1)), blocks=False))
    pairs = {key: pair for item in found for key, pair in probes_for(QWEN, item).items()}
    probes = [pair for pair in pairs.values() if sum(pair[0].stages[0]) in (1, 4)]
    model = MemoryModel(QWEN)
    oracle = Oracle(QWEN)
    chosen = random.Random(3).sample(probes, 12)
    for probe, shape in chosen:
        _learn(model, oracle, probe, shape)
    errors = sorted(abs(model.predict(strategy).used_mb / oracle(strategy).used_mb - 1) for strategy in found)
    assert errors[len(errors) // 2] < 0.01
    assert errors[-1] < 0.05


def test_the_spread_covers_the_error() -> None:
    """Predictions of what was not measured lie within three standard deviations of the count."""
    found = strategies(QWEN, 8, Space(vpp=(1, 2)))
    model = MemoryModel(QWEN)
    oracle = Oracle(QWEN)
    for strategy in random.Random(5).sample(found, 10):
        _learn(model, oracle, strategy, QWEN)
    outside = 0
    sample = random.Random(6).sample(found, 300)
    for strategy in sample:
        prediction = model.predict(strategy)
        outside += abs(prediction.actual_mb - oracle(strategy).actual_mb) > 3 * prediction.spread_mb
    assert outside <= 3
