"""The search against the exhaustive one, and what it says when there is nothing to find."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest
from report_samples import CRITERIA, ENGINE
from report_samples import rank as sample_rank
from strategy_models import EXAMPLES, MODELS, hardware
from strategy_oracle import Oracle

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.errors import DryRunError, Interrupted, UsageError, exit_status_after
from mindspeed_dryrun.estimate.strategy import Recompute, Strategy
from mindspeed_dryrun.estimate.time_model import estimate, iteration_seconds
from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.script import capture
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.megatron.model_shape import ModelShape
from mindspeed_dryrun.record.model import RankReport, Report
from mindspeed_dryrun.record.summary import summarise
from mindspeed_dryrun.report import strategy_page as page
from mindspeed_dryrun.report.view import Headline
from mindspeed_dryrun.search import results
from mindspeed_dryrun.search.measure import Measurement, StagePeak, job_with, read_measurement
from mindspeed_dryrun.search.search import Candidate, Search, SearchProgress, SearchResult
from mindspeed_dryrun.search.search_file import read_search
from mindspeed_dryrun.search.space import Space, strategies
from mindspeed_dryrun.search.written_script import script_with, write_script

HARDWARE = hardware()
Stages = Collection[int] | None
CASES = [
    ("qwen2.5-7b", 8, 58), ("qwen2.5-7b", 4, 58), ("qwen2.5-7b", 8, 40), ("llama3.1-8b", 8, 58), ("llama3.1-8b", 16, 32),
    ("qwen2.5-0.5b", 8, 12), ("qwen2.5-0.5b", 2, 20), ("llama2-13b", 8, 58), ("llama2-13b", 16, 40), ("small", 2, 6),
]  # fmt: skip


@pytest.mark.parametrize(("model", "cards", "budget_gb"), CASES)
def test_the_winners_are_those_of_the_exhaustive_dry_run(model: str, cards: int, budget_gb: int) -> None:
    shape = MODELS[model]
    listed = strategies(shape, cards, Space(vpp=(1, 2), micro_batch=(1, 2, 4)))
    oracle = Oracle(shape)
    budget = budget_gb * 1024
    found = Search(shape, listed, HARDWARE, budget, oracle).run()
    everything = Oracle(shape)
    # Struck-out strategies are tried too: the bound must not have cost a winner.
    order = Search(shape, listed, HARDWARE, 1 << 40, everything).result.candidates
    best = [candidate for candidate in order if everything(candidate.strategy).actual_mb <= budget][:3]
    assert [winner.strategy for winner in found.winners] == [candidate.strategy for candidate in best]
    assert all(winner.measurement and winner.measurement.actual_mb <= budget for winner in found.winners)
    assert len(oracle.asked) == found.probes + found.dry_runs <= 45
    assert len(oracle.asked) < len(listed) / 10


@pytest.mark.parametrize("fragments", [0.0, 0.12])
def test_fragments_that_jump_do_not_mislead(fragments: float) -> None:
    shape = MODELS["qwen2.5-7b"]
    listed = strategies(shape, 8, Space(tp=(2, 4), vpp=(1,)))
    found = Search(shape, listed, HARDWARE, 30 * 1024, Oracle(shape, fragments)).run()
    everything = Oracle(shape, fragments)
    order = Search(shape, listed, HARDWARE, 1 << 40, everything).result.candidates
    best = next(item for item in order if everything(item.strategy).actual_mb <= 30 * 1024)
    assert found.winners[0].strategy == best.strategy


class Misleading(Oracle):
    """Small dry runs count a quarter more than they should: everything learnt from them is too high."""

    def __call__(self, strategy: Strategy, stages: Stages = None) -> Measurement:
        found = super().__call__(strategy, stages)
        if strategy.layers == self.shape.layers:
            return found
        larger = {stage: StagePeak(int(s.used_mb * 1.25), int(s.actual_mb * 1.25)) for stage, s in found.stages.items()}
        return dataclasses.replace(found, stages=larger)


@pytest.mark.parametrize("budget_gb", [24, 30, 40, 50])
def test_a_prediction_that_is_too_high_costs_time_and_not_the_answer(budget_gb: int) -> None:
    shape = MODELS["qwen2.5-7b"]
    listed = strategies(shape, 8, Space(tp=(2, 4), vpp=(1,), micro_batch=(1, 2), uneven=False))
    found = Search(shape, listed, HARDWARE, budget_gb * 1024, Misleading(shape), winners=1).run()
    everything = Oracle(shape)
    order = Search(shape, listed, HARDWARE, 1 << 40, everything).result.candidates
    best = next(item for item in order if everything(item.strategy).actual_mb <= budget_gb * 1024)
    assert found.winners[0].strategy == best.strategy


def test_dry_runs_grow_slowly_with_the_space() -> None:
    shape = dataclasses.replace(MODELS["qwen2.5-7b"], global_batch=1024)
    asked = {}
    for cards in (8, 64, 512):
        oracle = Oracle(shape)
        found = Search(shape, strategies(shape, cards, Space()), HARDWARE, 40 * 1024, oracle).run()
        assert found.winners
        asked[cards] = len(oracle.asked)
    assert max(asked.values()) <= 2 * asked[8] + 10


def test_a_budget_that_nothing_can_meet_names_the_closest() -> None:
    shape = MODELS["qwen2.5-7b"]
    listed = strategies(shape, 8, Space())
    oracle = Oracle(shape)
    found = Search(shape, listed, HARDWARE, 4 * 1024, oracle).run()
    assert not oracle.asked and not found.winners
    said = results.nothing_fits(found)
    assert "No strategy fits 4096M" in said and "holds at least" in said and "too much" in said


def test_a_budget_just_missed_names_the_closest_and_its_count() -> None:
    shape = MODELS["qwen2.5-7b"]
    space = Space(tp=(4,), pp=(2,), vpp=(1,), micro_batch=(4,), recompute=(Recompute("full", 1),), blocks=False, uneven=False)
    listed = strategies(shape, 8, space)
    assert listed
    count = min(Oracle(shape)(strategy).actual_mb for strategy in listed)
    found = Search(shape, listed, HARDWARE, count - 10, Oracle(shape)).run()
    assert not found.winners and found.closest
    said = results.nothing_fits(found)
    assert f"needs {count}M" in said and "10M too much" in said


def test_a_first_dry_run_that_fails_is_a_sentence() -> None:
    shape = MODELS["small"]

    def broken(strategy: Strategy, stages: Stages = None) -> Measurement:
        return Measurement(stages={}, error="rank 0: --strange-flag is not modelled")

    with pytest.raises(DryRunError, match="--strange-flag is not modelled"):
        Search(shape, strategies(shape, 2, Space()), HARDWARE, 1500, broken).run()


def test_a_flag_that_the_trainer_does_not_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real plan refuses it; the search says so in one sentence and does not try a thousand times."""
    path = _file(tmp_path, args="--moe-fb-overlap --num-query-groups 4", budget="58G")
    status = main(["search", str(path), "--out", str(tmp_path / "out"), "--trainer", "embedded"])
    said = capsys.readouterr().err
    assert status in (1, 2) and "--moe-fb-overlap" in said and "Traceback" not in said


