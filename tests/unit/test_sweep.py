"""Sweeps: what a file means, what comes out, what is kept when it stops half way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from report_samples import CRITERIA, ENGINE
from report_samples import rank as sample_rank
from strategy_models import EXAMPLES, hardware

from mindspeed_dryrun.errors import DryRunError, UsageError, exit_status_after
from mindspeed_dryrun.launch.executors import Interrupted
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.summary import summarise
from mindspeed_dryrun.sweep.sweep import (
    Sweep,
    exit_status,
    to_html,
    to_json,
    to_text,
    variant_job,
)
from mindspeed_dryrun.sweep.sweep_file import SweepPlan, Variant, read_sweep

SCRIPT = EXAMPLES / "lab" / "qwen25_7b_8p.sh"


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return path


def test_a_list_of_variants_over_common_changes(tmp_path: Path) -> None:
    plan = read_sweep(
        _write(
            tmp_path,
            """
script: train.sh
set: {SEQ: 4096, TP: 1}
args: --bf16
env: {HCCL_BUFFSIZE: 200}
budget: 58G
variants:
  - {name: a, set: {TP: 2}, args: [--micro-batch-size, 2], env: {X: true}}
  - {set: {TP: 4}}
""",
        )
    )
    assert plan.script == tmp_path / "train.sh" and plan.budget_mb == 59392
    first, second = plan.variants
    assert first == Variant(
        "a", {"SEQ": "4096", "TP": "2"}, ("--bf16", "--micro-batch-size", "2"), {"HCCL_BUFFSIZE": "200", "X": "true"}
    )
    assert second.name == "TP=4" and second.args == ("--bf16",)


def test_a_product_is_every_combination(tmp_path: Path) -> None:
    plan = read_sweep(
        _write(
            tmp_path,
            """
script: train.sh
product:
  set: {TP: [1, 2, 4], PP: [1, 2]}
  env: {MODE: [a, b]}
  args: {plain: [], again: --recompute-granularity full}
