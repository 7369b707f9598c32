"""Output reaches any terminal: its encoding, its reader, and what a file would make it do are no reason to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dryrun.terminal import plain

ROOT = Path(__file__).resolve().parents[2]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mindspeed_dryrun", *words]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


LOG = """Device MOC memory size: 65536M
MindSpore Used memory size: 61430M
MindSpore memory base address: 0x7f
Used peak memory usage (without fragments): 55389M
Actual peak memory usage (with fragments): {}M
"""


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank, peak_mb in enumerate((57341, 62000)):
        (folder / f"worker_{rank}.log").write_text(LOG.format(peak_mb))
    return folder


def test_a_reader_that_leaves_does_not_change_the_exit_status(record: Path) -> None:
    for reader in ("head -1", "true"):
        script = f"set -o pipefail; {' '.join(command('report', str(record)))} | {reader} > /dev/null"
        done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (3, ""), reader


@pytest.mark.parametrize("encoding", ["gbk", "latin-1", "ascii", "utf-8"])
@pytest.mark.parametrize("words", [("report",), ("report", "--format", "markdown"), ("compare",)])
def test_every_encoding_of_a_terminal_gets_the_whole_output(record: Path, encoding: str, words: tuple[str, ...]) -> None:
    names = [str(record)] * (2 if words[0] == "compare" else 1)
    done = subprocess.run(command(words[0], *names, *words[1:]), env=environment(PYTHONIOENCODING=encoding), capture_output=True)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert len(done.stdout.decode(encoding).splitlines()) > 5


def test_a_full_disk_is_a_sentence(record: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command("report", str(record)), env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "mindspeed-dryrun: Cannot write the output: No space left on device.\n"


def test_a_record_cannot_steer_the_terminal(record: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\u202e"
    (record / "worker_2.log").write_text(f"Traceback (most recent call last):\nValueError: {evil}\n")
    record = record.rename(record.with_name(f"logs{evil}"))
    for words in (("report", str(record)), ("report", str(record / "\x1b[2J")), ("compare", str(record), str(record))):
        done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True)
        seen = done.stdout + done.stderr
        assert seen and not any(char in seen for char in "\x1b\x07\u202e"), words


def test_colours_of_our_own_are_kept() -> None:
    assert plain("\x1b[1;32mFITS\x1b[0m\t1\n") == "\x1b[1;32mFITS\x1b[0m\t1\n"
    assert plain("a\x1b[8mhidden\rb\x9b2J") == "a\\x1b[8mhidden\\x0db\\x9b2J"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_change_the_exit_status(record: Path, closed: str) -> None:
    line = f'"$0" -m mindspeed_dryrun report "$1" {closed}'
    done = subprocess.run(["bash", "-c", line, sys.executable, str(record)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