def test_when_nothing_can_be_dry_run_the_search_stops() -> None:
    shape = MODELS["small"]
    asked = []

    def broken(strategy: Strategy, stages: Stages = None) -> Measurement:
        asked.append(strategy)
        return Measurement(stages={}, error="no engine")

    with pytest.raises(DryRunError, match="no engine"):
        Search(shape, strategies(shape, 2, Space()), HARDWARE, 60000, broken).run()
    assert len(asked) <= 3


def test_what_was_found_is_kept_when_the_engine_breaks_half_way() -> None:
    shape = MODELS["qwen2.5-7b"]
    oracle = Oracle(shape)
    listed = strategies(shape, 8, Space())
    whole = Search(shape, listed, HARDWARE, 58 * 1024, Oracle(shape)).run()

    def breaks(strategy: Strategy, stages: Stages = None) -> Measurement:
        if len(oracle.asked) > whole.probes:
            return Measurement(stages={}, error="disk full")
        return oracle(strategy, stages)

    found = Search(shape, listed, HARDWARE, 58 * 1024, breaks).run()
    assert [item.strategy for item in found.winners] == [whole.winners[0].strategy] and len(found.failed) == 3
    assert "Stopped early: 3 dry runs in a row failed" in results.to_text(found, shape, HARDWARE)


