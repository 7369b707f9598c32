"""Advice: what a lever would do follows from the blocks of the peak, and agrees with the program that pulls it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from report_samples import CRITERIA, ENGINE, job_file, rank
from report_samples import job as sample_job
from tracker_file import Program

from mindspeed_dryrun.advise import levers as advice
from mindspeed_dryrun.advise import view as advice_view
from mindspeed_dryrun.advise.report_page import job_to_change
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.megatron.layout import Parallel
from mindspeed_dryrun.record.model import JobSummary, Report
from mindspeed_dryrun.record.summary import summarise
from mindspeed_dryrun.report.explain import Explanation, explain

LAYERS, IN_FLIGHT = 6, 2
# 1024 tokens × 4096 × 2 bytes = 8 MB of hidden states between layers: the made-up program's activation.
ARGS = (
    f"--num-layers {LAYERS * 2} --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 2 --bf16"
)


def job(world: int = 2, more: str = "") -> JobSummary:
    return sample_job("train.sh", world, Parallel(pp=2, dp=world // 2), "embedded", *f"{ARGS} {more}".split())


def job_of(summary: JobSummary | None) -> Job | None:
    return job_to_change(job_file(job=summary)) if summary else None


def made(tmp_path: Path, summary: JobSummary, second_peak_mb: int = 0, **settings: bool) -> tuple[Report, Explanation, Program]:
    program = Program(layers=LAYERS, microbatches=4, in_flight=IN_FLIGHT, **settings).run()
    peak = program.peak()[0] >> 20
    ranks = (
        rank(0, (0,), 0, "ok", used_peak_mb=peak, actual_peak_mb=peak + 10),
        rank(1, (1,), 1, "ok", used_peak_mb=second_peak_mb or peak, actual_peak_mb=second_peak_mb or peak),
    )
    report = dataclasses.replace(summarise(summary, ENGINE, ranks, CRITERIA), worst_rank=0)
    return report, explain(program.write(tmp_path / "memory_block.csv"), 0, peak, peak + 10), program


def by_name(report: Report, found: Explanation) -> dict[str, advice.Lever]:
    return {lever.name: lever for lever in advice.levers(report, job_of(report.job), found)}


def test_full_recomputation_is_the_peak_of_the_program_that_recomputes(tmp_path):
    report, found, program = made(tmp_path, job())
    lever = by_name(report, found)["full recomputation"]
    real = Program(layers=LAYERS, microbatches=4, in_flight=IN_FLIGHT, recompute=True).run().peak()[0]
    assert lever.used_peak_mb == pytest.approx(real / 2**20, abs=program.activation / 2**20)
    assert lever.command.endswith("-- --recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    recomputing = made(tmp_path, job(more=" ".join(lever.flags)), recompute=True)
    assert "full recomputation" not in by_name(*recomputing[:2])


def test_the_distributed_optimizer_shares_the_states_among_data_parallel_ranks(tmp_path):
    report, found, program = made(tmp_path, job(world=8))
    states = sum(tensor.size for tensor in program.tensors if tensor.category == "optimizer")
    assert by_name(report, found)["distributed optimizer"].saves_mb == states * 3 // 4 >> 20
    alone, found, _ = made(tmp_path, job(world=2))
    assert "distributed optimizer" not in by_name(alone, found)
    shared, found, _ = made(tmp_path, job(world=8, more="--use-distributed-optimizer"), distributed_optimizer=True)
    assert "distributed optimizer" not in by_name(shared, found)


def test_a_smaller_micro_batch_halves_what_depends_on_it(tmp_path):
    report, found, _ = made(tmp_path, job(more="--micro-batch-size 2"))
    moving = sum(part.size_bytes for part in found.categories if part.name in ("activations", "temporary"))
    lever = by_name(report, found)["micro batch 1"]
    assert lever.saves_mb == pytest.approx(moving / 2 / 2**20, abs=1)


def test_an_uneven_split_evens_the_stages_out(tmp_path):
    report, found, program = made(tmp_path, job(), second_peak_mb=100)
    lever = next(lever for name, lever in by_name(report, found).items() if name.startswith("uneven split"))
    moved = LAYERS - int(lever.flags[1].split(",")[0])
    assert moved >= 1 and sum(map(int, lever.flags[1].split(","))) == 2 * LAYERS
    static, kept = 2 * program.weight * 9, 4 * program.activation
    peak = found.peak_bytes >> 20 << 20  # a report holds whole MB

    def worse_stage(layers: int) -> float:
        return max(peak - layers * (static + 2 * kept), (100 << 20) + layers * (static + kept)) / 2**20

    assert lever.used_peak_mb == pytest.approx(worse_stage(moved), abs=1)
    assert worse_stage(moved) <= min(worse_stage(moved - 1), worse_stage(moved + 1))
    level, found, _ = made(tmp_path, job())
    assert not any(name.startswith("uneven") for name in by_name(level, found))


def test_more_pipeline_stages_agree_with_the_program_of_that_shape(tmp_path):
    report, found, _ = made(tmp_path, job(world=4))
    lever = by_name(report, found)["more PP: TP1 PP4 DP1"]
    real = Program(layers=LAYERS // 2, microbatches=8, in_flight=2 * IN_FLIGHT).run().peak()[0]
    assert lever.used_peak_mb == pytest.approx(real / 2**20, rel=0.02)


QWEN = (  # the tutorial's job; its first stage counts 55389M
    "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention --num-query-groups 4 "
    "--seq-length 10240 --micro-batch-size 1 --global-batch-size 64 --padded-vocab-size 152064 --untie-embeddings-and-output-weights "
    "--swiglu --bf16 --use-flash-attn --sequence-parallel --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


@pytest.mark.parametrize(
    ("flags", "measured_mb"),
    [("--recompute-granularity selective", 56264), ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1", 46841)],
)
def test_what_the_blocks_do_not_tell_the_memory_model_does(flags: str, measured_mb: int) -> None:
    """Both measured by `explain --try` on the real engine: within 2 %. A job that the model does not describe gets no figure."""
    now = job_of(sample_job("train.sh", 4, Parallel(tp=2, pp=2), "embedded", *QWEN.split()))
    assert now is not None
    changed = advice._changed(now, flags.split())
    assert changed is not None
    figure = advice._by_model(now, changed, 0, 55389 << 20)
    assert figure is not None and figure / 2**20 == pytest.approx(measured_mb, rel=0.02)
    assert advice._by_model(now, changed, 0, 70000 << 20) is None


def test_only_what_megatron_accepts_is_proposed(tmp_path):
    report, found, _ = made(tmp_path, job(world=4, more="--num-attention-heads 1 --group-query-attention --num-query-groups 1"))
    assert not any(name.startswith("more TP") for name in by_name(report, found))


def test_no_advice_without_a_job_or_blocks(tmp_path):
    report, found, _ = made(tmp_path, job())
    assert advice.levers(report, job_of(report.job), None) == []
    assert advice.levers(dataclasses.replace(report, job=None), job_of(report.job), found) == []
    assert advice.levers(report, None, found) == []


def test_computed_and_measured_stand_side_by_side_in_80_columns(tmp_path):
    report, found, _ = made(tmp_path, job(world=8))
    levers = advice.levers(report, job_of(report.job), found)
    better = dataclasses.replace(report, used_peak_mb=444, worst_rank=1)
    failed = dataclasses.replace(report, ranks=(rank(0, (0,), 0, "failed", error="boom"),))
    tried = {levers[0].name: better, levers[1].name: failed, levers[2].name: "Megatron would refuse it."}
    text = advice_view.render(levers, 500, 0, tried)
    assert "444M (1)" in text and "boom" in text and "could not be tried: Megatron would refuse it." in text
    lines = [line for line in text.splitlines() if not line.startswith("  mindspeed-dryrun launch")]
    assert all(len(line) <= 80 for line in lines)
