"""The comparison with real NPUs: rows in, table and margin out; a rank that did not run is in the table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

from real_npu import (
    ALPACA_TOKENS,
    BLIND,
    PACKED_TOKENS,
    WHY,
    RealRank,
    _of_all_nodes,
    _sample_length,
    collect,
    find_scripts,
    kept,
    margin,
    markdown,
    read_jobs,
    run_job,
    with_dates,
    without_known,
)

from mindspeed_dryrun.engines.torch_npu.margin import margin_sentence
from mindspeed_dryrun.launch.run import Execution

HEADER = "job,rank,max_allocated_mb,allocated_mb,script,branches\n"


def rank(number: int, **figures: float) -> RealRank:
    return RealRank(job="qwen", branch="26.1.0", current=True, rank=number, real_allocated=100.0, real_max=200.0, **figures)  # type: ignore[arg-type]


def test_jobs_and_the_newest_branch_that_has_the_script(tmp_path: Path) -> None:
    file = tmp_path / "real.csv"
    file.write_text(
        HEADER + "qwen,0,200.0,100.0,tests/qwen.sh,2.2.0 26.0.0 26.1.0\nqwen,1,200.0,100.0,tests/qwen.sh,2.2.0 26.0.0 26.1.0\n"
    )
    (job,) = read_jobs(file)
    assert [item.rank for item in job.ranks] == [0, 1] and not job.ranks[0].current  # kept since 2.2.0
    assert find_scripts(job, tmp_path) == []
    moved = tmp_path / "26.0.0" / "MindSpeed-LLM" / "tests" / "legacy" / "qwen.sh"
    moved.parent.mkdir(parents=True)
    moved.touch()
    assert find_scripts(job, tmp_path) == [("26.0.0", moved)]


def test_why_a_job_without_a_script_did_not_run(tmp_path: Path) -> None:
    file = tmp_path / "real.csv"
    file.write_text(HEADER + "old,0,200.0,100.0,tests/old.sh,1.0.RC3 2.1.0\nnew,0,200.0,100.0,tests/new.sh,2.1.0 26.0.0\n")
    (tmp_path / "26.0.0").mkdir()
    old, new = (run_job(job, tmp_path, tmp_path, Execution())[0].error for job in read_jobs(file))
    assert old == "its baseline is of branches before 2.2.0 only, which a dry run does not know: 1.0.RC3, 2.1.0"
    assert new == "no branch that is here has its script (looked in 26.0.0; not set up: 2.1.0)"


def test_a_job_of_several_nodes_gets_a_script_that_starts_them_all(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "st"
    tests.mkdir(parents=True)
    (tests / "job.sh").write_text('TRAIN_SCRIPTS=(\n    "./tests/st/edge"\n    "./tests/st/cloud"\n)\nrun_conversion || exit 1\n')
    (tests / "cloud").write_text("torchrun x.py --no-pad-to-seq-lengths\n")
    (tests / "edge").write_text('DATA="/data/tune_dataset/alpaca/alpaca"\ntorchrun x.py --no-pad-to-seq-lengths\n')
    made = _of_all_nodes(tests / "job.sh", tmp_path, tmp_path)
    assert made.read_text() == f"cd {tmp_path}\nbash ./tests/st/edge &\nbash ./tests/st/cloud &\nwait\n"
    assert _of_all_nodes(tests / "edge", tmp_path, tmp_path) == tests / "edge"
    assert _sample_length(tests / "job.sh") == _sample_length(tests / "edge") == ALPACA_TOKENS
    (tests / "edge").write_text('DATA="/data/tune_dataset/alpaca"\ntorchrun x.py --no-pad-to-seq-lengths\n')
    assert _sample_length(tests / "job.sh") == PACKED_TOKENS
    (tests / "edge").write_text('DATA="/data/tune_dataset/alpaca"\ntorchrun x.py\n')
    (tests / "cloud").write_text("torchrun x.py\n")
    assert _sample_length(tests / "job.sh") == 0


def test_baselines_of_several_branches_become_one_job(tmp_path: Path) -> None:
    def baseline(branch: str, allocated: float) -> None:
        tests = tmp_path / branch / "MindSpeed-LLM" / "tests"
        for file, text in (
            (
                "st/baseline/qwen.json",
                json.dumps({"memo info": [{"rank": 0, "allocated memory": allocated, "max allocated memory": 9.0}]}),
            ),
            ("st/qwen.sh", "torchrun pretrain_gpt.py"),
            ("st/baseline/empty.json", ""),
            ("st/baseline/losses.json", '{"lm loss": [1.0]}'),
        ):
            (tests / file).parent.mkdir(parents=True, exist_ok=True)
            (tests / file).write_text(text)

    for branch, allocated in (("master", 2.0), ("26.1.0", 2.0), ("1.0.0", 1.0), ("1.0.RC3", 1.0)):
        baseline(branch, allocated)
    assert [(row["job"], row["allocated_mb"], row["branches"], row["script"]) for row in collect(tmp_path)] == [
        ("qwen", 1.0, "1.0.RC3 1.0.0", "tests/st/qwen.sh"),
        ("qwen", 2.0, "26.1.0 master", "tests/st/qwen.sh"),
    ]


def test_since_when_a_baseline_has_its_figures(tmp_path: Path) -> None:
    def commit(day: str, file: str, allocated: float) -> None:
        path = tmp_path / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"memo info": [{"rank": 0, "allocated memory": allocated, "max allocated memory": 200.0}]}))
        stamp = {"GIT_AUTHOR_DATE": f"{day}T00:00:00Z", "GIT_COMMITTER_DATE": f"{day}T00:00:00Z"}
        for words in (["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", day]):
            subprocess.run(
                ["git", "-C", tmp_path, *words], check=True, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **stamp}
            )

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit("2024-01-02", "baseline/qwen.json", 90.0)
    commit("2025-03-04", "baseline/qwen.json", 100.0)
    (tmp_path / "tests/baseline/qwen.json").unlink()
    commit("2026-05-06", "st/baseline_results/qwen.json", 100.0)  # moved, with the same figures
    csv = tmp_path / "real.csv"
    csv.write_text(HEADER + "qwen,0,200.0,100.0,,26.1.0\nglm,0,200.0,100.0,,26.1.0\n")
    dated = [with_dates(job, tmp_path).ranks[0] for job in read_jobs(csv)]
    assert [one.since for one in dated] == ["2025-03-04", ""]
    assert "| qwen | 26.1.0 | 2025-03-04 | 0 | 100.0 |" in markdown(dated, "torch_npu X")


def test_the_table_has_every_rank_and_the_margin_only_those_that_ran() -> None:
    ranks = [rank(0, allocated=100.5, maximum=199.0), rank(1, allocated=90.0, maximum=180.0), rank(2)]
    text = markdown(ranks, "torch_npu X")
    assert "| 0 | 100.0 | 100.5 | +0.500 | 200.0 | 199.0 | -1.0 (-0.50 %) |" in text
    assert (
        "3 real ranks, 2 ran. Allocated within 1 MB on 1 of 2; max allocated within 1 % on 1 of 2; more than 3 % below on 1 of 2"
        in text
    )
    assert "did not run" in text
    found = margin([*ranks, dataclasses.replace(ranks[0], current=False)])
    assert found["current"] == {"jobs": 1, "ranks": 2, "lowest_percent": -10.0, "highest_percent": -0.5, "within_1_percent": 1}
    assert found["older"]["ranks"] == 1


def test_what_the_engine_was_not_developed_against_has_a_table_of_its_own(tmp_path: Path) -> None:
    known, every = tmp_path / "known.csv", tmp_path / "all.csv"
    known.write_text(HEADER + "qwen,0,200.0,100.0,tests/qwen.sh,26.1.0\n")
    every.write_text(HEADER + "qwen,0,200.04,100.01,,26.1.0\nqwen,1,210.0,100.0,,26.1.0\nglm,0,200.0,100.0,,26.1.0\n")
    found = [one for job in without_known(read_jobs(every), read_jobs(known)) for one in job.ranks]
    assert [(one.job, one.rank, one.blind) for one in found] == [("qwen", 1, True), ("glm", 0, True)]
    text = markdown([rank(0), *found], "torch_npu X")
    assert text.index("| qwen | 26.1.0 |  | 0 |") < text.index(BLIND) < text.index("| glm | 26.1.0 |  | 0 |")
    assert BLIND not in markdown([rank(0)], "torch_npu X")


def test_what_people_wrote_stays_when_the_page_is_written_again(tmp_path: Path) -> None:
    page = tmp_path / "real_npu.md"
    assert kept(page) == ""
    page.write_text(markdown([rank(0)], "torch_npu X") + f"\n{WHY}\n\nThe embedding.\n")
    again = markdown([rank(0, allocated=100.0, maximum=200.0)], "torch_npu X", kept(page))
    assert again.endswith(f"\n\n{WHY}\n\nThe embedding.\n") and "| 0 | 100.0 | 100.0 |" in again


def test_the_engine_says_the_margin_that_was_measured() -> None:
    assert "EXPERIMENTAL" in margin_sentence() and "may be too LOW" in margin_sentence()