def test_a_strategy_that_fails_is_shown_and_passed() -> None:
    shape = MODELS["qwen2.5-7b"]
    oracle = Oracle(shape)
    listed = strategies(shape, 8, Space(vpp=(1,)))
    fastest = Search(shape, listed, HARDWARE, 60000, oracle).result.candidates[0].strategy

    def fails_once(strategy: Strategy, stages: Stages = None) -> Measurement:
        return Measurement(stages={}, error="rank 3: crashed") if strategy == fastest else oracle(strategy, stages)

    found = Search(shape, listed, HARDWARE, 60000, fails_once).run()
    assert found.failed[0].strategy == fastest and found.winners
    assert "could not be dry-run: rank 3: crashed" in results.to_text(found, shape, HARDWARE)


def test_an_interruption_keeps_what_is_known() -> None:
    shape = MODELS["qwen2.5-7b"]
    oracle = Oracle(shape)
    listed = strategies(shape, 8, Space())
    whole = Search(shape, listed, HARDWARE, 58 * 1024, Oracle(shape)).run()

    def stops(strategy: Strategy, stages: Stages = None) -> Measurement:
        if len(oracle.asked) == whole.probes + 2:
            raise Interrupted(signal.SIGTERM)
        return oracle(strategy, stages)

    found = Search(shape, listed, HARDWARE, 58 * 1024, stops).run()
    assert found.interrupted and exit_status_after(found.interrupted) == 128 + signal.SIGTERM
    assert [item.strategy for item in found.winners] == [item.strategy for item in whole.winners[: len(found.winners)]]
    assert "Interrupted" in results.to_text(found, shape, HARDWARE)


def test_communicators_must_fit_beside_the_pool() -> None:
    """A layout whose communicators need more than the pool leaves of the card is no winner."""
    shape = MODELS["qwen2.5-7b"]
    listed = strategies(shape, 8, Space(vpp=(1,), micro_batch=(1,)))
    budget = HARDWARE.usable_mb
    plain = Search(shape, listed, HARDWARE, budget, Oracle(shape)).run()
    crowded = plain.winners[0].strategy

    def counts_buffers(strategy: Strategy, stages: Stages = None) -> Measurement:
        return dataclasses.replace(Oracle(shape)(strategy, stages), outside_mb=40000 if strategy == crowded else 400)

    found = Search(shape, listed, HARDWARE, budget, counts_buffers).run()
    assert found.winners and crowded not in [winner.strategy for winner in found.winners]
    assert "Communicators of the best take 400M outside the pool" in results.to_text(found, shape, HARDWARE)


def test_the_budget_is_the_real_cards(tmp_path: Path) -> None:
    plan = read_search(_file(tmp_path, budget=None))
    assert plan.budget_mb == HARDWARE.usable_mb and plan.device == "ascend910b-64g"
    assert read_search(_file(tmp_path, hardware="910b")).device == "910b"


def test_progress_has_the_time_left() -> None:
    shape = MODELS["small"]
    told: list[SearchProgress] = []
    Search(shape, strategies(shape, 2, Space()), HARDWARE, 4000, Oracle(shape), on_progress=told.append).run()
    assert told[0].seconds_left is None and told[-1].seconds_left is not None
    assert {item.phase for item in told} >= {"dry-running"}


