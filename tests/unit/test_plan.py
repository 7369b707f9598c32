"""Plans: ranks, environment, trainer, and inputs that are not there."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from report_samples import CRITERIA, rank

from mindspeed_dryrun.commands.launch import parse_sets
from mindspeed_dryrun.engines.cann.stand_in import StandIn
from mindspeed_dryrun.engines.mindspore.engine import MindSporeEngine
from mindspeed_dryrun.engines.torch_npu.engine import TorchEngine
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.mock_inputs import (
    ASSUMED_VOCABULARY,
    absolute_paths,
    checkpoint_layout,
    dry_args,
    padded_vocabulary,
)
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.plan import check_results, choose_ranks, make_plan, plan_json, rewritten_call
from mindspeed_dryrun.launch.torchrun_call import read_torchrun_call
from mindspeed_dryrun.launch.trainers import choose_trainer
from mindspeed_dryrun.rank.activation import Activation
from mindspeed_dryrun.record.model import EngineSummary, Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.record.summary import summarise

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


def job(cwd: Path | str = "/nowhere", extra: str = "", world: int = 8, program: str = "pretrain_gpt.py") -> Job:
    text = f"--worker_num {world} --node_rank 0 --log_dir=msrun_log {program} {BASE}"
    return understand(read_msrun_call(text.split(), str(cwd), {"USER_SETTING": "kept"}), "train.sh", extra.split())


def test_a_task_can_be_sent_to_another_machine() -> None:
    task = make_plan(job(), RunSpec(), None).tasks[0]
    assert pickle.loads(pickle.dumps(task)) == task


MINDSPORE = MindSporeEngine(version="2.7.1", cann="stand-in", level=1, base=StandIn(Path("/cann")))
TORCH = TorchEngine("2.13.0", StandIn(Path("/cann")))


def test_the_environment_of_a_rank_of_torchrun() -> None:
    words = f"--nproc_per_node 4 --nnodes 2 pretrain_gpt.py {BASE}".split()
    call = read_torchrun_call(words, "/here", {"TASK_QUEUE_ENABLE": "2", "RANK_TABLE_FILE": "x"})
    plan = make_plan(understand(call, "train.sh"), RunSpec(ranks="5", explain=True), TORCH)
    env = plan.tasks[0].env
    place = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    assert place == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert env["LD_LIBRARY_PATH"].startswith("/cann/lib64") and "MS_SIMULATION_LEVEL" not in env and "RANK_TABLE_FILE" not in env
    assert json.loads(env["MINDSPEED_DRYRUN"])["engine"] == "torch_npu"
    assert env["TORCH_HCCL_ASYNC_ERROR_HANDLING"] == "0"  # no thread that waits for Python while it holds HCCL's lock
    assert env["MINDSPEED_DRYRUN_SNAPSHOT"] == "memory_snapshot.pickle"
    assert plan_json(plan, Path("/out"))["engine"]["name"] == "torch_npu"
    names = {patch["name"] for patch in plan.patches}
    assert "torch-rendezvous" in names and "msadapter-device-count" not in names


@pytest.mark.parametrize(("device", "cores"), [(None, 24), ("ascend910b3-64g", 20), ("910b4", 20)])
def test_a_rank_knows_the_cores_of_the_named_card(device: str | None, cores: int) -> None:
    call = read_torchrun_call(f"--nproc_per_node 8 pretrain_gpt.py {BASE}".split(), "/here", {})
    plan = make_plan(understand(call, "train.sh"), RunSpec(ranks="0", device=device), TORCH)
    assert Activation.from_env(plan.tasks[0].env).cube_cores == cores


def test_the_environment_of_a_rank() -> None:
    task = make_plan(job(), RunSpec(), MINDSPORE).tasks[1]
    assert (task.rank, task.stage, task.represents) == (4, 1, (4, 5, 6, 7))
    assert task.env["RANK_ID"] == "4" and task.env["RANK_SIZE"] == task.env["MS_WORKER_NUM"] == "8"
    assert task.env["USER_SETTING"] == "kept" and task.env["MS_DRY_RUN"] == "1"
    activation = json.loads(task.env["MINDSPEED_DRYRUN"])
    assert activation["mode"] == "rank" and activation["progress"] == "{record}/ranks/00004/progress.jsonl"
    assert task.argv[1:3] == ("-m", "mindspeed_dryrun.rank")


@pytest.mark.parametrize(("text", "ranks"), [("all", list(range(8))), ("3", [3]), ("5,0-1", [0, 1, 5])])
def test_chosen_ranks(text: str, ranks: list[int]) -> None:
    chosen = choose_ranks(job(), text)
    assert [item.rank for item in chosen] == ranks
    assert all(item.represents == (item.rank,) for item in chosen)


@pytest.mark.parametrize("text", ["8", "-1", "x", "1-", "", "0,9", "0-99999999999", "5-3"])
def test_ranks_that_do_not_exist(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        choose_ranks(job(), text)


def test_checked_classes_still_cover_the_world_once() -> None:
    plan = make_plan(job(), RunSpec(check_classes=3), None)
    assert sorted(rank for task in plan.tasks for rank in task.represents) == list(range(8))
    assert len(plan.tasks) == 5 and len(plan.checks) == 3
    same: dict[int, int | None] = dict.fromkeys(range(8), 100)
    check_results(plan, report(same))
    with pytest.raises(DryRunError, match="101M"):
        check_results(plan, report({**same, plan.checks[0][0]: 101}))


def test_ranks_that_failed_are_not_called_equal() -> None:
    plan = make_plan(job(), RunSpec(check_classes=3), None)
    assert "3 of 3 other ranks could not be compared" in str(check_results(plan, report(dict.fromkeys(range(8)))))


def report(peaks: dict[int, int | None]) -> Report:
    ranks = [rank(number, (number,), 0, "ok", used_peak_mb=peak, actual_peak_mb=peak) for number, peak in peaks.items()]
    return summarise(None, EngineSummary(), ranks, CRITERIA)


def test_the_rewritten_call() -> None:
    call = rewritten_call(job(), 1, Path("/out"))
    assert call[:9] == ["msrun", "--worker_num", "8", "--rank", "0", "--log_dir", "/out", "--sim_level", "1"]
    assert "--node_rank" not in call


def test_plan_as_json_has_the_shape_of_a_report() -> None:
    data = plan_json(make_plan(job(), RunSpec(), None), Path("/out"))
    assert data["schema_version"] == 2
    assert data["job"]["parallel"] == {"tp": 2, "pp": 2, "dp": 2, "cp": 1, "ep": 1, "etp": 1, "vpp": None}
    assert [(rank["rank"], rank["represents"], rank["stage"]) for rank in data["ranks"]] == [
        (0, [0, 1, 2, 3], 0),
        (4, [4, 5, 6, 7], 1),
    ]
    json.dumps(data)


def test_the_fingerprint_changes_with_the_job_and_not_with_the_ranks() -> None:
    first = make_plan(job(), RunSpec(), None).fingerprint
    assert make_plan(job(), RunSpec(ranks="3"), None).fingerprint == first
    assert make_plan(job(extra="--seq-length 64"), RunSpec(), None).fingerprint != first
    assert make_plan(job(), RunSpec(microbatches="all"), None).fingerprint != first
    exported = dataclasses.replace(job(), env={"USER_SETTING": "kept", "MS_DEV_RUNTIME_CONF": "x"})
    assert make_plan(exported, RunSpec(), None).fingerprint != first, "the environment decides figures"


def test_inputs_never_reach_a_rank(tmp_path: Path) -> None:
    (tmp_path / "data_text_document.bin").touch()
    found = job(tmp_path, "--load ckpt --save out --data-path data_text_document --tokenizer-name-or-path your tokenizer path "
                          "--tensorboard-dir tb --exit-on-missing-checkpoint --vocab-size 1000")  # fmt: skip
    args, notes = dry_args(found, found.args)
    assert not {"--load", "--save", "--data-path", "--tensorboard-dir", "--tokenizer-name-or-path", "your", "path"} & set(args)
    assert "--mock-data" in args
    assert any("not needed for a dry run: the checkpoint 'ckpt'" in note for note in notes)
    assert any("tokenizer 'your tokenizer path'" in note for note in notes)
    assert not any("data set" in note for note in notes)


def test_the_padded_vocabulary_stays_the_same(tmp_path: Path) -> None:
    assert padded_vocabulary(job(extra="--padded-vocab-size 152064"))[0] == 152064
    assert padded_vocabulary(job(extra="--vocab-size 1000"))[0] == 1024  # 128 × TP 2 divides it
    assert padded_vocabulary(job(extra="--vocab-size 1000 --make-vocab-size-divisible-by 1"))[0] == 1000
    size, notes = padded_vocabulary(job(extra="--make-vocab-size-divisible-by 1"))
    assert size == ASSUMED_VOCABULARY and "ASSUMED" in notes[0]
    (tmp_path / "tok").mkdir()
    words = {"model": {"vocab": {f"w{i}": i for i in range(500)}}, "added_tokens": [{"content": "<eos>"}, {"content": "w1"}]}
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(words))
    found = job(tmp_path, "--tokenizer-name-or-path tok --make-vocab-size-divisible-by 1")
    assert padded_vocabulary(found)[0] == 502  # 501 tokens, divisible by TP 2
    flag = "--tokenizer-type PretrainedFromHF --vocab-size 1000"
    here = job(tmp_path, f"{flag} --tokenizer-name-or-path tok --make-vocab-size-divisible-by 1")
    assert padded_vocabulary(here)[0] == 502  # the trainer asks the tokenizer, not the flag
    size, notes = padded_vocabulary(job(tmp_path, f"{flag} --tokenizer-name-or-path gone"))
    assert size == 1024 and "taken from --vocab-size 1000" in notes[0]


def test_a_word_of_a_known_flag_is_no_folder_by_chance(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    args = ("--ckpt-format", "torch", "--my-own-flag", "torch")
    assert absolute_paths(args, str(tmp_path)) == ("--ckpt-format", "torch", "--my-own-flag", str(tmp_path / "torch"))


def test_paths_mean_what_they_mean_to_the_user(tmp_path: Path) -> None:
    (tmp_path / "templates.json").touch()
    args = ["--prompt-type-path", "templates.json", "--bf16", "--lr", "1e-6", "--other", "missing.json", "--abs", "/etc"]
    assert absolute_paths(args, str(tmp_path)) == (
        "--prompt-type-path", str(tmp_path / "templates.json"), *args[2:],
    )  # fmt: skip


def test_a_checkpoint_of_another_layout_is_reported(tmp_path: Path) -> None:
    for tp in range(2):
        for pp in range(4):
            (tmp_path / "ckpt" / "iter_0000001" / f"mp_rank_{tp:02d}_{pp:03d}").mkdir(parents=True)
    assert checkpoint_layout(tmp_path / "ckpt") == checkpoint_layout(tmp_path / "ckpt" / "iter_0000001") == (2, 4)
    notes = dry_args(*(lambda found: (found, found.args))(job(tmp_path, "--load ckpt")))[1]
    assert any("converted for TP 2 PP 4, and this job is TP 2 PP 2" in note for note in notes)
    (tmp_path / "flat" / "mp_rank_03").mkdir(parents=True)
    assert checkpoint_layout(tmp_path / "flat") == (4, 1)
    assert checkpoint_layout(tmp_path) is None and checkpoint_layout(tmp_path / "missing") is None


@pytest.fixture(autouse=True)
def _no_stack_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINDSPEED_CORE_MS_PATH", raising=False)


def stack(folder: Path) -> None:
    for file in ("MindSpeed-LLM/pretrain_gpt.py", "MindSpeed-LLM/mindspeed_llm/__init__.py", "MindSpeed/mindspeed/__init__.py",
                 "Megatron-LM/megatron/training/__init__.py", "MSAdapter/msa_thirdparty/torch/__init__.py"):  # fmt: skip
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def test_the_scripts_own_trainer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack(tmp_path)
    monkeypatch.setattr("mindspeed_dryrun.launch.trainers._PACKAGES", ())
    beside = [
        str(tmp_path / name) for name in ("MindSpeed-LLM", "MindSpeed", "Megatron-LM", "MSAdapter", "MSAdapter/msa_thirdparty")
    ]
    inside = choose_trainer(job(tmp_path / "MindSpeed-LLM"))
    assert (inside.kind, inside.program, inside.problem) == ("script", str(tmp_path / "MindSpeed-LLM/pretrain_gpt.py"), None)
    assert list(inside.path) == beside
    monkeypatch.setenv("MINDSPEED_CORE_MS_PATH", str(tmp_path))
    assert choose_trainer(job("/elsewhere")).program == str(tmp_path / "MindSpeed-LLM/pretrain_gpt.py")


HOLDS, FREES = "for kind in ctx.kinds: ...", "for kind in kinds: ..."
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(("body", "extra", "said"), [
    (HOLDS, WHOLE, True), (HOLDS, "--recompute-granularity selective", False),
    (FREES, WHOLE, False), (None, WHOLE, False),
])  # fmt: skip
def test_a_tree_that_leaves_recomputed_layers_to_the_garbage_collector_is_told(
    tmp_path: Path, body: str | None, extra: str, said: bool
) -> None:
    stack(tmp_path)
    layers = tmp_path / "MindSpeed-LLM" / "mindspeed_llm" / "core" / "tensor_parallel" / "layers.py"
    layers.parent.mkdir(parents=True)
    if body:
        layers.write_text(f"def forward(ctx, kinds):\n    def wrapped_run_func(*args):\n        {body}\n")
    found = job(tmp_path / "MindSpeed-LLM", extra=extra + " --global-batch-size 64")
    chosen = choose_trainer(found, "script")
    assert any("garbage collector" in note for note in chosen.notes) is said is chosen.keeps_checkpoints
    notes = make_plan(found, RunSpec(trainer="script"), None).notes
    assert any("a longer run may need more" in note for note in notes) is said


def test_a_tree_whose_scripts_fail_on_an_npu_too_is_told_before_a_rank_starts(tmp_path: Path) -> None:
    stack(tmp_path)
    ours, theirs = (
        tmp_path / "MindSpeed-LLM" / "mindspeed_llm" / folder / "tasks" / "checkpoint" / "models.py"
        for folder in ("mindspore", ".")
    )
    ours.parent.mkdir(parents=True)
    ours.touch()
    problem = choose_trainer(job(tmp_path / "MindSpeed-LLM"), "script").problem
    assert problem and "f107818f" in problem and "nor on an NPU" in problem
    instead = choose_trainer(job(tmp_path / "MindSpeed-LLM"))
    assert instead.kind == "embedded" and "f107818f" in instead.notes[0]
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    assert "f107818f" not in (choose_trainer(job(tmp_path / "MindSpeed-LLM"), "script").problem or "")


def test_weights_that_a_checkpoint_would_bring_are_not_left_out_in_silence(tmp_path: Path) -> None:
    stack(tmp_path)
    problem = choose_trainer(job(tmp_path / "MindSpeed-LLM", extra="--qlora"), "script").problem
    assert problem and "far too low" in problem


def test_the_embedded_trainer_takes_over_and_says_why(tmp_path: Path) -> None:
    chosen = choose_trainer(job(tmp_path))
    assert chosen.kind == "embedded" and "neither in" in chosen.notes[0]
    stack(tmp_path)
    (tmp_path / "MindSpeed/mindspeed/__init__.py").unlink()
    chosen = choose_trainer(job(tmp_path / "MindSpeed-LLM"))
    assert chosen.kind == "embedded" and "MindSpeed not found" in chosen.notes[0]
    assert choose_trainer(job(tmp_path / "MindSpeed-LLM"), "script").problem is not None


def test_a_refused_flag_stops_the_run_and_not_the_plan() -> None:
    plan = make_plan(job(extra="--use-ascend-mc2"), RunSpec(trainer="embedded"), None)
    assert plan.problem is not None and "--use-ascend-mc2" in plan.problem


def test_small_things() -> None:
    assert parse_sets(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_sets(["A"])


def test_what_the_embedded_trainer_would_refuse_is_refused_before_a_rank_starts() -> None:
    extra = "--use-flash-attn --attention-dropout 0 --context-parallel-size 2 --context-parallel-algo megatron_cp_algo --reset-position-ids"
    problem = make_plan(job(extra=extra), RunSpec(trainer="embedded"), None).problem
    assert (
        problem
        and "with context parallelism are modelled with --context-parallel-algo ulysses_cp_algo or --attention-mask-type general only"
        in problem
    )


def test_a_patch_without_its_target_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "upstream_project").mkdir()
    (tmp_path / "upstream_project" / "__init__.py").write_text("def kept(): ...\n")
    (tmp_path / "train.py").touch()
    call = read_msrun_call(["--worker_num", "2", "train.py"], str(tmp_path), {"PYTHONPATH": str(tmp_path)})
    patches = tmp_path / "patches.yaml"
    for name, found in (("kept", True), ("moved", False)):
        patches.write_text(
            "project: U\npackage: upstream_project\nversions: ['1']\npatches:\n"
            f"  - {{name: u, target: 'upstream_project:{name}', skip: true, why: w, without: x}}\n"
        )
        problem = make_plan(understand(call, "train.sh"), RunSpec(patch_files=(str(patches),)), None).problem or ""
        assert ("upstream_project has no moved" in problem) is not found, problem
