"""Runs that decide a close verdict: two ranks of the worst class first, all chosen ones only while they fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_samples import CRITERIA, rank

from mindspeed_dryrun.engines.cann.stand_in import StandIn
from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine
from mindspeed_dryrun.launch import run
from mindspeed_dryrun.launch.deciding import deciding_plans
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.plan import Plan, make_plan
from mindspeed_dryrun.launch.run import Execution, run_plan
from mindspeed_dryrun.record.model import EngineSummary, Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.summary import summarise

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 1"
)


def _plan() -> Plan:
    call = read_msrun_call(f"--worker_num 16 --local_worker_num 8 pretrain_gpt.py {FLAGS}".split(), "/nowhere")
    return make_plan(
        understand(call, "train.sh"),
        RunSpec(),
        MindSporeEngine(version="2.7.1", cann="stand-in", level=1, base=StandIn(Path("/cann"))),
    )


def _report(peak: int) -> Report:
    worst = rank(0, tuple(range(16)), 0, "ok", used_peak_mb=peak, actual_peak_mb=peak)
    return summarise(None, EngineSummary(), [worst], CRITERIA)


def test_a_close_verdict_is_decided_by_two_ranks_then_by_eight() -> None:
    first, whole = deciding_plans(_plan(), _report(58000))
    assert len(first.tasks) == 2 and len(whole.tasks) == 8
    assert first.tasks == whole.tasks[:2] and first.fingerprint == whole.fingerprint
    assert whole.microbatches == 4


@pytest.mark.parametrize("peak", [50000, 58167])
def test_a_clear_verdict_needs_no_more_runs(peak: int) -> None:
    assert deciding_plans(_plan(), _report(peak)) == []


@pytest.mark.parametrize(("after", "runs"), [(58167, [2]), (58050, [2, 8])])
def test_one_rank_that_does_not_fit_is_enough(
    after: int, runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def ran(plan: Plan, out: Path, *rest: object) -> Report:
        if out.name == "deciding":
            seen.append(len(plan.tasks))
        return _report(58000)

    monkeypatch.setattr(run, "_run", ran)
    monkeypatch.setattr(run, "_write_report", lambda record: _report(after))
    monkeypatch.setattr(run.Record, "open", lambda path: path)
    report = run_plan(_plan(), tmp_path, Execution(executor="ray"))
    assert seen == runs and report.fits == (after <= 58166)
