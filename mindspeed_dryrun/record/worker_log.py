"""A worker's log → its figures. Any bytes in, constant memory, the speed of a disk.

MindSpore prints five lines when a process ends, once with GLOG_v=2 and twice with GLOG_v=1, also when the run failed:

    Device MOC memory size: 65536M
    MindSpore Used memory size: 61430M
    MindSpore memory base address: 0x7ffe481d8347
    Used peak memory usage (without fragments): 55389M
    Actual peak memory usage (with fragments): 57341M

A log may be gigabytes of INFO lines, so large chunks are scanned for a few literal strings and only the lines around
hits are looked at. All that is kept is a maximum or a first occurrence: reading a stretch twice changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.rank.activation import ERROR_PREFIX
from mindspeed_dryrun.record.model import Status

_WORKER_LOG = re.compile(r"worker_(\d{1,7})\.log")
_OUT_OF_MEMORY = re.compile(r"out of memory|memory (?:is )?not enough|memory isn't enough|EL0004|207018", re.IGNORECASE)
_CHUNK = 1 << 20
_LINE_LIMIT = 64 << 10  # a longer line is read in pieces
_OVERLAP = 512  # bytes of a piece that are read again with the next one: longer than any line that carries a figure
_ERROR_LIMIT = 500  # characters kept of an error line

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_NUMBER = rb":\s*(\d{1,12})\s*M(?![A-Za-z0-9])"  # a number that is cut off, or runs into other text, is no figure
_SIZE = re.compile(rb"(?:(Device (?:MOC|HBM) memory size)|MindSpore Used memory size)" + _NUMBER)
_BASE = re.compile(rb"MindSpore memory base address:\s*(0x[0-9a-fA-F]{1,16}|\d{1,20})(?![0-9A-Za-z])")
_PEAK = re.compile(rb"(?:(Used peak)|Actual peak) memory usage \((?:without|with) fragments\)" + _NUMBER)
_ITERATION = re.compile(rb"iteration\s+(\d{1,9})\s*/\s*(\d{1,9})")
# torchrun, kubectl and friends put the rank before each line when they mix several ranks into one stream
_PREFIX = re.compile(rb"\s*\[?(?:rank|worker|default)[ _=]?(\d{1,7})\]?[:|\]]\s?", re.IGNORECASE)
_RAISED = re.compile(rb"[A-Za-z_][\w.]*: .*|(?:\w+\.)*[A-Z]\w*:?")  # what ends a traceback: `ValueError: …`, `KeyError`
_EXCEPTION = re.compile(
    rb"(?:[A-Za-z_][\w.]*(?:Error|Exception)|Fatal Python error|[\w./-]+: error): .*|terminate called after .*"
)
_OWN = ERROR_PREFIX.encode()
_TRACEBACK = b"Traceback (most recent call last)"
_LOGGED = (b"[ERROR]", b"[CRITICAL]")
_HARMLESS = b"signature, but not documented"  # transformers' auto_docstring, of any model that is imported
_BARE = (b"rror: ", b"xception: ", b"terminate called after ")  # exceptions without a traceback before them


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """What a worker's log says. None: the log does not say it."""

    device_total_mb: int | None = None
    usable_mb: int | None = None
    base_address: str | None = None
    used_peak_mb: int | None = None
    actual_peak_mb: int | None = None
    first_error: str | None = None  # the first line that tells of an error, of whatever kind
    raised: str | None = None  # the first exception that came before the block: the run did not end well
    iterations_seen: int = 0
    iterations_total: int | None = None
    differs: bool = False  # several blocks with different figures; the largest are given
    size_bytes: int = 0

    @property
    def whole(self) -> bool:
        """Both peaks are there."""
        return self.used_peak_mb is not None and self.actual_peak_mb is not None

    @property
    def truncated(self) -> bool:
        """A block begins but does not have both peaks."""
        figures = (self.device_total_mb, self.usable_mb, self.base_address, self.used_peak_mb, self.actual_peak_mb)
        return not self.whole and any(item is not None for item in figures)


def read_worker_log(source: Path | str | BinaryIO, rank: int | None = None) -> RankLog:
    """Reads a log to its end. With `rank`, lines that are marked as another rank's are left out."""
    reader = _Reader(rank)
    if isinstance(source, (str, Path)):
        with open(source, "rb", buffering=0) as stream:
            _feed(reader, stream.read)
    else:
        _feed(reader, source.read)
    return reader.result()


