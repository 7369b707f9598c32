"""MindSpore's `memory_block.csv`, replayed: the peak, the blocks alive at it, and the curve of its iteration.

One pass, in memory that grows with the blocks alive at once and not with the file: rows come in the order of
allocation, so a heap of the ends is enough. The long column (`python_stack`) is hashed, not parsed: a training
program has few different stacks. The rows of the peak are read again at the end, by offset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.call_stack import CallStack, movement, read_stack

NEVER = 2**63 - 1
_NEEDED = ("start_time_stamp", "end_time_stamp", "size", "type", "node_name", "python_stack")
# Bounds of what one pass remembers; real programs stay far below them.
_MOST_STACKS = 20_000
_MOST_POINTS = 1_200
_BITS = 40  # of a block's number
_MOST_SEGMENTS = 10_000


@dataclass(eq=False)
class Segment:
    """A stretch of one phase: a microbatch's forward or backward, an optimizer step, the building of the model."""

    phase: str
    iteration: int  # 0 before training, then from 1
    microbatch: int | None  # from 1, of the iteration
    start: int
    end: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Block:
    """A block that is alive at the peak."""

    start: int
    end: int
    size: int
    kind: str  # MindSpore's type: PyNativeOutput, Weight, WorkSpace, …
    node: str
    stack: CallStack
    segment: Segment
    layer: int | None  # from 1, of this rank


