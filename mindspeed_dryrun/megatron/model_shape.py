"""The model and the batch, read from the trainer's arguments: what memory and time are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron import sizes
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.flags import with_tag


@dataclass(frozen=True)
class ModelShape:
    """A dense GPT as Megatron's flags describe it, with the batch of one iteration."""

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

    @property
    def layer_parameters(self) -> int:
        """Matrices of one layer; biases and norms are left out (they are thousandths)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.query_groups)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def vocabulary_parameters(self) -> int:
        """The embedding table, and as many again in an untied output layer."""
        return self.vocab * self.hidden

    def iteration_flops(self, noop_layers: int = 0, causal: bool = True) -> float:
        """Floating-point operations of one iteration as Megatron counts them: three times the forward pass, causal
        attention at half, no recomputation. Its older releases count attention in full, and no-op layers."""
        attention = 6.0 * self.seq * self.heads * self.head_dim * (1 if causal else 2)
        tokens = float(self.global_batch) * self.seq
        layers = (self.layers + noop_layers) * (6.0 * self.layer_parameters + attention)
        return tokens * (layers + 6.0 * self.vocabulary_parameters)


def read_shape(args: Sequence[str]) -> ModelShape:
    """The shape behind a trainer's arguments; `UsageError` names the flag that is missing or not supported here."""
    arguments = Arguments(tuple(args))
    if (arguments.number("--num-experts") or 0) > 1:
        raise UsageError(
            "The script trains a mixture of experts (--num-experts): search models dense models only. "
            "`mindspeed-dryrun sweep` takes any script."
        )
    if arguments.has_any(("--multi-latent-attention", "--multi-head-latent-attention")):
        raise UsageError(
            "The script trains with multi-latent attention: search models plain and grouped attention only. "
            "`mindspeed-dryrun sweep` takes any script."
        )
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--global-batch-size"):
        if not arguments.has(flag):
            raise UsageError(f"The script does not set {flag}: a search needs it.")
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
    )
