"""The support page: releases side by side, what differs, and why scripts do not run."""

from __future__ import annotations

import argparse
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
    new = support.Table("26.1.0", "MindSpore 2.7.1", "0", (same, flagged, failed), scripts=5)
    for table in (old, new):
        table.write(tmp_path / "rows.json")
        assert support.Table.read(tmp_path / "rows.json") == support.Table.read(tmp_path) == table
    text = support.page([new, old])
    assert "**2.2.0** (MindSpore 2.7.1): 2 of 2 run to their end." in text
    assert "1 of 3 run to their end; 1 more with the flag that the tool names; 2 were not tried." in text
    assert "| same.sh | 8: TP1 PP1 | 100 (9 s) | 100 (5 s) |" in text
    assert "| b.sh | 7 in 2.2.0; 8 in 26.1.0 | – | not looked into yet |" in text and "| same.sh | 100 in" not in text
    assert "1 scripts count the same" in text
    assert "| c.sh |  | – | does not run |" in text
    assert "| c.sh | 26.1.0 | failed: KeyError: 'a\\|b' |" in text
    assert "## 2.2.0, every rank class" in text and "| same.sh | 8: TP1 PP1 | 120M |" in text
    assert "†" not in text and "dagger" not in text


def test_rows_of_today_take_the_place_of_earlier_ones(support: ModuleType) -> None:
    earlier = support.Row(script="a.sh", ranks="0:5 4:9", used_peak_mb=9, seconds=1.0, call="x", earlier=True)
    other = dataclasses.replace(earlier, script="b.sh")
    today = support.Row(script="a.sh", ranks="0:6", used_peak_mb=6, seconds=2.0, call="x")
    changed = support.Row(script="a.sh", ranks="0:7", used_peak_mb=7, seconds=2.0, call="y")
    before = support.Table("2.2.0", "MindSpore 2.7.1", "auto", (earlier, other))
    after = support.Table("2.2.0", "MindSpore 2.7.1", "0", (today,))
    text = support.page([after, before, support.Table("2.3.0", "MindSpore 2.7.1", "0", (changed,))])
    assert "| a.sh |  | 6 (2 s) | 7 (2 s) |" in text and "| b.sh |  | 5† (1 s) | – |" in text
    assert "| a.sh | 6 in 2.2.0; 7 in 2.3.0 | differ |" in text
    assert "A figure with a dagger was counted earlier, by an earlier state of this package: 1 in 2.2.0." in text
    assert "| a.sh |  | 9M† |" in text


def test_rows_of_every_rank_class_are_kept_beside_those_of_rank_0(
    support: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "KEPT", tmp_path)
    row = support.Row(script="a.sh", ranks="0:5 4:9", used_peak_mb=9, seconds=1.0)
    for ranks in ("auto", "0"):
        support.Table("2.2.0", "MindSpore 2.7.1", ranks, (row,)).write(tmp_path / f"{ranks}.rows")
        support.keep(argparse.Namespace(records=tmp_path / f"{ranks}.rows"))
    assert [support.Table.read(file).ranks for file in support.kept()] == ["auto", "0"]


def test_the_page_is_made_from_the_rows_that_are_kept(support: ModuleType) -> None:
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert support.page([support.Table.read(file) for file in support.kept()]) == page.read_text(encoding="utf-8")


def test_the_page_of_torch_npu_has_the_rows_that_are_kept(support: ModuleType) -> None:
    docs = Path(__file__).parents[2] / "docs"
    kept = [support.Table.read(docs / "support_torch" / f"{name}.json") for name in ("mcore", "fsdp2")]
    rows = {line for line in support.page(kept).splitlines() if line.startswith("|")}
    assert rows <= set((docs / "support_torch.md").read_text(encoding="utf-8").splitlines())


def test_arguments_are_compared_wherever_the_trees_are(support: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for root in ("/here", "/there"):
        monkeypatch.setenv("MINDSPEED_CORE_MS_PATH", root)
        digests.add(support.digest(["--spec", f"{root}/MindSpeed-LLM/spec.py"]))
    assert len(digests) == 1 and support.digest(["--spec", "other"]) not in digests


def test_only_scripts_that_train_are_run(support: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("msrun pretrain_gpt.py")
    (tmp_path / "convert.sh").write_text("python convert_ckpt.py")
    assert [script.name for script in support.training_scripts(tmp_path, [])] == ["train.sh"]
