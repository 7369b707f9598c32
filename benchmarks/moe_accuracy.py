"""Mixtures of experts, latent attention and fine-tuning: the embedded trainer against MindSpeed-LLM itself, case by case.

    MINDSPEED_CORE_MS_PATH=… python benchmarks/moe_accuracy.py --out DIR [--scripts] [--only "shared;MLA"] [--markdown FILE]

Every rank class of every case, or of upstream's own scripts at full size, is run by both trainers with the same arguments,
iterations and microbatches. Records stay in DIR and are used again; the page has a table for each release that was run there. The Python that runs it needs the packages
of MindSpeed-Core-MS's requirements.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_full_size import EXAMPLES, overrides_of, scripts

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch.job import Job, understand
from mindspeed_dryrun.launch.msrun_call import read_msrun_call
from mindspeed_dryrun.launch.releases import release_of
from mindspeed_dryrun.launch.run import Execution, dry_run_job, read_job
from mindspeed_dryrun.megatron.arguments import override_args
from mindspeed_dryrun.record.model import RankReport, Report
from mindspeed_dryrun.record.run_spec import RunSpec

# Small enough for seconds, large enough that a tensor too many shows in the megabytes.
COMMON = """
--use-mcore-models --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16
--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 16
--disable-bias-linear --swiglu --use-fused-swiglu --normalization RMSNorm --use-fused-rmsnorm --use-flash-attn
--position-embedding-type rope --use-fused-rotary-pos-emb --use-rotary-position-embeddings --padded-vocab-size 32000
--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1 --attention-dropout 0.0 --hidden-dropout 0.0 --bf16
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --attention-softmax-in-fp32 --train-iters 2000 --lr 1e-6
--tokenizer-type PretrainedFromHF --tokenizer-name-or-path nowhere --data-path nowhere --split 100,0,0 --eval-iters 0
--eval-interval 2000 --save-interval 2000 --log-interval 1 --distributed-backend nccl --ai-framework mindspore --transformer-impl local
"""
MOE = """
--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 704 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.001 --moe-permutation-async-comm --sequence-parallel --use-distributed-optimizer
"""
STEP = " --seq-length 64 --global-batch-size 4 --padded-vocab-size 152064"
GROUPED = " --moe-grouped-gemm --moe-token-dispatcher-type alltoall_seq"
FULL = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EP2, EP4 = " --expert-model-parallel-size 2", " --expert-model-parallel-size 4"
PP2 = " --pipeline-model-parallel-size 2"
TP2 = " --tensor-model-parallel-size 2"

LATENT = """
--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --multi-latent-attention --qk-pos-emb-head-dim 32 --qk-head-dim 64
--kv-lora-rank 128 --v-head-dim 64 --qk-layernorm --rope-scaling-type yarn --rope-scaling-factor 40 --rope-scaling-mscale 1.0
--rope-scaling-mscale-all-dim 1.0 --rope-scaling-original-max-position-embeddings 2048 --rope-scaling-beta-fast 32
--rope-scaling-beta-slow 1
"""
LIMITED = (
    " --moe-router-load-balancing-type group_limited_greedy --moe-router-group-topk 2 --moe-router-num-groups 4"
    " --moe-device-level-aux-loss-coeff 0.05 --moe-comm-aux-loss-coeff 0.02 --moe-router-topk-scaling-factor 16.0"
)
DEEPSEEK3 = (
    LATENT + " --q-lora-rank 384 --first-k-dense-replace 1 --moe-layer-freq 1 --n-shared-experts 1 --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-load-balancing-type none"
    " --moe-router-topk-scaling-factor 2.5 --seq-aux --norm-topk-prob --moe-router-dtype fp32 --mla-fa-without-pad"
)  # fmt: skip
PREDICT = " --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
EXTENDED = GROUPED + TP2 + EP2 + " --moe-tp-extend-ep"
OVERLAP = " --moe-alltoall-overlap-comm"
RING2 = " --context-parallel-size 2 --context-parallel-algo megatron_cp_algo --use-cp-send-recv-overlap"
ULYSSES2 = " --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
AUX_FREE = (
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type none"
    " --moe-router-topk-scaling-factor 2.5 --norm-topk-prob --moe-router-dtype fp32"
)
COC = " --use-ascend-coc --coc-fused-kernel"
TUNE = " --stage sft --is-instruction-dataset --prompt-type llama3 --finetune"
LORA = " --lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"
GENERAL = (
    " --attention-mask-type general --context-parallel-size 2 --context-parallel-algo megatron_cp_algo --use-cp-send-recv-overlap"
    " --use-distributed-optimizer --reuse-fp32-param --swap-attention"
)
DPO = (
    " --stage dpo --is-instruction-dataset --is-pairwise-dataset --prompt-type llama3 --finetune --variable-seq-lengths"
    " --no-pad-to-seq-lengths --dpo-loss-type sigmoid"
)


@dataclass(frozen=True)
class Case:
    """A job: how many ranks, and its flags beside the common ones."""

    world_size: int
    flags: str
    program: str = "pretrain_gpt.py"
    without: str = ""
    releases: tuple[str, ...] = ("2.2.0", "26.1.0")  # that have these flags, with this meaning
    samples: int = 0  # tokens of each, where they are not padded (`launch --sample-length`)


def experts(world_size: int, flags: str) -> Case:
    return Case(world_size, MOE + flags)


def tuning(world_size: int, flags: str, variable: str = " --variable-seq-lengths --no-pad-to-seq-lengths") -> Case:
    return Case(world_size, TUNE + variable + flags, "posttrain_gpt.py")


def short(samples: int, world_size: int, flags: str) -> Case:
    """Samples of this many tokens in sequences of 2048."""
    return dataclasses.replace(tuning(world_size, flags), samples=samples)


def packed(world_size: int, flags: str, release: str, program: str = "posttrain_gpt.py") -> Case:
    """Several documents in a sample: the flag for it has changed its name."""
    flag = " --reset-position-ids" if release == "2.2.0" else " --reset-attention-mask"
    return Case(world_size, flags + flag, program, releases=(release,))


CASES = {
    "no fused attention": Case(2, PP2, without="--use-flash-attn"),
    "no fused attention, selective": Case(2, PP2 + " --recompute-granularity selective", without="--use-flash-attn"),
    "no fused attention, dropout": Case(2, PP2 + " --attention-dropout 0.1", without="--use-flash-attn"),
    "alltoall_seq, EP 4": experts(4, GROUPED + EP4),
    "alltoall_seq, EP 2, PP 2, recomputed": experts(4, GROUPED + EP2 + PP2 + FULL),
    "alltoall_seq, no EP": experts(2, GROUPED),
    "alltoall_seq, TP 2, EP 2": experts(4, GROUPED + TP2 + EP2),
    "alltoall_seq, fused gradient accumulation": experts(2, GROUPED + EP2 + " --gemm-gradient-accumulation-fusion"),
    "alltoall, EP 2": experts(2, EP2 + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall"),
    "alltoall, TP 2, EP 2": experts(4, TP2 + EP2 + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall"),
    "allgather, EP 2": experts(2, EP2 + " --moe-grouped-gemm --moe-token-dispatcher-type allgather"),
    "allgather, TP 2, EP 2": experts(4, TP2 + EP2 + " --moe-grouped-gemm --moe-token-dispatcher-type allgather"),
    "experts one by one": experts(2, EP2 + " --moe-token-dispatcher-type alltoall_seq"),
    "experts one by one, TP 2": experts(4, TP2 + EP2 + " --moe-token-dispatcher-type alltoall_seq"),
    "micro batch 2, no aux loss": experts(
        2, GROUPED + EP2 + " --micro-batch-size 2 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0"
    ),
    "top-k probabilities normalised": experts(2, GROUPED + EP2 + " --norm-topk-prob"),
    "softmax before top-k": experts(2, GROUPED + EP2 + " --moe-router-load-balancing-type softmax_topk --norm-topk-prob"),
    "one expert a token": experts(2, GROUPED + EP2 + " --num-experts 8 --moe-router-topk 1"),
    "softmax scores, expert bias": Case(
        2, MOE + GROUPED + EP2 + " --moe-router-enable-expert-bias --moe-router-load-balancing-type none --moe-aux-loss-coeff 0",
        releases=("26.1.0",),
    ),
    "LoRA, experts in groups, PP 2, recomputed": tuning(4, MOE + GROUPED + EP2 + PP2 + LORA + FULL),
    "z loss": experts(2, GROUPED + EP2 + " --moe-z-loss-coeff 0.001"),
    "shared experts": experts(2, GROUPED + EP2 + " --n-shared-experts 2"),
    "shared experts with a gate": experts(
        2, GROUPED + EP2 + " --n-shared-experts 2 --shared-expert-gate --spec mindspeed_llm.tasks.models.spec.qwen2_moe_spec layer_spec"
    ),
    "first layer dense": experts(2, GROUPED + EP2 + " --first-k-dense-replace 1 --moe-layer-freq 1"),
    "every second layer": experts(2, GROUPED + EP2 + " --first-k-dense-replace -1 --moe-layer-freq 2"),
    "sigmoid, expert bias, groups": experts(
        2, GROUPED + EP2 + " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4"
        " --moe-router-group-topk 2 --moe-router-load-balancing-type none --moe-router-topk-scaling-factor 2.5 --seq-aux"
        " --moe-router-dtype fp32",
    ),
    "groups of experts, three losses": experts(4, EP4 + " --moe-grouped-gemm --moe-token-dispatcher-type allgather" + LIMITED),
    "groups of experts, losses by sequence": experts(4, GROUPED + EP4 + LIMITED + " --seq-aux --num-experts 64"),
    "PAI's loss": experts(2, GROUPED + EP2 + " --moe-router-load-balancing-type pai_megatron_aux_loss"),
    "sequence loss": experts(2, GROUPED + EP2 + " --moe-router-load-balancing-type seq_aux_loss"),
    "capacity, padded": experts(2, GROUPED + EP2 + " --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"),
    "capacity, dropped": experts(2, GROUPED + EP2 + " --moe-expert-capacity-factor 1.5"),
    "capacity, dropped by position, alltoall": experts(
        2, EP2 + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5"
        " --moe-token-drop-policy position"
    ),
    "post-norms (Grok)": experts(2, GROUPED + EP2 + " --spec mindspeed_llm.tasks.models.spec.grok_spec layer_spec --post-norm"),
    "expert tensor parallelism 1": experts(
        4, TP2 + EP2 + " --moe-grouped-gemm --moe-token-dispatcher-type allgather --expert-tensor-parallel-size 1"
    ),
    "MLA": Case(2, LATENT + " --q-lora-rank 384"),
    "MLA, no query compression": Case(2, LATENT),
    "MLA, TP 2, recomputed": Case(2, LATENT + TP2 + " --q-lora-rank 384 --sequence-parallel" + FULL),
    "MLA, no padding": Case(2, LATENT + " --q-lora-rank 384 --mla-fa-without-pad"),
    "MLA, split products, no padding": Case(2, LATENT + " --q-lora-rank 384 --mla-fa-without-pad --mla-mm-split"),
    "MLA, experts, PP 2": experts(
        4, GROUPED + EP2 + PP2 + LATENT + " --q-lora-rank 384 --first-k-dense-replace 1 --moe-layer-freq 1 --n-shared-experts 1"
        " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2"
        " --moe-router-load-balancing-type none --moe-router-topk-scaling-factor 2.5 --seq-aux --norm-topk-prob",
    ),
    "multi-token prediction": experts(4, GROUPED + EP2 + PP2 + PREDICT),
    "multi-token prediction, two depths, TP 2": Case(4, TP2 + PP2 + " --sequence-parallel --mtp-num-layers 2"),
    "multi-token prediction, logits freed, MLA": experts(4, GROUPED + EP2 + PP2 + DEEPSEEK3 + PREDICT + " --mtp-mem-efficient-logits"),
    "TP extends EP": experts(4, EXTENDED),
    "TP extends EP, shared experts, PP 2": experts(8, EXTENDED + PP2 + " --n-shared-experts 1"),
    "DeepSeek-V3 in small": experts(8, EXTENDED + PP2 + DEEPSEEK3 + PREDICT + " --mtp-mem-efficient-logits --reuse-fp32-param" + COC),
    "overlapped EP 2": experts(2, GROUPED + EP2 + OVERLAP),
    "overlapped EP 4, PP 2, shared experts": experts(8, GROUPED + EP4 + PP2 + OVERLAP + " --n-shared-experts 1"),
    "overlapped EP 2, PP 2, recomputed": experts(4, GROUPED + EP2 + PP2 + OVERLAP + FULL),
    "overlapped, VPP 2, parameters gathered on the way": experts(
        4, GROUPED + EP2 + PP2 + OVERLAP + " --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"
        " --overlap-grad-reduce --overlap-param-gather"
    ),
    "first layer dense, Transformer Engine": Case(
        2, MOE + GROUPED + EP2 + " --first-k-dense-replace 1 --moe-layer-freq 1 --transformer-impl transformer_engine",
        releases=("26.1.0",),
    ),
    "GLM-4.5 in small": Case(
        8, MOE + GROUPED + EP4 + PP2 + OVERLAP + PREDICT + FULL + " --num-layers 8 --first-k-dense-replace 1 --moe-layer-freq 1"
        " --n-shared-experts 1 --noop-layers 1,7 --post-norm --transformer-impl transformer_engine", releases=("26.1.0",),
    ),
    "overlapped, TP extends EP": experts(4, EXTENDED + OVERLAP),
    "overlapped, fused gradient accumulation": experts(2, GROUPED + EP2 + OVERLAP + " --gemm-gradient-accumulation-fusion"),
    "fused linear layers, no TP": experts(4, GROUPED + EP2 + PP2 + COC),
    "attention dropout": Case(2, " --attention-dropout 0.1 --use-distributed-optimizer"),
    "first and last stage with fewer layers": Case(
        4, " --num-layers 10 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1"
        " --decoder-last-pipeline-num-layers 3"
    ),
    "embedding gradients later": Case(2, PP2 + " --defer-embedding-wgrad-compute"),
    "SFT, PP 2": tuning(2, PP2),
    "SFT, PP 4, TP 2": tuning(8, TP2 + " --pipeline-model-parallel-size 4 --sequence-parallel"),
    "SFT, micro batch 2, recomputed": tuning(2, " --micro-batch-size 2 --use-distributed-optimizer" + FULL),
    "SFT without fused attention": Case(2, TUNE + PP2, "posttrain_gpt.py", without="--use-flash-attn"),
    "SFT without fused attention, TP 2, recomputed": Case(
        4, TUNE + PP2 + TP2 + " --sequence-parallel" + FULL, "posttrain_gpt.py", without="--use-flash-attn"
    ),
    "SFT, PP 4, padded": tuning(4, " --pipeline-model-parallel-size 4", ""),
    "SFT, packed": packed(2, TUNE + PP2, "2.2.0"),
    "SFT, packed, PP 2": packed(2, TUNE + PP2, "26.1.0"),
    "SFT, packed, PP 4, TP 2, micro batch 2": packed(
        8, TUNE + TP2 + " --pipeline-model-parallel-size 4 --sequence-parallel --micro-batch-size 2", "26.1.0"
    ),
    "SFT, packed, experts, CP 2": packed(
        4, TUNE + MOE + GROUPED + EP2 + " --neat-pack --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", "26.1.0"
    ),
    "pretraining, packed, PP 4": packed(4, " --pipeline-model-parallel-size 4", "26.1.0", "pretrain_gpt.py"),
    "pretraining, packed, MLA, prediction": packed(
        8, MOE + EXTENDED + PP2 + DEEPSEEK3 + PREDICT + " --mtp-mem-efficient-logits", "26.1.0", "pretrain_gpt.py"
    ),
    "LoRA, PP 2": tuning(2, PP2 + LORA),
    "LoRA, TP 2, fused": tuning(2, TP2 + " --sequence-parallel --lora-fusion" + LORA),
    "LoRA, TP 2": tuning(2, TP2 + " --sequence-parallel" + LORA),
    "LoRA, TP 2, fused, whole sequences": tuning(2, TP2 + " --lora-fusion" + LORA),
    "LoRA, fused": tuning(2, " --lora-fusion" + LORA),
    "LoRA, some layers, PP 4": tuning(4, " --pipeline-model-parallel-size 4 --lora-r 16 --lora-target-modules linear_qkv linear_proj"),
    "LoRA, block by block": tuning(
        2, PP2 + LORA + " --recompute-granularity full --recompute-method block --recompute-num-layers 1"
    ),
    "LoRA, recomputed": tuning(2, PP2 + LORA + FULL),
    # Short sequences and a wide vocabulary: the peak is in the optimizer's step.
    "step, main parameters reused, DP 1": Case(2, PP2 + STEP + " --reuse-fp32-param --use-distributed-optimizer"),
    "step, main parameters reused, DP 2": Case(4, PP2 + STEP + " --reuse-fp32-param --use-distributed-optimizer"),
    "step, main parameters reused, experts of one rank": experts(4, GROUPED + EP2 + PP2 + STEP + " --reuse-fp32-param"),
    "step, main parameters reused, experts of two ranks": experts(4, GROUPED + EP2 + STEP + " --reuse-fp32-param"),
    "step": Case(2, PP2 + STEP),
    "step, DP 2": Case(2, STEP),
    "step, distributed, DP 2": Case(2, STEP + " --use-distributed-optimizer"),
    "step, distributed, overlapped, VPP": Case(
        4, PP2 + STEP + " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        " --num-layers-per-virtual-pipeline-stage 1"
    ),
    "step, tied embeddings": Case(2, PP2 + STEP, without="--untie-embeddings-and-output-weights"),
    "step, float16": Case(2, PP2 + STEP + " --fp16", without="--bf16"),
    "step, float16, constant scale, distributed": Case(
        2, STEP + " --fp16 --loss-scale 1024 --use-distributed-optimizer", without="--bf16"
    ),
    "step, no clipping, no weight decay": Case(2, PP2 + STEP + " --clip-grad 0.0 --weight-decay 0.0"),
    "step, gradients in float32": Case(2, STEP + " --accumulate-allreduce-grads-in-fp32 --use-distributed-optimizer"),
    "step, gradients in bfloat16": Case(2, STEP + " --grad-reduce-in-bf16 --use-distributed-optimizer"),
    "step, gradients in bfloat16, zeros counted": Case(
        2, STEP + " --grad-reduce-in-bf16 --use-distributed-optimizer --log-num-zeros-in-grad"
    ),
    "step, small buckets": Case(2, STEP + " --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 5000000"),
    "step, swapped optimizer, DP 1": Case(2, PP2 + STEP + " --use-distributed-optimizer --swap-optimizer"),
    "step, swapped optimizer in four parts, DP 2": Case(
        2, STEP + " --use-distributed-optimizer --swap-optimizer --swap-optimizer-times 4"
    ),
    "step, memory given back": Case(2, PP2 + STEP + " --empty-unused-memory-level 2"),
    "step, experts": experts(4, GROUPED + EP2 + PP2 + STEP),
    "step, LoRA": tuning(2, PP2 + STEP + LORA),
    "step, TP 2": Case(2, TP2 + " --sequence-parallel" + STEP),
    "step, multi-token prediction, one stage": experts(2, GROUPED + EP2 + PREDICT + STEP),
    "SFT, PP 2, samples of 91 tokens": short(91, 2, PP2),
    "SFT, PP 4, TP 2, samples of 333 tokens": short(333, 8, TP2 + " --pipeline-model-parallel-size 4 --sequence-parallel"),
    "SFT, micro batch 2, recomputed, samples of 1000 tokens": short(
        1000, 2, " --micro-batch-size 2 --use-distributed-optimizer --pad-to-multiple-of 128" + FULL
    ),
    "SFT, experts, PP 2, samples of 333 tokens": short(333, 4, MOE + GROUPED + EP2 + PP2),
    "SFT, samples longer than the sequence": short(5000, 2, PP2),
    "LoRA, TP 2, fused, samples of 91 tokens": short(91, 2, TP2 + " --sequence-parallel --lora-fusion" + LORA),
    "LoRA, MLA, samples of 333 tokens": short(333, 2, PP2 + LATENT + " --q-lora-rank 384" + LORA),
    "DPO, PP 4, recomputed, samples of 333 tokens": Case(
        4, DPO + " --pipeline-model-parallel-size 4 --variable-seq-lengths --no-pad-to-seq-lengths" + FULL, "posttrain_gpt.py",
        samples=333,
    ),
    "SFT, packed, a length of samples that does not matter": Case(
        2, TUNE + PP2 + " --reset-attention-mask", "posttrain_gpt.py", releases=("26.1.0",), samples=91
    ),
    "DPO": Case(2, DPO + PP2, "posttrain_gpt.py"),
    "DPO, TP 2": Case(2, DPO + TP2 + " --sequence-parallel", "posttrain_gpt.py"),
    "DPO, PP 4, recomputed": Case(4, DPO + " --pipeline-model-parallel-size 4" + FULL, "posttrain_gpt.py"),
    "logits in slices": Case(2, PP2 + " --output-layer-slice-num 10", releases=("2.2.0",)),
    "logits in slices, limited groups, BNSD": experts(
        4, EP4 + " --moe-grouped-gemm --moe-token-dispatcher-type allgather --shape-order BNSD --output-layer-slice-num 10" + LIMITED,
    ),
    "swapped attention": Case(2, PP2 + " --swap-attention"),
    "swapped attention, experts, recomputed": experts(
        4, GROUPED + EP2 + PP2 + " --swap-attention --recompute-granularity full --recompute-method block --recompute-num-layers 1"
    ),
    "swapped optimizer": experts(4, GROUPED + EP2 + PP2 + " --swap-optimizer"),
    "swapped optimizer, fused gradients, gathered on the way": experts(
        4, EXTENDED + " --swap-optimizer --gemm-gradient-accumulation-fusion --overlap-grad-reduce --overlap-param-gather" + FULL
    ),
    "LoRA, experts one by one, fused": tuning(2, MOE + EP2 + " --moe-token-dispatcher-type alltoall_seq --lora-fusion" + LORA),
    "LoRA, experts one by one": tuning(2, MOE + EP2 + " --moe-token-dispatcher-type alltoall_seq" + LORA),
    "LoRA, MLA": tuning(2, PP2 + LATENT + " --q-lora-rank 384" + LORA),
    "LoRA, MLA, fused": tuning(2, PP2 + LATENT + " --q-lora-rank 384 --lora-fusion" + LORA),
    "LoRA, DeepSeek-V3 in small": tuning(
        4, MOE + EP2 + PP2 + LATENT + " --q-lora-rank 384 --first-k-dense-replace 1 --moe-layer-freq 1 --n-shared-experts 1"
        " --moe-token-dispatcher-type alltoall_seq --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        " --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-load-balancing-type none"
        " --moe-router-topk-scaling-factor 2.5 --seq-aux --norm-topk-prob --reuse-fp32-param --shape-order BNSD --lora-fusion" + LORA
    ),
    "permutation asked to be fused": experts(2, GROUPED + EP2 + " --use-fused-moe-token-permute-and-unpermute"),
    "overlapped alltoall, EP 2": experts(2, EP2 + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall" + OVERLAP),
    "overlapped alltoall, DeepSeek-V2 Lite in small": experts(
        2, EP2 + FULL + LATENT + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall" + OVERLAP + " --n-shared-experts 2"
        " --use-fused-moe-token-permute-and-unpermute --first-k-dense-replace 1 --moe-layer-freq 1 --shape-order BNSD"
        " --moe-router-load-balancing-type pai_megatron_aux_loss --moe-router-group-topk 1 --moe-router-num-groups 8"
        " --moe-router-topk-scaling-factor 1.0 --seq-aux --reuse-fp32-param"
    ),
    "overlapped alltoall, wide experts, recomputed": experts(
        2, EP2 + FULL + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall" + OVERLAP + " --n-shared-experts 2"
        " --moe-ffn-hidden-size 2816 --num-layers 8 --padded-vocab-size 1000"
    ),
    "router of 512 experts": experts(4, GROUPED + EP2 + PP2 + " --num-experts 512 --moe-ffn-hidden-size 32"),
    "general mask, packed, CP 2": packed(4, TUNE + PP2 + GENERAL, "26.1.0"),
    "general mask, packed, CP 2, positions": packed(4, TUNE + PP2 + GENERAL, "2.2.0"),
    "Qwen3-235B at 64K in small": packed(
        8, TUNE + MOE + EXTENDED + PP2 + OVERLAP + " --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --swap-attention"
        " --swap-optimizer --recompute-granularity full --recompute-method block --recompute-num-layers 2 --norm-topk-prob"
        " --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --moe-permute-fusion --overlap-grad-reduce"
        " --overlap-param-gather --gemm-gradient-accumulation-fusion --use-cp-send-recv-overlap --neat-pack", "26.1.0"
    ),
    "sliding window": Case(2, PP2 + " --sliding-window 512"),
    # Flags together that the cases above have one by one.
    "experts, TP 2, ring of 2": experts(4, GROUPED + TP2 + EP2 + RING2),
    "experts, Ulysses 2": experts(4, GROUPED + EP2 + ULYSSES2),
    "experts gathered, TP 2, Ulysses 2": experts(
        4, TP2 + EP2 + ULYSSES2 + " --moe-grouped-gemm --moe-token-dispatcher-type allgather"
    ),
    "experts, ring of rings": experts(
        4, GROUPED + EP2 + " --context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2"
        " --use-cp-send-recv-overlap"
    ),
    "overlapped, Ulysses 2, TP extends EP": experts(8, EXTENDED + OVERLAP + ULYSSES2),
    "multi-token prediction, VPP 2": experts(
        4, GROUPED + EP2 + PP2 + PREDICT + " --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"
    ),
    "multi-token prediction, recomputed block by block, MLA": experts(
        4, GROUPED + EP2 + PP2 + LATENT + PREDICT + " --q-lora-rank 384 --recompute-granularity full --recompute-method block"
        " --recompute-num-layers 1"
    ),
    "multi-token prediction, SFT": tuning(2, PP2 + PREDICT),
    "multi-token prediction, gathered, aux-free": experts(
        2, EP2 + PREDICT + AUX_FREE + " --moe-grouped-gemm --moe-token-dispatcher-type allgather"
    ),
    "aux-free, gathered, TP 2": experts(4, TP2 + EP2 + AUX_FREE + " --moe-grouped-gemm --moe-token-dispatcher-type allgather"),
    "aux-free, alltoall": experts(2, EP2 + AUX_FREE + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall"),
    "aux-free, alltoall_seq, TP 2": experts(4, GROUPED + TP2 + EP2 + AUX_FREE),
    "aux-free, experts one by one, sequence loss": experts(2, EP2 + AUX_FREE + " --moe-token-dispatcher-type alltoall_seq --seq-aux"),
    "overlapped alltoall, shared experts, PP 2": experts(
        4, EP2 + PP2 + " --moe-grouped-gemm --moe-token-dispatcher-type alltoall" + OVERLAP + " --n-shared-experts 2"
    ),
    "activation functions recomputed, experts": experts(2, GROUPED + EP2 + " --recompute-activation-function"),
    "activation functions recomputed, shared experts, first layer dense": experts(
        2, GROUPED + EP2 + " --recompute-activation-function --n-shared-experts 1 --first-k-dense-replace 1 --moe-layer-freq 1"
    ),
    "activation functions recomputed, experts one by one": experts(
        2, EP2 + " --moe-token-dispatcher-type alltoall_seq --recompute-activation-function"
    ),
    "activation functions recomputed, overlapped": experts(2, GROUPED + EP2 + OVERLAP + " --recompute-activation-function"),
    "norms recomputed, MLA, experts": experts(2, GROUPED + EP2 + LATENT + " --q-lora-rank 384 --recompute-norm"),
    "first layer dense, uneven stages": experts(
        4, GROUPED + EP2 + PP2 + " --num-layers 8 --num-layer-list 3,5 --first-k-dense-replace 1 --moe-layer-freq 1"
    ),
    "first layer dense, empty layers, VPP 2": experts(
        4, GROUPED + EP2 + PP2 + " --num-layers 8 --noop-layers 6,7 --first-k-dense-replace 1 --moe-layer-freq 1"
        " --num-layers-per-virtual-pipeline-stage 2"
    ),
    "capacity, dropped, TP 2, shared experts": experts(
        4, GROUPED + TP2 + EP2 + " --moe-expert-capacity-factor 1.5 --n-shared-experts 1"
    ),
    "hidden dropout, experts": experts(2, GROUPED + EP2 + " --hidden-dropout 0.1"),
    "GELU, LayerNorm, experts one by one": Case(
        2, MOE + EP2 + " --moe-token-dispatcher-type alltoall_seq --normalization LayerNorm --no-bias-gelu-fusion",
        without="--swiglu --use-fused-swiglu --use-fused-rmsnorm",
    ),
    "MLA, swapped attention": Case(2, LATENT + PP2 + " --q-lora-rank 384 --swap-attention"),
    "SFT, experts, PP 2, TP 2": tuning(8, MOE + GROUPED + PP2 + TP2 + EP2),
    "SFT, MLA, TP 2, recomputed": tuning(2, LATENT + TP2 + " --q-lora-rank 384 --sequence-parallel" + FULL),
    "SFT, packed, PP 2, VPP 2": packed(
        2, TUNE + PP2 + " --num-layers 8 --num-layers-per-virtual-pipeline-stage 2", "26.1.0"
    ),
    "SFT, packed, MLA, experts, TP extends EP": packed(8, TUNE + MOE + EXTENDED + PP2 + LATENT + " --q-lora-rank 384", "26.1.0"),
    "LoRA, MLA, TP 2": tuning(2, TP2 + LATENT + " --q-lora-rank 384 --sequence-parallel" + LORA),
    "LoRA, MLA, split products, fused": tuning(2, LATENT + " --q-lora-rank 384 --mla-mm-split --lora-fusion" + LORA),
    "LoRA, shared experts, PP 2": tuning(
        4, MOE + EP2 + PP2 + " --moe-token-dispatcher-type alltoall_seq --n-shared-experts 1" + LORA
    ),
    "SFT, VPP 2": tuning(2, PP2 + " --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"),
    "LoRA, VPP 2": tuning(2, PP2 + " --num-layers 8 --num-layers-per-virtual-pipeline-stage 2" + LORA),
    "LoRA, VPP 2, packed": packed(
        2, TUNE + PP2 + " --num-layers 8 --num-layers-per-virtual-pipeline-stage 2" + LORA, "26.1.0"
    ),
    "LoRA, experts in groups": tuning(2, MOE + GROUPED + EP2 + LORA),
    "DPO, VPP 2, TP 2": Case(
        4, DPO + TP2 + PP2 + " --sequence-parallel --num-layers 8 --num-layers-per-virtual-pipeline-stage 2", "posttrain_gpt.py"
    ),
    "DPO, experts": Case(2, DPO + MOE + GROUPED + EP2, "posttrain_gpt.py"),
    "DPO, MLA": Case(2, DPO + LATENT + " --q-lora-rank 384", "posttrain_gpt.py"),
    "DPO, LoRA": Case(2, DPO + PP2 + LORA, "posttrain_gpt.py"),
    "MLA, ring of 2": Case(2, LATENT + RING2 + " --q-lora-rank 384"),
    "MLA, Ulysses 2": Case(2, LATENT + ULYSSES2 + " --q-lora-rank 384"),
    "multi-token prediction, Ulysses 2": Case(2, PREDICT + ULYSSES2),
    "multi-token prediction, LoRA": tuning(2, PP2 + PREDICT + LORA),
    "MLA, plain rotary, TP 2": Case(2, LATENT.partition("--rope-scaling-type")[0] + TP2 + " --q-lora-rank 384 --sequence-parallel"),
    "MLA, rotary in steps": Case(2, LATENT + " --q-lora-rank 384", without="--use-fused-rotary-pos-emb"),
    "MLA, BNSD, TP 2, experts, block by block": experts(
        4, GROUPED + TP2 + EP2 + LATENT + " --q-lora-rank 384 --shape-order BNSD --recompute-granularity full --recompute-method block"
        " --recompute-num-layers 1"
    ),
    "TP extends EP, without TP": experts(2, GROUPED + EP2 + " --moe-tp-extend-ep"),
    "allgather, shared experts, VPP 2": experts(
        4, EP2 + PP2 + " --moe-grouped-gemm --moe-token-dispatcher-type allgather --n-shared-experts 1 --num-layers 8"
        " --num-layers-per-virtual-pipeline-stage 2"
    ),
    "zero memory, EP 4, PP 2, shared experts": experts(
        8, GROUPED + EP4 + PP2 + OVERLAP + " --moe-zero-memory level0 --n-shared-experts 2 --reuse-fp32-param"
    ),
    "DPO, experts, TP 2, PP 2": Case(8, DPO + MOE + GROUPED + TP2 + EP2 + PP2, "posttrain_gpt.py"),
    "SFT, norms in steps": Case(
        2, TUNE + PP2 + " --variable-seq-lengths --transformer-impl transformer_engine", "posttrain_gpt.py",
        without="--use-fused-rmsnorm", releases=("26.1.0",)
    ),
    "zero memory, overlapped": experts(2, GROUPED + EP2 + OVERLAP + " --moe-zero-memory level0"),
    "zero memory, activations, SFT, PP 2": tuning(
        4, MOE + GROUPED + EP2 + PP2 + OVERLAP + " --moe-zero-memory level0 --n-shared-experts 1"
    ),
    "zero memory, PP 2": experts(4, GROUPED + EP2 + PP2 + OVERLAP + " --moe-zero-memory level1"),
    "zero memory of some layers, shared experts": experts(
        2, GROUPED + EP2 + OVERLAP + " --moe-zero-memory level1 --moe-zero-memory-num-layers 2 --n-shared-experts 1"
    ),
}  # fmt: skip


def job_of(case: Case, release: str) -> Job:
    """Samples of any length have a flag of another name from 2.3.0 on."""
    other = "--no-pad-to-seq-lengths" if release == "2.2.0" else "--variable-seq-lengths"
    argv = ["--worker_num", str(case.world_size), "--local_worker_num", str(min(8, case.world_size)), case.program]
    flags = [word for word in case.flags.split() if word != other]
    groups = [] if "--multi-latent-attention" in flags else ["--group-query-attention", "--num-query-groups", "4"]
    args = [word for word in override_args([*COMMON.split(), *groups], flags) if word not in case.without.split()]
    return understand(read_msrun_call([*argv, *args], str(Path.cwd())), "a case")


@dataclass(frozen=True)
class Task:
    """A job that both trainers run."""

    name: str
    world_size: int
    job: Job
    overrides: tuple[str, ...] = ()
    samples: int = 0


def small_tasks(release: str) -> Iterator[Task]:
    """The cases above."""
    for name, case in CASES.items():
        if release in case.releases:
            yield Task(name, case.world_size, job_of(case, release), samples=case.samples)


def script_tasks(root: Path, more: str) -> Iterator[Task]:
    """Upstream's own scripts, at full size, with more arguments if there are any."""
    for path in scripts(root):
        overrides = (*overrides_of(path), *more.split())
        job = read_job(path, RunSpec(overrides=overrides))
        yield Task(str(path.relative_to(root / EXAMPLES)) + (more and f", {more}"), job.world_size, job, overrides)


