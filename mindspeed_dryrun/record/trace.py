"""The profiler's `trace_view.json` (Chrome trace format) → time per operator. Streaming: events are read one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mindspeed_dryrun.errors import UsageError

_CHUNK = 2**20
_LONGEST_EVENT = 2**26
# An operator's running number (`MatMul_12`, `Default/MatMul-op7`) is not part of its name.
_NUMBER = re.compile(r"(?:[-_]op\d+|_\d+)$")
_DEVICE = re.compile(r"ascend hardware|hardware|npu", re.IGNORECASE)
_COMMUNICATION = re.compile(r"hccl|communication", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """All calls of one operator."""

    name: str
    where: str  # the trace's process name: "Ascend Hardware", "Communication(HCCL)", …
    calls: int
    total_us: float
    longest_us: float

    @property
    def mean_us(self) -> float:
        return self.total_us / self.calls


@dataclass(frozen=True)
class Trace:
    """Operators by total time, longest first; `device_only` says that host events were left out."""

    operators: tuple[OperatorTime, ...]
    events: int
    device_only: bool

    @property
    def total_us(self) -> float:
        return sum(operator.total_us for operator in self.operators)


def _process_name(args: Any) -> str:
    return str(args.get("name", "")) if isinstance(args, dict) else ""


def read_trace(path: Path) -> Trace:
    """Device and communication operators where the trace names its processes, else every complete event."""
    processes: dict[str, str] = {}
    sums: dict[tuple[str, str], list[float]] = {}
    open_events: dict[tuple[str, str, str], float] = {}
    events = 0
    with path.open("r", encoding="utf-8", errors="replace") as file:
        for event in _events(file, path):
            events += 1
            phase, pid = event.get("ph"), str(event.get("pid"))
            if phase == "M" and event.get("name") == "process_name":
                processes[pid] = _process_name(event.get("args"))
                continue
            name = _NUMBER.sub("", str(event.get("name", "")).rsplit("/", 1)[-1])
            duration = None
            if phase == "X":
                duration = _number(event.get("dur"))
            elif phase in ("B", "E"):
                key = (pid, str(event.get("tid")), str(event.get("name")))
                if phase == "B":
                    open_events[key] = _number(event.get("ts")) or 0.0
                elif key in open_events:
                    duration = (_number(event.get("ts")) or 0.0) - open_events.pop(key)
            if duration is not None:
                entry = sums.setdefault((pid, name), [0, 0.0, 0.0])
                entry[0] += 1
                entry[1] += duration
                entry[2] = max(entry[2], duration)
    wanted = {pid for pid, name in processes.items() if _DEVICE.search(name) or _COMMUNICATION.search(name)}
    device_only = any(pid in wanted for pid, _ in sums)
    found = [
        OperatorTime(name=name, where=processes.get(pid, ""), calls=int(calls), total_us=total, longest_us=longest)
        for (pid, name), (calls, total, longest) in sums.items()
        if not device_only or pid in wanted
    ]
    return Trace(tuple(sorted(found, key=lambda item: (-item.total_us, item.name))), events, device_only)


def _events(file: IO[str], path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the top array, or of `traceEvents`; a file cut off in the middle gives what it holds."""
    decoder = json.JSONDecoder()
    text = file.read(_CHUNK)
    start = re.match(r'\ufeff?\s*\[|\s*\{(?:.|\n)*?"traceEvents"\s*:\s*\[', text)
    if not start:
        raise UsageError(f"{path} is not a Chrome trace (trace_view.json): it has no list of events.")
    position = start.end()
    while True:
        while position < len(text) and text[position] in ", \t\r\n":
            position += 1
        if position < len(text) and text[position] == "]":
            return
        try:
            event, position = decoder.raw_decode(text, position)
        except RecursionError:
            raise UsageError(f"{path} is not a Chrome trace (trace_view.json): an event is nested too deeply.") from None
        except json.JSONDecodeError:
            more = file.read(_CHUNK)
            if not more or len(text) - position > _LONGEST_EVENT:
                return
            text, position = text[position:] + more, 0
            continue
        if isinstance(event, dict):
            yield event


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
