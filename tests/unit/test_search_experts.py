"""Searching over mixtures of experts: the space, the bound, the memory model, and the exhaustive search beside it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Collection

import pytest
from mixture_oracle import MixtureOracle
from strategy_models import MIXTURES, hardware, read_space

from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.estimate.lower_bound import lower_bound_mb, state_mb
from mindspeed_dryrun.estimate.memory_model import MemoryModel, Observation
from mindspeed_dryrun.estimate.operators import Operators
from mindspeed_dryrun.estimate.stage_parts import expert_parameters, keeps_mixtures, mixture_layers, stage_parameters
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy, apply, read_strategy
from mindspeed_dryrun.estimate.timeline import trace
from mindspeed_dryrun.estimate.volumes import counted
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.checks import read_checked
from mindspeed_dryrun.megatron.flags import with_tag
from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape
from mindspeed_dryrun.record.model import StagePeak
from mindspeed_dryrun.search.measure import Measurement
from mindspeed_dryrun.search.probes import probes_for
from mindspeed_dryrun.search.search import Search
from mindspeed_dryrun.search.space import Space, strategies

HARDWARE = hardware()
DEEPSEEK = MIXTURES["deepseek-v2-lite"]
_FLAGS = """
    --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --padded-vocab-size 102400
    --untie-embeddings-and-output-weights --swiglu --seq-length 4096 --max-position-embeddings 4096 --global-batch-size 64
    --micro-batch-size 1 --bf16 --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --num-experts 64 --moe-router-topk 6 --moe-intermediate-size 1408 --n-shared-experts 2
    --first-k-dense-replace 1 --moe-layer-freq 1 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8
    --kv-channels 128"""
FLAGS = _FLAGS.split()


def test_the_shape_of_a_mixture_is_read() -> None:
    found = read_shape(FLAGS)
    assert found.experts == DEEPSEEK.experts and found.latent == DEEPSEEK.latent
    assert read_shape([*FLAGS, "--moe-layer-freq", "[0]*3+[1]*24"]).experts.dense_in_front == 3  # type: ignore[union-attr]
    assert dataclasses.replace(found, vocab_grows=DEEPSEEK.vocab_grows, head_dim=DEEPSEEK.head_dim) == DEEPSEEK
    assert read_shape([*FLAGS, "--first-k-dense-replace", "-1"]).experts.dense_in_front == 0  # type: ignore[union-attr]
    # As published: 15.7 billion parameters.
    one = Strategy(tp=1, pp=1, dp=1, cp=1, micro_batch=1, stages=((27,),), etp=1)
    assert stage_parameters(found, one, 0) + expert_parameters(found, one, 0) == pytest.approx(15.7e9, rel=0.01)


@pytest.mark.parametrize("dispatcher", ["alltoall", "alltoall_seq", "allgather"])
def test_every_strategy_is_one_that_megatron_accepts_and_says_itself(dispatcher: str) -> None:
    space = Space(
        vpp=(1, 2), dispatchers=(dispatcher,), recompute=(Recompute(), Recompute("full", 1)), blocks=False, tp=(1, 2, 4)
    )
    found = strategies(DEEPSEEK, 16, space)
    assert len(found) == len({item.name for item in found}) == len(set(found)) > 100
    assert {item.ep for item in found} >= {1, 2, 4, 8} and {item.etp for item in found if item.tp == 4} == {1, 4}
    for item in found:
        words = apply(FLAGS, item)
        layout, _ = read_checked(Arguments(words), 16)
        again = read_strategy(words, 16)
        assert (again.ep, again.etp, again.dispatcher, again.stages) == (item.ep, item.etp, item.dispatcher, item.stages)
        assert again.arguments() == item.arguments()
        assert item.sequence_parallel or item.tp == 1
        empty = layout.noop
        assert all(
            DEEPSEEK.is_mixture(index) == DEEPSEEK.is_mixture(index - sum(noop < index for noop in empty))
            for stage in range(item.pp)
            for chunk in layout.real_layers(stage)
            for index in chunk
        )
        assert 16 % (item.ep * item.etp * item.pp) == 0


def test_the_older_dispatcher_spreads_experts_over_data_parallel_ranks() -> None:
    found = strategies(DEEPSEEK, 16, Space(tp=(4,), pp=(1,), vpp=(1,), dispatchers=("alltoall_seq",)))
    assert {(item.ep, item.etp) for item in found} == {(1, 4), (2, 4), (4, 4), (4, 1), (8, 1), (16, 1)}
    extended = next(item for item in found if (item.ep, item.etp) == (16, 1))
    assert " ".join(extended.arguments()).count("--expert-model-parallel-size 4 --moe-tp-extend-ep") == 1


def test_no_op_layers_may_not_turn_a_dense_layer_into_a_mixture() -> None:
    shape = MIXTURES["small-with-prediction"]
    good = Strategy(tp=1, pp=2, dp=1, cp=1, micro_batch=1, stages=((6,), (6,)), etp=1)
    shifted = dataclasses.replace(good, stages=((2,), (10,)))
    assert keeps_mixtures(shape, good) and not keeps_mixtures(shape, shifted)
    assert [mixture_layers(shape, good, stage) for stage in (0, 1)] == [3, 6]
    assert all(keeps_mixtures(shape, item) for item in strategies(shape, 8, Space()))


def test_a_stage_of_dense_layers_alone_is_neither_listed_nor_accepted() -> None:
    experts = dataclasses.replace(DEEPSEEK.experts, dense_in_front=3)  # type: ignore[type-var]
    shape = dataclasses.replace(DEEPSEEK, layers=24, experts=experts)
    found = strategies(shape, 8, Space(tp=(1,), vpp=(1, 2), dispatchers=("alltoall",)))
    assert not any(item.stages == ((3,),) * 8 for item in found) and any(item.stages == ((6,),) * 4 for item in found)
    words = [*FLAGS, "--num-layers", "24", "--first-k-dense-replace", "3"]
    for item in found:
        read_checked(Arguments(apply(words, item)), 8)
    with pytest.raises(UsageError, match="leaves no mixture on the first of 8 stages of 3 layers"):
        read_checked(Arguments((*words, "--pipeline-model-parallel-size", "8", "--expert-model-parallel-size", "1")), 8)


def test_flags_that_leave_activations_out_of_the_bound() -> None:
    assert set(with_tag("fewer_activations")) >= {
        "--moe-zero-memory",
        "--moe-layer-recompute",
        "--moe-adaptive-recompute-activation",
        "--swap-attention",
        "--recompute-activation-function",
    }
    assert set(with_tag("strategy")) >= {
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--moe-tp-extend-ep",
        "--ulysses-degree-in-cp",
    }


@pytest.mark.parametrize("name", [name for name in MIXTURES if name != "deepseek-v3"])
def test_the_bound_is_low(name: str) -> None:
    shape = MIXTURES[name]
    oracle = MixtureOracle(shape, fragments=0.0)
    listed = strategies(shape, 16, Space(vpp=(1, 2)))
    for item in random.Random(1).sample(listed, 300):
        assert lower_bound_mb(shape, item) < oracle(item).used_mb


# Six spaces and more: every strategy is counted, and the search must name the same winners.
CASES = [
    ("qwen3-30b-a3b", 16, 58), ("qwen3-30b-a3b", 32, 40), ("mixtral-8x7b", 32, 58), ("deepseek-v2-lite", 8, 58),
    ("deepseek-v2-lite", 16, 40), ("qwen2-57b-a14b", 32, 58), ("small-with-prediction", 8, 24), ("every-other", 8, 16),
]  # fmt: skip


@pytest.mark.parametrize(("model", "cards", "budget_gb"), CASES)
def test_the_winners_are_those_of_the_exhaustive_dry_run(model: str, cards: int, budget_gb: int) -> None:
    shape, budget = MIXTURES[model], budget_gb * 1024
    listed = strategies(shape, cards, Space(vpp=(1, 2), per_stage=False), "alltoall")
    oracle = MixtureOracle(shape)
    found = Search(shape, listed, HARDWARE, budget, oracle).run()
    everything = MixtureOracle(shape)
    order = Search(shape, listed, HARDWARE, 1 << 40, everything).result.candidates
    best = []
    for candidate in order:
        if everything(candidate.strategy).actual_mb <= budget:
            best.append(candidate.strategy)
        if len(best) == 3:
            break
    assert [winner.strategy for winner in found.winners] == best and len(best) == 3
    assert all(winner.measurement and winner.measurement.actual_mb <= budget for winner in found.winners)
    assert len(oracle.asked) == found.probes + found.dry_runs <= 60


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite", "small-with-prediction"])
def test_small_dry_runs_predict_large_ones(name: str) -> None:
    """Learnt from probes of one layout and of a second EP: a hundred others are predicted, half of them within 1 %."""
    shape = MIXTURES[name]
    space = Space(tp=(1, 2), vpp=(1,), recompute=(Recompute(), Recompute("full", 1)), blocks=False, distributed_optimizer=(True,))
    found = strategies(shape, 16, space, "alltoall")
    model = MemoryModel(shape)
    chosen = [
        next(item for item in found if (item.tp, item.recompute.kind, item.etp, item.pp) == key)
        for key in ((1, "none", 1, 2), (2, "none", 1, 2), (2, "full", 2, 2), (2, "none", 2, 2))
    ]
    for strategy in chosen:
        for probe, small in probes_for(shape, strategy).values():
            _learn(model, small, probe)
    oracle = MixtureOracle(shape, fragments=0.0)
    errors = sorted(abs(model.predict(item).used_mb / oracle(item).used_mb - 1) for item in random.Random(2).sample(found, 100))
    assert errors[50] < 0.01 and errors[-1] < 0.08


def _learn(model: MemoryModel, shape: ModelShape, strategy: Strategy) -> None:
    measured = MixtureOracle(shape, fragments=0.0)(strategy)
    model.add(
        [
            Observation(shape=shape, strategy=strategy, stage=stage, used_mb=peak.used_mb, actual_mb=peak.actual_mb)
            for stage, peak in measured.stages.items()
        ]
    )


def test_a_probe_has_a_mixture() -> None:
    """MindSpeed-LLM refuses a model of dense layers alone."""
    shape = MIXTURES["small-with-prediction"]
    for item in strategies(shape, 8, Space(vpp=(1, 2))):
        for probe, small in probes_for(shape, item).values():
            assert sum(mixture_layers(small, probe, stage) for stage in range(probe.pp)) > 0


def test_long_sequences_are_searched_with_context_parallelism() -> None:
    shape = dataclasses.replace(MIXTURES["qwen3-30b-a3b"], seq=32768, global_batch=64)
    found = strategies(shape, 32, Space(vpp=(1,), blocks=False, uneven=False))
    seen = {(item.cp_algorithm, item.heads_exchanged) for item in found if item.cp == 4}
    assert seen == {("megatron_cp_algo", 1), ("ulysses_cp_algo", 4), ("hybrid_cp_algo", 2)}
    hybrid = next(item for item in found if item.ulysses == 2)
    assert read_strategy([*hybrid.arguments(), "--num-experts", "128"], 32).heads_exchanged == 2
    assert {item.cp for item in strategies(dataclasses.replace(shape, seq=4096), 32, Space(blocks=False))} == {1}


def test_dualpipev_is_a_schedule_of_its_own() -> None:
    """The output layer comes back to the first stage, and every stage holds as many microbatches."""
    shape = dataclasses.replace(MIXTURES["small-with-prediction"], layers=16)
    found = strategies(shape, 8, Space(tp=(1,), vpp=(1,), blocks=False, uneven=False, dualpipe=True))
    vs = [item for item in found if item.dualpipe]
    assert vs and all(item.chunks == 2 and item.head_stage == 0 and "DualPipeV" in item.name for item in vs)
    strategy = next(item for item in vs if item.pp == 4)
    words = [*strategy.arguments(), "--num-experts", "32"]
    assert "--num-layers-per-virtual-pipeline-stage" not in words
    again = read_strategy(words, strategy.world)
    assert again.dualpipe and again.stages == strategy.stages
    assert strategy.positions() == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1), (0, 1)]
    assert [sum(strategy.in_flight(stage, 16)) for stage in range(4)] == [8] * 4
    assert [mixture_layers(shape, strategy, stage) for stage in range(4)] == [2, 3, 4, 4]
    # Both tables are on the first stage.
    assert stage_parameters(shape, strategy, 0) > stage_parameters(shape, strategy, 3) + 2 * shape.vocabulary_parameters


def test_the_trace_of_dualpipev_runs_every_pass_once() -> None:
    shape = dataclasses.replace(MIXTURES["small-with-prediction"], layers=16, global_batch=16)
    strategy = Strategy(tp=1, pp=4, dp=1, cp=1, micro_batch=1, stages=((2, 2),) * 4, etp=1, dispatcher="alltoall", dualpipe=True)
    events = [event for event in trace(shape, strategy, HARDWARE)["traceEvents"] if event.get("cat") in ("forward", "backward")]
    assert len(events) == len({(event["name"], event["pid"]) for event in events}) == 2 * 2 * 4 * 16
    for stage in range(4):
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["pid"] == stage)
        assert all(end <= start + 0.01 for (_, end), (start, _) in itertools.pairwise(spans))


def test_an_option_is_a_dimension() -> None:
    """Words of the trainer that are tried beside the script as it is: they change bound, memory and time."""
    shape = MIXTURES["every-other"]
    less = dataclasses.replace(shape, full_activations=False)
    option = ("--moe-zero-memory", "level0")
    listed = strategies(shape, 8, Space(vpp=(1,), blocks=False, uneven=False, options=((), option)), "alltoall")
    assert {item.options for item in listed} == {(), option}
    assert all(
        item.arguments()[-2:] == option and item.name.endswith("moe-zero-memory level0") for item in listed if item.options
    )

    class Saves(MixtureOracle):
        """The option halves what is not states."""

        def _stage(self, strategy: Strategy, stage: int) -> StagePeak:
            plain = super()._stage(strategy, stage)
            states = state_mb(shape, strategy, stage) if strategy.options else plain.used_mb
            used = int(states + (plain.used_mb - states) / 2)
            return StagePeak(used, used)

    def variant(options: tuple[str, ...]) -> tuple[ModelShape, Operators]:
        return (less if options else shape), Operators(recomputed_experts=bool(options))

    budget = 11 * 1024
    found = Search(shape, listed, HARDWARE, budget, Saves(shape), variant=variant).run()
    order = Search(shape, listed, HARDWARE, 1 << 40, Saves(shape), variant=variant).result.candidates
    best = [item.strategy for item in order if Saves(shape)(item.strategy).actual_mb <= budget][:3]
    assert [winner.strategy for winner in found.winners] == best


def test_a_space_of_experts_is_read() -> None:
    space = read_space(
        {"ep": [4, 8], "expert_tp": 1, "dispatcher": ["alltoall", "alltoall_seq"], "schedule": ["1f1b", "dualpipev"], "options": ["", "--moe-zero-memory level0"], "cp_algorithm": "hybrid"},
        {}, 8, "f.yaml",
    )  # fmt: skip
    assert (space.ep, space.etp, space.dispatchers, space.dualpipe) == ((4, 8), (1,), ("alltoall", "alltoall_seq"), True)
    assert space.options == ((), ("--moe-zero-memory", "level0"))
    for wrong, said in (
        ({"dispatcher": "mail"}, "is not one of allgather"),
        ({"options": "level0"}, "must start with a flag"),
        ({"schedule": "gpipe"}, "1f1b"),
    ):
        with pytest.raises(UsageError, match=said):
            read_space(wrong, {}, 8, "f.yaml")


def test_what_the_trainer_refuses_costs_no_dry_run_and_is_counted() -> None:
    shape = MIXTURES["mixtral-8x7b"]
    listed = strategies(shape, 32, Space(vpp=(1,), micro_batch=(1,)), "alltoall")
    oracle, ran = MixtureOracle(shape), list[Strategy]()

    def measure(strategy: Strategy, stages: Collection[int] | None = None) -> Measurement:
        ran.append(strategy)
        return oracle(strategy, stages)

    # What would win is refused, so that the search meets it.
    best = Search(shape, listed, HARDWARE, 58166, oracle, 1).run().winners[0].strategy

    def refusal(strategy: Strategy) -> str | None:
        return "This tensor-parallel size fails." if strategy.tp == best.tp else None

    result = Search(shape, listed, HARDWARE, 58166, measure, 1, refusal=refusal).run()
    alone = Search(shape, [item for item in listed if item.tp != best.tp], HARDWARE, 58166, oracle, 1).run()
    assert result.winners[0].strategy == alone.winners[0].strategy
    assert all(item.tp != best.tp for item in ran) and not result.failed
    assert result.refused["This tensor-parallel size fails."] > 0
    assert all(item.strategy.tp != best.tp for item in result.candidates if item.prediction)


def test_a_space_that_the_trainer_refuses_as_a_whole_says_why() -> None:
    shape = MIXTURES["mixtral-8x7b"]
    listed = strategies(shape, 32, Space(vpp=(1,), micro_batch=(1,)), "alltoall")
    with pytest.raises(DryRunError, match="with no strategy of this space: This flag is not modelled"):
        Search(shape, listed, HARDWARE, 58166, MixtureOracle(shape), 1, refusal=lambda _: "This flag is not modelled.").run()


@pytest.mark.parametrize(("stage", "exchanged", "data"), [(0, 6496.9, 12589.8), (1, 6720.9, 11934.5)])
def test_volumes_with_latent_attention_and_a_prediction_layer(stage: int, exchanged: float, data: float) -> None:
    """DeepSeek-V3 on 512 cards, dry-run: MB of exchanged tokens a microbatch, of gradients and weights an iteration. Routers and
    compressions are whole on every tensor-parallel rank; the prediction layer is a mixture of the last stage."""
    strategy = Strategy(
        tp=8,
        pp=2,
        dp=32,
        cp=1,
        micro_batch=1,
        stages=((32,), (29,)),
        distributed_optimizer=True,
        ep=256,
        etp=1,
        dispatcher="alltoall_seq",
    )
    found = counted(MIXTURES["deepseek-v3"], strategy, stage)
    assert found.experts / 2**20 == pytest.approx(exchanged, rel=1e-3)
    assert found.data / 2**20 == pytest.approx(data, rel=1e-3)


def test_volumes_of_a_mixture_are_those_that_the_engine_lists() -> None:
    # Qwen3-30B-A3B on 16 cards, dry-run: 13827M of exchanged tokens a microbatch, 5880M of gradients and weights an iteration.
    shape = MIXTURES["qwen3-30b-a3b"]
    strategy = Strategy(
        tp=1, pp=2, dp=8, cp=1, micro_batch=1, stages=((24,), (24,)), recompute=Recompute("block", 6, (6, 0)), distributed_optimizer=True, ep=8, etp=1,
        dispatcher="alltoall_seq",
    )  # fmt: skip
    found = counted(shape, strategy, 0)
    assert found.experts / 2**20 == pytest.approx(13827, rel=1e-3)
    assert found.data / 2**20 == pytest.approx(5880, rel=1e-3)
    # Overlapped gathers are one for both optimizers; experts with replicas reduce their gradients, too.
    assert counted(shape, strategy, 0, overlapped_gather=True).data == pytest.approx(found.data * 6 / 8)
    assert counted(shape, dataclasses.replace(strategy, ep=4), 0).data > 2 * found.data
