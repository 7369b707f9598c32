"""Galvatron's search, written from its paper (Miao et al., VLDB 2023, section 4), as something to compare ours with.

For every pipeline degree and number of microbatches it splits the layers evenly into stages and, stage by stage, solves

    C(l, e) = min over s of  C(l - 1, e - O(l, s)) + c(l, s) + R(l, s', s)

the least time of the first l layers within memory e, where s ranges over the strategies of one layer (tensor and data
parallel sizes that fill the stage's cards, recomputed or not), O is the layer's memory, c its time and R the cost of
changing the layout between two layers. A microbatch is a share of the global batch, so a layer with more data parallel
ranks works on fewer samples of it. The iteration then takes `Σ stages + (m - 1) · slowest stage`.

Memory and time come from the caller's tables, so both searches see the same model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

INFINITE = float("inf")


@dataclass(frozen=True)
class LayerStrategy:
    """What one layer may do within a stage."""

    tp: int
    dp: int
    recompute: bool


@dataclass(frozen=True)
class Plan:
    """A whole plan: one strategy for each layer, in order."""

    pp: int
    microbatches: int
    global_batch: int
    layers: tuple[LayerStrategy, ...]
    seconds: float


LayerCost = Callable[[LayerStrategy], float]
Change = Callable[[LayerStrategy, LayerStrategy], float]


def best_stage(
    layers: int,
    choices: Sequence[LayerStrategy],
    memory: Callable[[LayerStrategy], int],
    seconds: LayerCost,
    change: Change,
    budget: int,
) -> tuple[float, tuple[LayerStrategy, ...]] | None:
    """The recurrence for one stage; memory in whole units. None if nothing fits."""
    weights = [memory(choice) for choice in choices]
    # best[e][s]: least time of the layers so far within memory e whose last layer does s; and the way there.
    best = [[INFINITE] * len(choices) for _ in range(budget + 1)]
    steps: list[list[list[int]]] = []
    for layer in range(layers):
        now = [[INFINITE] * len(choices) for _ in range(budget + 1)]
        came = [[-1] * len(choices) for _ in range(budget + 1)]
        for chosen, choice in enumerate(choices):
            cost = seconds(choice)
            moves = [change(other, choice) for other in choices]
            for left in range(weights[chosen], budget + 1):
                if layer == 0:
                    now[left][chosen] = cost
                    continue
                before = best[left - weights[chosen]]
                for other, earlier in enumerate(before):
                    if earlier + moves[other] + cost < now[left][chosen]:
                        now[left][chosen] = earlier + moves[other] + cost
                        came[left][chosen] = other
        best = now
        steps.append(came)
    least = min(best[budget])
    if least == INFINITE:
        return None
    chosen, left = best[budget].index(least), budget
    way = [chosen]
    for layer in range(layers - 1, 0, -1):
        earlier = steps[layer][left][chosen]
        left -= weights[chosen]
        chosen = earlier
        way.append(chosen)
    return least, tuple(choices[index] for index in reversed(way))


@dataclass(frozen=True)
class Tables:
    """Memory and time of one layer and of what a stage has beside its layers, from the caller's models.

    `layer_mb(strategy, micro_batch, in_flight)`, `fixed_mb(stage, pp, tp, dp, micro_batch)`,
    `layer_s(strategy, micro_batch)`, `fixed_s(stage, pp, tp, micro_batch)`, all for one microbatch.
    """

    world: int
    layers: int
    global_batch: int
    budget_mb: int
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    micro_batch: tuple[int, ...]
    layer_mb: Callable[[LayerStrategy, int, int], float]
    fixed_mb: Callable[[int, int, int, int, int], float]
    layer_s: Callable[[LayerStrategy, int], float]
    fixed_s: Callable[[int, int, int, int], float]
    change_s: Callable[[LayerStrategy, LayerStrategy, int], float]
    unit_mb: int = 256


def search(tables: Tables) -> Plan | None:
    """The plan with the least predicted time over all pipeline degrees and numbers of microbatches."""
    found: Plan | None = None
    counts = [number for number in range(1, tables.global_batch + 1) if tables.global_batch % number == 0]
    for pp, microbatches in itertools.product(tables.pp, counts):
        if tables.layers % pp or tables.world % pp:
            continue
        plan = _one(tables, pp, microbatches)
        if plan is not None and (found is None or plan.seconds < found.seconds):
            found = plan
    return found


def _one(tables: Tables, pp: int, microbatches: int) -> Plan | None:
    cards = tables.world // pp
    samples = tables.global_batch // microbatches
    choices = [
        LayerStrategy(tp, cards // tp, recompute)
        for tp in tables.tp
        if cards % tp == 0 and samples % (cards // tp) == 0 and samples // (cards // tp) in tables.micro_batch
        for recompute in (False, True)
    ]
    if not choices:
        return None
    stages: list[tuple[float, tuple[LayerStrategy, ...]]] = []
    for stage in range(pp):
        in_flight = min(microbatches, pp - stage)
        # The embedding and the output layer may take the layout that needs the least memory.
        fixed = min(tables.fixed_mb(stage, pp, item.tp, item.dp, samples // item.dp) for item in choices)
        budget = int((tables.budget_mb - fixed) // tables.unit_mb)
        if budget < 0:
            return None

        def memory(choice: LayerStrategy, held: int = in_flight) -> int:
            return -(-int(tables.layer_mb(choice, samples // choice.dp, held)) // tables.unit_mb)

        solved = best_stage(
            tables.layers // pp,
            choices,
            memory,
            lambda choice: tables.layer_s(choice, samples // choice.dp),
            lambda one, other: tables.change_s(one, other, samples // min(one.dp, other.dp)),
            budget,
        )
        if solved is None:
            return None
        first = solved[1][0]
        stages.append((solved[0] + tables.fixed_s(stage, pp, first.tp, samples // first.dp), solved[1]))
    times = [seconds for seconds, _ in stages]
    total = sum(times) + (microbatches - 1) * max(times)
    layers = tuple(itertools.chain.from_iterable(way for _, way in stages))
    return Plan(pp, microbatches, tables.global_batch, layers, total)


def as_trained(plan: Plan) -> tuple[int, int, int, int, bool]:
    """(tp, pp, dp, micro batch, recompute) that such a plan is trained with where layers cannot differ: the first
    layer's sizes for all, recomputation for all if any layer asks for it."""
    first = plan.layers[0]
    micro_batch = plan.global_batch // plan.microbatches // first.dp
    return first.tp, plan.pp, first.dp, micro_batch, any(layer.recompute for layer in plan.layers)