def _feed(reader: _Reader, read: Callable[[int], bytes | None]) -> None:
    rest = b""
    while chunk := read(_CHUNK):
        reader.size += len(chunk)
        data = rest + chunk
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", max(0, len(data) - _LINE_LIMIT))) + 1
        if len(data) - cut > _LINE_LIMIT:
            reader.scan(data, ends_line=False)
            rest = data[-_OVERLAP:]
        else:
            reader.scan(data[:cut], ends_line=True)
            rest = data[cut:]
    reader.scan(rest, ends_line=True)
    reader.close()


class _Reader:
    """Sees the log as pieces of whole lines; a line that is too long comes in several pieces."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.total: int | None = None
        self.usable: int | None = None
        self.base: str | None = None
        self.peaks: dict[bool, set[int]] = {True: set(), False: set()}  # used, actual; a handful at most
        self.error: str | None = None
        self.own: str | None = None  # a sentence of ours, which says more than whatever came before it
        self.raised: str | None = None
        self.block_begun = False
        self.iterations = 0
        self.iterations_total: int | None = None
        self.in_traceback = False
        self.last_frame = b""
        self.size = 0
        self.at_line_start = True

    def scan(self, data: bytes, ends_line: bool) -> None:
        if not data:
            return
        if b"\x1b" in data:
            data = _ANSI.sub(b"", data)
        if self._searching() or self.in_traceback:
            self._errors(data)
        self._figures(data)
        self._iterations(data)
        for line in _lines_with(data, _OWN):
            if self.own is None and (content := self._content(line) or b"").startswith(_OWN):
                self.own = _one_line(content[len(_OWN) :])
        self.at_line_start = ends_line

    def _iterations(self, data: bytes) -> None:
        at = data.rfind(b"iteration ")
        while at >= 0:
            if match := _ITERATION.match(data, at):  # they are counted upwards: the last one of a piece is enough
                self.iterations = max(self.iterations, int(match[1]))
                self.iterations_total = int(match[2])
                return
            at = data.rfind(b"iteration ", 0, at)

    def _figures(self, data: bytes) -> None:
        for line in _lines_with(data, b" memory size:"):
            if (match := _SIZE.search(line)) and self._ours(line):
                self.block_begun = True
                if match[1]:
                    self.total = max(self.total or 0, int(match[2]))
                else:
                    self.usable = max(self.usable or 0, int(match[2]))
        for line in _lines_with(data, b" memory base address:"):
            if (match := _BASE.search(line)) and self._ours(line):
                self.base = match[1].decode()
        for line in _lines_with(data, b" peak memory usage (with"):
            if (match := _PEAK.search(line)) and self._ours(line):
                self.block_begun = True
                seen = self.peaks[match[1] is not None]
                seen.add(int(match[2]))
                if len(seen) > 2:
                    seen.remove(min(seen))

    def _errors(self, data: bytes) -> None:
        """The first error of any kind, and the first exception before the block."""
        block = data.find(b" peak memory usage (with")
        position = 0
        if self.in_traceback:
            position = self._traceback(data, 0 if self.at_line_start else data.find(b"\n") + 1, block)
        if position < 0:
            return
        logged = _LOGGED if self.error is None else ()
        for at, text in _hits(data, (_TRACEBACK, *logged, *_BARE)):
            if at < position:
                continue
            if not self._searching():
                return
            start, position = _line_start(data, at), _line_end(data, at)
            line = self._content(data[start:position])
            if line is None:
                continue
            if text == _TRACEBACK:
                self.in_traceback = True
                position = self._traceback(data, position, block)
                if position < 0:
                    return
            elif not (data[start - 1 : start] in (b"\n", b"\r") if start else self.at_line_start):
                continue
            elif line.lstrip().startswith(_LOGGED):
                if _HARMLESS not in line:
                    self._note(line)
            elif _EXCEPTION.fullmatch(line.strip()):
                self._note(line, exception=block < 0 or at < block)

    def _searching(self) -> bool:
        return self.error is None or (self.raised is None and not self.block_begun)

    def _traceback(self, data: bytes, position: int, block: int) -> int:
        """From inside a traceback to after its last line; -1 when the piece ends first."""
        while position < len(data):
            end = _line_end(data, position)
            line = self._content(data[position:end])
            if line is not None and line.strip():
                if line[:1] in b" \t":
                    self.last_frame = line.strip()[:_ERROR_LIMIT]
                elif _RAISED.fullmatch(line.rstrip()):
                    self.in_traceback = False
                    self._note(line, exception=block < 0 or position < block)
                    return end
            position = end + 1
        return -1

    def _content(self, line: bytes) -> bytes | None:
        """The line without its rank prefix; None when it is another rank's."""
        match = _PREFIX.match(line)
        if not match:
            return line
        return line[match.end() :] if self.rank is None or int(match[1]) == self.rank else None

    def _ours(self, line: bytes) -> bool:
        return self._content(line) is not None

    def _note(self, line: bytes, exception: bool = False) -> None:
        text = _one_line(self._content(line) or b"")
        self.error = self.error or text
        if exception and not self.block_begun:
            self.raised = self.raised or text

    def close(self) -> None:
        if self.in_traceback:
            frame = self.last_frame.decode("utf-8", "replace") or "no frame"
            self._note(f"the log ends inside a traceback: {frame}".encode(), exception=True)

    def result(self) -> RankLog:
        return RankLog(
            device_total_mb=self.total,
            usable_mb=self.usable,
            base_address=self.base,
            used_peak_mb=max(self.peaks[True], default=None),
            actual_peak_mb=max(self.peaks[False], default=None),
            first_error=self.own or self.error,
            raised=self.raised,
            iterations_seen=self.iterations,
            iterations_total=self.iterations_total,
            differs=len(self.peaks[True]) > 1 or len(self.peaks[False]) > 1,
            size_bytes=self.size,
        )


