"""The predicted schedule as a Chrome trace: what Perfetto needs, and what a pipeline allows."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json

import pytest
from strategy_models import MODELS, hardware

from mindspeed_dryrun.estimate.strategy import Strategy
from mindspeed_dryrun.estimate.time_model import iteration_seconds
from mindspeed_dryrun.estimate.timeline import step_order, trace

QWEN = dataclasses.replace(MODELS["qwen2.5-7b"], layers=32, global_batch=16)
CASES = {
    "one stage": Strategy(tp=4, pp=1, dp=2, cp=1, micro_batch=1, stages=((32,),), distributed_optimizer=True),
    "1F1B": Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((8,),) * 4),
    "interleaved": Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((4, 4),) * 4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trace_is_what_perfetto_reads(name: str) -> None:
    """Complete events with times in microseconds, and no two of one thread overlap without one inside the other."""
    strategy = CASES[name]
    data = json.loads(json.dumps(trace(QWEN, strategy, hardware())))
    spans = collections.defaultdict(list)
    for event in data["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= set(event) and event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for found in spans.values():
        found.sort()
        assert all(one[1] <= two[0] + 0.01 for one, two in itertools.pairwise(found))
    names = {event["args"]["name"] for event in data["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"stage {stage}" for stage in range(strategy.pp)}
    categories = {event.get("cat") for event in data["traceEvents"]}
    assert {"forward", "backward", "gradients", "optimizer"} <= categories
    assert ("exchange" in categories) == (strategy.pp > 1)


@pytest.mark.parametrize("name", CASES)
def test_every_pass_is_there_once_and_behind_its_input(name: str) -> None:
    strategy = CASES[name]
    events = trace(QWEN, strategy, hardware())["traceEvents"]
    passes = [event for event in events if event["tid"] == 0 and "dur" in event]
    microbatches = strategy.microbatches(QWEN.global_batch)
    assert len(passes) == 2 * microbatches * strategy.chunks * strategy.pp
    ends = {
        (event["cat"], event["args"]["microbatch"], event["args"]["chunk"] * strategy.pp + event["pid"]): event
        for event in passes
    }
    assert len(ends) == len(passes)
    for (kind, micro, place), event in ends.items():
        before = ends.get((kind, micro, place - 1 if kind == "forward" else place + 1))
        if before is not None:
            assert before["ts"] + before["dur"] <= event["ts"] + 0.01


@pytest.mark.parametrize("name", CASES)
def test_the_schedule_takes_as_long_as_predicted(name: str) -> None:
    """Event by event against the formula."""
    events = trace(QWEN, CASES[name], hardware())["traceEvents"]
    end = max(event["ts"] + event["dur"] for event in events if "dur" in event) * 1e-6
    assert end == pytest.approx(iteration_seconds(QWEN, CASES[name], hardware()), rel=0.12)


def test_the_order_is_megatrons() -> None:
    """The first stage of four: three forward passes, then one forward, one backward."""
    order = step_order(4, 1, 8, 0)
    assert [forward for forward, _, _ in order[:6]] == [True, True, True, True, False, True]
    interleaved = step_order(4, 2, 8, 0)
    assert [chunk for _, _, chunk in interleaved[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sum(forward for forward, _, _ in interleaved[:11]) == 11 and not interleaved[11][0]
