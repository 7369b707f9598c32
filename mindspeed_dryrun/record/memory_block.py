"""MindSpore's `memory_block.csv`, followed: the peak, the blocks alive at it, and the curve of its iteration.

`memory_rows` reads the file in parts; one pass goes over their columns, in memory that grows with the blocks alive at
once and not with the file. Each row says how much the engine counted as used after it: the largest is the peak. The
blocks alive then must add up to it, and those at the end of every part to what is said there. Where they do not (a file
that was cut, or that other software wrote), a second pass adds them up row by row. The rows of the peak are read again
at the end, by offset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import le, sub
from pathlib import Path
from typing import BinaryIO

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.call_stack import CallStack, movement, read_stack
from mindspeed_dryrun.record.memory_rows import ColumnOrder, Rows, read_rows
from mindspeed_dryrun.temporary import temporary_folder

NEVER = 2**63 - 1
_NEEDED = ("start_time_stamp", "end_time_stamp", "size", "type", "node_name", "python_stack")
# Bounds of what one pass remembers; real programs stay far below them.
_MOST_STACKS = 20_000
_MOST_POINTS = 1_200
_MOST_SEGMENTS = 10_000
_MOST_UNDRAWN = 30_000


@dataclass(eq=False, kw_only=True)
class Segment:
    """A stretch of one phase: a microbatch's forward or backward, an optimizer step, the building of the model."""

    phase: str
    iteration: int  # 0 before training, then from 1
    microbatch: int | None  # from 1, of the iteration
    start: int
    end: int = 0
    peak_bytes: int = 0  # told for the segments of the peak's iteration


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
    """Reads a whole file. UsageError if it is not a memory_block.csv or contains no memory blocks.

    MindSpore writes blocks in the order of allocation. A file in another order is sorted into a temporary copy first.
    """
    try:
        return _replay(path)
    except _OutOfOrderError:
        with temporary_folder() as folder:
            found = _replay(_sorted_copy(path, folder / path.name))
        return dataclasses.replace(found, path=path)


def _replay(path: Path) -> Replay:
    with path.open("rb") as file:
        columns = _columns(file.readline(), path)
        first = file.tell()
        try:
            reader = _follow(path, columns, first, None if columns.layout.used >= 0 else _Sum())
        except _OtherSumError:
            reader = _follow(path, columns, first, _Sum())
        if reader.peak_segment is None or reader.iteration is None:
            raise UsageError(f"{path} contains no memory blocks: was the memory tracker on while the program ran?")
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


def _follow(path: Path, columns: _Columns, first: int, adding: _Sum | None) -> _Reader:
    reader = _Reader(columns, adding)
    for rows in read_rows(path, columns.layout, first):
        reader.take(rows)
    reader.finish()
    return reader


class _OutOfOrderError(Exception):
    """A block starts before the one above it."""


class _OtherSumError(Exception):
    """The engine's count is not the sum of the blocks."""


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

    @property
    def layout(self) -> ColumnOrder:
        at = self.at
        return ColumnOrder(
            start=at["start_time_stamp"],
            end=at["end_time_stamp"],
            size=at["size"],
            used=at.get("actual_used_memory", -1),
            peak=at.get("actual_peak_memory", -1),
            stack=self.before_stack,
        )


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