def run(task: Task, trainer: str, out: Path, release: str) -> Report | str:
    """The report, or the sentence that refuses the job."""
    print(f"{task.name}: {trainer}", file=sys.stderr, flush=True)
    try:
        folder = out / release / trainer / "".join(letter if letter.isalnum() else "_" for letter in task.name)
        spec = RunSpec(trainer=trainer, overrides=task.overrides, sample_length=task.samples)
        return dry_run_job(task.job, folder, spec, Execution(jobs=1))
    except DryRunError as error:
        return str(error)


def figure(rank: RankReport | None, why: str) -> str:
    if rank is None:
        return f"refused: {why}"
    return str(rank.used_peak_mb) if rank.status in ("ok", "oom") else f"{rank.status}: {rank.error}"


def difference(ours: RankReport | None, theirs: RankReport | None) -> str:
    if ours is None or theirs is None or not {ours.status, theirs.status} <= {"ok", "oom"}:
        return "—"
    more = int(ours.used_peak_mb or 0) - int(theirs.used_peak_mb or 0)
    return "equal" if not more else f"{more:+d} ({100 * more / int(theirs.used_peak_mb or 1):+.2f} %)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank class of one case."""

    case: str
    ranks: int
    rank: int
    embedded: str
    upstream: str
    difference: str

    def markdown(self) -> str:
        return f"| {self.case} | {self.ranks} | {self.rank} | {self.embedded} | {self.upstream} | {self.difference} |"


