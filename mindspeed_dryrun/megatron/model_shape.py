"""The model and the batch, read from the trainer's arguments: what memory and time are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron import sizes
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.flags import with_tag
from mindspeed_dryrun.megatron.layout import DISAGGREGATED


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Mixtures of experts. `ffn` and `shared_ffn` are inner sizes of one expert and of all shared ones together."""

    number: int
    topk: int
    ffn: int
    shared_ffn: int = 0
    dense_in_front: int = 0  # layers before the first mixture
    every: int = 1  # each n-th layer behind them is a mixture
    capacity: float | None = None  # times an even load that an expert takes at most; None: all tokens that come

    def in_layer(self, layer: int) -> bool:
        """Whether a layer (from 0, as Megatron counts it) is a mixture."""
        return layer >= self.dense_in_front and layer % self.every == 0


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-latent attention: ranks of the compressions and sizes of a head."""

    query_rank: int
    key_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A GPT as Megatron's flags describe it, with the batch of one iteration."""

    layers: int  # real ones, without no-op layers
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    head_dim: int
    vocab: int
    gated: bool
    tied: bool
    seq: int
    global_batch: int
    full_states: bool  # bf16 weights, fp32 gradients, master weights and two Adam moments: 18 bytes a parameter
    shared_master: bool  # --reuse-fp32-param: master weights share memory with the bf16 ones
    full_activations: bool = True  # every layer that is not recomputed keeps what its backward pass needs
    qk_norm: bool = False  # norms of queries and keys
    vocab_grows: bool = False  # the vocabulary is padded as tensor parallelism needs it
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    prediction_layers: int = 0  # multi-token prediction on the last stage, each with an output layer

    @property
    def attention_parameters(self) -> int:
        """Matrices of attention; biases and norms are left out everywhere (they are thousandths)."""
        latent = self.latent
        if latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.query_groups)
        wide = self.heads * (latent.nope + latent.rope)
        query = latent.query_rank * (self.hidden + wide) if latent.query_rank else self.hidden * wide
        key = (latent.key_rank + latent.rope) * self.hidden + self.heads * (latent.nope + latent.value) * latent.key_rank
        return query + key + self.hidden * self.heads * latent.value

    @property
    def layer_parameters(self) -> int:
        """Matrices of one dense layer."""
        return self.attention_parameters + self.mlp_parameters(self.ffn)

    def mlp_parameters(self, ffn: int) -> int:
        """Matrices of an MLP of this inner size."""
        return self.hidden * ffn * (3 if self.gated else 2)

    @property
    def shared_parameters(self) -> int:
        """Of a mixture, what is not one of its routed experts: shared experts and router."""
        experts = self.experts
        return self.mlp_parameters(experts.shared_ffn) + self.hidden * experts.number if experts else 0

    @property
    def routed_parameters(self) -> int:
        """All routed experts of a mixture."""
        return self.experts.number * self.mlp_parameters(self.experts.ffn) if self.experts else 0

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer (from 0, as Megatron counts it) holds experts."""
        return self.experts is not None and self.experts.in_layer(layer)

    @property
    def vocabulary_parameters(self) -> int:
        """The embedding table, and as many again in an untied output layer."""
        return self.vocab * self.hidden

    def iteration_flops(self, noop_layers: int = 0, causal: bool = True) -> float:
        """Floating-point operations of one iteration as Megatron counts them: three times the forward pass, causal
        attention at half, no recomputation. Its older releases count attention in full, and no-op layers."""
        # `num_floating_point_operations`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/training.py#L132
        attention = 6.0 * self.seq * self.heads * self.head_dim * (1 if causal else 2)
        tokens = float(self.global_batch) * self.seq
        layers = (self.layers + noop_layers) * (6.0 * self.layer_parameters + attention)
        return tokens * (layers + 6.0 * self.vocabulary_parameters)


def read_shape(args: Sequence[str]) -> ModelShape:
    """The shape behind a trainer's arguments; `UsageError` names the flag that is missing or not supported here."""
    arguments = Arguments(tuple(args))
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--global-batch-size"):
        if not arguments.has(flag):
            raise UsageError(f"The script does not set {flag}: it is needed to count the model.")
    if arguments.has(DISAGGREGATED):
        raise UsageError(f"Search and the models of memory and time do not know the U-shaped pipeline of {DISAGGREGATED}.")
    # A strategy may change TP, and with it the padding: what TP 1 pads to is the least.
    vocab = sizes.read_padded_vocabulary(arguments, 1)
    if vocab is None:
        raise UsageError("The script sets neither --padded-vocab-size nor --vocab-size: add one of them under 'args'.")
    return ModelShape(
        layers=arguments.positive("--num-layers", 1) - len(set(arguments.numbers("--noop-layers"))),
        hidden=arguments.positive("--hidden-size", 1),
        ffn=sizes.ffn_size(arguments),
        heads=arguments.positive("--num-attention-heads", 1),
        query_groups=sizes.query_groups(arguments),
        head_dim=sizes.head_size(arguments),
        vocab=vocab,
        gated=sizes.is_gated(arguments),
        tied=not arguments.has("--untie-embeddings-and-output-weights"),
        seq=arguments.positive("--seq-length", 1),
        global_batch=arguments.positive("--global-batch-size", 1),
        full_states=arguments.has("--bf16")
        and (arguments.text("--optimizer") or "adam") == "adam"
        and not arguments.has_any(with_tag("fewer_states")),
        shared_master=arguments.has("--reuse-fp32-param"),
        full_activations=not arguments.has_any(with_tag("fewer_activations")),
        qk_norm=arguments.has("--qk-layernorm"),
        vocab_grows=not arguments.has("--padded-vocab-size"),
        experts=_experts(arguments),
        latent=_latent(arguments),
        prediction_layers=arguments.number("--mtp-num-layers") or 0,
    )


