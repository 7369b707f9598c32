"""The Python interface, and the JUnit file for CI servers."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import report_samples

import mindspeed_dryrun
from mindspeed_dryrun.report import junit


def test_the_package_loads_the_standard_library_only() -> None:
    """A rank imports it; what the interface needs is loaded when it is used."""
    code = "import sys, mindspeed_dryrun; print([name for name in ('yaml', 'pydantic', 'rich', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("first", ["mindspeed_dryrun.search.search", "mindspeed_dryrun.api", "mindspeed_dryrun"])
def test_search_can_be_called_whoever_imported_the_package_first(first: str) -> None:
    code = f"import {first}; from mindspeed_dryrun import search, dry_run, compare; print(callable(search), callable(dry_run), callable(compare))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\n"


def test_every_public_name_is_there_and_documented() -> None:
    for name in mindspeed_dryrun.__all__:
        thing = getattr(mindspeed_dryrun, name)
        assert name == "__version__" or inspect.getdoc(thing)
    assert isinstance(mindspeed_dryrun.search, ModuleType)
    with pytest.raises(AttributeError):
        mindspeed_dryrun.serch  # noqa: B018


def test_compare_reads_two_reports(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(report_samples.fits().to_json()))
    found = mindspeed_dryrun.compare(tmp_path / "a.json", tmp_path / "b.json", ("one", "two"))
    assert found.labels == ("one", "two")
    assert found.worst.used_diff_mb == 0


def test_a_junit_file_has_a_case_for_the_job_and_each_class() -> None:
    suite = ElementTree.fromstring(junit.render(report_samples.fits()))
    assert [case.get("name") for case in suite][1:] == ["rank 0-1 of stage 0", "rank 2-3 of stage 1"]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "0")


def test_what_does_not_fit_fails_and_what_broke_is_an_error() -> None:
    suite = ElementTree.fromstring(junit.render(report_samples.does_not_fit()))
    assert (suite.get("failures"), suite.get("errors")) == ("2", "0")  # the job, and the rank above the budget
    suite = ElementTree.fromstring(junit.render(report_samples.hostile()))
    assert (suite.get("failures"), suite.get("errors")) == ("0", "3")
    assert any("<script>" in (error.get("message") or "") for error in suite.iter("error"))
