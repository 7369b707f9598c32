"""The msrun calls of real scripts, as argument lists: each is planned, with the layout its arguments say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.plan import make_plan
from mindspeed_dryrun.launch.rank_classes import rank_classes
from mindspeed_dryrun.launch.short_run import short_run
from mindspeed_dryrun.record.run_spec import RunSpec

CORPUS = Path(__file__).parents[1] / "corpus" / "msrun_calls.jsonl"
CALLS = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
TRAINING = [call for call in CALLS if "inference.py" not in call["argv"] and "evaluation.py" not in call["argv"]]

# script → world size, (TP, PP, DP, CP, EP, VPP), classes: read off the scripts by hand
KNOWN = {
    "pretrain_chatglm3_6B_32k.sh": (8, (1, 1, 1, 8, 1, None), 1),
    "pretrain_deepseek3_671b_4k_A3_ms.sh": (512, (2, 8, 32, 1, 16, None), 8),
    "tune_distill_llama_70b_full_ms.sh": (32, (8, 4, 1, 1, 1, 10), 4),
    "pretrain_glm4_9b_32k_ms.sh": (16, (2, 2, 1, 4, 1, None), 6),
    "pretrain_grok1_40b_ms.sh": (32, (8, 2, 2, 1, 2, 6), 2),
    "pretrain_llama2_70b_ms.sh": (32, (8, 4, 1, 1, 1, 4), 4),
    "pretrain_mixtral_8x22b_32k_ms.sh": (64, (8, 4, 1, 2, 1, 7), 8),
    "pretrain_qwen2_57b_a14b_4k_ms.sh": (64, (1, 4, 4, 4, 4, None), 4),
    "tune_qwen25_32b_4k_full_ms.sh": (16, (1, 16, 1, 1, 1, None), 16),
    "tune_mixtral_8x22b_qlora_sh.sh": (2, (2, 1, 1, 1, 1, None), 1),
}
KINDS = {"tune_llama31_8b_lora_ms.sh": "lora", "dpo_llama31_8b_8k_ms.sh": "dpo", "train_prm_llama2_7b_full_ms.sh": "prm",
         "tune_qwen3_8b_4K_full_ms.sh": "sft", "pretrain_gemma_7b_ms.sh": "pretrain"}  # fmt: skip


def name(call: dict[str, object]) -> str:
    return Path(str(call["script"])).name


def job_of(call: dict[str, object]) -> Job:
    return understand(read_msrun_call(call["argv"], "/nowhere"), str(call["script"]))  # type: ignore[arg-type]


def test_the_corpus_has_every_call_that_is_known() -> None:
    assert {*KNOWN, *KINDS} <= {name(call) for call in CALLS}
    assert len(TRAINING) == len(CALLS) - 2


@pytest.mark.parametrize("call", TRAINING, ids=name)
def test_training_scripts_get_a_plan(call: dict[str, object]) -> None:
    job = job_of(call)
    p = job.parallel
    assert p.tp * p.pp * p.dp * p.cp == job.world_size
    if name(call) in KNOWN:
        world, layout, classes = KNOWN[name(call)]
        assert (job.world_size, (p.tp, p.pp, p.dp, p.cp, p.ep, p.vpp)) == (world, layout)
        assert len(rank_classes(job)) == classes
    if name(call) in KINDS:
        assert job.kind == KINDS[name(call)]
    plan = make_plan(job, RunSpec(), None)
    covered = [rank for task in plan.tasks for rank in task.represents]
    assert sorted(covered) == list(range(job.world_size))
    assert {task.stage for task in plan.tasks} == set(range(p.pp))
    assert all(task.rank in task.represents for task in plan.tasks)
    # no argument of a rank can reach the user's checkpoint, data or logs
    for flag in ("--load", "--save", "--data-path", "--tensorboard-dir"):
        assert flag not in plan.tasks[0].argv
    assert "--mock-data" in plan.tasks[0].argv and "--padded-vocab-size" in plan.tasks[0].argv


@pytest.mark.parametrize("call", TRAINING, ids=name)
def test_layers_are_dealt_out_once(call: dict[str, object]) -> None:
    job = job_of(call)
    dealt = sorted(layer for stage in job.stage_layers for chunk in stage for layer in chunk)
    noops = [int(item) for item in (job.arguments.text("--noop-layers") or "").split(",") if item]
    assert dealt == [layer for layer in range(job.num_layers) if layer not in noops]


@pytest.mark.parametrize("call", TRAINING, ids=name)
def test_one_class_holds_one_stage(call: dict[str, object]) -> None:
    job = job_of(call)
    for item in rank_classes(job):
        assert {job.layout.place(rank).pp for rank in item.represents} == {item.stage}


@pytest.mark.parametrize("call", TRAINING, ids=name)
def test_a_short_run_keeps_the_layout(call: dict[str, object]) -> None:
    job = job_of(call)
    cut = short_run(job)
    short = understand(read_msrun_call([*_msrun_words(job), "pretrain_gpt.py", *cut.args], "/nowhere"), job.script)
    assert cut.iterations == 2 and short.microbatches == cut.microbatches <= job.microbatches
    assert short.parallel == job.parallel and short.stage_layers == job.stage_layers


def _msrun_words(job: Job) -> list[str]:
    return ["--worker_num", str(job.world_size), "--local_worker_num", str(job.local_world_size)]


@pytest.mark.parametrize("call", [call for call in CALLS if call not in TRAINING], ids=name)
def test_the_others_are_told_what_they_are(call: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"generates text \(inference\.py\)|evaluates a model \(evaluation\.py\)"):
        job_of(call)
