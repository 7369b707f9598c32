"""The rows of MindSpore's `memory_block.csv` as columns: the part of the reading that needs nothing of earlier rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

_PART = 2**25  # bytes of the file
_AT_ONCE = 2**20


class ColumnOrder(NamedTuple):
    """Which column is which; -1 where the file has no such column."""

    start: int
    end: int
    size: int
    used: int
    peak: int
    stack: int


class Rows(NamedTuple):
    """A part of the file. Rows that cannot be read are counted, and left out of the columns."""

    damaged: int
    highest_peak: int
    texts: list[bytes]  # the different stacks, each with what follows it in its row
    offsets: array[int]
    starts: array[int]
    ends: array[int]
    sizes: array[int]
    used: array[int]  # as the engine counted it; empty where the file does not say
    # Rows whose stack is another than that of the row above, the first of the part among them; and which text it is.
    changes: array[int]
    stacks: array[int]


def read_rows(path: Path, layout: ColumnOrder, first: int) -> Iterator[Rows]:
    """The parts of the file in its order. `first` is the offset of the first row."""
    with path.open("rb", buffering=_AT_ONCE) as file:
        for start in range(first, path.stat().st_size, _PART):
            yield _read_part(file, layout, start, start + _PART, first)


def _read_part(file: BinaryIO, layout: ColumnOrder, start: int, end: int, first: int) -> Rows:
    """The rows that begin from `start` on and before `end`."""
    file.seek(max(first, start - 1))
    if start > first:
        file.readline()
    offset = file.tell()
    columns = [array("q") for _ in range(7)]
    texts: list[bytes] = []
    stacks = _Stacks(layout.stack, texts)
    damaged = highest = 0
    while offset < end and (lines := file.readlines(min(_AT_ONCE, end - offset))):
        offsets = list(accumulate(map(len, lines), initial=offset))
        offset = offsets.pop()
        try:
            numbers, peak = _numbers(lines, layout)
            changed, which = stacks.changes(lines, len(columns[0]))
        except (ValueError, IndexError, OverflowError):
            sound = [index for index, line in enumerate(lines) if _is_sound(line, layout)]
            damaged += sum(bool(line.strip()) for line in lines) - len(sound)
            lines, offsets = [lines[index] for index in sound], [offsets[index] for index in sound]
            numbers, peak = _numbers(lines, layout)
            changed, which = stacks.changes(lines, len(columns[0]))
        highest = max(highest, peak)
        for column, more in zip(columns, (offsets, *numbers, changed, which), strict=True):
            column.extend(more if isinstance(more, array) else array("q", more))
    return Rows(damaged, highest, texts, *columns)


def _numbers(lines: Sequence[bytes], layout: ColumnOrder) -> tuple[list[array[int]], int]:
    """Starts, ends, sizes, used; and the highest peak with fragments, which seldom changes."""
    if not lines:
        return [array("q") for _ in layout[:4]], 0
    last = max(layout[:-1]) + 1
    columns = list(zip(*[line.split(b",", last) for line in lines], strict=True))
    numbers = [array("q", list(map(int, columns[index]))) for index in layout[:4] if index >= 0]
    if layout.used < 0:
        numbers.append(array("q"))
    peaks = set(columns[layout.peak]) if layout.peak >= 0 else ()
    return numbers, max((int(peak) for peak in peaks if peak.isdigit()), default=0)


def _is_sound(line: bytes, layout: ColumnOrder) -> bool:
    try:
        _numbers([line], layout)
    except (ValueError, IndexError, OverflowError):
        return False
    return line.count(b",") >= layout.stack


class _Stacks:
    """Which stack each row has. The column is long and is compared, not parsed: a training program has few different
    stacks, and after one comes the same again or the one that came after it last time."""

    def __init__(self, column: int, texts: list[bytes]) -> None:
        self._column = column
        self._texts = texts
        self._known: dict[bytes, int] = {}
        self._after: list[tuple[bytes, int]] = []
        self._last = -1

    def changes(self, lines: Sequence[bytes], base: int) -> tuple[list[int], list[int]]:
        """Numbers of the rows that have another stack than the one above, and which. IndexError for a row without one."""
        column, texts, known, after, number = self._column, self._texts, self._known, self._after, self._last
        text, (guess, guessed) = (b"," + texts[number], after[number]) if number >= 0 else (b"\0", (b"\0", -1))
        changed: list[int] = []
        which: list[int] = []
        for index, line in enumerate(lines, base):
            if line.endswith(text):
                continue
            if line.endswith(guess):
                text, number = guess, guessed
            else:
                tail, before = line.split(b",", column)[column], number
                text = b"," + tail
                if tail in known:
                    number = known[tail]
                else:
                    number = known[tail] = len(texts)
                    texts.append(tail)
                    after.append((b"\0", -1))
                if before >= 0:
                    after[before] = text, number
            guess, guessed = after[number]
            changed.append(index)
            which.append(number)
        self._last = number
        return changed, which
