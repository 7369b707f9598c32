"""The card that a verdict is about: shipped, named, read from logs, read from the driver; what it leaves outside the pool."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from pytest_mock import MockerFixture
from report_samples import CARD, CRITERIA, ENGINE, fits, job, job_file, rank

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.devices import real_runs
from mindspeed_dryrun.devices.hardware import names, read_hardware
from mindspeed_dryrun.devices.local import read_card
from mindspeed_dryrun.devices.real_runs import Peaks, RealRun, save_run, seen_excess
from mindspeed_dryrun.doctor import checks
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.layout import Parallel, read_layout
from mindspeed_dryrun.record.communication import communicators
from mindspeed_dryrun.record.criteria import device_of_logs, make_criteria, named_device
from mindspeed_dryrun.record.model import Report, Verdict
from mindspeed_dryrun.record.run_spec import JobFile
from mindspeed_dryrun.record.store import Record, write_json
from mindspeed_dryrun.record.summary import build_report, summarise
from mindspeed_dryrun.report import view
from mindspeed_dryrun.report.compare import Run
from mindspeed_dryrun.report.compared_runs import real_run

BLOCK = (
    "Device MOC memory size: {}M\nMindSpore Used memory size: {}M\nMindSpore memory base address: 0x1\n"
    "Used peak memory usage (without fragments): 55405M\nActual peak memory usage (with fragments): 57400M\n"
)
NPU_SMI = """
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     {name:<20}| OK            | 93.7        42                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3363 / {size}         |
+===========================+===============+====================================================+
"""


@pytest.fixture(autouse=True)
def no_runs_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_the_default_is_the_published_card() -> None:
    device = named_device()
    assert (device.name, device.total_mb, device.usable_mb, device.source) == ("ascend910b-64g", 62420, 58166, "published")
    assert make_criteria().budget_mb == 58166
    assert make_criteria(budget_mb=50000).budget_mb == 50000


@pytest.mark.parametrize(
    ("text", "name"),
    [("910b", "ascend910b-64g"), ("Ascend 910B (64 GB)", "ascend910b-64g"), ("910b-32g", "ascend910b4-32g"),
     ("A3", "ascend-a3"), ("950", "ascend950"), ("ascend910b3-64g", "ascend910b3-64g")],
)  # fmt: skip
def test_a_device_has_several_spellings(text: str, name: str) -> None:
    assert read_hardware(text).key == name


def test_every_device_leaves_room_outside_the_pool_and_says_where_its_figures_are_from() -> None:
    assert len(names()) >= 4
    for name in names():
        device = named_device(name)
        assert device.usable_mb < device.total_mb and device.source in ("published", "derived", "measured")
        # MindSpore's rule: 15/16 of the device, less what it has in use at start
        assert 0 <= device.total_mb * 15 // 16 - device.usable_mb <= 400


def test_a_device_that_is_not_known() -> None:
    with pytest.raises(UsageError, match=r"no device '910c-128g'\. .*Known are ascend910b-64g"):
        named_device("910c-128g")


@pytest.mark.parametrize(("budget", "status"), [(58166, 0), (57256, 3)])
def test_the_tutorials_job_on_its_card(budget: int, status: int) -> None:
    report = summarise(None, ENGINE, [rank(0, (0,), 0, "ok", used_peak_mb=55389, actual_peak_mb=57257)],
                       dataclasses.replace(CRITERIA, budget_mb=budget))  # fmt: skip
    assert report.exit_status == status and report.margin_mb == budget - 57257


def test_a_32_gb_card_is_too_small_for_it() -> None:
    criteria = make_criteria(named_device("910b-32g"))
    report = summarise(None, ENGINE, [rank(0, (0,), 0, "ok", used_peak_mb=55389, actual_peak_mb=57257)], criteria)
    assert report.verdict is Verdict.DOES_NOT_FIT and "usable on Ascend 910B4 (32 GB)" in view.headline(report).sentence


def test_a_card_from_the_logs_of_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "msrun_log"
    logs.mkdir()
    (logs / "worker_0.log").write_text(BLOCK.format(62420, 58178))
    (logs / "worker_1.log").write_text(BLOCK.format(62420, 58166))
    device = device_of_logs(tmp_path)
    assert (device.total_mb, device.usable_mb, device.source) == (62420, 58166, "measured")
    assert main(["device", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["usable_mb"] == 58166


def test_a_simulations_logs_do_not_tell_a_card(tmp_path: Path) -> None:
    (tmp_path / "worker_0.log").write_text(BLOCK.format(65536, 61430))
    with pytest.raises(UsageError, match="come from a simulation"):
        device_of_logs(tmp_path)
    (tmp_path / "worker_0.log").write_text("nothing\n")
    with pytest.raises(UsageError, match="do not print the device's memory"):
        device_of_logs(tmp_path)


@pytest.mark.parametrize(
    ("chip", "size", "name"),
    [("910B3", 65536, "ascend910b3-64g"), ("910B2", 65536, "ascend910b-64g"), ("910B4", 32768, "ascend910b4-32g")],
)
def test_the_card_of_this_machine(mocker: MockerFixture, chip: str, size: int, name: str) -> None:
    mocker.patch("shutil.which", return_value="/usr/local/bin/npu-smi")
    text = NPU_SMI.format(name=chip, size=size)
    mocker.patch("subprocess.run", return_value=subprocess.CompletedProcess([], 0, text, ""))
    assert named_device("here").name == name


def test_a_card_that_no_file_describes() -> None:
    with pytest.raises(UsageError, match="a 310P3 with 21527M, which no device file describes"):
        read_card(NPU_SMI.format(name="310P3", size=21527))
    with pytest.raises(UsageError, match="lists no card"):
        read_card("")


ARGS = Arguments(("--num-layers", "4", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"))
GROUPS = {"4": (0,), "12": (0, 1, 2, 3), "13": (0, 1), "15": (0, 2)}


def test_communicators_have_names_and_twice_the_buffer() -> None:
    layout = read_layout(ARGS, 4)
    found = communicators(GROUPS, layout, ARGS, {})
    assert [(item.group, item.kind, item.size) for item in found] == [
        ("4", "self", 1),
        ("12", "mp", 4),
        ("13", "tp", 2),
        ("15", "pp", 2),
    ]
    assert [item.buffer_mb for item in found] == [400] * 4
    assert {item.buffer_mb for item in communicators(GROUPS, layout, ARGS, {"HCCL_BUFFSIZE": "100"})} == {200}
    sized = Arguments((*ARGS.words, "--hccl-group-buffer", "tp:300;pp:50"))
    assert [item.buffer_mb for item in communicators(GROUPS, layout, sized, {})] == [400, 400, 600, 100]


def test_communicators_stand_beside_the_peak_and_are_never_added(tmp_path: Path) -> None:
    described = job("a.sh", 4, Parallel(tp=2, pp=2), "embedded", *ARGS.words)
    record = Record.create(tmp_path, job_file(plan=((0, (0, 1, 2, 3)),), job=described, environment={"HCCL_BUFFSIZE": "600"}))
    record.rank_folder(0).mkdir(parents=True)
    result = {"rank": 0, "status": "ok", "represents": [0], "used_peak_mb": 500, "actual_peak_mb": 600, "groups": GROUPS}
    write_json(record.rank_folder(0) / "result.json", result)
    report = build_report(tmp_path)
    assert report.actual_peak_mb == 600 and report.outside_pool is not None
    assert (report.outside_pool.communicators, report.outside_pool.hccl_mb, report.outside_pool.left_mb) == (4, 4800, 4254)
    assert "not enough" in view.outside_words(report)


def test_what_a_users_own_runs_needed_is_the_margin(tmp_path: Path) -> None:
    assert seen_excess("mindspore").runs == 2  # type: ignore[union-attr]
    assert seen_excess("another") is None
    own = RealRun(job="a", engine="mindspore", device="x", dry=Peaks(900, 1000), real=Peaks(950, 1050))
    for _ in range(3):
        save_run(own)
    found = seen_excess("mindspore")
    assert found and (round(found.share, 6), found.runs, found.whose) == (0.05, 3, "your own")
    report = summarise(None, ENGINE, [rank(0, (0,), 0, "ok", used_peak_mb=55389, actual_peak_mb=57257)], make_criteria())
    assert report.verdict is Verdict.BARELY and report.needed_mb == 2863


def test_compare_saves_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry = tmp_path / "dry.json"
    dry.write_text(json.dumps(fits().to_json()))
    logs = tmp_path / "real"
    logs.mkdir()
    (logs / "worker_0.log").write_text(BLOCK.format(62420, 58178))
    assert main(["compare", str(logs), str(dry), "--labels", "real,dry", "--save"]) == 0
    saved = real_runs.read_runs(real_runs.user_file())
    assert len(saved) == 1 and saved[0].real == Peaks(55405, 57400) and saved[0].layout == "TP2 PP2 DP1"
    assert main(["compare", str(dry), str(dry), "--save"]) == 2
    assert "one side must be a dry run" in capsys.readouterr().err


def test_a_pair_is_told_apart_whichever_side_is_real() -> None:
    real = dataclasses.replace(fits(), ranks=(rank(0, (0,), None, "ok", used_peak_mb=1, actual_peak_mb=58000,
                                                    device_total_mb=62420, usable_mb=58178),))  # fmt: skip
    for a, b in ((fits(), real), (real, fits())):
        assert (
            real_run(
                Run(label="a", report=a, flags={}, environment={}), Run(label="b", report=b, flags={}, environment={})
            ).real.actual_peak_mb
            == 58000
        )


def test_reports_and_records_of_version_1_are_read(tmp_path: Path) -> None:
    old = fits().to_json() | {"schema_version": 1, "engine": {"mindspore": "2.7.1", "cann": "stand-in", "level": 1},
                              "device": {"total_mb": 65536, "usable_mb": 61430}, "budget_mb": 61430}  # fmt: skip
    report = Report.from_json(old)
    assert (report.engine.name, report.engine.version, report.verdict) == ("mindspore", "2.7.1", Verdict.FITS)
    assert report.device and report.device.total_mb == 65536
    plan = [{"rank": 0, "represents": [0], "stage": 0, "why": "w", "argv": ["x"], "timeout_s": 1, "iterations": 2}]
    job_1 = {"schema_version": 1, "version": "0.1", "fingerprint": "1", "engine": old["engine"], "budget_mb": None,
             "job": {"script": "a.sh", "world_size": 1, "parallel": {"tp": 1}, "trainer": "script", "trainer_args": []},
             "details": {"cwd": "/", "program": "p.py"}, "plan": plan}  # fmt: skip
    file = JobFile.from_json(job_1, "job.json")
    assert file.engine.version == "2.7.1" and file.plan[0].iterations == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [({"schema_version": 9}, "schema_version 9, and this program reads 1 to 2"), ([], "no schema_version"),
     ({**fits().to_json(), "ranks": 5}, "'ranks'"), ({**fits().to_json(), "verdict": "maybe"}, "'verdict'")],
)  # fmt: skip
def test_what_is_not_a_report_is_a_sentence(data: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Report.from_json(data)


def test_deep_nesting_is_a_sentence() -> None:
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="nested"):
        Report.from_json({**fits().to_json(), "notes": deep})


def test_the_sample_card_is_the_shipped_one() -> None:
    assert named_device() == CARD


def test_doctor_shows_the_card_of_an_ascend_host(mocker: MockerFixture) -> None:
    mocker.patch("mindspeed_dryrun.doctor.checks.npus", return_value=8)
    mocker.patch("mindspeed_dryrun.devices.local.shutil.which", return_value="/usr/local/bin/npu-smi")
    text = NPU_SMI.format(name="910B3", size=65536)
    mocker.patch("mindspeed_dryrun.devices.local.subprocess.run", return_value=subprocess.CompletedProcess([], 0, text, ""))
    assert checks.cards().found == "8, Ascend 910B3 (64 GB): 62420M in all, 58166M usable (published)"
