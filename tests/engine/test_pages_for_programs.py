"""What docs/python.md, docs/agents.md and examples/ show to programs works as it stands, on the real engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mindspeed_dryrun.engines.packages import packages_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/pretrain_qwen25_7b_32k_ms.sh"
LONG = {"sweep", "search"}  # their output as JSON is tested where they are
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not packages_folder().is_dir(), reason="mindspeed-dryrun setup has not been run"),
]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with the examples in it, and nothing else of ours."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_program_of_the_python_page_runs(elsewhere: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", text_of("python.md"), re.MULTILINE | re.DOTALL)
    done = run(elsewhere, "-c", program)
    assert done.returncode == 0, done.stderr
    verdict, *ranks = done.stdout.splitlines()
    assert re.fullmatch(r"fits \d+ \d+ \d+", verdict) and [line.split()[:3] for line in ranks] == [
        ["0", "0", "ok"],
        ["2", "1", "ok"],
    ]


def test_the_example_that_plots_draws_a_bar_for_each_length(elsewhere: Path) -> None:
    program = "import pathlib, runpy; space = runpy.run_path('examples/plot_sequence_length.py'); "
    program += "space['main'].__globals__['LENGTHS'] = (1024, 2048); space['main'](pathlib.Path('drawn'))"
    done = run(elsewhere, "-c", program)
    assert done.returncode == 0, done.stderr
    bars = ElementTree.parse(elsewhere / "drawn" / "peaks.svg").findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 2 and float(bars[0].attrib["height"]) < float(bars[1].attrib["height"])


def commands() -> list[list[str]]:
    """The command lines of the page for agents, in its order; those that only name a file of the user's are left out."""
    shown = re.findall(r"`mindspeed-dryrun ([^`]+)`", text_of("agents.md"))
    lines = [shlex.split(line.replace("SCRIPT", SCRIPT)) for line in shown]
    return [words for words in lines if words[0] not in LONG]


def test_an_agent_follows_its_page(elsewhere: Path) -> None:
    seen: dict[str, Any] = {}
    for words in commands():
        done = run(elsewhere, "-m", "mindspeed_dryrun", *words)
        assert done.returncode == 0, f"{words}\n{done.stdout[-500:]}{done.stderr[-1000:]}"
        if "--json" in words or "json" in words or words[0] == "schema":
            seen[" ".join(words[:1] + [word for word in words if word.startswith("--")])] = json.loads(done.stdout)
    assert {"doctor --json", "launch --plan-only --json", "launch --json --out", "explain --format", "schema"} <= seen.keys()
    assert {"job", "ranks"} <= seen["launch --plan-only --json"].keys()
    report = seen["launch --json --out"]
    assert {"verdict", "margin_mb", "worst_rank", "not_counted"} <= report.keys()
    assert {"used_peak_mb", "actual_peak_mb", "status", "error"} <= report["ranks"][0].keys()
