"""What the streams of the stand-in have done when torch_npu asks: everything at once, or what the host has waited for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from mindspeed_dryrun.rank.activation import Activation
from mindspeed_dryrun.rank.torch_npu import streams
from mindspeed_dryrun.rank.torch_npu.streams import Streams

MAIN, SIDE, OTHER = 0, 1, 2


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    fresh = Streams()
    monkeypatch.setattr(streams, "streams", fresh)
    streams.late_in.cache_clear()
    yield fresh
    streams.late_in.cache_clear()


def status(event: int) -> tuple[int, int]:
    """As torch_npu asks for it: recorded or not, and waited for or not."""
    found = ctypes.c_int32(7), ctypes.c_int32(7)
    streams.event_status(event, ctypes.addressof(found[0]))
    streams.event_wait_status(event, ctypes.addressof(found[1]))
    return found[0].value, found[1].value


def test_an_event_is_done_when_the_host_has_waited_for_its_stream(given: Streams) -> None:
    given.record(10, SIDE)
    given.record(11, SIDE)
    assert given.is_done(99), "an event that was never recorded"
    given.finish([MAIN])
    assert not given.is_done(10) and not given.is_done(11)
    given.finish_event(10)
    assert given.is_done(10) and not given.is_done(11)
    given.finish([SIDE])
    assert given.is_done(11)
    given.record(10, SIDE)  # once more
    assert not given.is_done(10)


def test_a_stream_that_is_done_has_waited_for_others(given: Streams) -> None:
    given.record(10, OTHER)
    given.wait(SIDE, 10)
    given.record(11, SIDE)
    given.wait(MAIN, 11)
    given.record(12, OTHER)
    given.finish([MAIN])
    assert given.is_done(10) and given.is_done(11), "what the main stream waited for, and that in turn"
    assert not given.is_done(12), "given to the other stream after that"


def test_a_wait_further_on_is_not_reached(given: Streams) -> None:
    given.record(10, SIDE)
    given.record(11, MAIN)
    given.wait(MAIN, 10)
    given.finish_event(11)
    assert not given.is_done(10)
    given.finish([MAIN])
    assert given.is_done(10)


def test_only_a_late_rank_remembers(given: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    streams.record_event(10, SIDE)
    assert status(10) == (1, 0), "at once"
    for name, value in Activation(mode="rank", late_streams=True).to_env().items():
        monkeypatch.setenv(name, value)
    streams.late_in.cache_clear()
    streams.record_event(10, SIDE)
    streams.stream_wait_event(None, 10)
    streams.record_event(11, None)
    assert status(10) == status(11) == (0, 0xFFFF)
    streams.synchronize_event(11)
    assert status(10) == status(11) == (1, 0)
    streams.record_event(10, SIDE)
    streams.record_event(11, OTHER)
    streams.synchronize_stream(SIDE)
    assert (status(10), status(11)) == ((1, 0), (0, 0xFFFF))
    streams.synchronize_device()
    assert status(11) == (1, 0)
