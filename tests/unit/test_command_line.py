"""Wrong words on the command line get the right ones back."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.files import cannot_write, write_output
from mindspeed_dryrun.megatron import flags
from mindspeed_dryrun.report import table
from mindspeed_dryrun.units import parse_size_mb

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_qwen25_7b_32k_ms.sh"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("lanch train.sh", "There is no verb lanch (did you mean launch?)."),
        ("launch train.sh --buget 58G", "launch has no option --buget (did you mean --budget?)."),
        (
            "launch train.sh --seq-length 512",
            "--seq-length is the trainer's: put it after `--`, as in `launch SCRIPT -- --seq-length …`.",
        ),
        ("launch train.sh --seq-length=512", "--seq-length is the trainer's: put it after `--`"),
        ("report a b", "report takes no argument b."),
    ],
)
def test_a_wrong_word_is_named_with_the_right_one(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["launch", "sweep", "search", "report", "studio", "explain"])
def test_a_path_that_the_system_refuses_is_named(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    assert main([verb, long]) in (1, 2)
    assert main(["launch", str(EXAMPLE), "--out", long]) in (1, 2)
    said = capsys.readouterr().err
    assert long in said and "Traceback" not in said


def test_a_flag_of_the_trainer_is_proposed() -> None:
    assert "--seq-lenght (did you mean --seq-length?)" in flags.check(["--seq-lenght", "512"]).problem()


@pytest.mark.parametrize("text", ["58", "1", "1023"])
def test_a_small_number_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"write {text}G or {text}M"):
        parse_size_mb(text)
    assert parse_size_mb("59392") == 59392 and parse_size_mb("58M") == 58


@pytest.mark.parametrize(("columns", "width"), [("20", 40), ("60", 60), ("100", 100), ("300", 120)])
def test_a_table_is_as_wide_as_the_terminal(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = "word " * 100
    assert max(map(len, table._wrap(text))) <= 80
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = table._wrap(text)
    assert width - 10 < max(map(len, lines)) <= width


def test_output_into_a_pipe_or_a_device_leaves_it_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    write_output(pipe, "FITS\n")
    reader.join(5)
    assert read == ["FITS\n"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert [item.name for item in tmp_path.iterdir()] == ["pipe"]


def test_output_into_a_folder_is_refused_and_a_file_is_replaced_whole(tmp_path: Path) -> None:
    with pytest.raises(DryRunError, match="Is a directory"):
        write_output(tmp_path, "FITS\n")
    (tmp_path / "old.txt").write_text("old")
    write_output(tmp_path / "old.txt", "new")
    assert (tmp_path / "old.txt").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_schemas_are_written_into_a_folder_that_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "report", "--into", str(tmp_path / "new" / "schemas")]) == 0
    assert (tmp_path / "new" / "schemas" / "report.json").is_file()
    (tmp_path / "file").write_text("")
    assert main(["schema", "--into", str(tmp_path / "file")]) == 1
    assert "Cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "sentence"), [("none/x.xml", "does not exist"), (".", "is a folder")])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    file: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", str(EXAMPLE), "--junit", str(tmp_path / file)]) == 2
    assert sentence in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_only_a_full_disk_asks_for_room() -> None:
    assert "make room" in str(cannot_write(Path("x"), OSError(errno.ENOSPC, "No space left on device")))
    assert "make room" not in str(cannot_write(Path("x"), OSError(errno.EACCES, "Permission denied")))


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_cannot_be_is_named(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    assert main(["studio", str(EXAMPLE), "--no-browser", f"--port={port}"]) == 2
    assert f"--port {port}: give a number from 1 to 65535" in capsys.readouterr().err