def rows(task: Task, ours: Report | str, theirs: Report | str) -> list[Row]:
    """One row for each rank class."""
    tables = [{} if isinstance(report, str) else {rank.rank: rank for rank in report.ranks} for report in (ours, theirs)]
    reasons = [report if isinstance(report, str) else "" for report in (ours, theirs)]
    found = []
    for number in sorted({*tables[0], *tables[1]} or {0}):
        pair = tables[0].get(number), tables[1].get(number)
        figures = {"embedded": figure(pair[0], reasons[0]), "upstream": figure(pair[1], reasons[1])}
        found.append(Row(case=task.name, ranks=task.world_size, rank=number, difference=difference(*pair), **figures))
    return found


HEADER = """# Mixtures of experts, latent attention and fine-tuning: how exact the embedded trainer is

Made by `benchmarks/moe_accuracy.py --markdown docs/moe_accuracy.md`, with each release of MindSpeed-LLM, and once more with
`--scripts`. Used peak in MB of every rank class, with an even load of experts: the embedded trainer, MindSpeed-LLM itself (its
own trainer in a dry run), and the difference. The small cases are those of the benchmark; the scripts are upstream's own at full
size, unmodified.
"""
TABLE = """
## {kind}, {release}

{equal} of {count} rank classes in {cases} {noun} are equal.

| {one} | ranks | rank | embedded | MindSpeed-LLM | difference |
|---|---|---|---|---|---|
"""
KINDS = {"cases": ("Small cases", "case"), "scripts": ("Scripts at full size", "script")}


