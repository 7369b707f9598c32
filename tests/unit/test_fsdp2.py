"""`train_fsdp2.py`: settings in a YAML file, shapes in a folder of the user's, and a short run of both."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch import fsdp2
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.mock_inputs import dry_args
from mindspeed_dryrun.launch.rank_classes import rank_classes
from mindspeed_dryrun.launch.short_run import short_run
from mindspeed_dryrun.launch.torchrun_call import read_torchrun_call
from mindspeed_dryrun.launch.trainers import choose_trainer
from mindspeed_dryrun.rank import activation
from mindspeed_dryrun.rank.handlers import fsdp2 as handlers

SETTINGS = """
model:
  model_name_or_path: ./weights
data:
  cutoff_len: 4096
training:
  gradient_accumulation_steps: 4
"""


def job(folder: Path, words: str = "") -> Job:
    call = read_torchrun_call(f"--nproc_per_node 8 train_fsdp2.py settings.yaml {words}".split(), str(folder), {})
    return understand(call, "train.sh")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.joinpath("settings.yaml").write_text(SETTINGS)
    tmp_path.joinpath("train_fsdp2.py").touch()
    tmp_path.joinpath("mindspeed_llm").mkdir()
    return tmp_path


def test_shapes_that_are_not_here_are_named_before_the_start(folder: Path) -> None:
    found = choose_trainer(job(folder)).problem or ""
    assert "not found" in found or "config.json" in found  # the projects come first
    said = fsdp2.problem(job(folder)) or ""
    assert "(./weights)" in said and "-- --model.model_name_or_path FOLDER" in said and "qwen3-8b" in said
    assert "settings.yaml are not in" in (fsdp2.problem(job(folder / "mindspeed_llm")) or "")


def test_a_folder_with_the_shapes_alone_is_enough(folder: Path) -> None:
    shapes = folder / "shapes"
    shapes.mkdir()
    shapes.joinpath("config.json").write_text("{}")
    found = job(folder, "--model.model_name_or_path shapes")
    assert fsdp2.problem(found) is None
    short = short_run(found)
    args = short.args
    flags = fsdp2.Fsdp2Settings.read(found).flags
    assert (short.iterations, short.microbatches, flags["--model.model_name_or_path"]) == (2, 2, ["shapes"])
    assert args[0] == str(folder / "settings.yaml")
    words = dict(zip(args[1::2], args[2::2], strict=True))
    assert words["--model.model_name_or_path"] == str(shapes) and words["--training.max_steps"] == "2"
    assert words["--training.gradient_accumulation_steps"] == "2" and words["--training.save_hf_weights"] == "false"
    assert short_run(found, "all").microbatches == 4
    _, notes = dry_args(found, args)
    assert any("cutoff_len 4096" in note for note in notes) and any("meta device" in note for note in notes)
    assert not any("one by one" in note for note in notes)
    shapes.joinpath("config.json").write_text('{"num_experts": 128}')
    assert any("one by one" in note for note in fsdp2.notes(found))
    assert not any(
        "one by one" in note for note in fsdp2.notes(job(folder, f"--model.model_name_or_path {shapes} --parallel.ep_size 4"))
    )


def test_the_shapes_of_a_public_model_need_no_folder(folder: Path) -> None:
    found = job(folder, "--model.model_name_or_path /home/hf_weights/Qwen3-14B/")
    assert fsdp2.problem(found) is None
    public = fsdp2.PUBLIC / "qwen3-14b"
    words = short_run(found).args
    assert words[words.index("--model.model_name_or_path") + 1] == str(public)
    assert any("Qwen3-14B is not here" in note and "huggingface.co/Qwen/Qwen3-14B" in note for note in fsdp2.notes(found))
    mixture = job(folder, "--model.model_name_or_path ./Qwen3-30B-A3B/ --model.moe_grouped_gemm False")
    assert any("one by one" in note for note in fsdp2.notes(mixture))
    own = folder / "Qwen3-14B"
    own.mkdir()
    own.joinpath("config.json").write_text("{}")  # the user's own folder counts more
    found = job(folder, "--model.model_name_or_path Qwen3-14B")
    assert str(own) in short_run(found).args and not any("is not here" in note for note in fsdp2.notes(found))


# Parameters that the publishers state, in billions: total figures of each model's own page.
@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3-8b", 8.2), ("qwen3-14b", 14.8), ("qwen3-32b", 32.8), ("qwen3-30b", 30.5), ("qwen3-235b", 235), ("gpt-oss-20b", 20.9),
     ("minimax-m2", 229), ("longcat-flash-lite", 68.5), ("qwen3-next", 80)],
)  # fmt: skip
def test_public_shapes_have_the_published_number_of_parameters(model: str, billions: float) -> None:
    shapes = json.loads((fsdp2.PUBLIC / model / "config.json").read_text())
    assert shapes["source"].startswith("https://huggingface.co/")
    assert parameters(shapes) / 1e9 == pytest.approx(billions, rel=0.01)


def parameters(shapes: dict[str, Any]) -> float:
    """Matrices only: norms and biases are below a thousandth."""
    hidden, layers, kind = shapes["hidden_size"], shapes["num_hidden_layers"], shapes["model_type"]
    heads, vocabulary = shapes["num_attention_heads"], 2 * shapes["vocab_size"] * shapes["hidden_size"]
    if kind == "longcat_flash":
        query, key = shapes["q_lora_rank"], shapes["kv_lora_rank"]
        plain, rotary, value = shapes["qk_nope_head_dim"], shapes["qk_rope_head_dim"], shapes["v_head_dim"]
        attention = hidden * (query + key + rotary) + query * heads * (plain + rotary) + key * heads * (plain + value)
        attention += heads * value * hidden
        experts = 3 * hidden * shapes["expert_ffn_hidden_size"] * shapes["n_routed_experts"]
        tables = shapes["emb_split_num"] * (shapes["emb_neighbor_num"] - 1)
        grams = shapes["ngram_vocab_size_ratio"] * shapes["vocab_size"] * hidden + tables * hidden * hidden // tables
        dense = 3 * hidden * shapes["ffn_hidden_size"]
        return vocabulary + grams + shapes["num_layers"] * (2 * attention + 2 * dense + experts)
    full = 2 * hidden * shapes["head_dim"] * (heads + shapes["num_key_value_heads"])
    expert = 3 * hidden * shapes.get("moe_intermediate_size", shapes["intermediate_size"])
    count = shapes.get("num_experts", shapes.get("num_local_experts", 1))
    attention = layers * full
    if kind == "qwen3_next":
        linear = shapes["linear_num_key_heads"] * shapes["linear_key_head_dim"] * 2
        values = shapes["linear_num_value_heads"] * shapes["linear_value_head_dim"]
        gated = full + hidden * shapes["head_dim"] * heads  # the output gate
        delta = hidden * (linear + 2 * values) + values * hidden
        attention = layers // 4 * gated + layers * 3 // 4 * delta
        expert_shared = 3 * hidden * shapes["shared_expert_intermediate_size"]
        attention += layers * expert_shared
    return vocabulary + attention + layers * (count * expert + (count > 1) * count * hidden)


def test_one_rank_stands_for_all(folder: Path) -> None:
    (only,) = rank_classes(job(folder))
    assert (only.rank, only.represents) == (0, tuple(range(8)))


class Tensor(types.SimpleNamespace):
    pass


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of torch as samples are made with: a tensor is its shape and type."""

    def made(shape: Any, dtype: str = "float32") -> Tensor:
        return Tensor(shape=shape if isinstance(shape, tuple) else (shape,), dtype=dtype)

    fake: Any = types.ModuleType("torch")
    fake.ones = fake.zeros = made
    fake.arange = lambda size: made(size, "int64")
    fake.int64, fake.bool, fake.bfloat16 = "int64", "bool", "bfloat16"
    monkeypatch.setitem(sys.modules, "torch", fake)


