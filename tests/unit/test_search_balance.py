"""Recomputation stage by stage: the flags say it, the fewest layers are found, and a search never gets slower by it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_models import MODELS, hardware
from strategy_oracle import Oracle

from mindspeed_dryrun.estimate.strategy import Recompute, Strategy, read_strategy
from mindspeed_dryrun.estimate.time_model import iteration_seconds
from mindspeed_dryrun.search.balance import balanced, least
from mindspeed_dryrun.search.results import galvatron_fields
from mindspeed_dryrun.search.search import Search
from mindspeed_dryrun.search.space import Space, strategies

HARDWARE = hardware()
QWEN = MODELS["qwen2.5-7b"]


def _strategy(layers: tuple[int, ...], each: tuple[int, ...]) -> Strategy:
    recompute = Recompute("block", max(each), each)
    return Strategy(
        tp=2, pp=len(layers), dp=1, cp=1, micro_batch=1, stages=tuple((count,) for count in layers), recompute=recompute
    )


@pytest.mark.parametrize(
    ("layers", "each"),
    [((14, 14), (9, 0)), ((14, 14), (9, 4)), ((15, 13), (3, 13)), ((6, 8, 8, 6), (5, 2, 0, 0)), ((7, 7, 7, 7), (7, 6, 2, 0))],
)
def test_no_op_layers_in_front_make_the_trainer_recompute_so_many_of_each_stage(
    layers: tuple[int, ...], each: tuple[int, ...]
) -> None:
    """Counted the way Megatron does: of every stage's first N places, those that hold a real layer."""
    strategy = _strategy(layers, each)
    words = strategy.arguments()
    total = int(words[words.index("--num-layers") + 1])
    number = int(words[words.index("--recompute-num-layers") + 1])
    noop = {int(item) for item in words[words.index("--noop-layers") + 1].split(",")}
    assert total % len(layers) == 0 and total - len(noop) == sum(layers) == strategy.layers
    slots = total // len(layers)
    places = [range(stage * slots, (stage + 1) * slots) for stage in range(len(layers))]
    assert tuple(sum(index not in noop for index in place) for place in places) == layers
    assert tuple(sum(index not in noop for index in place[:number]) for place in places) == each
    assert [sum(strategy.recomputed_noop(stage)) for stage in range(len(layers))] == [number - own for own in each]
    read = read_strategy([*words, "--bf16"], strategy.world)
    assert read.recompute == strategy.recompute and read.stages == strategy.stages and read.slots == slots
    assert read.noop_layers == strategy.noop_layers
    recomputed = galvatron_fields(strategy, QWEN)["recompute_list"].split(",")
    assert len(recomputed) == sum(layers) and recomputed.count("1") == sum(each)


def test_names_stay_short() -> None:
    assert _strategy((14, 14), (9, 0)).name == "TP2 PP2 DP1 MBS1 block-9,0"
    assert _strategy((5,) * 8, (3, 1, 1, 0, 0, 0, 0, 0)).name == "TP2 PP8 DP1 MBS1 block-3,1,1,0x5"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_fewest_layers_are_those_of_the_brute_force(data: st.DataObject) -> None:
    """Every combination, tried one by one: none that fits recomputes fewer layers on any stage."""
    counts = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    needs = [
        sorted(data.draw(st.lists(st.integers(1, 40), min_size=count + 1, max_size=count + 1)), reverse=True) for count in counts
    ]
    noop = data.draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    limit = data.draw(st.integers(1, 45))

    def fits(each: tuple[int, ...]) -> bool:
        most = max(each)
        return all(row[own] + (most - own) * extra <= limit for row, own, extra in zip(needs, each, noop, strict=True))

    every = [each for each in itertools.product(*(range(count + 1) for count in counts)) if fits(each)]
    found = least(needs, noop, limit)
    if found is None:
        assert not every
        return
    assert found in every
    assert not [each for each in every if max(each) < max(found)]
    assert not [each for each in every if max(each) == max(found) and any(map(int.__lt__, each, found))]


