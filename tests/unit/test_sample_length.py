"""How long samples are that a script does not pad: told, read from the data set's index, or as long as the sequence."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import pytest

from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.plan import make_plan
from mindspeed_dryrun.launch.sample_length import longest_sample, sample_length
from mindspeed_dryrun.record.run_spec import RunSpec

TUNE = "--stage sft --is-instruction-dataset --finetune"
OPEN = f"{TUNE} --no-pad-to-seq-lengths"


def job(folder: Path, extra: str) -> Job:
    words = (
        "--worker_num 2 posttrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --padded-vocab-size 512 --bf16"
    )
    return understand(read_msrun_call(words.split(), str(folder), {}), "tune.sh", extra.split())


def index(folder: Path, name: str, *lengths: int) -> Path:
    """As Megatron's `_IndexWriter` writes it."""
    samples, documents = array("i", lengths), array("q", range(len(lengths) + 1))
    file = folder / f"{name}_document.idx"
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(documents))
    file.write_bytes(header + samples.tobytes() + array("q", lengths).tobytes() + documents.tobytes())
    return file


def counted(folder: Path, extra: str, told: int = 0) -> tuple[int, list[str]]:
    plan = make_plan(job(folder, extra), RunSpec(sample_length=told), None)
    return plan.spec.sample_length, [note for note in plan.notes if "not padded" in note]


def test_without_a_length_every_sample_fills_the_sequence_and_the_peak_may_be_too_high(tmp_path: Path) -> None:
    tokens, (note,) = counted(tmp_path, f"{OPEN} --data-path absent")
    assert tokens == 0 and "full 4096 tokens" in note and "too HIGH" in note
    tokens, (note,) = counted(tmp_path, f"{OPEN} --data-path absent", told=91)
    assert tokens == 91 and "91 tokens" in note and "too LOW" in note


@pytest.mark.parametrize(
    ("release", "flag", "said"),
    [
        ("2.2.0", "--variable-seq-lengths", True),
        ("2.2.0", "--no-pad-to-seq-lengths", False),
        ("26.1.0", "--variable-seq-lengths", False),  # the collator pads
        ("26.1.0", "--no-pad-to-seq-lengths", True),
        ("", "--no-pad-to-seq-lengths", True),
        ("", "--variable-seq-lengths", True),
    ],
)
def test_the_flag_has_another_name_since_2_3_0(tmp_path: Path, release: str, flag: str, said: bool) -> None:
    found = sample_length(job(tmp_path, f"{TUNE} {flag}"), RunSpec(sample_length=91), release)
    assert (found.note is not None and flag in found.note) is said


@pytest.mark.parametrize(
    "extra",
    [
        "",
        TUNE,
        "--no-pad-to-seq-lengths",
        f"{OPEN} --neat-pack",
        f"{OPEN} --reset-position-ids",
        f"{OPEN} --reset-attention-mask",
    ],
)
def test_nothing_is_said_of_samples_that_are_padded_or_packed(tmp_path: Path, extra: str) -> None:
    index(tmp_path, "alpaca_packed_input_ids", 7)
    assert counted(tmp_path, f"{extra} --data-path alpaca") == (0, [])


def test_the_longest_sample_of_the_data_set_counts_where_it_is_here(tmp_path: Path) -> None:
    index(tmp_path, "alpaca_packed_input_ids", 70, 214, 96)
    index(tmp_path, "alpaca_packed_labels", 9999)
    tokens, (note,) = counted(tmp_path, f"{OPEN} --data-path alpaca")
    assert tokens == 214 and "214 tokens" in note and "'alpaca'" in note and "too HIGH" in note
    assert counted(tmp_path, f"{OPEN} --data-path alpaca", told=91)[0] == 91, "what the user says comes first"
    index(tmp_path, "long_packed_input_ids", 70, 9000)
    assert counted(tmp_path, f"{OPEN} --data-path {tmp_path}/long")[0] == 4096, "samples are cut to the sequence"


def test_pairs_and_blends(tmp_path: Path) -> None:
    index(tmp_path, "orca_packed_chosen_input_ids", 300, 20)
    index(tmp_path, "orca_packed_rejected_input_ids", 20, 500)
    assert counted(tmp_path, f"{OPEN} --is-pairwise-dataset --data-path orca")[0] == 500
    index(tmp_path, "al[p]aca_packed_input_ids", 600)
    assert counted(tmp_path, f"{OPEN} --data-path 0.3 orca 0.7 al[p]aca")[0] == 600
    assert counted(tmp_path, f"{OPEN} --data-path 0.3 orca 0.7 absent")[0] == 0, "one of them is not here"


def test_an_index_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    whole = index(tmp_path, "whole_packed_input_ids", 70, 214)
    for name, content in (
        ("cut", whole.read_bytes()[:30]),
        ("short", whole.read_bytes()[:36]),
        ("lying", whole.read_bytes()[:18] + struct.pack("<QQ", 1 << 60, 3) + whole.read_bytes()[34:]),
        ("other", b"PK" + whole.read_bytes()),
        ("empty", b""),
    ):
        (tmp_path / f"{name}_packed_input_ids_document.idx").write_bytes(content)
        assert longest_sample([tmp_path / name]) == 0, name
    (tmp_path / "folder_packed_input_ids_document.idx").mkdir()
    assert longest_sample([tmp_path / "folder"]) == longest_sample([tmp_path / ("x" * 300)]) == longest_sample([]) == 0
    assert longest_sample([tmp_path / "whole"]) == 214
