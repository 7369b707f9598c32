"""The predicted schedule of one iteration as a Chrome trace (the JSON that chrome://tracing and Perfetto open).

One process a pipeline stage; its threads are the passes, the exchanges with its neighbours, and the end of the iteration.
Passes run in Megatron's order (1F1B, or the interleaved schedule), each as soon as its stage is free and its input is there.
"""

from __future__ import annotations

from typing import Any

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.estimate.layer_time import Case
from mindspeed_dryrun.estimate.operators import Operators
from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.estimate.time_model import (
    USUAL,
    chunk_passes,
    embedding,
    end_of_iteration,
    exchange,
    head_passes,
)
from mindspeed_dryrun.megatron.model_shape import ModelShape

_PASSES, _EXCHANGE, _END = 0, 1, 2
_THREADS = {_PASSES: "passes", _EXCHANGE: "exchange", _END: "gradients and optimizer"}

# A pass: forward or backward, microbatch, chunk.
Step = tuple[bool, int, int]


def trace(shape: ModelShape, strategy: Strategy, hardware: Hardware, operators: Operators = USUAL) -> dict[str, Any]:
    """The trace of one iteration; times are microseconds."""
    case = Case(shape, strategy, hardware, operators)
    microbatches = strategy.microbatches(shape.global_batch)
    events = _names(strategy)
    if strategy.dualpipe:
        clocks = _run_v(case, microbatches, events)
    else:
        orders = [step_order(strategy.pp, strategy.chunks, microbatches, stage) for stage in range(strategy.pp)]
        clocks = _run(case, orders, events)
    finish = max(clocks)
    gradients, step = end_of_iteration(case, finish / max(1, microbatches))
    for stage in range(strategy.pp):
        events.append(_event("gradient reduction", "gradients", stage, _END, finish, gradients))
        events.append(_event("optimizer step", "optimizer", stage, _END, finish + gradients, step))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def step_order(pp: int, chunks: int, microbatches: int, stage: int) -> list[Step]:
    """The passes of a stage in Megatron's order (core/pipeline_parallel/schedules.py)."""
    # `forward_backward_pipelining_with_interleaving`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/pipeline_parallel/schedules.py#L672
    total = microbatches * chunks
    warm = min(total, pp - stage - 1 if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp)
    if chunks > 1 and microbatches == pp:
        warm = total
    forward = [(True, *_at(index, pp, chunks, microbatches)) for index in range(total)]
    backward = [
        (False, micro, chunks - 1 - chunk) for micro, chunk in (_at(index, pp, chunks, microbatches) for index in range(total))
    ]
    order: list[Step] = list(forward[:warm])
    for index in range(total - warm):
        order += [forward[warm + index], backward[index]]
    return order + backward[total - warm :]


def _at(index: int, pp: int, chunks: int, microbatches: int) -> tuple[int, int]:
    """Microbatch and chunk of the n-th pass: groups of `pp` microbatches go through all chunks."""
    if chunks == 1:
        return index, 0
    group, inside = divmod(index, pp * chunks)
    size = min(pp, microbatches - group * pp)
    return group * pp + inside % size, inside // size


class _Stages:
    """The clocks of all stages, and when each pass was done: (forward, microbatch, position in the model)."""

    def __init__(self, case: Case, events: list[dict[str, Any]]):
        self.case, self.events, self.strategy = case, events, case.strategy
        pp, chunks = self.strategy.pp, self.strategy.chunks
        self.times = [_durations(case, stage) for stage in range(pp)]
        self.send = [exchange(case, stage).total / 2 / (1 if stage in (0, pp - 1) else 2) / chunks for stage in range(pp)]
        self.done: dict[tuple[bool, int, int], float] = {}
        self.clocks = [0.0] * pp

    def start(self, stage: int, step: Step) -> float | None:
        """When a pass could start; None while its input is not there."""
        forward, micro, chunk = step
        place = self.strategy.position(stage, chunk)
        needed = _needed(forward, micro, place, self.strategy.pp * self.strategy.chunks)
        if needed is None:
            return self.clocks[stage]
        if needed not in self.done:
            return None
        start = max(self.clocks[stage], self.done[needed])
        # A V turns inside the last stage: nothing is sent there.
        return start + (self.send[stage] if self._from_elsewhere(stage, needed[2]) else 0.0)

    def _from_elsewhere(self, stage: int, place: int) -> bool:
        return all(self.strategy.position(stage, chunk) != place for chunk in range(self.strategy.chunks))

    def run(self, stage: int, step: Step, start: float) -> None:
        """Writes the events of a pass and moves the clock."""
        forward, micro, chunk = step
        place, chunks = self.strategy.position(stage, chunk), self.strategy.chunks
        needed = _needed(forward, micro, place, self.strategy.pp * chunks)
        if needed is not None and self._from_elsewhere(stage, needed[2]):
            sent = self.send[stage]
            self.events.append(_event("exchange", "exchange", stage, _EXCHANGE, start - sent, sent))
        seconds = self.times[stage][chunk][0 if forward else 1]
        kind = "forward" if forward else "backward"
        name = f"{kind} {micro}" + (f" chunk {chunk}" if chunks > 1 else "")
        self.events.append(_event(name, kind, stage, _PASSES, start, seconds) | {"args": {"microbatch": micro, "chunk": chunk}})
        self.clocks[stage] = self.done[(forward, micro, place)] = start + seconds


