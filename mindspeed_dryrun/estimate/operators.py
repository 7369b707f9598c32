"""What a trainer's arguments say about the operators it runs: flags that change the time and leave the sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.megatron.arguments import Arguments


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The default is what most scripts of MindSpeed-LLM ask for: everything fused, nothing overlapped."""

    activation: str = "fused"  # fused, gated (several kernels), tanh (gelu written out), plain (not gated)
    fused_rotary: bool = True
    rotary_share: float = 1.0
    norms: int = 2  # of a layer, on hidden states
    fused_norm: bool = True
    scaled_branches: bool = False  # each branch is multiplied by a constant before it is added
    capped_logits: bool = False
    window: int = 0  # every layer attends to this many tokens; 0: to all
    window_masks: bool = False  # every other layer builds a mask for its window
    fused_collectives: bool = False  # MC2
    fused_accumulation: bool = False
    overlapped_reduce: bool = False
    overlapped_gather: bool = False
    repeated_keys: bool = False  # keys and values are repeated before Ulysses' exchange
    recomputed_activation: bool = False
    fused_attention: bool = True
    fused_softmax: bool = False  # of attention that is not fused: scale, mask and softmax in one kernel
    grouped_experts: bool = True  # one product for all local experts
    overlapped_dispatch: bool = False  # the exchange of tokens runs beside the experts' products
    fused_permutation: bool = False
    recomputed_experts: bool = False  # the experts' products and their activation are computed again
    recomputed_mlp: bool = False  # everything behind attention is
    latent_multiple: int = 128  # heads of latent attention are padded to it; 1: values to the size of queries; 0: not at all
    sequence_pieces: int = 1  # Seq1F1B: the pipeline is filled with pieces of a sequence
    older_release: bool = False  # the arguments are spelled as before MindSpeed-LLM 2.2 (Megatron-LM core_r0.8.0 at most)


# Renamed in MindSpeed-LLM 2.2 (features_manager/arguments/deprecated_args.py).
_OLD_SPELLINGS = (
    "--use-mc2", "--use-deter-comp", "--cp-attention-mask-type", "--moe-intermediate-size", "--n-group", "--topk-group",
    "--routed-scaling-factor", "--qk-rope-head-dim", "--qk-nope-head-dim", "--multi-head-latent-attention",
    "--rope-scaling-beta-fast", "--rope-scaling-beta-slow",
)  # fmt: skip


def read_operators(args: Sequence[str]) -> Operators:
    """The operators behind a trainer's arguments."""
    flags = Arguments(tuple(args))
    return Operators(
        activation=_activation(flags),
        fused_rotary=flags.has("--use-fused-rotary-pos-emb"),
        rotary_share=0.5 if flags.has("--use-partial-rope") else 1.0,
        norms=4 if flags.has("--post-norm") else 2,
        fused_norm=flags.has("--use-fused-rmsnorm") or flags.text("--normalization") != "RMSNorm",
        scaled_branches=flags.has("--scale-depth"),
        capped_logits=flags.has("--output-logit-softcapping"),
        window=flags.number("--sliding-window") or 0,
        window_masks=flags.has("--interleave-sliding-window"),
        # The old spelling still switches it on: MindSpeed-LLM 2.2, features_manager/arguments/deprecated_args.py:61.
        # `deprecated_use_mc2`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/arguments/deprecated_args.py#L61
        fused_collectives=flags.has("--use-ascend-mc2") or flags.has("--use-mc2"),
        fused_accumulation=not flags.has("--no-gradient-accumulation-fusion"),
        overlapped_reduce=flags.has("--overlap-grad-reduce"),
        overlapped_gather=flags.has("--overlap-param-gather"),
        repeated_keys=flags.has("--kv-head-repeat-before-uly-alltoall"),
        recomputed_activation=flags.has("--recompute-activation-function"),
        fused_attention=flags.has("--use-flash-attn"),
        fused_softmax=not flags.has("--no-masked-softmax-fusion"),
        grouped_experts=flags.has("--moe-grouped-gemm"),
        overlapped_dispatch=flags.has_any(("--moe-alltoall-overlap-comm", "--moe-fb-overlap")),
        fused_permutation=flags.has_any(("--moe-permute-fusion", "--use-fused-moe-token-permute-and-unpermute")),
        recomputed_experts=flags.has("--moe-layer-recompute") or flags.text("--moe-zero-memory") in ("level0", "level1"),
        recomputed_mlp=_recomputed_mlp(flags),
        latent_multiple=_latent_multiple(flags),
        sequence_pieces=sequence_pieces(flags),
        older_release=flags.has_any(_OLD_SPELLINGS),
    )


def sequence_pieces(flags: Arguments) -> int:
    """Into how many pieces Seq1F1B cuts a sequence (MindSpeed-LLM 2.3, docs/mindspore/features/seq1f1b.md)."""
    return flags.positive("--seq1f1b-splits", 4) if flags.has("--enable-seq1f1b") else 1


def _latent_multiple(flags: Arguments) -> int:
    """What heads of queries, keys and values that differ in size are padded to (MindSpeed-LLM, multi_latent_attention.py)."""
    if flags.has("--mla-fa-without-pad"):
        return 0
    return 1 if flags.text("--shape-order") == "BNSD" else flags.positive("--padded-base-length", 128)


def _recomputed_mlp(flags: Arguments) -> bool:
    """`--swap-attention` keeps attention on the host and computes the MLPs of `--recompute-num-layers` layers of a chunk again
    (MindSpeed, docs/features/swap_attention.md). Counted where those are all layers of a chunk."""
    # `AdaptiveRecomputeSwap`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/memory/swap_attention/adaptor.py#L63
    pieces = flags.positive("--pipeline-model-parallel-size", 1)
    chunk = flags.number("--num-layers-per-virtual-pipeline-stage") or (flags.number("--num-layers") or 0) // pieces
    again = flags.number("--recompute-num-layers") or 0
    return flags.has("--swap-attention") and not flags.has("--recompute-granularity") and 0 < chunk <= again


def _activation(flags: Arguments) -> str:
    if flags.has("--gelu-tanh"):
        return "tanh"
    if flags.has("--swiglu"):
        return "fused" if flags.has("--use-fused-swiglu") else "gated"
    return "gated" if flags.has("--geglu") else "plain"
