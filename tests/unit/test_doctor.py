"""doctor: every check says what it found, and what is wrong comes with the command that fixes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mindspeed_dryrun.commands import doctor, main
from mindspeed_dryrun.doctor import checks
from mindspeed_dryrun.doctor.checks import Check
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.releases import TREES


def test_a_missing_mindspore_names_the_command(mocker) -> None:
    mocker.patch.object(checks, "find_mindspore", side_effect=DryRunError("none"))
    found = checks.mindspore()
    assert (found.state, found.fix) == ("wrong", "pip install mindspore==2.7.1")


def test_a_cpu_only_mindspore_is_wrong(mocker, tmp_path: Path) -> None:
    mocker.patch.object(checks, "find_mindspore", return_value=(tmp_path, "2.7.1"))
    assert "CPU-only build" in checks.mindspore().found and checks.mindspore().state == "wrong"


@pytest.mark.parametrize(("version", "state"), [("2.7.1", "ok"), ("2.10.0", "ok"), ("2.6.0", "note")])
def test_versions_that_the_tests_pass_on_are_good_and_others_are_noted(mocker, tmp_path: Path, version: str, state: str) -> None:
    (tmp_path / "lib" / "plugin").mkdir(parents=True)
    (tmp_path / "lib" / "plugin" / "libmindspore_ascend.so.2").touch()
    mocker.patch.object(checks, "find_mindspore", return_value=(tmp_path, version))
    assert checks.mindspore().state == state


def test_upstream_is_optional(tmp_path: Path) -> None:
    assert {check.state for check in checks.upstream({})} == {"absent"}


def test_the_release_and_what_is_missing_are_shown(mocker, tmp_path: Path) -> None:
    for tree, package in TREES.items():
        (tmp_path / tree / package).mkdir(parents=True)
    (tmp_path / "MindSpeed-LLM" / "setup.py").write_text("__version__ = '2.3.0'\n")
    mocker.patch.object(checks, "missing_packages", return_value=["scikit-learn", "networkx"])
    environ = {checks.CORE_MS: str(tmp_path)}
    found = {check.name: check for check in checks.upstream(environ)}
    assert (found["Upstream release"].found, found["Upstream release"].state) == ("2.3.0", "ok")
    assert found["MindSpeed"].wanted == "2.3.0_core_r0.12.1" and found["MindSpeed"].state == "ok"
    assert found["Upstream's packages"].fix == "pip install scikit-learn networkx"
    shutil.rmtree(tmp_path / "Megatron-LM")
    assert {check.name: check for check in checks.upstream(environ)}["Megatron-LM"].state == "wrong"


def test_a_variable_that_names_no_folder_is_wrong(tmp_path: Path) -> None:
    (found,) = checks.upstream({checks.CORE_MS: str(tmp_path / "nowhere")})
    assert found.state == "wrong" and "nowhere is not a directory" in found.found


def test_little_disk_and_memory_are_wrong(mocker) -> None:
    mocker.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=2**30))
    mocker.patch.object(psutil, "virtual_memory", return_value=SimpleNamespace(available=2**29))
    assert checks.disk().state == "wrong" and "MINDSPEED_DRYRUN_CACHE" in (checks.disk().fix or "")
    assert checks.memory().state == "wrong"


def test_a_real_cann_is_named_with_its_version(mocker, tmp_path: Path) -> None:
    mocker.patch.object(checks, "find_real_cann", return_value=SimpleNamespace(home=tmp_path, version="8.2.RC1", complete=True))
    assert checks.cann({}).found == f"8.2.RC1 at {tmp_path}" and checks.cann({}).state == "ok"
    mocker.patch.object(
        checks, "find_real_cann", return_value=SimpleNamespace(home=tmp_path, version="8.2.RC1", complete=False, missing=("opp",))
    )
    assert "incomplete (opp missing)" in checks.cann({}).found and checks.cann({}).state == "note"


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("note", 0), ("absent", 0), ("wrong", 1)])
def test_exit_status_and_json(mocker, capsys, state: str, status: int) -> None:
    mocker.patch.object(
        doctor, "all_checks", return_value=iter([Check(name="Thing", found="this", wanted="that", state=state, fix="fix it")])
    )
    mocker.patch.object(doctor, "engine_trial", return_value=Check(name="Engine trial", found="fine", wanted="fine", state="ok"))
    assert main(["doctor", "--json"]) == status
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is (status == 0)
    assert shown["checks"][0] == {"name": "Thing", "found": "this", "wanted": "that", "state": state, "fix": "fix it"}


@pytest.mark.engine
def test_doctor_ends_with_a_real_trial_of_the_engine(capsys) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "768M counted by MindSpore" in shown
