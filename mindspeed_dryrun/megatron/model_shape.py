"""The model and the batch, read from the trainer's arguments: what memory and time are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dryrun.errors import UsageError

# Flags that make the parameters or the optimizer hold less than Megatron's mixed precision does. With one of them the
# lower bound of memory counts the weights alone.
_SMALLER_STATES = (
    "--use-precision-aware-optimizer",
    "--swap-optimizer",
    "--swap-attention",
    "--optimizer-cpu-offload",
    "--use-torch-fsdp2",
    "--use-custom-fsdp",
    "--fp8-format",
    "--lora-r",
    "--lora-target-modules",
    "--grad-reduce-in-bf16",
    "--low-memory",
)
# Flags that keep less of a layer's activations than plain training: with one of them the bound counts none.
_FEWER_ACTIVATIONS = (
    "--recompute-activation-function",
    "--recompute-norm",
    "--recompute-in-advance",
    "--recompute-in-bubble",
    "--adaptive-memory-optimization",
    "--adaptive-recompute-device-size",
    "--cpu-offloading-num-layers",
    "--fp8-format",
    "--lora-r",
    "--smart-swap",
    "--swap-attention",
    "--use-nanopipe-swap",
)


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


def value_of(args: Sequence[str], flag: str) -> str | None:
    """The last value of `flag` (`--flag value` or `--flag=value`), as argparse would take it."""
    found = None
    for index, word in enumerate(args):
        if word == flag and index + 1 < len(args):
            found = args[index + 1]
        elif word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
    return found


def read_shape(args: Sequence[str]) -> ModelShape:
    """The shape behind a trainer's arguments; `UsageError` names the flag that is missing or not supported here."""
    experts = value_of(args, "--num-experts")
    if experts and experts not in ("0", "1"):
        raise UsageError(
            "The script trains a mixture of experts (--num-experts): search models dense models only. "
            "`mindspeed-dryrun sweep` takes any script."
        )
    if _has_any(args, ("--multi-latent-attention", "--multi-head-latent-attention")):
        raise UsageError(
            "The script trains with multi-latent attention: search models plain and grouped attention only. "
            "`mindspeed-dryrun sweep` takes any script."
        )
    hidden, heads = _integer(args, "--hidden-size"), _integer(args, "--num-attention-heads")
    noop = value_of(args, "--noop-layers")
    head_dim = int(value_of(args, "--kv-channels") or hidden // heads)
    groups = int(value_of(args, "--num-query-groups") or heads) if "--group-query-attention" in args else heads
    vocab = value_of(args, "--padded-vocab-size") or value_of(args, "--vocab-size")
    if vocab is None:
        raise UsageError("The script sets neither --padded-vocab-size nor --vocab-size: add one of them under 'args'.")
    gated = _has_any(args, ("--swiglu", "--geglu", "--gelu-tanh"))
    return ModelShape(
        layers=_integer(args, "--num-layers") - (len(set(noop.split(","))) if noop else 0),
        hidden=hidden,
        ffn=int(value_of(args, "--ffn-hidden-size") or 4 * hidden),
        heads=heads,
        query_groups=groups,
        head_dim=head_dim,
        vocab=int(vocab),
        gated=gated,
        tied="--untie-embeddings-and-output-weights" not in args,
        seq=_integer(args, "--seq-length"),
        global_batch=_integer(args, "--global-batch-size"),
        full_states="--bf16" in args
        and (value_of(args, "--optimizer") or "adam") == "adam"
        and not _has_any(args, _SMALLER_STATES),
        shared_master="--reuse-fp32-param" in args,
        full_activations=not _has_any(args, _FEWER_ACTIVATIONS),
        qk_norm="--qk-layernorm" in args,
    )


def _has_any(args: Sequence[str], flags: Sequence[str]) -> bool:
    return any(word.split("=")[0] in flags for word in args)


def _integer(args: Sequence[str], flag: str) -> int:
    value = value_of(args, flag)
    if value is None:
        raise UsageError(f"The script does not set {flag}: a search needs it.")
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{flag} is '{value}' in the script: a search needs a whole number.") from None
