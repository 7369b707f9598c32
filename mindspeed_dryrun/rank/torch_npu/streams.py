"""Streams and events of CANN's runtime, and what has been done when torch_npu asks (acl_rt.h).

Everything has been done at once, but on ranks that are faster than those they talk to (the edge of layerwise disaggregated
training): there a stream has done what the host has waited for, no more. A block that a second stream uses is given out again
when that stream is done. So which block a tensor gets, and how much of it is too small to be split off, depends on this.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Iterable

from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank.torch_npu.slots import answers, store

_NOT_RECORDED, _RECORDED = 0, 1  # aclrtEventRecordedStatus
_WAIT_COMPLETE, _WAIT_NOT_READY = 0, 0xFFFF  # aclrtEventWaitStatus
_STREAM_COMPLETE = 0
_handles = itertools.count(0x1000, 0x40)


class Streams:
    """What each stream was given, in order: how far it has come, and where it waits for others."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}  # stream → records and waits so far
        self.done: dict[int, int] = {}  # of these
        self.waits: dict[int, list[tuple[int, int, int]]] = {}  # stream → (its own place, another stream, the place there)
        self.events: dict[int, tuple[int, int]] = {}  # event → where it was recorded last

    def record(self, event: int, stream: int) -> None:
        """The event is done when the stream has come to here."""
        self.events[event] = stream, self._next(stream)

    def wait(self, stream: int, event: int) -> None:
        """The stream goes on from here when the event is done."""
        if event in self.events:
            self.waits.setdefault(stream, []).append((self._next(stream), *self.events[event]))

    def finish(self, streams: Iterable[int]) -> None:
        """The host waits until these have done everything, and so has what they wait for."""
        for stream in list(streams):
            self._finish(stream, self.given.get(stream, 0))

    def finish_event(self, event: int) -> None:
        """The host waits for an event."""
        if event in self.events:
            self._finish(*self.events[event])

    def is_done(self, event: int) -> bool:
        """An event that was never recorded is."""
        stream, place = self.events.get(event, (0, 0))
        return self.done.get(stream, 0) >= place

    def _next(self, stream: int) -> int:
        self.given[stream] = self.given.get(stream, 0) + 1
        return self.given[stream]

    def _finish(self, stream: int, place: int) -> None:
        reached = [(stream, place)]
        while reached:
            stream, place = reached.pop()
            if self.done.get(stream, 0) < place:
                self.done[stream] = place
                waits = self.waits.pop(stream, [])
                reached += [there for own, *there in waits if own <= place]  # type: ignore[misc]
                self.waits[stream] = [wait for wait in waits if wait[0] > place]


streams = Streams()


@functools.cache
def late_in(process: int) -> bool:
    """A rank that was forked has an activation of its own. Thousands of events ask."""
    return config.current().late_streams


def _late() -> bool:
    return late_in(os.getpid())


@answers("p", "aclrtCreateStream", "aclrtCreateEvent")
@answers("pI", "aclrtCreateEventWithFlag", "aclrtCreateEventExWithFlag")
@answers("pII", "aclrtCreateStreamWithConfig")
def new_handle(handle: int, *options: int) -> int:
    return store(handle, next(_handles), ctypes.c_uint64)


@answers("pp", "aclrtStreamGetId")
def stream_id(stream: int | None, number: int) -> int:
    return store(number, (stream or 0) >> 6 & 0x7FFFFFFF, ctypes.c_int32)


@answers("pp", "aclrtStreamQuery")
def stream_query(stream: int, status: int) -> int:
    return store(status, _STREAM_COMPLETE, ctypes.c_int32)


@answers("pp", "aclrtRecordEvent")
def record_event(event: int, stream: int | None) -> int:
    if _late():
        streams.record(event, stream or 0)
    return 0


@answers("pp", "aclrtStreamWaitEvent")
def stream_wait_event(stream: int | None, event: int) -> int:
    if _late():
        streams.wait(stream or 0, event)
    return 0


@answers("p", "aclrtSynchronizeStream")
@answers("pi", "aclrtSynchronizeStreamWithTimeout")
def synchronize_stream(stream: int | None, *timeout: int) -> int:
    streams.finish([stream or 0])
    return 0


@answers("", "aclrtSynchronizeDevice")
@answers("i", "aclrtSynchronizeDeviceWithTimeout")
def synchronize_device(*timeout: int) -> int:
    streams.finish(streams.given)
    return 0


@answers("p", "aclrtSynchronizeEvent")
def synchronize_event(event: int) -> int:
    streams.finish_event(event)
    return 0


@answers("pp", "aclrtQueryEventStatus", "aclQueryEventRecordedStatus")
def event_status(event: int, status: int) -> int:
    return store(status, _RECORDED if streams.is_done(event) else _NOT_RECORDED, ctypes.c_int32)


@answers("pp", "aclrtQueryEventWaitStatus", "aclQueryEventWaitStatus")
def event_wait_status(event: int, status: int) -> int:
    return store(status, _WAIT_COMPLETE if streams.is_done(event) else _WAIT_NOT_READY, ctypes.c_int32)


@answers("ppp", "aclrtEventElapsedTime")
def elapsed_time(milliseconds: int, start: int, end: int) -> int:
    ctypes.c_float.from_address(milliseconds).value = 1.0
    return 0


@answers("pp", "aclrtEventGetTimestamp")
def timestamp(event: int, time: int) -> int:
    return store(time, 0, ctypes.c_uint64)


@answers("pp", "aclrtGetStreamOverflowSwitch")
def overflow_switch(stream: int, flag: int) -> int:
    return store(flag, 0, ctypes.c_uint32)
