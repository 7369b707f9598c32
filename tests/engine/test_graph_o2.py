"""Graph mode O2 needs GE: on the stand-in a rank that asks for it stops with a sentence, before anything crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine
from mindspeed_dryrun.launch import patch_catalogue as catalogue

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "program",
    ["ms.set_context(mode=ms.GRAPH_MODE, jit_config={'jit_level': 'O2'})", "ms.jit(backend='GE')(lambda x: x)"],
)
def test_graph_mode_o2_is_refused_on_the_stand_in(engine: MindSporeEngine, tmp_path: Path, program: str) -> None:
    if engine.cann != "stand-in":
        pytest.skip("there is a real CANN here")
    (tmp_path / "program.py").write_text(f"import mindspore as ms\nms.set_device('Ascend')\n{program}\nprint('went on')\n")
    (tmp_path / "patches.json").write_text(json.dumps(catalogue.compile()))
    activation = {"mode": "rank", "rank": 0, "world_size": 1, "trainer": "script", "patches": str(tmp_path / "patches.json")}
    environ = engine.environment(os.environ) | {"RANK_ID": "0", "RANK_SIZE": "1", "MINDSPEED_DRYRUN": json.dumps(activation)}
    command = [sys.executable, "-m", "mindspeed_dryrun.rank", str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "compiles with GE, which only a real CANN has" in done.stderr
    assert "Traceback" not in done.stderr and "went on" not in done.stdout
