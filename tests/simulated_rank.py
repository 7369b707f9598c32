"""A rank of a simulation that runs a program of a test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine
from mindspeed_dryrun.rank import installed

ROOT = Path(__file__).resolve().parents[1]
MINDSPORE = tuple(int(part) for part in re.findall(r"\d+", installed.version("mindspore") or "")[:3])
# Peaks with fragments are other ones on later versions (docs/versions.md).
AS_SHOWN = MINDSPORE == (2, 7, 1)
as_shown = pytest.mark.skipif(not AS_SHOWN, reason="these figures are those of MindSpore 2.7.1")


class Rank:
    """One rank that runs a program of the test with the patches of its choice."""

    def __init__(self, engine: MindSporeEngine, packages: list[str], folder: Path) -> None:
        self.engine, self.packages, self.folder = engine, packages, folder

    def run(
        self, program: str, patches: list[dict[str, Any]], world_size: int = 2, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        (self.folder / "program.py").write_text(program)
        (self.folder / "patches.json").write_text(json.dumps(patches))
        settings = {
            "mode": "rank",
            "trainer": "embedded",
            "patches": str(self.folder / "patches.json"),
            "progress": str(self.folder / "progress.jsonl"),
            "scratch": str(self.folder / "scratch"),
            "iterations": 1,
            **json.loads(environ.pop("settings", "{}")),
        }
        environment = self.engine.environment(os.environ) | {
            "RANK_ID": "0",
            "RANK_SIZE": str(world_size),
            "MS_WORKER_NUM": str(world_size),
            "DEVICE_ID": "0",
            "MINDSPEED_DRYRUN": json.dumps(settings),
        }
        environment["PYTHONPATH"] = os.pathsep.join([*self.packages, str(ROOT), environment.get("PYTHONPATH", "")])
        environment.update(environ)
        command = [sys.executable, "-m", "mindspeed_dryrun.rank", str(self.folder / "program.py")]
        return subprocess.run(
            command,
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            errors="replace",
        )

    def phases(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "progress.jsonl").read_text().splitlines()]