""",
        )
    )
    assert len(plan.variants) == 3 * 2 * 2 * 2
    assert len({variant.name for variant in plan.variants}) == 24
    last = plan.variants[-1]
    assert last.name == "TP=4 PP=2 MODE=b again"
    assert (last.sets, last.env, last.args) == ({"TP": "4", "PP": "2"}, {"MODE": "b"}, ("--recompute-granularity", "full"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("variants: [{name: a}]", "'script' is missing"),
        ("script: a.sh", "name the variants"),
        ("script: a.sh\nvariant: []", "did you mean 'variants'"),
        ("script: a.sh\nvariants: {a: 1}", "'variants' must be a list"),
        ("script: a.sh\nvariants: [{nmae: a}]", "variants 1: unknown key 'nmae'; did you mean 'name'"),
        ("script: a.sh\nvariants: [{name: a}, {name: a}]", "two variants are called 'a'"),
        ("script: a.sh\nvariants: [{set: [TP=2]}]", "must be a mapping of names to values"),
        ("script: a.sh\nvariants: [{args: {a: 1}}]", "a string or a list of arguments"),
        ("script: a.sh\nvariants: [{set: {TP: [1, 2]}}]", "must be text or a number"),
        ("script: a.sh\nproduct: {set: [1]}", "must map each name"),
        ("script: a.sh\nproduct: {args: --x}", "must map a label"),
        ("script: a.sh\nproduct: {tp: [1]}", "unknown key 'tp'"),
        ("script: a.sh\nbudget: huge\nvariants: [{name: a}]", "is not a size"),
        ("script: a.sh\ntrainer_release: new\nvariants: [{name: a}]", "'new'; give MindSpeed-LLM's release, such as 2.1"),
        ("script: a.sh\ntrainer_release: 2\nvariants: [{name: a}]", "'2'; give MindSpeed-LLM's release, such as 2.1"),
        ("script: [a\n", "is not YAML"),
        ("just text", "must be a mapping"),
    ],
)
def test_a_sweep_file_that_cannot_be_meant(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_sweep(_write(tmp_path, text))


def test_the_labs_file_is_the_labs_list() -> None:
    plan = read_sweep(EXAMPLES / "sweeps" / "qwen25_7b_lab.yaml")
    jobs = {variant.name: variant_job(plan.script, variant) for variant in plan.variants}
    layouts = {name: (job.parallel.tp, job.parallel.pp, job.parallel.vpp, job.parallel.cp) for name, job in jobs.items()}
    assert layouts == {
        "TP2PP4": (2, 4, None, 1), "TP2PP4+VPP": (2, 4, 4, 1), "TP4PP2": (4, 2, None, 1),
        "TP4PP2+recompute": (4, 2, None, 1), "TP2PP2+ring 16k": (2, 2, None, 2), "TP2PP2+Ulysses 16k": (2, 2, None, 2),
    }  # fmt: skip
    assert [sum(map(len, stage)) for stage in jobs["TP2PP4+VPP"].stage_layers] == [7, 6, 7, 8]
    assert jobs["TP2PP2+ring 16k"].seq_length == 16384
    assert read_sweep(EXAMPLES / "sweeps" / "product.yaml").variants


def test_the_labs_file_predicts_the_labs_throughput_order(tmp_path: Path) -> None:
    """Published: 119, 126, 126, 99. Recomputation slowest, TP2PP4 third, without calibration."""
    sweep = Sweep(read_sweep(EXAMPLES / "sweeps" / "qwen25_7b_lab.yaml"), tmp_path, lambda *_: _report(1000))
    rows = sweep.run()[:4]
    by_throughput = sorted(rows, key=lambda row: row.estimate.tflops_per_card if row.estimate else 0)
    assert [row.variant.name for row in by_throughput][:2] == ["TP4PP2+recompute", "TP2PP4"]
    assert "as MindSpeed-LLM 2.1 logs them" in to_text(sweep.plan, rows)
    assert "as MindSpeed-LLM 2.1 logs them" in (tmp_path / "sweep.html").read_text()


def test_environment_reaches_script_and_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.read_text().replace("GBS=64", "GBS=${MY_BATCH:-64}"))
    job = variant_job(script, Variant("v", {}, (), {"MY_BATCH": "32"}))
    assert job.global_batch == 32 and job.env["MY_BATCH"] == "32"
    assert variant_job(script, Variant("v")).global_batch == 64


def test_a_variant_never_sees_anothers_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants are captured in threads of one process, whose environment they share."""
    monkeypatch.delenv("MY_BATCH", raising=False)
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.read_text().replace("GBS=64", "GBS=${MY_BATCH:-64}"))
    variants = [Variant("set", env={"MY_BATCH": "32"}), Variant("plain")]
    with ThreadPoolExecutor(4) as pool:
        found = [job.global_batch for job in pool.map(lambda number: variant_job(script, variants[number % 2]), range(8))]
    assert found == [32, 64] * 4 and "MY_BATCH" not in os.environ


def _report(peak: int, budget: int = 59392, status: str = "ok") -> Report:
    ranks = tuple(
        sample_rank(
            rank, (rank,), rank // 4, status if rank else "ok", error="boom" if status == "failed" and rank else None,
            used_peak_mb=None if status == "failed" and rank else peak - rank, actual_peak_mb=peak, seconds=3.0,
        )
        for rank in (0, 4)
    )  # fmt: skip
    return summarise(None, ENGINE, ranks, dataclasses.replace(CRITERIA, budget_mb=budget))


PLAN = SweepPlan(
    script=SCRIPT,
    variants=tuple(Variant(name, {"TP": tp, "PP": pp}) for name, tp, pp in [("a", "2", "4"), ("b", "4", "2")]),
    budget_mb=59392,
)


def test_the_json_has_the_fixed_shape(tmp_path: Path) -> None:
    sweep = Sweep(PLAN, tmp_path, lambda job, out: _report(1000 * job.parallel.tp))
    rows = sweep.run()
    data = to_json(rows)
    assert data["schema_version"] == 1 and list(data) == ["schema_version", "variants"]
    fixed = ["name", "set", "args", "status", "used_peak_mb", "actual_peak_mb", "fits", "worst_rank", "ranks"]
    for variant in data["variants"]:
        assert [key for key in variant if key in fixed] == fixed
    assert data["variants"][1]["used_peak_mb"] == 4000 and data["variants"][1]["set"] == {"TP": "4", "PP": "2"}
    assert data["variants"][0]["ranks"][0]["stage"] == 0
    assert json.loads((tmp_path / "sweep.json").read_text()) == data
    assert exit_status(rows) == 0