def samples(monkeypatch: pytest.MonkeyPatch, stage: str, given: int = 0, **data: Any) -> handlers.Samples:
    own = activation.Activation(iterations=2, sample_length=given)
    monkeypatch.setattr(handlers.config, "current", lambda: own)
    settings = {"cutoff_len": 64, "packing": False, "neat_packing": False, "create_attention_mask_in_dataloader": False} | data
    training = types.SimpleNamespace(stage=stage, gradient_accumulation_steps=3, per_device_train_batch_size=2)
    return handlers.Samples(types.SimpleNamespace(**settings), training, types.SimpleNamespace(cp_size=1))


@pytest.mark.usefixtures("torch")
def test_samples_have_what_upstreams_own_have(monkeypatch: pytest.MonkeyPatch) -> None:
    found = samples(monkeypatch, "pt")
    assert len(found) == 12
    assert {name: value.shape for name, value in found[0].items()} == dict.fromkeys(
        ("input_ids", "labels", "loss_mask", "position_ids"), (64,)
    )
    with_mask = samples(monkeypatch, "pt", create_attention_mask_in_dataloader=True)[0]
    assert with_mask["attention_mask"] == Tensor(shape=(1, 64, 64), dtype="bool")
    assert set(samples(monkeypatch, "sft")[0]) == {"input_ids", "labels", "attention_mask"}
    assert samples(monkeypatch, "sft", neat_packing=True)[0]["attention_mask"] == Tensor(shape=(1, 64, 64), dtype="bfloat16")
    assert samples(monkeypatch, "sft", given=13)[0]["input_ids"].shape == (16,)  # padded as upstream's collator does
    assert samples(monkeypatch, "sft", given=13, packing=True)[0]["input_ids"].shape == (64,)
    with pytest.raises(IndexError):
        found[12]