def _experts(arguments: Arguments) -> ExpertShape | None:
    number = arguments.number("--num-experts") or 0
    if number < 2:
        return None
    ffn = arguments.number("--moe-intermediate-size") or arguments.number("--moe-ffn-hidden-size")
    ffn = ffn or sizes.ffn_size(arguments)
    shared = arguments.number("--moe-shared-expert-intermediate-size") or ffn * (arguments.number("--n-shared-experts") or 0)
    front, every = _mixed_layers(arguments)
    capacity = arguments.text("--moe-expert-capacity-factor")
    return ExpertShape(
        number=number,
        topk=arguments.number("--moe-router-topk") or arguments.number("--moe-topk") or 2,
        ffn=ffn,
        shared_ffn=shared,
        dense_in_front=front,
        every=every,
        capacity=_factor(capacity) if capacity else None,
    )


def _factor(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--moe-expert-capacity-factor expects a number and got '{text}'.") from None


def _mixed_layers(arguments: Arguments) -> tuple[int, int]:
    """Dense layers in front, and the step between mixtures. MindSpeed-LLM mixes only if both of its flags are there and not
    0, and -1 means every layer (core/transformer/transformer_block.py); Megatron's `--moe-layer-freq` may be a pattern."""
    # `first_k_dense_replace`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/core/transformer/transformer_block.py#L114
    frequency = arguments.text("--moe-layer-freq") or "1"
    pattern = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", frequency.replace(" ", ""))
    if pattern:
        return int(pattern[1]), 1
    if not re.fullmatch(r"-?\d+", frequency):
        raise UsageError(f"--moe-layer-freq {frequency}: a number, or [0]*a+[1]*b, is what a prediction understands.")
    front, every = arguments.number("--first-k-dense-replace"), int(frequency)
    if arguments.has("--first-k-dense-replace") and not (front and arguments.has("--moe-layer-freq") and every):
        return 0, 1
    return max(0, front or 0), max(1, every)


def _latent(arguments: Arguments) -> LatentShape | None:
    # `MLAFeature`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/features_manager/transformer/multi_latent_attention/mla_feature.py#L4
    if not arguments.has_any(("--multi-latent-attention", "--multi-head-latent-attention")):
        return None
    return LatentShape(
        query_rank=arguments.number("--q-lora-rank") or 0,
        key_rank=arguments.positive("--kv-lora-rank", 512),
        nope=arguments.number("--qk-head-dim") or arguments.number("--qk-nope-head-dim") or 128,
        rope=arguments.number("--qk-pos-emb-head-dim") or arguments.number("--qk-rope-head-dim") or 64,
        value=arguments.positive("--v-head-dim", 128),
    )