def test_every_variant_has_its_own_record(tmp_path: Path) -> None:
    folders: list[Path] = []

    def dry_run(job: Job, stem: Path) -> Report:
        folders.append(stem)
        return _report(5)

    plan = SweepPlan(script=SCRIPT, variants=(*PLAN.variants, Variant("odd / name & all", {"TP": "1", "PP": "1"})))
    Sweep(plan, tmp_path, dry_run).run()
    assert [folder.name for folder in folders] == ["a", "b", "odd_name_all"]
    assert all(folder.parent == tmp_path / "variants" for folder in folders)


def test_a_variant_that_cannot_run_is_a_sentence_in_the_table(tmp_path: Path) -> None:
    plan = SweepPlan(script=SCRIPT, variants=(Variant("bad", {"TP": "3"}), Variant("none", {"NOPE": "1"}), *PLAN.variants))

    def dry_run(job: Job, out: Path) -> Report:
        if job.parallel.tp == 4:
            raise DryRunError("--strange-flag changes memory and is not modelled.")
        return _report(70000, status="oom")

    rows = Sweep(plan, tmp_path, dry_run).run()
    assert [row.status for row in rows] == ["failed", "failed", "oom", "failed"]
    text = to_text(plan, rows)
    assert "bad: " in text and "no assignment NOPE" in text and "--strange-flag" in text and "too big" in text
    assert exit_status(rows) == 1
    assert exit_status(rows[2:3]) == 3


def test_a_failed_rank_is_never_dropped(tmp_path: Path) -> None:
    rows = Sweep(PLAN, tmp_path, lambda job, out: _report(5, status="failed")).run()
    assert {row.status for row in rows} == {"failed"} and rows[0].error == "boom"
    assert all(variant["status"] == "failed" and len(variant["ranks"]) == 2 for variant in to_json(rows)["variants"])


def test_an_interruption_keeps_the_finished_variants(tmp_path: Path) -> None:
    def dry_run(job: Job, out: Path) -> Report:
        if job.parallel.tp == 4:
            raise KeyboardInterrupt
        return _report(5)

    sweep = Sweep(PLAN, tmp_path, dry_run)
    rows = sweep.run()
    assert sweep.interrupted and [row.status for row in rows] == ["ok", "open"]
    assert [variant["name"] for variant in json.loads((tmp_path / "sweep.json").read_text())["variants"]] == ["a"]
    assert "not run" in to_text(PLAN, rows) and exit_status(rows) == 1


def test_variants_run_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=20)

    def dry_run(job: Job, out: Path) -> Report:
        together.wait()  # one alone would wait for ever
        return _report(1000 * job.parallel.tp)

    heard: list[tuple[int, str]] = []
    sweep = Sweep(PLAN, tmp_path, dry_run, lambda before, row: heard.append((before, row.said)), at_once=2)
    assert [row.report.used_peak_mb for row in sweep.run() if row.report] == [2000, 4000]
    assert [before for before, _ in heard] == [0, 1] and {said.split()[0] for _, said in heard} == {"2000M", "4000M"}


def test_an_interrupted_rank_ends_the_sweep_and_is_no_failure(tmp_path: Path) -> None:
    def dry_run(job: Job, out: Path) -> Report:
        raise Interrupted(signal.SIGTERM)

    sweep = Sweep(PLAN, tmp_path, dry_run)
    assert [row.status for row in sweep.run()] == ["open", "open"] and sweep.stop.is_set()
    assert sweep.interrupted and exit_status_after(sweep.interrupted) == 128 + signal.SIGTERM


def test_the_page_has_a_chart_and_escapes_names(tmp_path: Path) -> None:
    plan = SweepPlan(script=SCRIPT, variants=(Variant("<b>&", {"TP": "2"}),), budget_mb=59392, hardware=hardware())
    rows = Sweep(plan, tmp_path, lambda job, out: _report(60000, status="oom")).run()
    text = to_html(plan, rows)
    assert "<svg" in text and "budget 59392M" in text and "&lt;b&gt;&amp;" in text and "<b>&" not in text
    assert "s/iteration" in text and "<script" not in text and "src=" not in text
    assert (tmp_path / "sweep.html").read_text() == text