def test_an_iteration_counts_when_the_gradients_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(handlers.progress, "iteration", lambda done, total: told.append((done, total)))
    monkeypatch.setattr(handlers.config, "current", lambda: activation.Activation(iterations=2))

    class Optimizer:
        cleared = 0

        def zero_grad(self) -> None:
            assert len(told) == self.cleared
            self.cleared += 1

    class Trainer:
        optimizer = Optimizer()

    def train(self: Trainer) -> str:
        for _ in range(2):
            self.optimizer.zero_grad()
        return "done"

    assert handlers.train(train)(Trainer()) == "done" and told == [(1, 2), (2, 2)]


@pytest.mark.usefixtures("torch")
def test_tokens_are_spread_evenly_over_the_experts_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = sys.modules["torch"]
    fake.distributed = types.SimpleNamespace(get_world_size=lambda group: 4, get_rank=lambda group: 1)
    fake.tensor = lambda values, **options: values
    fake.zeros = lambda size, **options: size
    monkeypatch.setattr(handlers.moe, "load", lambda: types.SimpleNamespace(is_even=True))
    choices = types.SimpleNamespace(numel=lambda: 80, device="npu")
    call = handlers.even_dispatch(lambda *args: None)
    (tokens, chosen), (sent, received) = call("group", choices, 8, types.SimpleNamespace(dtype="int64"))
    assert (tokens, chosen, sent, received) == ([40, 40], 80, [20] * 4, [20] * 4)  # as many tokens as came in
    busy = types.SimpleNamespace(is_even=False, busiest=lambda total, experts, local: [15, 15])
    monkeypatch.setattr(handlers.moe, "load", lambda: busy)
    (tokens, chosen), (sent, received) = call("group", choices, 8, types.SimpleNamespace(dtype="int64"))
    assert (tokens, chosen, sent, received) == ([60, 60], 120, [20] * 4, [30] * 4)


def test_no_sample_is_padded() -> None:
    asked: list[Any] = []
    handlers.without_padding(lambda mask, *rest: asked.append((mask, *rest)))("mask", 4, 4, 0)
    assert asked == [(None, 4, 4, 0)]


def test_fine_tuning_leaves_out_the_causal_masks_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: Any = types.ModuleType("transformers.masking_utils")
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    create = handlers.data_manager(lambda **options: None)
    arguments = {
        name: types.SimpleNamespace(cutoff_len=8, packing=False, neat_packing=False, cp_size=1, per_device_train_batch_size=1)
        for name in ("data_args", "parallel_args")
    }
    tuning, pretraining = (types.SimpleNamespace(stage=stage, per_device_train_batch_size=1) for stage in ("sft", "pt"))
    create(training_args=pretraining, **arguments)  # which hands no mask of tokens over
    with pytest.raises(DryRunError, match="requirements"):
        create(training_args=tuning, **arguments)
    masks._ignore_causal_mask_sdpa = lambda padding, *rest: padding is None
    create(training_args=tuning, **arguments)
    assert masks._ignore_causal_mask_sdpa("some are padding", 4, 4, 0) is True


def test_biases_of_experts_are_repeated_for_as_many_tokens_as_there_are() -> None:
    asked: list[Any] = []

    class Tensor:
        def __init__(self, *shape: int) -> None:
            self.shape, self.device = shape, "npu"

        def numel(self) -> int:
            return int(self.shape[0]) * int(self.shape[1])

        def repeat_interleave(self, repeats: Any, dim: int | None = None, output_size: int | None = None) -> int | None:
            asked.append((dim, output_size))
            return output_size

    def experts(self: Any, tokens: Tensor, counts: Any) -> Any:
        return Tensor(32, 8).repeat_interleave(Tensor(32), dim=0), Tensor(4, 8).repeat_interleave(2, dim=1)

    call = handlers.expert_biases(experts)
    assert call(None, Tensor(16384, 2880), Tensor(8)) == (16384, None)  # dispatched: each token once
    assert call(None, Tensor(1, 4096, 2880), Tensor(4096, 4)) == (16384, None)  # each token for four experts
    assert asked == [(0, 16384), (1, None)] * 2
    assert Tensor(2, 2).repeat_interleave(Tensor(2), 0) is None
