"""The time model against published throughput, its band, and jobs beside dense ones."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path

import pytest
from strategy_models import ROOT, hardware

from mindspeed_dryrun.devices.hardware import names, read_hardware
from mindspeed_dryrun.estimate.layer_time import Case
from mindspeed_dryrun.estimate.operators import read_operators
from mindspeed_dryrun.estimate.strategy import read_strategy
from mindspeed_dryrun.estimate.time_model import estimate, predict_time, trust
from mindspeed_dryrun.megatron.model_shape import read_shape

sys.path.insert(0, str(ROOT / "benchmarks"))

import time_accuracy

# Tokens a second and card from README tables of Ascend/MindSpeed-LLM, with the flags of the scripts that decide the time.
ROWS = time_accuracy.read_published(Path(__file__).with_name("published_throughput.jsonl"))
HARDWARE = hardware()
DENSE = [
    "--tensor-model-parallel-size",
    "2",
    "--pipeline-model-parallel-size",
    "2",
    "--sequence-parallel",
    "--num-layers",
    "8",
    "--hidden-size",
    "2048",
    "--ffn-hidden-size",
    "8192",
    "--num-attention-heads",
    "16",
    "--seq-length",
    "4096",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "32",
    "--vocab-size",
    "32000",
    "--swiglu",
    "--use-fused-swiglu",
    "--use-flash-attn",
    "--use-fused-rmsnorm",
    "--normalization",
    "RMSNorm",
    "--use-fused-rotary-pos-emb",
    "--bf16",
    "--use-distributed-optimizer",
]
EXPERTS = [
    "--num-experts",
    "32",
    "--moe-router-topk",
    "4",
    "--moe-intermediate-size",
    "1024",
    "--expert-model-parallel-size",
    "4",
]


def _seconds(*more: str) -> float:
    return predict_time([*DENSE, *more], 16, HARDWARE).iteration_s


def test_published_rows_are_predicted() -> None:
    """All 23 within 15 %, half of them within 7 %."""
    errors = [abs(row.error(HARDWARE)) for row in ROWS]
    assert len(errors) == 23 and statistics.median(errors) < 0.07 and max(errors) < 0.15


def test_the_band_is_what_errors_left_out_justify() -> None:
    """Figures fitted without a family predict it, and older tables that nothing was fitted to: nine of ten inside the printed
    band, which is not wider than needed."""
    held = time_accuracy.left_out(ROWS, HARDWARE)
    assert HARDWARE.error is not None
    assert statistics.median(map(abs, held)) < 0.07
    unseen = [row.error(HARDWARE) for row in time_accuracy.read_published(Path(__file__).with_name("unseen_throughput.jsonl"))]
    assert len(unseen) == 29 and statistics.median(map(abs, unseen)) < 0.08
    assert sum(abs(error) <= 0.15 for error in unseen) >= 26
    held += unseen
    inside = sum(1 / (1 + HARDWARE.error) <= 1 + error <= 1 + HARDWARE.error for error in held)
    assert inside >= 0.9 * len(held)
    assert HARDWARE.error == pytest.approx(time_accuracy.band(held), abs=0.01)


def test_the_band_of_mixtures_covers_published_ones() -> None:
    """Nothing was fitted to them; the band is the quantile of their errors, and jobs whose experts leave a node have none."""
    rows = time_accuracy.read_published(Path(__file__).with_name("mixture_throughput.jsonl"))
    errors = [row.error(HARDWARE) for row in rows]
    assert len(rows) == 10 and statistics.median(map(abs, errors)) < 0.13
    assert HARDWARE.mixture_error == pytest.approx(time_accuracy.band(errors), abs=0.01)
    for row in rows:
        guess = estimate(row.shape, row.strategy, HARDWARE, operators=row.operators)
        assert guess.low_s <= row.seconds <= guess.high_s
        wide = dataclasses.replace(row.strategy, dp=16, ep=64)
        across = estimate(row.shape, wide, HARDWARE, operators=row.operators)
        assert across.high_s / across.low_s > guess.high_s / guess.low_s
        assert trust(row.shape, wide, HARDWARE) != trust(row.shape, row.strategy, HARDWARE)


def test_experts_one_by_one_cost_more_in_older_releases() -> None:
    """Each wrote its part of the result into one tensor, whose gradient PyTorch copies for every expert."""
    grouped, single = _seconds(*EXPERTS, "--moe-grouped-gemm"), _seconds(*EXPERTS)
    older = _seconds(*[word.replace("--moe-ffn-hidden-size", "--moe-intermediate-size") for word in EXPERTS])
    newer = _seconds(*[word.replace("--moe-intermediate-size", "--moe-ffn-hidden-size") for word in EXPERTS])
    assert older == single and grouped < newer < older


def test_latent_attention_gathers_what_is_compressed() -> None:
    """Its heads are padded unless the script says otherwise, and a larger compression takes longer to gather."""
    words = ["--multi-latent-attention", "--q-lora-rank", "512", "--kv-lora-rank", "256", "--qk-head-dim", "128"]
    words += ["--qk-pos-emb-head-dim", "64", "--v-head-dim", "128"]
    padded = _seconds(*words)
    assert _seconds(*words, "--mla-fa-without-pad") < _seconds(*words, "--shape-order", "BNSD") < padded
    case = Case(read_shape([*DENSE, *words]), read_strategy([*DENSE, *words], 16), HARDWARE, read_operators(DENSE))
    assert case.gathered(512) < case.gather


def test_the_file_holds_the_fitted_figures() -> None:
    fitted = time_accuracy.fit(ROWS, HARDWARE)
    assert set(HARDWARE.fitted) == set(time_accuracy.PRIORS)
    for name in HARDWARE.fitted:
        assert getattr(HARDWARE, name).typical == pytest.approx(getattr(fitted, name).typical, rel=0.02)


def test_flags_cost_what_they_run() -> None:
    plain = _seconds()
    assert _seconds("--use-ascend-mc2") < plain
    assert _seconds("--gelu-tanh") > plain
    assert _seconds("--sliding-window", "1024") < plain
    assert _seconds("--output-logit-softcapping", "30") > plain
    assert _seconds("--recompute-activation-function") > plain
    assert _seconds("--overlap-grad-reduce") < plain


def test_small_heads_cost_as_many_scores() -> None:
    """Twice the heads of half the size: the same products, twice the scores."""
    assert _seconds("--num-attention-heads", "32") > _seconds()


def test_mixtures_and_latent_attention_have_a_time() -> None:
    dense = predict_time(DENSE, 16, HARDWARE)
    mixture = predict_time([*DENSE, *EXPERTS], 16, HARDWARE)
    latent = predict_time([*DENSE, "--multi-latent-attention", "--kv-lora-rank", "256"], 16, HARDWARE)
    for one in (dense, mixture, latent):
        assert 0 < one.low_s < one.iteration_s < one.high_s
        assert one.tokens_per_s_per_card == pytest.approx(32 * 4096 / one.iteration_s / 16)
        assert 0 < one.tflops_per_card < 353.9
    # Nothing was fitted to mixtures, and no dense job with latent attention was among the rows: their bands are wider.
    assert mixture.high_s / mixture.low_s > 1.1 * dense.high_s / dense.low_s
    assert latent.high_s / latent.low_s > 1.5 * dense.high_s / dense.low_s
    assert set(dense.to_json()) >= {"iteration_s", "low_s", "high_s", "tokens_per_s_per_card"}


def test_more_routed_experts_take_longer() -> None:
    few, many = (_seconds(*EXPERTS, "--moe-router-topk", topk) for topk in ("2", "8"))
    assert many > few
    front = _seconds(*EXPERTS, "--first-k-dense-replace", "4", "--moe-layer-freq", "1")
    assert front != _seconds(*EXPERTS)
    # MindSpeed-LLM needs both flags to mix layers.
    assert _seconds(*EXPERTS, "--first-k-dense-replace", "4") == _seconds(*EXPERTS)


def test_permutation_in_one_kernel_is_cheaper() -> None:
    assert _seconds(*EXPERTS, "--moe-permute-fusion") < _seconds(*EXPERTS)


# MindSpeed-LLM's README: MiniCPM 8x2B (8 experts, 2 of them a token) on 8 cards, 2981 tokens a second and card.
MINICPM = "--num-experts 8 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall_seq --moe-alltoall-overlap-comm --moe-permute-fusion --moe-grouped-gemm --moe-layer-freq -1 --first-k-dense-replace -1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --sequence-parallel --num-layers 40 --hidden-size 2304 --ffn-hidden-size 5760 --num-attention-heads 36 --vocab-size 122753 --make-vocab-size-divisible-by 1 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-flash-attn --use-distributed-optimizer --recompute-activation-function --use-fused-swiglu --use-fused-rotary-pos-emb --overlap-grad-reduce --overlap-param-gather --scale-depth 1.4 --bf16"


def test_a_published_mixture_is_inside_its_band() -> None:
    """Nothing was fitted to it."""
    time = predict_time(MINICPM.split(), 8, HARDWARE)
    published = 128 * 4096 / 2981 / 8
    assert time.low_s < published < time.high_s
    assert published / time.iteration_s == pytest.approx(1.0, abs=0.2)


def test_operators_are_read() -> None:
    words = [*DENSE, *EXPERTS, "--moe-tp-extend-ep", "--n-shared-experts", "2", "--use-mc2"]
    shape, strategy = read_shape(words), read_strategy(words, 16)
    assert read_operators(words).fused_collectives
    assert shape.experts is not None and shape.experts.shared_ffn == 2048
    assert (strategy.ep, strategy.etp, strategy.expert_replicas) == (8, 1, 1)


@pytest.mark.parametrize("name", names())
def test_hardware_files_are_consistent(name: str) -> None:
    found = read_hardware(name)
    assert found.usable_mb < found.total_mb < found.hbm_mb
    for name in ("matmul_tflops", "memory_gb_s", "attention_gscores_s"):
        assert getattr(found, name).low < getattr(found, name).typical < getattr(found, name).high
    seconds = predict_time(DENSE, 16, dataclasses.replace(found, error=None))
    assert seconds.low_s < seconds.iteration_s < seconds.high_s