class _Sum:
    """Used memory added up from the blocks themselves."""

    def __init__(self) -> None:
        self._ending: list[tuple[int, int]] = []  # a heap of ends with their sizes
        self._now = 0

    def after(self, starts: Sequence[int], ends: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Bytes in use after each of these rows, which come after those of the last call."""
        ending, now, found = self._ending, self._now, []
        for start, end, size in zip(starts, ends, sizes, strict=True):
            while ending and ending[0][0] <= start:
                now -= heapq.heappop(ending)[1]
            now += size
            if end < NEVER:
                heapq.heappush(ending, (end, size))
            found.append(now)
        self._now = now
        return found


class _Reader:
    """The state of one pass."""

    def __init__(self, columns: _Columns, adding: _Sum | None) -> None:
        self.columns = columns
        self.rows = self.damaged = 0
        self.peak = self.peak_time = 0
        self.peak_segment: Segment | None = None
        self.iteration: Iteration | None = None
        self.counted_used: int | None = None
        self.counted_peak: int | None = None
        self._adding = adding
        self._kept: list[_Entry] = []  # alive now, or at the peak so far
        self._peak_sequence = -1
        self._last_start = -1
        self._program = _Program()
        self._stack = dataclasses.replace(read_stack(b""), phase="build")
        self._stacks: dict[bytes, CallStack] = {}
        self._moves: dict[tuple[CallStack, CallStack], str | None] = {}

    def take(self, part: Rows) -> None:
        """The next rows of the file."""
        self.damaged += part.damaged
        if not part.starts:
            return
        starts, ends, sizes, used = part.starts.tolist(), part.ends.tolist(), part.sizes.tolist(), part.used.tolist()
        if starts[0] < self._last_start or starts != sorted(starts):
            raise _OutOfOrderError
        self._last_start = starts[-1]
        if any(map(le, ends, starts)):  # a block is alive at least when it is made
            ends = [max(end, start + 1) for start, end in zip(starts, ends, strict=True)]
        if used and self.columns.layout.peak >= 0:
            self.counted_used = max(max(used), self.counted_used or 0)
            self.counted_peak = max(part.highest_peak, self.counted_peak or 0)
        if self._adding:
            used = self._adding.after(starts, ends, sizes)
        highest, until, peak_row = max(used), self._last_start, -1
        if highest > self.peak:
            peak_row = used.index(highest)
            self.peak, self.peak_time, self._peak_sequence = highest, starts[peak_row], self.rows + peak_row
            until = self.peak_time
        program = self._program
        program.go_on(starts, list(map(sub, used, sizes)), used)
        first_rows, places = [0], [(program.segment, program.layer)]
        for row, move, stack in self._moves_of(part):
            if first_rows[-1] <= peak_row < row:
                self.peak_segment = program.segment
            self._keep(program.enter(stack, move, row))
            first_rows.append(row)
            places.append((program.segment, program.layer))
        if first_rows[-1] <= peak_row:
            self.peak_segment = program.segment
        program.pause(len(starts))
        self._kept += [
            (end, self.rows + row, sizes[row], starts[row], part.offsets[row], *places[bisect_right(first_rows, row) - 1])
            for row, end in enumerate(ends)
            if end > until
        ]
        self.rows += len(starts)
        self._forget(used[-1])

    def finish(self) -> None:
        """After the last part."""
        self._keep(self._program.finish(self._last_start + 1))
        if not self._adding and sum(entry[2] for entry in self._at_the_peak()) != self.peak:
            raise _OtherSumError

    def _moves_of(self, part: Rows) -> Iterator[tuple[int, str, CallStack]]:
        """Rows at which the program moved on to another layer or phase, or left its layers."""
        if len(self._stacks) + len(part.texts) > _MOST_STACKS:
            self._stacks.clear()
            self._moves.clear()
        for text in part.texts:
            if text not in self._stacks:
                self._stacks[text] = read_stack(text)
        stacks = [self._stacks[text] for text in part.texts]
        moves, before = self._moves, self._stack
        for row, number in zip(part.changes, part.stacks, strict=True):
            after = stacks[number]
            try:
                found = moves[before, after]
            except KeyError:
                found = moves[before, after] = _move_between(before, after)
            before = after
            if found is not None:
                yield row, found, after
        self._stack = before

    def _forget(self, used: int) -> None:
        """Drops what is neither alive now nor at the peak."""
        now, peak, peak_time = self._last_start, self._peak_sequence, self.peak_time
        self._kept = [entry for entry in self._kept if entry[0] > now or (entry[1] <= peak and entry[0] > peak_time)]
        if not self._adding and sum(entry[2] for entry in self._kept if entry[0] > now) != used:
            raise _OtherSumError

    def _at_the_peak(self) -> Iterator[_Entry]:
        return (entry for entry in self._kept if entry[1] <= self._peak_sequence and entry[0] > self.peak_time)

    def live_blocks(self, file: BinaryIO) -> Iterator[Block]:
        """The rows alive at the peak, read again one by one."""
        at, i_stack = self.columns.at, self.columns.before_stack
        stacks: dict[bytes, CallStack] = {}
        for end, _, size, start, offset, segment, layer in self._at_the_peak():
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

    def _keep(self, ended: _Curve | None) -> None:
        if ended and self.peak_segment and self.peak_segment.iteration == ended.iteration.number:
            self.iteration = ended.draw()


def _move_between(before: CallStack, after: CallStack) -> str | None:
    """'layer', 'microbatch' or '' where there is something to note; else None."""
    move = movement(before, after)
    stays = not move and before.phase == after.phase and before.in_layer == after.in_layer
    return None if stays else move


class _Program:
    """Where the program is: iteration, microbatch, layer; and what is needed for the curve of the iteration so far."""

    def __init__(self) -> None:
        self.layer: int | None = None  # None outside of layers
        self.segment = Segment(phase="build", iteration=0, microbatch=None, start=0)
        self._phase = "build"
        self._last_layer: int | None = None
        self._iteration = Iteration(0, segments=[self.segment])
        self._forwards = self._backwards = 0
        self._stepped = False
        self._curve = _Curve(self._iteration)
        self._columns: tuple[list[int], list[int], list[int]] = [], [], []
        self._begin = 0

    def go_on(self, starts: list[int], lows: list[int], highs: list[int]) -> None:
        """The next rows: when, and what was used before and after."""
        self._columns, self._begin = (starts, lows, highs), 0

    def pause(self, row: int) -> None:
        """All rows have been gone through."""
        self._curve.add(self.segment, self._columns, self._begin, row)

    def enter(self, stack: CallStack, move: str, row: int) -> _Curve | None:
        """Goes on to where `stack` is. Returns the curve of the iteration that ended with it, if one did."""
        ended = None
        if move == "layer" and stack.phase == self._phase:
            self._last_layer = (self._last_layer or 0) + 1
        elif (move or stack.phase != self._phase) and not stack.phase == self._phase != "forward":
            ended = self._enter_phase(stack, row)
        self.layer = self._last_layer if stack.in_layer else None
        return ended

    def _enter_phase(self, stack: CallStack, row: int) -> _Curve | None:
        phase, now, ended = stack.phase, self._columns[0][row], None
        self._curve.add(self.segment, self._columns, self._begin, row)
        self._begin = row
        if phase in ("forward", "backward", "recompute") and (self._stepped or self._iteration.number == 0):
            ended = self.finish(now)
            self._iteration = Iteration(self._iteration.number + 1)
            self._curve = _Curve(self._iteration)
            self._stepped = False
            self._forwards = self._backwards = 0
        microbatch = None
        if phase == "forward":
            self._forwards += 1
            microbatch = self._forwards
        elif phase in ("backward", "recompute"):
            # A backward that recomputes its layers goes to and fro between the two phases.
            self._backwards += self._phase not in ("backward", "recompute")
            microbatch = self._backwards
        elif phase == "step":
            self._stepped = True
        self.segment.end = now
        self.segment = Segment(phase=phase, iteration=self._iteration.number, microbatch=microbatch, start=now)
        if len(self._iteration.segments) < _MOST_SEGMENTS:
            self._iteration.segments.append(self.segment)
        self._phase = phase
        self._last_layer = 1 if stack.in_layer else None
        return ended

    def finish(self, now: int) -> _Curve:
        """The iteration so far, closed."""
        self.segment.end = now
        return self._curve


class _Curve:
    """The curve of an iteration. Most iterations do not hold the peak, so it is drawn when it is asked for."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self._rows: list[tuple[Segment, tuple[list[int], list[int], list[int]], int, int]] = []
        self._number = 0
        self._rows_a_point = 1

    def add(self, segment: Segment, columns: tuple[list[int], list[int], list[int]], begin: int, end: int) -> None:
        """Rows of a segment."""
        self._rows.append((segment, columns, begin, end))
        self._number += end - begin
        if self._number > _MOST_UNDRAWN:
            self.draw()

    def draw(self) -> Iteration:
        """The iteration with the points of all rows so far."""
        for segment, (starts, lows, highs), begin, end in self._rows:
            while begin < end:
                stop = min(end, begin + self._rows_a_point)
                self._point(segment, starts[begin], min(lows[begin:stop]), max(highs[begin:stop]), stop - begin)
                begin = stop
        self._rows.clear()
        self._number = 0
        return self.iteration

    def _point(self, segment: Segment, time: int, low: int, high: int, rows: int) -> None:
        """A point of the curve; neighbours are merged when there are too many, lows and highs kept."""
        segment.peak_bytes = max(segment.peak_bytes, high)
        points = self.iteration.points
        if points and rows < self._rows_a_point and len(points) * 2 > _MOST_POINTS:
            # A short stretch at the end of a phase: part of the point before it.
            points[-1] = (points[-1][0], min(low, points[-1][1]), max(high, points[-1][2]))
            return
        points.append((time, low, high))
        if len(points) >= _MOST_POINTS:
            pairs = zip(points[::2], points[1::2], strict=True)
            points[:] = [(one[0], min(one[1], two[1]), max(one[2], two[2])) for one, two in pairs]
            self._rows_a_point *= 2
