"""What a trainer's arguments say about the operators it runs: flags that change the time and leave the sizes alone, and
the parts of a model beside dense layers (experts, latent attention, extra prediction layers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.megatron.arguments import Arguments

_HYBRID, _ULYSSES = ("hybrid_cp_algo", "hybrid_adaptive_cp_algo"), "ulysses_cp_algo"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts. `ffn` and `shared_ffn` are inner sizes of one expert and of all shared ones together."""

    number: int
    topk: int
    ffn: int
    shared_ffn: int = 0
    parallel: int = 1  # EP
    tensor: int = 1  # how many ranks share one expert
    dense_in_front: int = 0
    every: int = 1  # each n-th layer behind them is a mixture
    grouped: bool = True  # one product for all local experts
    overlapped: bool = False  # the exchange runs beside the experts' products
    gathered: bool = False  # tokens are gathered instead of exchanged
    fused_permutation: bool = False


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-latent attention: ranks of the compressions and sizes of a head."""

    query_rank: int
    key_rank: int
    nope: int
    rope: int
    value: int


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
    ulysses: int = 1  # ranks of a context-parallel group that exchange heads; the rest is a ring
    recomputed_activation: bool = False
    fused_attention: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    prediction_layers: int = 0  # multi-token prediction, each with an output layer


def read_operators(args: Sequence[str]) -> Operators:
    """The operators behind a trainer's arguments."""
    flags = Arguments(tuple(args))
    cp = flags.positive("--context-parallel-size", 1)
    algorithm = flags.text("--context-parallel-algo") or ""
    ulysses = cp if algorithm == _ULYSSES else 1
    if algorithm in _HYBRID:
        ulysses = flags.positive("--ulysses-degree-in-cp", 1)
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
        fused_collectives=flags.has("--use-ascend-mc2") or flags.has("--use-mc2"),
        fused_accumulation=not flags.has("--no-gradient-accumulation-fusion"),
        overlapped_reduce=flags.has("--overlap-grad-reduce"),
        overlapped_gather=flags.has("--overlap-param-gather"),
        repeated_keys=flags.has("--kv-head-repeat-before-uly-alltoall"),
        ulysses=ulysses,
        recomputed_activation=flags.has("--recompute-activation-function"),
        fused_attention=flags.has("--use-flash-attn"),
        experts=_experts(flags),
        latent=_latent(flags),
        prediction_layers=flags.number("--mtp-num-layers") or 0,
    )


def _activation(flags: Arguments) -> str:
    if flags.has("--gelu-tanh"):
        return "tanh"
    if flags.has("--swiglu"):
        return "fused" if flags.has("--use-fused-swiglu") else "gated"
    return "gated" if flags.has("--geglu") else "plain"


def _experts(flags: Arguments) -> Experts | None:
    number = flags.number("--num-experts") or 0
    if number < 2:
        return None
    ffn = flags.number("--moe-intermediate-size") or flags.number("--moe-ffn-hidden-size")
    ffn = ffn or flags.positive("--ffn-hidden-size", 4 * flags.positive("--hidden-size", 1))
    shared = flags.number("--moe-shared-expert-intermediate-size") or ffn * (flags.number("--n-shared-experts") or 0)
    tp = flags.positive("--tensor-model-parallel-size", 1)
    parallel = flags.positive("--expert-model-parallel-size", 1)
    tensor = flags.positive("--expert-tensor-parallel-size", tp)
    if flags.has("--moe-tp-extend-ep"):
        parallel, tensor = parallel * tp, 1
    every = flags.text("--moe-layer-freq") or "1"
    return Experts(
        number=number,
        topk=flags.number("--moe-router-topk") or flags.number("--moe-topk") or 2,
        ffn=ffn,
        shared_ffn=shared,
        parallel=parallel,
        tensor=tensor,
        dense_in_front=max(0, flags.number("--first-k-dense-replace") or 0),
        every=int(every) if every.isdigit() and int(every) else 1,
        grouped=flags.has("--moe-grouped-gemm"),
        overlapped=flags.has("--moe-alltoall-overlap-comm") or flags.has("--moe-fb-overlap"),
        gathered=flags.text("--moe-token-dispatcher-type") == "allgather",
        fused_permutation=flags.has_any(("--moe-permute-fusion", "--use-fused-moe-token-permute-and-unpermute")),
    )


def _latent(flags: Arguments) -> Latent | None:
    if not (flags.has("--multi-latent-attention") or flags.has("--multi-head-latent-attention")):
        return None
    nope = flags.number("--qk-head-dim") or flags.number("--qk-nope-head-dim") or 128
    rope = flags.number("--qk-pos-emb-head-dim") or flags.number("--qk-rope-head-dim") or 64
    return Latent(
        query_rank=flags.number("--q-lora-rank") or 0,
        key_rank=flags.positive("--kv-lora-rank", 512),
        nope=nope,
        rope=rope,
        value=flags.positive("--v-head-dim", 128),
    )
