"""The log reader: any bytes in, figures or None out, in constant memory."""

from __future__ import annotations

import io
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dryrun.record.worker_log import RankLog, read_worker_log

HEAD = b"[WARNING] DEVICE(1,7f,python):2026-11-16-23:42:00.105.322 [ascend_memory_adapter.cc:240] DeInitialize] statistics:\n"
LINES = (
    b"Device MOC memory size: 65536M",
    b"MindSpore Used memory size: 61430M",
    b"MindSpore memory base address: 0x7fffd32577f7",
    b"Used peak memory usage (without fragments): 55389M",
    b"Actual peak memory usage (with fragments): 57341M",
)
BLOCK = HEAD + b"\n".join(LINES) + b"\n\n"
INFO = b"[INFO] PRE_ACT(9747,7fab,python):2026-11-16-23:43:02.682.866 [mem_pool.cc:45] Alloc] memory size 12M, peak, error\n"
TRACEBACK = b'Traceback (most recent call last):\n  File "t.py", line 6, in <module>\n    f()\nRuntimeError: it broke\n'


def read(data: bytes, rank: int | None = None) -> RankLog:
    return read_worker_log(io.BytesIO(data), rank)


def figures(log: RankLog) -> tuple[object, ...]:
    return log.device_total_mb, log.usable_mb, log.base_address, log.used_peak_mb, log.actual_peak_mb


WHOLE = (65536, 61430, "0x7fffd32577f7", 55389, 57341)


@pytest.mark.parametrize(
    "data",
    [
        BLOCK,
        INFO * 3 + BLOCK + BLOCK + INFO,  # GLOG_v=1
        BLOCK.replace(b"\n", b"\r\n"),
        BLOCK.rstrip(),
        INFO.join(line + b"\n" for line in LINES),
        b"\x1b[33m" + BLOCK.replace(b"peak", b"\x1b[1mpeak\x1b[0m").replace(b": ", b":\x1b[0m \x1b[32m"),
        b"\xff\xfe\x00" * 1000 + b"\n" + BLOCK,
        b"x" * 3_000_000 + BLOCK,
        BLOCK.replace(b"MOC", b"HBM"),
        b"".join(b"[rank0]: " + line + b"\n" for line in LINES),
        b"10%|#   |\r20%|##  |\r" + b"\r".join(LINES),
    ],
    ids=[
        "plain",
        "twice",
        "crlf",
        "no-newline",
        "interleaved",
        "ansi",
        "garbage",
        "huge-line",
        "hbm",
        "prefixed",
        "cr",
    ],
)
def test_the_five_figures_are_found(data: bytes) -> None:
    log = read(data)
    assert figures(log) == WHOLE and log.whole and not log.truncated and not log.differs
    assert log.size_bytes == len(data)


@given(st.integers(0, len(BLOCK)))
def test_a_cut_block_gives_no_false_figure(cut: int) -> None:
    log = read(INFO + BLOCK[:cut])
    for found, right in zip(figures(log), WHOLE, strict=True):
        # a base address is a word without an end mark; it is no figure
        assert found in (None, right) or (isinstance(found, str) and str(right).startswith(found))
    assert log.whole == (BLOCK[:cut].find(b"57341M") >= 0)
    assert log.truncated == (not log.whole and any(item is not None for item in figures(log)))


@given(st.binary(max_size=3000), st.binary(max_size=300), st.integers(1, 400))
def test_any_bytes_give_a_result_that_does_not_depend_on_how_they_arrive(before: bytes, after: bytes, step: int) -> None:
    data = before + b"\n" + BLOCK + TRACEBACK + after

    class Trickle:
        def __init__(self) -> None:
            self.stream = io.BytesIO(data)

        def read(self, size: int) -> bytes:
            return self.stream.read(step)

    log = read(data)
    assert log.used_peak_mb is not None and log.used_peak_mb >= 55389
    assert log.first_error is not None
    assert read_worker_log(Trickle()) == log  # type: ignore[arg-type]


junk = st.sampled_from(
    [
        INFO,
        b"\n",
        b"iteration 3/ 5 | x\n",
        b"\x1b[31m",
        b"\x1b[",
        b"[ERROR] ME: bad\n",
        TRACEBACK,
        b"x" * 70000,
        *LINES,
        b"\r",
        b"M",
        b": 5",
    ]
)


@settings(deadline=None)
@given(st.lists(st.one_of(junk, st.binary(max_size=20)), max_size=40))
def test_pieces_of_logs_in_any_order_never_raise(pieces: list[bytes]) -> None:
    log = read(b"".join(pieces))
    for value in (log.device_total_mb, log.usable_mb, log.used_peak_mb, log.actual_peak_mb):
        assert value is None or value >= 0
    assert log.first_error is None or (len(log.first_error) <= 500 and log.first_error.isprintable())


@given(st.lists(st.sampled_from([INFO, b"[rank7]: hello\n", b"step 3\n"]), min_size=4, max_size=4))
def test_other_lines_between_the_blocks_lines_do_not_matter(between: list[bytes]) -> None:
    parts = [LINES[0] + b"\n"]
    for noise, line in zip(between, LINES[1:], strict=True):
        parts += [noise, line + b"\n"]
    assert figures(read(b"".join(parts))) == WHOLE


def test_lines_marked_as_another_ranks_are_left_out() -> None:
    other = b"".join(b"[rank1]: " + line.replace(b"55389", b"99999") + b"\n" for line in LINES) + b"[rank1]: ValueError: theirs\n"
    assert read(other + BLOCK).used_peak_mb == 99999
    log = read(other + BLOCK, rank=0)
    assert log.used_peak_mb == 55389 and log.first_error is None


