"""trace_view.json: operator times from a Chrome trace of any size."""

from __future__ import annotations

import json

import pytest

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.trace import read_trace

EVENTS = [
    {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "Ascend Hardware"}},
    {"name": "process_name", "ph": "M", "pid": 8, "args": {"name": "Python"}},
    {"name": "process_name", "ph": "M", "pid": 9, "args": {"name": "Communication(HCCL)"}},
    {"name": "MatMul_12", "ph": "X", "pid": 7, "tid": 1, "ts": 1.0, "dur": 100.5},
    {"name": "MatMul_13", "ph": "X", "pid": 7, "tid": 1, "ts": 200.0, "dur": "50"},
    {"name": "MatMulV2", "ph": "X", "pid": 7, "tid": 1, "ts": 300.0, "dur": 1},
    {"name": "forward", "ph": "X", "pid": 8, "tid": 1, "ts": 0.0, "dur": 9999},
    {"name": "hcom_allReduce_", "ph": "B", "pid": 9, "tid": 1, "ts": 400.0},
    {"name": "hcom_allReduce_", "ph": "E", "pid": 9, "tid": 1, "ts": 425.0},
    {"name": "flow", "ph": "s", "pid": 7, "id": 3},
]


@pytest.mark.parametrize("wrap", [lambda events: events, lambda events: {"displayTimeUnit": "ms", "traceEvents": events}])
def test_device_operators_are_summed_by_name_and_host_events_left_out(tmp_path, wrap):
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(wrap(EVENTS), indent=1))
    trace = read_trace(path)
    assert [(item.name, item.calls, item.total_us, item.longest_us) for item in trace.operators] == [
        ("MatMul", 2, 150.5, 100.5),
        ("hcom_allReduce_", 1, 25.0, 25.0),
        ("MatMulV2", 1, 1.0, 1.0),
    ]
    assert trace.device_only and trace.events == len(EVENTS)


def test_a_trace_larger_than_a_chunk_and_cut_off_gives_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_dryrun.record.trace._CHUNK", 64)
    path = tmp_path / "trace_view.json"
    many = [{"name": f"Add_{number}", "ph": "X", "pid": 1, "dur": 2} for number in range(500)]
    path.write_text(json.dumps(many)[:-30])
    (add,) = read_trace(path).operators
    assert (add.name, add.calls) == ("Add", 499)


def test_it_is_shown_as_a_table_and_rubbish_is_refused(tmp_path, capsys):
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(EVENTS))
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "MatMul" in out and "0.150" in out and all(len(line) <= 80 for line in out.splitlines())
    path.write_text('{"a": 1}')
    with pytest.raises(UsageError):
        read_trace(path)
    assert main(["explain", str(path)]) == 2


def test_an_event_that_is_nested_too_deeply_is_refused_with_a_sentence(tmp_path):
    path = tmp_path / "trace_view.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        read_trace(path)