def test_only_what_one_number_for_all_stages_cannot_say() -> None:
    layout = Strategy(tp=2, pp=2, dp=1, cp=1, micro_batch=1, stages=((3,), (3,)))

    def memory(strategy: Strategy, stage: int) -> float:
        return 10.0 * (2 - stage) * (3 - strategy.recomputed(stage)[0]) + strategy.recomputed_noop(stage)[0]

    found = [strategy.recompute.each for strategy in balanced(layout, memory, 0, 100)]
    assert found == [(1, 0), (2, 0), (2, 1), (3, 2)]
    assert [strategy.recompute.each for strategy in balanced(layout, memory, 35, 45)] == [(1, 0), (2, 0)]


def _all_counts(layout: Strategy) -> list[Strategy]:
    found = []
    for each in itertools.product(*(range(stage[0] + 1) for stage in layout.stages)):
        most = max(each)
        same = all(own == min(most, stage[0]) for own, stage in zip(each, layout.stages, strict=True))
        recompute = Recompute("block", most, () if same else each) if most else Recompute()
        found.append(dataclasses.replace(layout, recompute=recompute))
    return found


@pytest.mark.parametrize("budget_mb", [2300, 2600, 2900, 3300, 3800])
def test_a_small_space_with_every_combination_of_stages(budget_mb: int) -> None:
    """The winner is as fast as the best of all combinations of recomputed layers, each tried."""
    shape = dataclasses.replace(MODELS["small"], global_batch=32)
    space = Space(tp=(1, 2), pp=(2,), dp=(1, 2), vpp=(1,), micro_batch=(1,), uneven=False, recompute=(Recompute(),))
    listed = strategies(shape, 4, space)
    found = Search(shape, listed, HARDWARE, budget_mb, Oracle(shape, 0.0), winners=1, per_stage=True).run()
    layouts = dict.fromkeys(dataclasses.replace(item, recompute=Recompute()) for item in listed)
    oracle = Oracle(shape, 0.0)
    fitting = [item for layout in layouts for item in _all_counts(layout) if oracle(item).actual_mb <= budget_mb]
    best = min((iteration_seconds(shape, item, HARDWARE) for item in fitting), default=None)
    assert (found.winners[0].seconds if found.winners else None) == best
    assert found.winners and found.winners[0].measurement and found.winners[0].measurement.actual_mb <= budget_mb


@pytest.mark.parametrize(
    ("model", "cards", "budget_gb"), [("qwen2.5-7b", 8, 36), ("llama2-13b", 16, 28), ("llama3.1-8b", 16, 32)]
)
def test_a_search_never_gets_slower_and_seldom_dearer(model: str, cards: int, budget_gb: int) -> None:
    shape = MODELS[model]
    listed = strategies(shape, cards, Space(vpp=(1,)))
    plain, fine = Oracle(shape), Oracle(shape)
    one = Search(shape, listed, HARDWARE, budget_gb * 1024, plain).run()
    other = Search(shape, listed, HARDWARE, budget_gb * 1024, fine, per_stage=True).run()
    assert other.winners[0].seconds <= one.winners[0].seconds
    assert other.considered > one.considered == len(listed)
    assert len(fine.asked) <= 45
    assert other.winners[0].measurement and len(other.winners[0].measurement.stages) == other.winners[0].strategy.pp


def test_a_strategy_that_does_not_fit_costs_its_worst_stages_only() -> None:
    shape = MODELS["llama2-13b"]
    oracle = Oracle(shape)
    found = Search(shape, strategies(shape, 16, Space(vpp=(1,), tp=(1,), pp=(8,))), HARDWARE, 30 * 1024, oracle).run()
    over = [item for item in found.candidates if item.measurement and item not in found.winners]
    assert over and all(item.measurement and len(item.measurement.stages) == 2 for item in over)
    assert all(winner.measurement and len(winner.measurement.stages) == 8 for winner in found.winners)