def _one_line(content: bytes) -> str:
    text = content.decode("utf-8", "replace").strip()
    return "".join(char if char.isprintable() else " " for char in text)[:_ERROR_LIMIT]


def _lines_with(data: bytes, text: bytes) -> Iterator[bytes]:
    at = data.find(text)
    while at >= 0:
        end = _line_end(data, at)
        yield data[_line_start(data, at) : end]
        at = data.find(text, max(end, at + 1))


def _hits(data: bytes, texts: tuple[bytes, ...]) -> Iterator[tuple[int, bytes]]:
    """Where any of the texts occurs, in order; each text is looked for in one pass."""
    following = [(at, text) for text in texts if (at := data.find(text)) >= 0]
    while following:
        at, text = min(following)
        yield at, text
        following.remove((at, text))
        if (at := data.find(text, at + 1)) >= 0:
            following.append((at, text))


def _line_start(data: bytes, at: int) -> int:
    low = max(0, at - _LINE_LIMIT)
    for mark in (b"\n", b"\r"):
        low = data.rfind(mark, low, at) + 1 or low
    return low


def _line_end(data: bytes, at: int) -> int:
    high = min(len(data), at + _LINE_LIMIT)
    for mark in (b"\n", b"\r"):
        if (end := data.find(mark, at, high)) >= 0:
            high = end
    return high


def worker_logs(folder: Path) -> dict[int, Path]:
    """The `worker_N.log` files of a folder (or of its `msrun_log`), by rank; `UsageError` where there are none."""
    if folder.is_file():
        match = _WORKER_LOG.fullmatch(folder.name)
        return {int(match[1]) if match else 0: folder}
    for place in (folder, folder / "msrun_log"):
        found: dict[int, Path] = {}
        for file in sorted(place.glob("worker_*.log")):
            match = _WORKER_LOG.fullmatch(file.name)
            if match and file.is_file():
                found[int(match[1])] = file
        if found:
            return found
    raise UsageError(f"{folder} holds neither a dry run (job.json) nor worker logs (worker_0.log, …).")


def judge_log(log: RankLog) -> tuple[Status, str | None]:
    """Status and error of a rank of which there is only a log."""
    finished = bool(log.iterations_total) and log.iterations_seen == log.iterations_total
    if log.raised and not finished:
        return (Status.OOM if _OUT_OF_MEMORY.search(log.raised) else Status.FAILED), log.raised
    if log.whole:
        return Status.OK, None
    if log.first_error:
        return (Status.OOM if _OUT_OF_MEMORY.search(log.first_error) else Status.FAILED), log.first_error
    if log.truncated:
        return Status.FAILED, "the log ends inside the memory block"
    return Status.FAILED, "the log holds no memory block: the run was stopped, or GLOG_v hides it (use GLOG_v=2)"
