"""The support page: releases side by side, what differs, and why scripts do not run."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def support() -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / "support_table.py"
    spec = importlib.util.spec_from_file_location("support_table", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_page(support: ModuleType, tmp_path: Path) -> None:
    same = support.Row(script="same.sh", layout="8: TP1 PP1", ranks="0:100", used_peak_mb=100, seconds=5.0, result="fits")
    # Another rank was the worst: releases are compared by rank 0, which all have.
    all_ranks = support.Row(script="same.sh", layout="8: TP1 PP1", ranks="0:100 4:120", used_peak_mb=120, seconds=9.0)
    before = support.Row(script="b.sh", ranks="0:7", used_peak_mb=7, seconds=1.0)
    old = support.Table("2.2.0", "MindSpore 2.7.1", "auto", (all_ranks, before))
    flagged = dataclasses.replace(before, ranks="0:8", used_peak_mb=8, flag="--x", result="This fails. With it: fits")
    failed = support.Row(script="c.sh", result="failed: KeyError: 'a|b'")
    new = support.Table("26.1.0", "MindSpore 2.7.1", "0", (same, flagged, failed))
    for table in (old, new):
        folder = tmp_path / table.release
        folder.mkdir()
        table.write(folder)
        assert support.Table.read(folder) == table
    text = support.page([old, new])
    assert "**2.2.0** (MindSpore 2.7.1): 2 of 2 run to their end." in text
    assert "1 of 3 run to their end; 1 more with the flag that the tool names" in text
    assert "| same.sh | 8: TP1 PP1 | 100 (9 s) | 100 (5 s) |" in text
    assert "| b.sh | 2.2.0: 7, 26.1.0: 8 | not looked into yet |" in text and "same.sh | 2.2.0" not in text
    assert "| c.sh |  | – | does not run |" in text
    assert "failed: KeyError: 'a\\|b'" in text


def test_only_scripts_that_train_are_run(support: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("msrun pretrain_gpt.py")
    (tmp_path / "convert.sh").write_text("python convert_ckpt.py")
    assert [script.name for script in support.training_scripts(tmp_path, [])] == ["train.sh"]
