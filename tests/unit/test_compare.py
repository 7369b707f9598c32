"""compare: two runs rank by rank, what differs, the limit for CI, and the published A/B table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from report_samples import fits, rank
from test_report import check_gold

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.record.environment import engine_environment
from mindspeed_dryrun.record.model import EngineSummary
from mindspeed_dryrun.report import compare as view
from mindspeed_dryrun.report.compare import Run, beyond, compare
from mindspeed_dryrun.report.compared_runs import logged_arguments

PUBLISHED = Path(__file__).parents[2] / "examples" / "ab" / "qwen25_7b_published.json"


def real() -> Run:
    """Real logs of four ranks, one of which failed."""
    ranks = (
        rank(0, (0,), None, "ok", used_peak_mb=55405, actual_peak_mb=57400, device_total_mb=62420, usable_mb=58178),
        rank(1, (1,), None, "ok", used_peak_mb=55405, actual_peak_mb=57390, device_total_mb=62420, usable_mb=58178),
        rank(2, (2,), None, "ok", used_peak_mb=48500, actual_peak_mb=50060, device_total_mb=62420, usable_mb=58178),
        rank(3, (3,), None, "failed", error="RuntimeError", used_peak_mb=100, actual_peak_mb=100),
    )
    report = dataclasses.replace(fits(), job=None, ranks=ranks, engine=EngineSummary(), worst_rank=0)
    flags = {"--seq-length": "10240", "--bf16": "True", "--swiglu": "False", "--lr": "1e-5"}
    return Run(label="real", report=report, flags=flags, environment={}, flags_logged=True)


def dry() -> Run:
    flags = {"--seq-length": "4096", "--bf16": "set", "--swiglu": "set"}
    return Run(label="dry", report=fits(), flags=flags, environment={})


def test_a_class_speaks_for_its_ranks_and_stages_come_from_the_side_that_knows_them():
    found = compare(real(), dry())
    by_rank = {rank: pair for pair in found.ranks for rank in pair.ranks}
    assert sorted(by_rank) == [0, 1, 2, 3]
    assert (by_rank[1].a_used_mb, by_rank[1].b_used_mb, by_rank[1].stage) == (55405, 55389, 0)
    assert (by_rank[3].a_used_mb, by_rank[3].b_used_mb) == (None, 48436)
    assert [(pair.name, pair.used_diff_mb) for pair in found.stages] == [("stage 0", -16), ("stage 1", -64)]
    assert (found.worst.used_diff_mb, found.worst.actual_diff_mb) == (-16, -59)


def test_only_what_differs_is_listed_and_logged_defaults_are_no_difference():
    found = {item.name: (item.kind, item.a, item.b) for item in compare(real(), dry()).differences}
    assert found["--seq-length"] == ("argument", "10240", "4096")
    assert found["--swiglu"] == ("argument", None, "set")
    assert found["version"] == ("engine", None, "2.7.1")
    assert "--bf16" not in found and "--lr" not in found


@pytest.mark.parametrize("format", ["table", "markdown", "json"])
def test_gold(format):
    render = {"table": view.render_table, "markdown": view.render_markdown, "json": view.render_json}[format]
    suffix = {"table": "txt", "markdown": "md", "json": "json"}[format]
    check_gold(f"compare.{suffix}", render(compare(real(), dry())))


@pytest.mark.parametrize("factor", [1, 3, 40, 10_000])
def test_the_table_fits_80_columns(factor):
    ranks = tuple(
        dataclasses.replace(rank, used_peak_mb=55389 * factor, actual_peak_mb=57341 * factor, represents=(rank.rank, 9, 99, 999))
        for rank in fits().ranks
    )
    other = Run(
        label="a rather long label", report=dataclasses.replace(fits(), ranks=ranks), flags={"--x" * 30: "y" * 90}, environment={}
    )
    for found in (compare(dry(), other), compare(other, dry())):
        assert all(len(line) <= 80 for line in view.render_table(found).splitlines())


def test_max_diff():
    found = compare(real(), dry())
    missing = "rank 3: there is no figure on side real to compare."
    assert beyond(found, "1%") == [missing]
    assert [sentence.split(":")[0] for sentence in beyond(found, "20M")] == ["rank 2", "rank 3"]
    assert beyond(compare(dry(), dry()), "0%") == []
    with pytest.raises(UsageError):
        beyond(found, "two percent")


def test_the_published_table_is_shown_from_its_data(capsys):
    assert main(["compare", str(PUBLISHED)]) == 0
    check_gold("compare_published.txt", capsys.readouterr().out)
    assert main(["compare", str(PUBLISHED), "--max-diff", "0.4%"]) == 0
    assert main(["compare", str(PUBLISHED), "--max-diff", "0.1%"]) == 1
    assert "used peaks differ by -127M -0.36%, more than 0.1%" in capsys.readouterr().err


def test_two_report_files(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(fits().to_json()))
    second.write_text(
        json.dumps(dataclasses.replace(fits(), engine=EngineSummary("mindspore", "2.8.0", "stand-in", 1)).to_json())
    )
    assert main(["compare", str(first), str(second), "--labels", "old,new", "--max-diff", "0%"]) == 0
    out = capsys.readouterr().out
    assert "engine  version  2.7.1  2.8.0" in out and "used old" in out
    assert main(["compare", str(first), str(second), "--labels", "old"]) == 2
    assert main(["compare", str(tmp_path / "none.json"), str(second)]) == 2


def test_two_folders_of_logs(tmp_path, capsys):
    for name, used in (("a", 100), ("b", 130)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "worker_0.log").write_text(
            "------------------------ arguments ------------------------\n"
            f"  seq_length ...................................... {used}\n"
            "-------------------- end of arguments ---------------------\n"
            "Device MOC memory size: 65536M\nMindSpore Used memory size: 61430M\n"
            "MindSpore memory base address: 0x7fffe94febb7\n"
            f"Used peak memory usage (without fragments): {used}M\n"
            f"Actual peak memory usage (with fragments): {used + 5}M\n"
        )
    assert logged_arguments(tmp_path / "a") == {"--seq-length": "100"}
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--max-diff", "20%"]) == 1
    out = capsys.readouterr().out
    assert "+30M +30.00%" in out and "--seq-length" in out


def test_the_environment_of_a_record_holds_no_secret():
    kept = engine_environment(
        {"MS_ALLOC_CONF": "x", "HCCL_BUFFSIZE": "200", "PATH": "/", "AWS_SECRET_ACCESS_KEY": "s", "MS_API_TOKEN": "t"}
    )
    assert kept == {"HCCL_BUFFSIZE": "200", "MS_ALLOC_CONF": "x"}
