"""`launch --hardware`: the predicted time of a script, without a dry run."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from report_samples import fits

from mindspeed_dryrun import report as views
from mindspeed_dryrun.commands import main
from mindspeed_dryrun.devices.hardware import read_hardware
from mindspeed_dryrun.record.model import Report, TimeSummary

ROWS = [
    json.loads(line) for line in Path(__file__).with_name("published_throughput.jsonl").read_text(encoding="utf-8").splitlines()
]


def planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], hardware: str = "ascend910b"
) -> tuple[int, str, str]:
    script = tmp_path / "train.sh"
    script.write_text(f"msrun {shlex.join(argv)}\n", encoding="utf-8")
    status = main(["launch", str(script), "--plan-only", "--json", "--hardware", hardware])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['params']}")
def test_every_published_row_has_a_time(row: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--worker_num", str(row["cards"]), "--local_worker_num", "8", *row["argv"]]  # type: ignore[misc]
    status, out, err = planned(tmp_path, capsys, argv)
    assert status == 0, err
    time = json.loads(out)["time"]
    assert time["low_s"] <= time["iteration_s"] <= time["high_s"]
    assert abs(time["tokens_per_s_per_card"] / float(str(row["published"])) - 1) < 0.15
    assert time["tflops_per_card"] > 0


BASE = (
    "--worker_num 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --use-flash-attn --bf16"
)


def test_a_vocabulary_and_a_batch_that_only_the_trainer_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the dry run assumes, the time assumes too."""
    _, out, _ = planned(tmp_path, capsys, BASE.split())
    _, given, _ = planned(tmp_path, capsys, [*BASE.split(), "--vocab-size", "32000", "--global-batch-size", "8"])
    assert json.loads(out)["time"] == json.loads(given)["time"]


def test_a_mixture_does_not_claim_the_fitted_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, dense, _ = planned(tmp_path, capsys, BASE.split())
    _, mixture, _ = planned(tmp_path, capsys, [*BASE.split(), "--num-experts", "8", "--expert-model-parallel-size", "4"])
    one, other = json.loads(dense)["time"], json.loads(mixture)["time"]
    assert "±13%" in one["hardware"] and "not fitted to mixtures" in other["hardware"]
    assert other["high_s"] / other["low_s"] > one["high_s"] / one["low_s"]


def test_nodes_of_fewer_cards_are_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = f"{BASE} --tensor-model-parallel-size 8"
    _, one, _ = planned(tmp_path, capsys, ["--local_worker_num", "8", *args.split()])
    _, four, _ = planned(tmp_path, capsys, ["--local_worker_num", "2", *args.split()])
    assert json.loads(four)["time"]["iteration_s"] > json.loads(one)["time"]["iteration_s"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--worker_num 8 my_trainer.py --epochs 3", "is not one of them"),
        ("--worker_num 8 pretrain_gpt.py --num-layers four", "--hidden-size"),
        (BASE.replace("pretrain_gpt", "pretrain_mamba"), "not modelled"),
        (f"{BASE} --tensor-model-parallel-size 3", "not divisible"),
        (f"{BASE} --global-batch-size many", "expects a whole number"),
    ],
)
def test_what_is_not_understood_is_a_sentence(argv: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = planned(tmp_path, capsys, argv.split())
    assert status == 2 and out == "" and said in err and "Traceback" not in err
    assert err.startswith("mindspeed-dryrun: ") and err.strip().endswith(".")


@pytest.mark.parametrize("name", ["ascend910b-64g", "910B", "Ascend 910B (64 GB)", "A3", "910b4", "ascend950"])
def test_hardware_by_name(name: str) -> None:
    assert read_hardware(name).cards_per_node >= 8


def test_hardware_that_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = planned(tmp_path, capsys, BASE.split(), "ascend911b")
    assert status == 2 and "ascend950" in err and "Did you mean ascend910b" in err
    status, _, err = planned(tmp_path, capsys, BASE.split(), str(tmp_path / "mine.yaml"))
    assert status == 2 and "Cannot read" in err


def test_the_report_shows_the_time_in_every_view() -> None:
    time = TimeSummary(
        iteration_s=7.3, low_s=6.7, high_s=8.0, tokens_per_s_per_card=4482.1, tflops_per_card=150.2, hardware="Ascend 910B"
    )
    report = dataclasses.replace(fits(), time=time)
    assert Report.from_json(report.to_json()).time == time
    for view in ("table", "markdown", "html"):
        shown = " ".join(views.render(report, view).split())
        assert "7.30 s an iteration (6.70 to 8.00)" in shown and "4482 tokens/s/card" in shown and "150 TFLOP/s/card" in shown
    assert fits().time is None