@dataclass
class Iteration:
    """Used memory over one iteration: for each point its time stamp, the lowest and the highest bytes around it."""

    number: int
    points: list[tuple[int, int, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


@dataclass(frozen=True)
class Replay:
    """What the file says. Bytes are exact: the sizes of `blocks` add up to `peak_bytes`."""

    path: Path
    rows: int
    peak_bytes: int
    peak_time: int
    peak_segment: Segment
    blocks: tuple[Block, ...]
    iteration: Iteration  # the one that holds the peak
    counted_used_bytes: int | None  # the largest actual_used_memory that the engine wrote
    counted_peak_bytes: int | None  # the largest actual_peak_memory: with fragments
    damaged_rows: int


def replay(path: Path) -> Replay:
    """Reads a whole file. UsageError if it is not a memory_block.csv or holds no block.

    MindSpore writes blocks in the order of allocation. A file in another order is sorted into a temporary copy first.
    """
    try:
        return _replay(path)
    except _OutOfOrderError:
        with tempfile.TemporaryDirectory() as folder:
            found = _replay(_sorted_copy(path, Path(folder) / path.name))
        return dataclasses.replace(found, path=path)


def _replay(path: Path) -> Replay:
    with path.open("rb", buffering=2**20) as file:
        reader = _Reader(_columns(file.readline(), path))
        reader.read(file)
        if reader.peak_segment is None or reader.iteration is None:
            raise UsageError(f"{path} holds no block: was the memory tracker on while the program ran?")
        blocks = tuple(reader.live_blocks(file))
    return Replay(
        path=path,
        rows=reader.rows,
        peak_bytes=reader.peak,
        peak_time=reader.peak_time,
        peak_segment=reader.peak_segment,
        blocks=blocks,
        iteration=reader.iteration,
        counted_used_bytes=reader.counted_used,
        counted_peak_bytes=reader.counted_peak,
        damaged_rows=reader.damaged,
    )


class _OutOfOrderError(Exception):
    """A block starts before the one above it."""


def _sorted_copy(path: Path, target: Path) -> Path:
    """The same rows by start; what is in memory is one number and one offset for each."""
    with path.open("rb") as file, target.open("wb") as out:
        header = file.readline()
        i_start = _columns(header, path).at["start_time_stamp"]
        out.write(header)
        index: list[tuple[int, int]] = []
        offset = file.tell()
        for line in file:
            with contextlib.suppress(ValueError, IndexError):
                index.append((int(line.split(b",", i_start + 1)[i_start]), offset))
            offset += len(line)
        for _, where in sorted(index):
            file.seek(where)
            out.write(file.readline().rstrip(b"\r\n") + b"\n")
    return target


@dataclass(frozen=True)
class _Columns:
    at: dict[str, int]
    before_stack: int  # number of columns before python_stack
    after_stack: int  # number of commas after it


def _columns(header: bytes, path: Path) -> _Columns:
    names = [name.strip() for name in header.decode("utf-8-sig", errors="replace").rstrip("\r\n").split(",")]
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise UsageError(f"{path} is not a memory_block.csv of MindSpore: no column {', '.join(missing)}.")
    at = {name: index for index, name in enumerate(names) if name}
    if any(at[name] > at["python_stack"] for name in _NEEDED):
        raise UsageError(f"{path}: the columns are in an order that this version does not know.")
    return _Columns(at, at["python_stack"], len(names) - at["python_stack"] - 1)


_Entry = tuple[int, int, int, int, int, Segment, "int | None"]  # end, sequence, size, start, offset, segment, layer


class _Reader:
    """The state of one pass."""

    def __init__(self, columns: _Columns) -> None:
        self.columns = columns
        self.rows = self.damaged = 0
        self.peak = self.peak_time = 0
        self.peak_segment: Segment | None = None
        self.iteration: Iteration | None = None
        self.counted_used: int | None = None
        self.counted_peak: int | None = None
        self._alive: dict[int, _Entry] = {}
        self._staying: list[_Entry] = []
        # Blocks of the peak that were freed after it: with those still alive they are the peak's blocks.
        self._freed_since_peak: list[_Entry] = []
        self._peak_sequence = -1

    def read(self, file: BinaryIO) -> None:
        """The pass. One loop on purpose: a call per row would cost as much as the row."""
        at = self.columns.at
        i_start, i_end, i_size = at["start_time_stamp"], at["end_time_stamp"], at["size"]
        i_used, i_actual = at.get("actual_used_memory", i_size), at.get("actual_peak_memory", i_size)
        counts = "actual_used_memory" in at and "actual_peak_memory" in at
        head = max(i_start, i_end, i_size, i_used, i_actual) + 1
        i_stack = self.columns.before_stack
        stacks: dict[bytes, CallStack] = {}
        # Programs repeat themselves: after a stack comes the same again, or the one that came last time. Their text is
        # compared in place, at the end of the line; only where it differs is the column cut out and looked up.
        follower: dict[CallStack, tuple[bytes, CallStack, str]] = {}
        moves: dict[tuple[CallStack, CallStack], str] = {}
        guess: tuple[bytes, CallStack, str] | None = None
        text = b"\0"
        ending: list[int] = []  # a heap
        alive, staying, push, pop = self._alive, self._staying, heapq.heappush, heapq.heappop
        freed_since_peak = self._freed_since_peak
        program = _Program()
        segment, layer = program.segment, program.layer
        stack = read_stack(b"")
        used = peak = sequence = start = counted_used = counted_peak = 0
        last_actual = b""
        point_time = point_low = point_high = point_rows = 0
        last_start = peak_sequence = -1
        offset = file.tell()
        for line in file:
            row = line.split(b",", head)
            here, offset = offset, offset + len(line)
            try:
                start, end, size, engine_used = int(row[i_start]), int(row[i_end]), int(row[i_size]), int(row[i_used])
                if line.endswith(text):
                    changed = False
                else:
                    changed = True
                    if guess is not None and line.endswith(guess[0]):
                        text, stack, move = guess
                    else:
                        tail = line.split(b",", i_stack)[i_stack]
                        before, known = stack, stacks.get(tail)
                        if known is None:
                            if len(stacks) >= _MOST_STACKS:
                                stacks.clear()
                                follower.clear()
                                moves.clear()
                            known = stacks[tail] = read_stack(tail)
                        text, stack = b"," + tail, known
                        if (before, stack) not in moves:
                            moves[before, stack] = movement(before, stack)
                        move = moves[before, stack]
                        follower[before] = (text, stack, move)
                    guess = follower.get(stack)
            except (ValueError, IndexError):
                self.damaged += bool(line.strip())
                continue
            if start < last_start:
                raise _OutOfOrderError
            last_start = start
            # An end and its block's number in one integer: a heap of integers is three times as fast as one of tuples.
            while ending and ending[0] >> _BITS <= start:
                key = pop(ending)
                gone = alive.pop(key)
                used -= gone[2]
                if gone[1] <= peak_sequence:
                    freed_since_peak.append(gone)
            if changed:
                if move == "layer" and stack.phase == program.phase:
                    program.layer = (program.layer or 0) + 1
                elif move or stack.phase != program.phase:
                    if point_rows:
                        program.point(point_time, point_low, point_high, point_rows)
                        point_rows = 0
                    self._keep(program.move(stack, move, start))
                    segment = program.segment
                layer = program.layer if stack.in_layer else None
            if not point_rows:
                point_time, point_low, point_high = start, used, 0
            elif used < point_low:
                point_low = used
            used += size
            if used > point_high:
                point_high = used
            point_rows += 1
            if point_rows >= program.rows_a_point:
                program.point(point_time, point_low, point_high, point_rows)
                point_rows = 0
            if end >= NEVER:
                staying.append((end, sequence, size, start, here, segment, layer))
            else:
                key = end << _BITS | sequence
                push(ending, key)
                alive[key] = (end, sequence, size, start, here, segment, layer)
            if used > peak:
                peak, peak_sequence = used, sequence
                self.peak_time, self.peak_segment = start, segment
                freed_since_peak.clear()
            if engine_used > counted_used:
                counted_used = engine_used
            if row[i_actual] != last_actual:
                last_actual = row[i_actual]
                if last_actual.isdigit():
                    counted_peak = max(counted_peak, int(last_actual))
            sequence += 1
        self.rows, self.peak, self._peak_sequence = sequence, peak, peak_sequence
        if point_rows:
            program.point(point_time, point_low, point_high, point_rows)
        self._keep(program.finish(start + 1))
        if counts and sequence:
            self.counted_used, self.counted_peak = counted_used, counted_peak

    def live_blocks(self, file: BinaryIO) -> Iterator[Block]:
        """The rows alive at the peak, read again one by one."""
        at, i_stack = self.columns.at, self.columns.before_stack
        alive = [
            entry
            for group in (self._staying, self._alive.values(), self._freed_since_peak)
            for entry in group
            if entry[1] <= self._peak_sequence
        ]
        stacks: dict[bytes, CallStack] = {}
        for end, _, size, start, offset, segment, layer in sorted(alive, key=lambda entry: entry[1]):
            file.seek(offset)
            row = file.readline().rstrip(b"\r\n").split(b",", i_stack)
            tail = row[i_stack].rsplit(b",", self.columns.after_stack)[0]
            stack = stacks.get(tail)
            if stack is None:
                stack = stacks[tail] = read_stack(tail)
            yield Block(
                start=start,
                end=end,
                size=size,
                kind=row[at["type"]].decode(errors="replace"),
                node=row[at["node_name"]].decode(errors="replace"),
                stack=stack,
                segment=segment,
                layer=layer,
            )

    def _keep(self, iteration: Iteration | None) -> None:
        if iteration and self.peak_segment and self.peak_segment.iteration == iteration.number:
            self.iteration = iteration


class _Program:
    """Where the program is: iteration, microbatch, layer; and the curve of the iteration so far."""

    def __init__(self) -> None:
        self.phase = "build"
        self.layer: int | None = None
        self.segment = Segment("build", 0, None, 0)
        self._iteration = Iteration(0, segments=[self.segment])
        self._forwards = self._backwards = 0
        self._stepped = False
        self.rows_a_point = 1  # of the file, in this iteration

    def move(self, stack: CallStack, move: str, now: int) -> Iteration | None:
        """Enters a phase or a microbatch. Returns the iteration that ended with it, if one did."""
        phase = stack.phase
        if phase == self.phase and phase != "forward":
            return None
        ended = None
        if phase in ("forward", "backward", "recompute") and (self._stepped or self._iteration.number == 0):
            ended = self.finish(now)
            self._iteration = Iteration(ended.number + 1)
            self._stepped = False
            self._forwards = self._backwards = 0
            # Iterations are alike: the next one starts as coarse as this one ended.
            self.rows_a_point = self.rows_a_point if 2 * len(ended.points) >= _MOST_POINTS else 1
        microbatch = None
        if phase == "forward":
            self._forwards += 1
            microbatch = self._forwards
        elif phase in ("backward", "recompute"):
            # A backward that recomputes its layers goes to and fro between the two phases.
            self._backwards += self.phase not in ("backward", "recompute")
            microbatch = self._backwards
        elif phase == "step":
            self._stepped = True
        self.segment.end = now
        self.segment = Segment(phase, self._iteration.number, microbatch, now)
        if len(self._iteration.segments) < _MOST_SEGMENTS:
            self._iteration.segments.append(self.segment)
        self.phase = phase
        self.layer = 1 if stack.in_layer else None
        return ended

    def point(self, time: int, low: int, high: int, rows: int) -> None:
        """A point of the curve; neighbours are merged when there are too many, lows and highs kept."""
        if high > self.segment.peak_bytes:
            self.segment.peak_bytes = high
        points = self._iteration.points
        if points and rows < self.rows_a_point and len(points) * 2 > _MOST_POINTS:
            # A short stretch at the end of a layer or phase: part of the point before it.
            points[-1] = (points[-1][0], min(low, points[-1][1]), max(high, points[-1][2]))
            return
        points.append((time, low, high))
        if len(points) >= _MOST_POINTS:
            pairs = zip(points[::2], points[1::2], strict=True)
            points[:] = [(one[0], min(one[1], two[1]), max(one[2], two[2])) for one, two in pairs]
            self.rows_a_point *= 2

    def finish(self, now: int) -> Iteration:
        """The iteration so far, closed."""
        self.segment.end = now
        return self._iteration
