"""Recomputation stage by stage: as few layers of each as keep it within the memory.

The first stages of a pipeline hold the activations of more microbatches than the last ones, so they have to recompute
more. One number for all stages makes the others recompute for nothing: each gets its own here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from mindspeed_dryrun.estimate.strategy import Recompute, Strategy

# Memory of one stage of a strategy, MB.
StageMemory = Callable[[Strategy, int], float]


def balanced(layout: Strategy, memory: StageMemory, low_mb: float, high_mb: float) -> list[Strategy]:
    """For every limit between both that makes a difference, the strategy whose stages recompute as few layers as keep
    them within it; only those that one number for all stages cannot say."""
    stages = range(layout.pp)
    blocks = [_with(layout, count) for count in range(max(layers for (layers,) in layout.stages) + 1)]
    needs = [[memory(block, stage) for block in blocks[: layout.stages[stage][0] + 1]] for stage in stages]
    in_front = _with(layout, 1, (0,) * layout.pp)
    noop = [memory(in_front, stage) - needs[stage][0] for stage in stages]
    steps = {need for row in needs for need in row if low_mb <= need < high_mb}
    # Between two steps no-op layers make a difference: look at both ends.
    limits = {high_mb, *steps, *(step - 0.01 for step in steps)}
    found = dict.fromkeys(least(needs, noop, limit) for limit in sorted(limits, reverse=True))
    return [
        _with(layout, max(each), each)
        for each in found
        if each and any(own < min(max(each), layout.stages[stage][0]) for stage, own in enumerate(each))
    ]


def least(needs: Sequence[Sequence[float]], noop: Sequence[float], limit: float) -> tuple[int, ...] | None:
    """`needs[stage][count]`: what a stage needs that recomputes that many layers; `noop[stage]`: what each no-op layer adds
    that stands in front of its own to make it so few. None where recomputing everything is not enough."""
    for most in range(max(len(row) for row in needs)):
        each = []
        for row, extra in zip(needs, noop, strict=True):
            fitting = (count for count in range(min(most, len(row) - 1) + 1) if row[count] + (most - count) * extra <= limit)
            count = next(fitting, None)
            if count is None:
                break
            each.append(count)
        else:
            return tuple(each)
    return None


def _with(layout: Strategy, count: int, each: tuple[int, ...] = ()) -> Strategy:
    return dataclasses.replace(layout, recompute=Recompute("block", count, each)) if count else layout