def page(out: Path) -> str:
    """All tables that were made so far as a page, each with how much of it is equal."""
    text = HEADER
    for noun, (kind, one) in KINDS.items():
        for file in sorted(out.glob(f"{noun}-*.json")):
            lines = kept(file)
            text += TABLE.format(
                kind=kind,
                release=file.stem.partition("-")[2],
                equal=sum(row.difference == "equal" for row in lines),
                count=len(lines),
                cases=len({row.case for row in lines}),
                noun=noun,
                one=one,
            )
            text += "".join(f"{row.markdown()}\n" for row in lines)
    return text


def kept(file: Path) -> list[Row]:
    """What was run so far."""
    return [Row(**row) for row in json.loads(file.read_text("utf-8"))] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, with semicolons between them")
    parser.add_argument("--scripts", action="store_true", help="upstream's own scripts in place of the small cases")
    parser.add_argument("--more", default="", help='more arguments for the scripts, as in --more="--transformer-impl local"')
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--markdown", type=Path, help="file to write the tables to")
    options = parser.parse_args()
    root = Path(os.environ["MINDSPEED_CORE_MS_PATH"])
    release = release_of(root) or "unknown"
    file = options.out / f"{'scripts' if options.scripts else 'cases'}-{release}.json"
    for task in script_tasks(root, options.more) if options.scripts else small_tasks(release):
        if not any(part in task.name for part in options.only.split(";")):
            continue
        found = rows(task, *(run(task, trainer, options.out, release) for trainer in ("embedded", "script")))
        print("\n".join(row.markdown() for row in found), flush=True)
        # After each, so that a run that is stopped leaves a table.
        lines = [row for row in kept(file) if row.case != task.name] + found
        file.write_text(json.dumps([vars(row) for row in lines], indent=1), "utf-8")
        if options.markdown:
            options.markdown.write_text(page(options.out), "utf-8")


if __name__ == "__main__":
    main()