def test_blocks_with_different_figures_give_the_largest_and_say_so() -> None:
    log = read(BLOCK + BLOCK.replace(b"55389", b"40000"))
    assert log.used_peak_mb == 55389 and log.differs


def test_torn_figures_are_no_figures() -> None:
    log = read(
        b"Used peak memory usage (without fragments): 553MindSpore Used memory size: 12\n"
        b"Actual peak memory usage (with fragments): 57"
    )
    assert figures(log) == (None, None, None, None, None)


@pytest.mark.parametrize(
    ("data", "error", "raised"),
    [
        (TRACEBACK + BLOCK, "RuntimeError: it broke", True),
        (BLOCK + TRACEBACK, "RuntimeError: it broke", False),
        (TRACEBACK.replace(b"\n", b"\r\n"), "RuntimeError: it broke", True),
        (TRACEBACK.replace(b"RuntimeError: it broke", b"[WARNING] x\nAssertionError"), "AssertionError", True),
        (TRACEBACK.replace(b"RuntimeError: it broke", b"zmq.error.Again: later"), "zmq.error.Again: later", True),
        (b"\n".join(b"[rank3]: " + line for line in TRACEBACK.splitlines()), "RuntimeError: it broke", True),
        (TRACEBACK[:60], 'the log ends inside a traceback: File "t.py", line 6, in', True),
        (
            TRACEBACK + b"\nDuring handling\n\n" + TRACEBACK.replace(b"it broke", b"second"),
            "RuntimeError: it broke",
            True,
        ),
        (b"[ERROR] ME(1): bad thing\n" + TRACEBACK, "[ERROR] ME(1): bad thing", True),
        (
            b"[ERROR] `x` is part of M.forward's signature, but not documented. Make sure to add it\n" + TRACEBACK,
            "RuntimeError: it broke",
            True,
        ),
        (b"[CRITICAL] ME(1): bad thing\n" + BLOCK, "[CRITICAL] ME(1): bad thing", False),
        (b"\x1b[31m[ERROR]\x1b[0m red\n", "[ERROR] red", False),
        (
            b"pretrain_gpt.py: error: unrecognized arguments: --foo\n",
            "pretrain_gpt.py: error: unrecognized arguments: --foo",
            True,
        ),
        (b"Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault", True),
        (
            b"terminate called after throwing an instance of 'std::bad_alloc'\n",
            "terminate called after throwing an instance of 'std::bad_alloc'",
            True,
        ),
        (b"[INFO] ValueError: only quoted\n[WARNING] [ERROR] quoted\n" + BLOCK, None, False),
        (b"[ERROR] " + b"y" * 2000 + b"\n", "[ERROR] " + "y" * 492, False),
    ],
)
def test_the_first_error_line(data: bytes, error: str | None, raised: bool) -> None:
    log = read(INFO + data)
    assert log.first_error == error
    assert (log.raised is not None) == raised


def test_a_traceback_over_many_chunks() -> None:
    frames = b'  File "deep.py", line 1, in f\n    f()\n' * 100_000
    log = read(INFO * 10 + TRACEBACK.replace(b"    f()\n", b"    f()\n" + frames) + BLOCK)
    assert log.first_error == "RuntimeError: it broke"


def test_iterations_are_counted() -> None:
    text = b"".join(b" iteration %8d/ %7d | consumed samples: 1 |\n" % (i, 3) for i in (1, 2))
    log = read(text + b"iteration time\n" + BLOCK)
    assert (log.iterations_seen, log.iterations_total) == (2, 3)
    assert read(BLOCK).iterations_seen == 0


class Endless:
    """A gigabyte of INFO lines, made on the fly, with a block at its end."""

    def __init__(self, total: int) -> None:
        self.chunks = self._chunks(total)

    def _chunks(self, total: int) -> Iterator[bytes]:
        piece = INFO * ((1 << 20) // len(INFO)) + INFO[:50]
        for _ in range(total // len(piece)):
            yield piece
        yield b"\n" + BLOCK

    def read(self, size: int) -> bytes:
        return next(self.chunks, b"")


def test_a_gigabyte_is_read_in_constant_memory_at_speed() -> None:
    read_worker_log(Endless(8 << 20))  # type: ignore[arg-type]
    begun = time.process_time()
    log = read_worker_log(Endless(1 << 30))  # type: ignore[arg-type]
    took = time.process_time() - begun
    assert figures(log) == WHOLE and log.first_error is None
    assert took < 60, f"{took:.1f} s of CPU for a gigabyte"
    tracemalloc.start()
    read_worker_log(Endless(64 << 20))  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_one_endless_line_is_read_in_constant_memory() -> None:
    class Line:
        left = 64

        def read(self, size: int) -> bytes:
            self.left -= 1
            return b"z" * (1 << 20) if self.left > 0 else (b"\n" + BLOCK if self.left == 0 else b"")

    tracemalloc.start()
    log = read_worker_log(Line())  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert figures(log) == WHOLE and peak < 16 << 20


def test_a_path_is_read(tmp_path: Path) -> None:
    (tmp_path / "worker_0.log").write_bytes(BLOCK)
    assert figures(read_worker_log(tmp_path / "worker_0.log")) == WHOLE


def test_a_sentence_of_ours_is_the_error_whatever_came_before_it() -> None:
    text = (
        b"[ERROR] ME(1,2,python): harmless\nTraceback (most recent call last):\n  File\nImportError: made of ours\n"
        b"rank 3 says mindspeed-dryrun: error: quoted\nmindspeed-dryrun: error: Patch p: target m:f is gone.\n"
        b"mindspeed-dryrun: error: a second one\n"
    )
    assert read_worker_log(io.BytesIO(text)).first_error == "Patch p: target m:f is gone."
