"""The embedded trainer's flag table: nothing that changes memory slips through, and refusals name what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.megatron import flags, settings

CORPUS = Path(__file__).parents[1] / "corpus" / "msrun_calls.jsonl"
CALLS = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
DENSE = [call for call in CALLS if Path(call["script"]).name.startswith("pretrain_") and "--num-experts" not in call["argv"]]

QWEN = (  # noqa: SIM905
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 28 --hidden-size 3584 "
    "--ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention --num-query-groups 4 --seq-length 4096 "
    "--micro-batch-size 1 --global-batch-size 8 --padded-vocab-size 152064 --use-flash-attn --bf16 --swiglu --attention-dropout 0.0"
).split()


def read(*more: str, world_size: int = 4) -> settings.Settings:
    return settings.read([*QWEN, *more], rank=0, world_size=world_size)


@pytest.mark.parametrize("call", DENSE, ids=lambda call: Path(call["script"]).stem)
def test_every_dense_pretraining_call_of_the_corpus_can_be_run(call: dict[str, object]) -> None:
    report = flags.check(read_msrun_call(list(call["argv"]), "/").program_args)  # type: ignore[call-overload]
    assert report.problem() == ""


@pytest.mark.parametrize("args", ["--use-ascend-coc", "--use-ascend-coc --tensor-model-parallel-size 1"])
def test_fused_linear_layers_are_modelled_in_one_form_only(args: str) -> None:
    assert read("--use-ascend-coc", "--coc-fused-kernel").use_ascend_coc
    with pytest.raises(UsageError, match=r"--use-ascend-coc is modelled with --coc-fused-kernel"):
        read(*args.split())


@pytest.mark.parametrize(
    ("args", "named", "kind"),
    [
        ("--moe-fb-overlap", "--moe-fb-overlap", "way to run experts"),
        ("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type", "not modelled"),
        ("--mla-zero-memory", "--mla-zero-memory", "multi-latent attention"),
        ("--qlora", "--qlora", "LoRA"),
        ("--stage prm", "--stage", "not modelled"),
        ("--reward-model nowhere", "--reward-model", "post-training"),
        ("--smart-swap", "--smart-swap", "not modelled"),
        ("--fp8-format hybrid", "--fp8-format", "not modelled"),
        ("--mtp-after-norm", "--mtp-after-norm", "other model kinds"),
        ("--max-new-tokens 256", "--max-new-tokens", "inference"),
        ("--optimizer sgd", "--optimizer", "not modelled"),
        ("--context-parallel-algo adaptive_cp_algo", "--context-parallel-algo", "not modelled"),
        ("--num-layers many", "--num-layers", "not a value"),
        ("--no-such-flag 3", "--no-such-flag", "knows"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(args: str, named: str, kind: str) -> None:
    report = flags.check([*QWEN, *args.split()])
    assert not report.ok
    assert named in report.problem() and kind in report.problem()
    with pytest.raises(UsageError, match=named):
        flags.parse([*QWEN, *args.split()])


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--num-experts 8 --moe-tp-extend-ep", "--moe-tp-extend-ep works with"),
        ("--mtp-num-layers 1 --recompute-norm", "--mtp-num-layers with recomputed norms"),
        ("--num-experts 8 --moe-alltoall-overlap-comm", "--moe-alltoall-overlap-comm with a dispatcher that gathers"),
        (
            "--num-experts 8 --moe-alltoall-overlap-comm --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
            "--tensor-model-parallel-size 1 --moe-expert-capacity-factor 1.5",
            "the alltoall dispatcher and a capacity",
        ),
        ("--sliding-window 512 --stage sft", "--sliding-window is modelled in pretraining"),
        ("--output-layer-slice-num 2", "--output-layer-slice-num without tensor parallelism"),
        ("--output-layer-slice-num 7 --tensor-model-parallel-size 1", "7 does not divide a vocabulary of 152064"),
        ("--swap-attention --mtp-num-layers 1 --recompute-num-layers 1", "--swap-attention with recomputed layers"),
        ("--attention-mask-type general", "--attention-mask-type general is modelled for fine-tuning"),
        (
            "--reset-attention-mask --context-parallel-size 2 --tensor-model-parallel-size 1",
            "ulysses_cp_algo or --attention-mask-type general only",
        ),
        ("--swap-attention --recompute-norm", "--swap-attention with recomputed norms"),
        ("--swap-optimizer", "--swap-optimizer needs --use-distributed-optimizer"),
        ("--swap-optimizer --use-distributed-optimizer --reuse-fp32-param", "exclude each other"),
        ("--neat-pack", "--neat-pack needs --reset-attention-mask"),
    ],
)
def test_what_is_not_modelled_together_is_refused(args: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read(*args.split())


def test_a_refused_flag_that_asks_for_nothing_is_no_reason_to_stop() -> None:
    assert flags.check(["--cla-share-factor", "1", "--tp-x", "1"]).ok
    assert not flags.check(["--tp-x", "2"]).ok


def test_what_cannot_change_memory_is_taken_and_listed() -> None:
    report = flags.check(["--lr", "1e-5", "--data-path", "your", "data", "path", "--no-load-rng", "--seq-length=4096"])
    assert report.ok
    assert report.ignored == ["--lr", "--data-path", "--no-load-rng"]


def test_one_sentence_for_many_flags_of_one_kind() -> None:
    problem = flags.check(["--moe-bmm-mc2", "--moe-no-drop", "--qlora"]).problem()
    assert problem.count("way to run experts") == 1 and "--moe-bmm-mc2, --moe-no-drop:" in problem


@given(st.lists(st.text(min_size=0, max_size=12), max_size=12))
def test_any_words_get_an_answer(words: list[str]) -> None:
    report = flags.check(words)
    assert report.ok == (report.problem() == "")


def test_every_flag_says_what_it_does_and_stands_in_the_table_once() -> None:
    assert all(flag.effect and flag.tags <= set(flags.TAGS) for flag in flags.FLAGS.values())
    assert len(flags.FLAGS) == len(flags._TABLE)


def test_the_flag_table_in_docs_is_made_from_the_flags() -> None:
    done = subprocess.run([sys.executable, "-m", "mindspeed_dryrun.megatron.flags"], capture_output=True, text=True, check=True)
    assert done.stdout == (Path(__file__).parents[2] / "docs" / "embedded_trainer_flags.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in done.stdout for name in flags.FLAGS)


def test_checking_flags_imports_no_engine() -> None:
    program = (
        "import sys; from mindspeed_dryrun.megatron import flags, settings; "
        "print([m for m in ('torch', 'mindspore', 'megatron', 'yaml', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_follows_from_the_flags() -> None:
    plain = read()
    assert (plain.layout.parallel.dp, plain.batch.microbatches, plain.kv_size, plain.query_groups) == (1, 8, 128, 4)
    assert plain.accumulate_allreduce_grads_in_fp32 and plain.virtual_stages is None
    assert read(world_size=8).batch.microbatches == 4
    assert read("--num-layers-per-virtual-pipeline-stage", "7").virtual_stages == 2
    assert (
        read("--num-layers-per-virtual-pipeline-stage", "14").virtual_stages == 1
    )  # interleaved with one chunk, as upstream runs it
    assert [len(stage[0]) for stage in read("--num-layer-list", "12,16").layout.stages] == [12, 16]
    assert read("--tensor-model-parallel-size", "1", "--padded-vocab-size", "32000").sequence_parallel is False


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("--num-layers 27", "cannot be divided over PP 2"),
        ("--num-layer-list 12,15", "--num-layer-list"),
        ("--global-batch-size 3 --micro-batch-size 2", "--global-batch-size"),
        ("--context-parallel-size 3", "not divisible by TP 2"),
        ("--overlap-param-gather", "--overlap-param-gather"),
        ("--reuse-fp32-param", "--reuse-fp32-param"),
        ("--fp16", "exclude each other"),
        ("--noop-layers 1,x", "--noop-layers"),
    ],
)
def test_what_megatron_would_stumble_over_is_said_in_a_sentence(more: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read(*more.split())


def test_adapters_are_those_of_the_layers_named() -> None:
    targets = "--lora-target-modules linear_qkv linear_proj".split()  # noqa: SIM905
    assert read(*targets, "--lora-r", "8").lora_modules == ("linear_qkv", "linear_proj")
    assert read().lora_modules == ()
    experts = ("--num-experts", "8", "--sequence-parallel")
    in_turn = (*experts, "--moe-token-dispatcher-type", "alltoall_seq")
    assert read(*targets, *in_turn).lora_modules == ("linear_qkv", "linear_proj")
    for more, complaint in (
        (experts, "alltoall_seq only"),
        (
            (*in_turn, "--moe-grouped-gemm", "--gemm-gradient-accumulation-fusion"),
            "LoRA with --gemm-gradient-accumulation-fusion",
        ),
        ((*in_turn, "--moe-grouped-gemm", "--moe-tp-extend-ep"), "LoRA with --moe-tp-extend-ep"),
    ):
        with pytest.raises(UsageError, match=complaint):
            read(*targets, *more)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("--moe-expert-capacity-factor 1.5 --moe-token-dispatcher-type allgather", "does not take --moe-expert-capacity-factor"),
        ("--moe-zero-memory level0", "--moe-zero-memory needs --moe-alltoall-overlap-comm"),
        ("--moe-zero-memory level1 --moe-alltoall-overlap-comm --moe-token-dispatcher-type alltoall", "than alltoall_seq"),
        ("--moe-zero-memory level1 --moe-alltoall-overlap-comm --mtp-num-layers 1", "multi-token prediction"),
    ],
)
def test_ways_to_run_experts_are_refused_where_they_are_not_modelled(more: str, complaint: str) -> None:
    mixture = (  # noqa: SIM905
        "--tensor-model-parallel-size 1 --num-experts 8 --expert-model-parallel-size 2 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall_seq"
    ).split()
    both = (*mixture, "--moe-alltoall-overlap-comm", "--moe-zero-memory", "level1", "--moe-zero-memory-num-layers", "2")
    assert read(*both).moe_zero_memory_num_layers == 2
    with pytest.raises(UsageError, match=complaint):
        read(*mixture, *more.split())


def test_preference_optimization_is_refused_where_it_is_not_modelled() -> None:
    pairs = ("--stage", "dpo", "--is-pairwise-dataset")
    assert read(*pairs).stage == "dpo"
    for more, complaint in (
        ("--pipeline-model-parallel-size 1 --context-parallel-size 2", "DPO with context parallelism"),
        ("--reset-position-ids", "DPO with packed samples"),
    ):
        with pytest.raises(UsageError, match=complaint):
            read(*pairs, *more.split())
    with pytest.raises(UsageError, match="--is-pairwise-dataset"):
        read("--stage", "dpo")


def test_a_vocabulary_left_to_the_tokenizer_is_asked_for() -> None:
    args = [word for word in QWEN if word not in ("--padded-vocab-size", "152064")]
    with pytest.raises(UsageError, match="--vocab-size"):
        settings.read(args, 0, 4)
    padded = settings.read([*args, "--vocab-size", "151900", "--make-vocab-size-divisible-by", "16"], 0, 4)
    assert padded.padded_vocab == 151904


MIXED = "--num-experts 16 --expert-model-parallel-size 2 --moe-ffn-hidden-size 512 --n-shared-experts 2"


def test_which_layers_hold_experts() -> None:
    def layers(*more: str) -> list[int]:
        found = read(*MIXED.split(), *more, world_size=8)
        return [layer for layer in range(4) if found.has_experts(layer)]

    assert layers() == layers("--moe-layer-freq", "-1", "--first-k-dense-replace", "-1") == [0, 1, 2, 3]
    assert layers("--first-k-dense-replace", "1", "--moe-layer-freq", "1") == [1, 2, 3]
    assert layers("--first-k-dense-replace", "-1", "--moe-layer-freq", "2") == [0, 2]
    assert layers("--first-k-dense-replace", "2") == [0, 1, 2, 3]  # MindSpeed-LLM looks at it with --moe-layer-freq only
    assert not read().has_experts(0)


def test_sizes_of_experts() -> None:
    found = read(*MIXED.split(), world_size=8)
    assert (found.expert_ffn_size, found.shared_expert_size, found.expert_tensor_size) == (512, 1024, 2)
    assert read(*MIXED.split(), "--moe-shared-expert-intermediate-size", "700", world_size=8).shared_expert_size == 700
    assert read("--num-experts", "16", "--expert-tensor-parallel-size", "1").expert_tensor_size == 1


def test_norms_of_queries_and_keys_come_with_a_layer_spec_only() -> None:
    assert not read("--qk-layernorm").query_key_norms
    assert read("--qk-layernorm", "--spec", "mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec").query_key_norms


def test_a_dispatcher_that_fails_upstream_is_refused() -> None:
    with pytest.raises(UsageError, match="alltoall with tensor parallelism fails"):
        read(*MIXED.split(), "--moe-token-dispatcher-type", "alltoall", "--sequence-parallel", world_size=8)


DEEPSEEK = ("--spec", "mindspeed_llm.tasks.models.spec.deepseek_spec", "layer_spec", "--multi-latent-attention")


def test_latent_attention_comes_with_its_layer_spec() -> None:
    assert read(*DEEPSEEK).latent_attention
    for some in (DEEPSEEK[:3], DEEPSEEK[3:]):
        with pytest.raises(UsageError, match="--multi-latent-attention is modelled with --spec"):
            read(*some)


def test_rotated_dimensions_of_latent_attention_are_yarn_s() -> None:
    assert read(*DEEPSEEK, "--rope-scaling-type", "yarn").rotary_size == 64
    assert read(*DEEPSEEK).rotary_size == 128


def test_attention_without_the_fused_operator_is_modelled_with_a_plain_softmax() -> None:
    plain = [word for word in QWEN if word != "--use-flash-attn"]
    found = settings.read([*plain, "--no-masked-softmax-fusion"], rank=0, world_size=4)
    assert not found.use_flash_attn
    with pytest.raises(UsageError, match="--no-masked-softmax-fusion"):
        settings.read(plain, rank=0, world_size=4)
    with pytest.raises(UsageError, match="add --use-flash-attn"):
        settings.read([*plain, "--no-masked-softmax-fusion", "--reset-attention-mask"], rank=0, world_size=4)


def test_one_tensor_size_for_experts_and_attention_with_alltoall_seq() -> None:
    more = ["--num-experts", "16", "--moe-token-dispatcher-type", "alltoall_seq", "--expert-tensor-parallel-size", "1"]
    with pytest.raises(UsageError, match="does not work with expert TP 1 and TP 2"):
        read(*more)


def test_layers_of_the_first_and_last_stage() -> None:
    found = read("--decoder-first-pipeline-num-layers", "12")
    assert [sum(map(len, stage)) for stage in found.layout.stages] == [12, 16]


def test_a_ring_of_packed_samples_is_masked_by_documents() -> None:
    packed = "--stage sft --reset-attention-mask --attention-mask-type general --tensor-model-parallel-size 1".split()  # noqa: SIM905
    ring = ("--context-parallel-size", "2", "--context-parallel-algo", "megatron_cp_algo")
    assert read(*packed, *ring).masked_by_documents and not read().masked_by_documents
    with pytest.raises(UsageError, match="general is modelled for fine-tuning"):
        read(*packed, *ring[:2], "--context-parallel-algo", "ulysses_cp_algo")


def test_what_fails_upstream_is_said_before_a_rank_starts() -> None:
    assert settings.problem(QWEN) == ""
    assert "drop mask" in settings.problem([*QWEN, "--attention-dropout", "0.1"])
    assert "--smart-swap" in settings.problem([*QWEN, "--smart-swap"])
    prm = "--stage prm --placeholder-token ки --reward-tokens + -"
    assert "does not know it either" in settings.problem([*QWEN, *prm.split()])
