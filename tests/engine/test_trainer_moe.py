"""Mixtures of experts in the embedded trainer: to the megabyte what MindSpeed-LLM 2.2.0 counts in a dry run.

The figures are those of MindSpeed-LLM's own trainer with the same arguments; `benchmarks/moe_accuracy.py` makes them, with
more cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated_rank import MINDSPORE

from mindspeed_dryrun.launch.job import understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.record.model import RankReport
from mindspeed_dryrun.record.run_spec import RunSpec

pytestmark = pytest.mark.engine
EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_qwen3_30b_a3b_4k_ms.sh"

DENSE = (  # noqa: SIM905
    "--use-mcore-models --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 "
    "--group-query-attention --num-query-groups 4 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
    "--global-batch-size 16 --disable-bias-linear --swiglu --use-fused-swiglu --normalization RMSNorm --use-fused-rmsnorm "
    "--use-flash-attn --position-embedding-type rope --use-fused-rotary-pos-emb --use-rotary-position-embeddings "
    "--padded-vocab-size 32000 --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --bf16 --no-gradient-accumulation-fusion --no-masked-softmax-fusion --train-iters 2000"
).split()
MOE = (
    DENSE
    + (  # noqa: SIM905
        "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 704 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 0.001 --moe-permutation-async-comm --sequence-parallel --use-distributed-optimizer "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall_seq --expert-model-parallel-size 2"
    ).split()
)


def used_peak(
    out: Path, more: str, world_size: int, rank: int = 0, base: Sequence[str] = MOE, without: str = "", **spec: Any
) -> int | None:
    """One rank of the small job, launched as a user would."""
    result = one_rank(out, more, world_size, rank, base, without, **spec)
    assert result.status == "ok", result.error
    return result.used_peak_mb


def one_rank(
    out: Path, more: str, world_size: int, rank: int = 0, base: Sequence[str] = MOE, without: str = "", **spec: Any
) -> RankReport:
    argv = ["--worker_num", str(world_size), "--local_worker_num", str(world_size), "pretrain_gpt.py"]
    args = [word for word in override_args(base, more.split()) if word != without]
    job = understand(read_msrun_call([*argv, *args], str(out)), "script.sh")
    report = dry_run_job(job, out / "record", RunSpec(ranks=str(rank), trainer="embedded", **spec), Execution(jobs=1))
    (result,) = report.ranks
    return result


@pytest.mark.parametrize(
    ("more", "world_size", "used_peak_mb"),
    [
        pytest.param("--expert-model-parallel-size 4", 4, 1993, id="EP 4"),
        pytest.param("--expert-model-parallel-size 1", 2, 3201, id="no EP"),
        pytest.param("--tensor-model-parallel-size 2", 4, 1444, id="TP 2"),
        pytest.param("--moe-token-dispatcher-type alltoall", 2, 2805, id="alltoall"),
        pytest.param("--moe-token-dispatcher-type allgather", 2, 2813, id="allgather"),
        pytest.param("--n-shared-experts 2", 2, 3069, id="shared experts"),
        pytest.param(
            "--n-shared-experts 2 --shared-expert-gate --spec mindspeed_llm.tasks.models.spec.qwen2_moe_spec layer_spec",
            2, 3085, id="shared experts with a gate",
        ),
        pytest.param("--first-k-dense-replace 1 --moe-layer-freq 1 --transformer-impl local", 2, 2579, id="first layer dense"),
        pytest.param(
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
            "--moe-router-group-topk 2 --moe-router-load-balancing-type none --moe-router-topk-scaling-factor 2.5 --seq-aux "
            "--moe-router-dtype fp32",
            # Of the product with the scores, later versions keep four Swiglu outputs of 11M instead of the casts of these, 22M each.
            2, 2866 if MINDSPORE < (2, 8) else 2822, id="sigmoid scores in groups",
        ),
        pytest.param("--num-experts 8 --moe-router-topk 1", 2, 2029, id="one expert a token"),
        pytest.param(
            "--moe-router-enable-expert-bias --moe-router-load-balancing-type none --moe-aux-loss-coeff 0",
            2, 2804, id="softmax scores with a bias",
        ),
        pytest.param("--tensor-model-parallel-size 2 --moe-tp-extend-ep", 4, 1412, id="TP extends EP"),
        pytest.param("--moe-alltoall-overlap-comm", 2, 2821, id="exchanges beside products"),
        pytest.param("--moe-alltoall-overlap-comm --moe-token-dispatcher-type alltoall", 2, 2821, id="the same, token by token"),
        pytest.param("--moe-alltoall-overlap-comm --moe-zero-memory level0", 2, 2669, id="zero memory"),
        pytest.param(
            "--moe-alltoall-overlap-comm --moe-zero-memory level1 --moe-zero-memory-num-layers 2 --n-shared-experts 1",
            2, 2719, id="zero memory of two layers, shared experts",
        ),
        pytest.param("--recompute-activation-function", 2, 2717, id="activation recomputed"),
        pytest.param("--swap-optimizer --pipeline-model-parallel-size 2", 4, 834, id="optimizer on the host"),
        pytest.param(
            "--swap-attention --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
            "--recompute-num-layers 1",
            4, 1327, id="attention said to be swapped",
        ),
    ],
)  # fmt: skip
def test_experts_are_counted_as_mindspeed_llm_counts_them(tmp_path: Path, more: str, world_size: int, used_peak_mb: int) -> None:
    assert used_peak(tmp_path, more, world_size) == used_peak_mb


@pytest.mark.parametrize(("rank", "used_peak_mb"), [(0, 1448), (2, 2686)])
def test_multi_token_prediction(tmp_path: Path, rank: int, used_peak_mb: int) -> None:
    more = "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
    assert used_peak(tmp_path, more, 4, rank) == used_peak_mb


def test_fused_linear_layers_without_tensor_parallelism(tmp_path: Path) -> None:
    more = "--pipeline-model-parallel-size 2 --use-ascend-coc --coc-fused-kernel"
    assert used_peak(tmp_path, more, 4, 2) == 1600


def test_experts_one_by_one(tmp_path: Path) -> None:
    assert used_peak(tmp_path, "", 2, without="--moe-grouped-gemm") == 2761


def test_attention_without_the_fused_operator(tmp_path: Path) -> None:
    more = "--pipeline-model-parallel-size 2 --attention-softmax-in-fp32"
    assert used_peak(tmp_path, more, 2, base=DENSE, without="--use-flash-attn") == 3232


def test_a_busier_rank_holds_more(tmp_path: Path) -> None:
    even, hot, logged = (
        used_peak(tmp_path / load[:4], "", 2, moe_load=load) or 0 for load in ("even", "hot:2", str([1] * 8 + [3] * 8))
    )
    assert even < logged < hot


LATENT = (
    "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --multi-latent-attention --qk-pos-emb-head-dim 32 "
    "--qk-head-dim 64 --kv-lora-rank 128 --v-head-dim 64 --qk-layernorm --rope-scaling-type yarn --num-query-groups 16"
)


@pytest.mark.parametrize(
    ("more", "used_peak_mb"),
    [("--q-lora-rank 384", 2642), ("", 2694), ("--q-lora-rank 384 --mla-fa-without-pad --mla-mm-split", 2578)],
    ids=["compressed queries", "whole queries", "split products, no padding"],
)
def test_latent_attention(tmp_path: Path, more: str, used_peak_mb: int) -> None:
    assert used_peak(tmp_path, f"{LATENT} {more}", 2, base=DENSE) == used_peak_mb


def test_deepseek_v2_lite_in_small(tmp_path: Path) -> None:
    """Shared experts between the exchanges, and a fused permutation that MindSpeed switches off. From 2.7.2 on MindSpore refuses
    the backward pass of the shared experts, and the rank says so."""
    more = (
        f"{LATENT} --moe-alltoall-overlap-comm --moe-token-dispatcher-type alltoall --use-fused-moe-token-permute-and-unpermute "
        "--n-shared-experts 2 --first-k-dense-replace 1 --moe-layer-freq 1 --shape-order BNSD --reuse-fp32-param --seq-aux "
        "--moe-router-load-balancing-type pai_megatron_aux_loss --moe-router-group-topk 1 --moe-router-num-groups 8 "
        "--moe-router-topk-scaling-factor 1.0 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    if MINDSPORE <= (2, 7, 1):
        assert used_peak(tmp_path, more, 2) == 2300
    else:
        result = one_rank(tmp_path, more, 2)
        assert result.status == "failed" and "which MindSpore refuses from 2.7.2 on" in (result.error or "")


def test_logits_in_slices(tmp_path: Path) -> None:
    more = "--pipeline-model-parallel-size 2 --output-layer-slice-num 10"
    assert used_peak(tmp_path, more, 2, rank=1, base=DENSE) == 1465


def test_a_sliding_window_keeps_what_full_attention_keeps(tmp_path: Path) -> None:
    more = "--pipeline-model-parallel-size 2 --sliding-window 512"
    assert used_peak(tmp_path, more, 2, base=DENSE) == 1227


TUNE = "--stage sft --is-instruction-dataset --finetune --variable-seq-lengths"


@pytest.mark.parametrize(
    ("more", "world_size", "rank", "used_peak_mb"),
    [
        pytest.param("--pipeline-model-parallel-size 2", 2, 1, 1465, id="last stage"),
        pytest.param(
            "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel", 8, 4, 188, id="middle stage"
        ),
        pytest.param(
            "--micro-batch-size 2 --use-distributed-optimizer --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            2, 0, 2072, id="recomputed",
        ),
    ],
)  # fmt: skip
def test_full_fine_tuning(tmp_path: Path, more: str, world_size: int, rank: int, used_peak_mb: int) -> None:
    assert used_peak(tmp_path, f"{TUNE} {more}", world_size, rank, base=DENSE) == used_peak_mb


OPEN = f"{TUNE} --no-pad-to-seq-lengths --pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("more", "world_size", "rank", "tokens", "used_peak_mb"),
    [
        pytest.param(f"{OPEN} 2", 2, 1, 91, 1024, id="short"),
        pytest.param(f"{OPEN} 2", 2, 1, 5000, 1465, id="cut to the sequence"),
        pytest.param(
            f"{OPEN} 4 --tensor-model-parallel-size 2 --sequence-parallel", 8, 6, 333, 427, id="padded to a multiple of 8"
        ),
        pytest.param(f"{TUNE} --pipeline-model-parallel-size 2 --reset-attention-mask", 2, 1, 91, 1475, id="packed"),
    ],
)
def test_samples_of_a_length_that_is_told(
    tmp_path: Path, more: str, world_size: int, rank: int, tokens: int, used_peak_mb: int
) -> None:
    assert used_peak(tmp_path, more, world_size, rank, base=DENSE, sample_length=tokens) == used_peak_mb


def test_whole_parameters_are_copied_in_the_step_where_main_parameters_reuse_them(tmp_path: Path) -> None:
    more = "--pipeline-model-parallel-size 2 --reuse-fp32-param --use-distributed-optimizer --padded-vocab-size 152064 --seq-length 256"
    assert used_peak(tmp_path, more, 2, rank=1, base=DENSE) == 3319  # 594M of it are a copy of the output layer, laid out anew


# Up to 2.8 the first stage has its peak in the step, where --reuse-fp32-param makes copies of 64.0M and 41.5M by Reshape: the first is
# there until the second is made. From 2.9 on each is freed at once, and the peak is in a forward pass.
@pytest.mark.parametrize(("rank", "used_peak_mb"), [(0, 749 if MINDSPORE < (2, 9) else 726), (3, 836)])
def test_packed_samples_in_a_ring(tmp_path: Path, rank: int, used_peak_mb: int) -> None:
    more = (
        "--stage sft --is-instruction-dataset --finetune --reset-attention-mask --attention-mask-type general --swap-attention "
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --context-parallel-algo megatron_cp_algo "
        "--use-cp-send-recv-overlap --use-distributed-optimizer --reuse-fp32-param"
    )
    assert used_peak(tmp_path, more, 4, rank, base=DENSE) == used_peak_mb


def test_fine_tuning_without_the_fused_operator(tmp_path: Path) -> None:
    more = f"{TUNE} --pipeline-model-parallel-size 2 --attention-softmax-in-fp32".replace(" --variable-seq-lengths", "")
    assert used_peak(tmp_path, more, 2, base=DENSE, without="--use-flash-attn") == 3236


LORA = "--lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"


@pytest.mark.parametrize(
    ("more", "used_peak_mb"),
    [
        pytest.param("--pipeline-model-parallel-size 2", 399, id="adapters after the layers"),
        pytest.param("--lora-fusion", 855, id="one function"),
        pytest.param("--lora-fusion --tensor-model-parallel-size 2 --sequence-parallel", 433, id="one function, TP 2"),
        pytest.param("--lora-fusion --tensor-model-parallel-size 2", 469, id="one function, whole sequences"),
        pytest.param(
            "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
            288, id="blocks recomputed",
        ),
    ],
)  # fmt: skip
def test_adapters(tmp_path: Path, more: str, used_peak_mb: int) -> None:
    assert used_peak(tmp_path, f"{TUNE} {LORA} {more}", 2, base=DENSE) == used_peak_mb


@pytest.mark.parametrize(("more", "used_peak_mb"), [("", 2119), (LORA, 937)], ids=["all weights", "adapters"])
def test_stages_that_tell_each_other_their_shapes_hold_what_they_sent_shorter(
    tmp_path: Path, more: str, used_peak_mb: int
) -> None:
    chunks = "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --no-pad-to-seq-lengths"
    assert used_peak(tmp_path, f"{TUNE} {more} {chunks}", 2, 1, base=DENSE) == used_peak_mb


ONE_BY_ONE = (
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 704 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.001 --moe-permutation-async-comm --use-distributed-optimizer --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall_seq"
)
DEEPSEEK3 = (
    f"{LATENT} {ONE_BY_ONE} --pipeline-model-parallel-size 2 --q-lora-rank 384 --first-k-dense-replace 1 --moe-layer-freq 1 "
    "--n-shared-experts 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-load-balancing-type none --moe-router-topk-scaling-factor 2.5 --seq-aux "
    "--norm-topk-prob --reuse-fp32-param --shape-order BNSD --lora-fusion"
)


@pytest.mark.parametrize(
    ("more", "world_size", "rank", "used_peak_mb"),
    [
        pytest.param(ONE_BY_ONE, 2, 0, 997, id="experts"),
        pytest.param(f"{ONE_BY_ONE} --moe-grouped-gemm", 2, 0, 1041, id="experts in groups"),
        pytest.param(  # a first stage, whose embeddings ask for a gradient
            f"{ONE_BY_ONE} --moe-grouped-gemm --pipeline-model-parallel-size 2 --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            4, 0, 338, id="experts in groups, recomputed",
        ),
        pytest.param(f"{ONE_BY_ONE} --lora-fusion", 2, 0, 998, id="experts, one function"),
        pytest.param(f"{LATENT} --q-lora-rank 384 --pipeline-model-parallel-size 2", 2, 0, 509, id="latent attention"),
        pytest.param(DEEPSEEK3, 4, 0, 561, id="DeepSeek-V3 in small, first stage"),
        pytest.param(DEEPSEEK3, 4, 2, 760, id="DeepSeek-V3 in small, last stage"),
    ],
)  # fmt: skip
def test_adapters_of_mixtures(tmp_path: Path, more: str, world_size: int, rank: int, used_peak_mb: int) -> None:
    assert used_peak(tmp_path, f"{TUNE} {LORA} {more}", world_size, rank, base=DENSE) == used_peak_mb


DPO = "--stage dpo --is-instruction-dataset --is-pairwise-dataset --finetune --variable-seq-lengths --dpo-loss-type sigmoid"


@pytest.mark.parametrize(
    ("more", "rank", "used_peak_mb"),
    [
        pytest.param("--pipeline-model-parallel-size 2", 0, 1639, id="first stage"),
        pytest.param("--pipeline-model-parallel-size 2", 1, 3357, id="last stage"),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", 0, 3085, id="TP 2"),
    ],
)
def test_preference_optimization(tmp_path: Path, more: str, rank: int, used_peak_mb: int) -> None:
    assert used_peak(tmp_path, f"{DPO} {more}", 2, rank, base=DENSE) == used_peak_mb


@pytest.mark.parametrize(
    ("more", "base", "used_peak_mb"),
    [
        pytest.param("", MOE, 5083, id="experts"),
        pytest.param(f"{LATENT} --q-lora-rank 384", DENSE, 4861, id="latent attention"),
        pytest.param(f"--pipeline-model-parallel-size 2 {LORA}", DENSE, 823, id="LoRA"),
    ],
)
def test_preference_optimization_of(tmp_path: Path, more: str, base: Sequence[str], used_peak_mb: int) -> None:
    assert used_peak(tmp_path, f"{DPO} {more}", 2, base=base) == used_peak_mb


ULYSSES = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"


@pytest.mark.parametrize(
    ("more", "used_peak_mb"),
    [
        pytest.param(f"{LATENT} --q-lora-rank 384 {ULYSSES}", 2283, id="latent attention, Ulysses"),
        pytest.param(
            f"{LATENT} --q-lora-rank 384 --context-parallel-size 2 --use-cp-send-recv-overlap", 2267, id="the same, a ring"
        ),
        pytest.param(f"--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 {ULYSSES}", 2625, id="multi-token prediction, Ulysses"),
    ],
)
def test_parts_of_a_sequence(tmp_path: Path, more: str, used_peak_mb: int) -> None:
    assert used_peak(tmp_path, more, 2, base=DENSE) == used_peak_mb


def test_qwen3_30b_a3b_from_the_example(tmp_path: Path) -> None:
    """16 cards, EP 4, PP 4: every class of ranks."""
    spec = RunSpec(trainer="embedded")
    report = dry_run_job(read_job(EXAMPLE, spec), tmp_path / "record", spec, Execution(jobs=1))
    assert {rank.rank: rank.used_peak_mb for rank in report.ranks} == {0: 37527, 4: 34678, 8: 34484, 12: 39607}