def _run(case: Case, orders: list[list[Step]], events: list[dict[str, Any]]) -> list[float]:
    """Works all stages off in their orders, writes their events, and says when each is done."""
    stages = _Stages(case, events)
    positions = [0] * case.strategy.pp
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while positions[stage] < len(order):
                start = stages.start(stage, order[positions[stage]])
                if start is None:
                    break
                stages.run(stage, order[positions[stage]], start)
                positions[stage] += 1
                moved = True
    assert all(position == len(order) for position, order in zip(positions, orders, strict=True)), "Deadlock."
    return stages.clocks


def _run_v(case: Case, microbatches: int, events: list[dict[str, Any]]) -> list[float]:
    """DualPipeV without its own order: a stage runs what can start first, backward passes before forward ones, and holds
    no more microbatches than the schedule does."""
    strategy = case.strategy
    stages = _Stages(case, events)
    limits = [strategy.in_flight(stage, microbatches) for stage in range(strategy.pp)]
    following = [{(forward, chunk): 0 for forward in (False, True) for chunk in (0, 1)} for _ in range(strategy.pp)]
    for _ in range(4 * microbatches * strategy.pp):
        choices = []
        for stage, following_here in enumerate(following):
            for (forward, chunk), micro in following_here.items():
                held = following_here[(True, chunk)] - following_here[(False, chunk)]
                if micro == microbatches or (forward and held > limits[stage][chunk]):
                    continue
                start = stages.start(stage, (forward, micro, chunk))
                if start is not None:
                    choices.append((start, forward, -chunk, stage))
        start, forward, chunk, stage = min(choices)
        stages.run(stage, (forward, following[stage][(forward, -chunk)], -chunk), start)
        following[stage][(forward, -chunk)] += 1
    return stages.clocks


def _needed(forward: bool, micro: int, place: int, places: int) -> tuple[bool, int, int] | None:
    """What must be done before a pass may start."""
    if forward:
        return (True, micro, place - 1) if place else None
    return (False, micro, place + 1) if place < places - 1 else (True, micro, place)


def _durations(case: Case, stage: int) -> list[tuple[float, float]]:
    """Seconds of the forward and the backward pass of each chunk, with embedding and output layer."""
    found = [(forward.total, backward.total) for forward, backward in chunk_passes(case, stage)]
    if stage == 0:
        seconds = embedding(case).total
        found[0] = (found[0][0] + seconds / 2, found[0][1] + seconds / 2)
    if stage == case.strategy.head_stage:
        forward, backward = head_passes(case)
        found[-1] = (found[-1][0] + forward.total, found[-1][1] + backward.total)
    return found


def _names(strategy: Strategy) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for stage in range(strategy.pp):
        events.append({"name": "process_name", "ph": "M", "pid": stage, "tid": 0, "args": {"name": f"stage {stage}"}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": stage, "tid": 0, "args": {"sort_index": stage}})
        for thread, name in _THREADS.items():
            events.append({"name": "thread_name", "ph": "M", "pid": stage, "tid": thread, "args": {"name": name}})
    return events


def _event(name: str, category: str, stage: int, thread: int, start: float, seconds: float) -> dict[str, Any]:
    return {
        "name": name, "cat": category, "ph": "X", "pid": stage, "tid": thread,
        "ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3),
    }  # fmt: skip
