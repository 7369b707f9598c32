"""Galvatron's recurrence is right, and our search does at least as well under the same tables."""

from __future__ import annotations

import itertools

import pytest
from galvatron import LayerStrategy, Plan, as_trained, best_stage
from galvatron_search import compare
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_models import MODELS, hardware

HARDWARE = hardware()
CHOICES = [LayerStrategy(1, 2, False), LayerStrategy(2, 1, False), LayerStrategy(2, 1, True)]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    st.integers(0, 5),
    st.integers(1, 24),
)
def test_the_recurrence_is_the_brute_force(layers: int, memory: list[int], time: list[int], change: int, budget: int) -> None:
    """Every assignment of strategies to layers, tried one by one, gives the same least time."""
    weight, cost = dict(zip(CHOICES, memory, strict=True)), dict(zip(CHOICES, time, strict=True))

    def move(one: LayerStrategy, other: LayerStrategy) -> float:
        return change * (one.tp != other.tp)

    expected = min(
        (
            sum(cost[item] for item in way) + sum(move(a, b) for a, b in itertools.pairwise(way))
            for way in itertools.product(CHOICES, repeat=layers)
            if sum(weight[item] for item in way) <= budget
        ),
        default=None,
    )
    found = best_stage(layers, CHOICES, weight.__getitem__, cost.__getitem__, move, budget)
    assert (None if found is None else found[0]) == expected
    if found is not None:
        way = found[1]
        assert sum(weight[item] for item in way) <= budget
        assert sum(cost[item] for item in way) + sum(move(a, b) for a, b in itertools.pairwise(way)) == found[0]


def test_a_plan_is_trained_with_its_first_layers_sizes() -> None:
    layers = (LayerStrategy(2, 4, False), LayerStrategy(4, 2, True))
    assert as_trained(Plan(2, 8, 64, layers, 1.0)) == (2, 2, 4, 2, True)


@pytest.mark.parametrize(
    ("model", "cards", "budget_gb"),
    [
        ("qwen2.5-7b", 8, 58), ("qwen2.5-7b", 8, 36), ("qwen2.5-7b", 8, 28), ("llama3.1-8b", 16, 40), ("llama3.1-8b", 16, 30),
        ("llama2-13b", 16, 30), ("qwen2.5-0.5b", 4, 10), ("small", 4, 3),
    ],
)  # fmt: skip
def test_ours_is_at_least_as_fast_under_the_same_model(model: str, cards: int, budget_gb: int) -> None:
    """As Galvatron plans it, layer by layer, which Megatron cannot train; and as Megatron can."""
    found = compare(MODELS[model], cards, budget_gb * 1024, HARDWARE)
    assert found.ours is not None and found.ours_fits and found.plan is not None
    assert found.ours_s <= found.plan_s * (1 + 1e-9) and found.plan_s <= found.theirs_s * (1 + 1e-9)