def _result() -> tuple[SearchResult, ModelShape]:
    shape = MODELS["qwen2.5-7b"]
    listed = strategies(shape, 8, Space(vpp=(1, 2, 4)))
    return Search(shape, listed, HARDWARE, 40 * 1024, Oracle(shape)).run(), shape


def test_strategy_json_has_galvatrons_fields_beside_ours() -> None:
    shape = MODELS["qwen2.5-7b"]
    strategy = Strategy(
        tp=2,
        pp=4,
        dp=1,
        cp=1,
        micro_batch=1,
        stages=((1, 2, 2, 2), (1, 2, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1)),
        recompute=Recompute("block", 1),
    )
    winner = Candidate(strategy=strategy, seconds=1.0, bound_mb=1.0, measurement=Oracle(shape)(strategy))
    data = results.strategy_json(winner, shape, estimate(shape, strategy, HARDWARE), 59392)
    assert json.loads(json.dumps(data)) == data
    fields = data["galvatron"]
    assert fields["pp_size"] == 4
    assert fields["tp_size_list"].split(",") == ["2"] * 28
    assert fields["dp_size_list"].split(",") == ["1"] * 28
    assert sum(map(int, fields["recompute_list"].split(","))) == 16 and len(fields["recompute_list"].split(",")) == 28
    # As Galvatron's guide has it: global batch / accumulation steps / dp.
    assert fields["per_device_train_batch_size"] == fields["global_batch_size"] / fields["gradient_accumulation_steps"] / 1
    assert data["strategy"]["noop_layers"] == [1, 3, 5, 31]
    assert data["strategy"]["recomputed_layers_per_stage"] == [[1, 1, 1, 1]] * 4
    assert data["conversion_args"][-2:] == ["--noop-layers", "1,3,5,31"]


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(
            tp=4,
            pp=2,
            dp=2,
            cp=1,
            micro_batch=2,
            stages=((14,), (14,)),
            recompute=Recompute("full", 1),
            sequence_parallel=True,
            distributed_optimizer=True,
        ),
        Strategy(tp=2, pp=4, dp=1, cp=1, micro_batch=1, stages=((1, 2, 2, 2), (1, 2, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1))),
        Strategy(
            tp=1,
            pp=2,
            dp=4,
            cp=1,
            micro_batch=1,
            stages=((15,), (13,)),
            recompute=Recompute("none"),
            sequence_parallel=False,
            distributed_optimizer=True,
        ),
    ],
    ids=lambda strategy: strategy.name,
)
@pytest.mark.parametrize("script", ["lab/qwen25_7b_8p.sh", "pretrain_qwen25_7b_32k_ms.sh"])
def test_the_script_with_the_strategy_set_makes_that_job(tmp_path: Path, strategy: Strategy, script: str) -> None:
    """The copy, run by bash up to its msrun call, gives exactly the job that was dry-run."""
    original = EXAMPLES / script
    copy = tmp_path / original.name
    copy.write_text(script_with(original.read_text(), strategy, 8))
    assert subprocess.run(["bash", "-n", str(copy)], check=False).returncode == 0
    call = capture(original)
    wanted = job_with(call, str(original), strategy, 8)
    found = capture(copy)
    assert found.world_size == wanted.world_size == strategy.world
    assert sorted(found.program_args) == sorted(wanted.args)
    assert original.read_text().partition("\n")[2] in copy.read_text()


def test_the_written_script_is_the_job_that_was_searched(tmp_path: Path) -> None:
    """Variables and arguments of the search file, its nodes, and comments in GBK."""
    original = tmp_path / "train.sh"
    text = """#!/bin/bash
# 训练脚本
SEQ=4096
: "${BATCH:=64}"
ARGS="--num-layers 28 --hidden-size 3584 --num-attention-heads 28 --seq-length $SEQ --global-batch-size $BATCH --data-path a b c"
msrun --worker_num 8 --local_worker_num=8 pretrain_gpt.py $ARGS --micro-batch-size 1 --bf16
"""
    original.write_bytes(text.encode("gbk"))
    sets, args = {"SEQ": "8192", "BATCH": "128"}, ("--data-path", "d", "--swiglu", "--micro-batch-size", "9")
    strategy = Strategy(
        tp=2,
        pp=2,
        dp=2,
        cp=1,
        micro_batch=4,
        stages=((14,), (14,)),
        recompute=Recompute("full", 1),
        sequence_parallel=True,
        distributed_optimizer=True,
    )
    copy = tmp_path / "out" / "train.sh"
    write_script(copy, original, strategy, 4, sets, args)
    assert "训练脚本".encode("gbk") in copy.read_bytes()
    call = capture(original, sets)
    call = dataclasses.replace(call, program_args=override_args(call.program_args, args))
    wanted, found = job_with(call, str(original), strategy, 4), understand(capture(copy), "copy")
    assert sorted(found.args) == sorted(wanted.args)
    assert (found.seq_length, found.global_batch, found.micro_batch) == (8192, 128, 4)
    assert (found.world_size, found.local_world_size) == (8, 4)
    assert found.arguments.values["--data-path"] == ("d",)


def test_smaller_nodes_count_in_script_and_time(tmp_path: Path) -> None:
    plan = read_search(_file(tmp_path, cluster={"nodes": 2, "cards_per_node": 4}))
    assert (plan.world, plan.hardware.cards_per_node, plan.hardware.link_cards) == (8, 4, 4)
    strategy = Strategy(tp=8, pp=1, dp=1, cp=1, micro_batch=1, stages=((28,),))
    shape = MODELS["qwen2.5-7b"]
    assert iteration_seconds(shape, strategy, plan.hardware) > iteration_seconds(shape, strategy, HARDWARE)


def test_the_trace_of_the_best_one(tmp_path: Path) -> None:
    found, shape = _result()
    trace = tmp_path / "here" / "trace.json"
    written = results.write_results(tmp_path, found, shape, HARDWARE, read_search(_file(tmp_path)), trace)
    assert written[-1] == trace
    events = json.loads(trace.read_text())["traceEvents"]
    best = found.winners[0]
    assert {event["pid"] for event in events} == set(range(best.strategy.pp))
    assert {"forward", "backward", "gradients", "optimizer"} <= {event.get("cat") for event in events}
    end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert end == pytest.approx(best.seconds * 1e6, rel=0.1)


def test_everything_is_written(tmp_path: Path) -> None:
    found, shape = _result()
    plan = read_search(_file(tmp_path))
    written = results.write_results(tmp_path, found, shape, HARDWARE, plan)
    assert {path.name for path in written} == {"search.html", "strategy.json", "qwen25_7b_8p.sh", "convert_args.txt"}
    assert all(path.is_file() for path in written)
    data = json.loads((tmp_path / "strategy.json").read_text())
    assert data["name"] == found.winners[0].strategy.name and len(data["others"]) == len(found.winners) - 1
    assert data["memory"]["actual_peak_mb"] <= 40 * 1024
    text = (tmp_path / "search.html").read_text()
    assert "<svg" in text and "http" not in text.replace("http-equiv", "") and found.winners[0].strategy.name in text
    printed = results.to_text(found, shape, HARDWARE)
    assert "considered" in printed and "struck out" in printed and "fitted to published throughput" in printed


def test_the_pareto_front_is_what_nothing_beats() -> None:
    points = [page.Point("a", 10, 5, "winner"), page.Point("b", 20, 4, "over"), page.Point("c", 30, 9, "predicted")]
    assert [point.label for point in page.pareto_front(points)] == ["a", "c"]


def test_a_page_escapes_what_it_is_given() -> None:
    drawn = page.plot([page.Point("<script>", 1, 1, "winner")], 10, "tokens/s")
    bars = page.bars([("<script>", 10, 12), ("broken", None, None)], 20)
    table = page.Table(["a"], [["<script>"]])
    text = page.render(
        "<script>",
        Headline("FOUND", "good", "<script>"),
        [page.PageSection(title="s", bars=bars, budget=20, plot=drawn, table=table, code=["<script>"], text=["<script>"])],
    )
    assert "<script" not in text and text.count("&lt;script&gt;") >= 7 and "no figures" in text


def test_a_failed_rank_is_never_a_measurement() -> None:
    def rank(number: int, stage: int, status: str = "ok", used: int | None = 10) -> RankReport:
        error = "boom" if status == "failed" else None
        return sample_rank(number, (number,), stage, status, error=error, used_peak_mb=used, actual_peak_mb=used)

    def report(*ranks: RankReport) -> Report:
        return summarise(None, ENGINE, ranks, CRITERIA)

    good = read_measurement(report(rank(0, 0, used=7), rank(1, 0, "oom", 9), rank(2, 1, used=5)), 1.0)
    assert {stage: peak.used_mb for stage, peak in good.stages.items()} == {0: 9, 1: 5} and good.error is None
    bad = read_measurement(report(rank(0, 0), rank(2, 1, "failed", 99)), 1.0)
    assert bad.error == "rank 2: boom" and not bad.stages


def _file(tmp_path: Path, **changes: object) -> Path:
    import yaml

    data: dict[str, object] = {
        "script": str(EXAMPLES / "lab" / "qwen25_7b_8p.sh"),
        "hardware": "ascend910b-64g",
        "budget": "58G",
    }
    data |= changes
    path = tmp_path / "search.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budget": "much"}, "is not a size"),
        ({"budget": "80G"}, "more than the 65536M"),
        ({"hardware": "nowhere.yaml"}, "Cannot read"),
        ({"cluster": {"nodes": 0}}, "whole number"),
        ({"cluster": {"cards_per_node": 16}}, "has 8"),
        ({"cluster": 8}, "must be a mapping"),
        ({"memory": 3}, "unknown key 'memory'"),
        ({"winners": "all"}, "whole number"),
    ],
)
def test_a_search_file_that_cannot_be_meant(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_search(_file(tmp_path, **changes))


def test_a_cluster_may_have_other_memory_and_links(tmp_path: Path) -> None:
    plain = read_search(_file(tmp_path, cluster={"nodes": 2})).hardware
    cluster = {"nodes": 2, "hbm_gb": 96, "link_gb_s": 30, "network_gb_s": [20, 40, 50]}
    plan = read_search(_file(tmp_path, cluster=cluster, budget="80G"))
    assert (plan.hardware.hbm_mb, plan.world, plan.budget_mb) == (96 * 1024, 16, 80 * 1024)
    assert plan.hardware.link_gb_s.typical == 30 and plan.hardware.network_gb_s.high == 50
    assert (
        dataclasses.replace(plan.hardware, hbm_mb=plain.hbm_mb, link_gb_s=plain.link_gb_s, network_gb_s=plain.network_gb_s)
        == plain
    )
    with pytest.raises(UsageError, match=r"'cluster\.link_gb_s' must be one number above 0"):
        read_search(_file(tmp_path, cluster={"link_gb_s": "fast"}))


def test_wrong_files_exit_with_2_and_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("script: [", "- 1", "a: b: c", ""):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        assert main(["search", str(path)]) == 2
        assert main(["sweep", str(path)]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert main(["search", str(tmp_path / "missing.yaml")]) == 2
    assert main(["search", str(_file(tmp_path, script="missing.sh"))]) == 2
    assert main(["search", str(_file(tmp_path, space={"tp": 8}))]) == 2
    assert "query groups" in capsys.readouterr().err


def test_plan_only_dry_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(EXAMPLES / "searches" / "qwen25_7b_8cards.yaml"), "--plan-only"]) == 0
    out = capsys.readouterr().out
    assert "struck out by the lower bound" in out and "TP1 PP2 DP4" in out


@pytest.mark.parametrize("name", ["qwen25_7b_8cards.yaml", "qwen25_7b_64cards.yaml"])
def test_the_example_searches_can_be_read(name: str) -> None:
    plan = read_search(EXAMPLES / "searches" / name)
    assert plan.world in (8, 64) and plan.script.is_file()
