"""Sizes that Megatron derives from other flags. Rules of Megatron-LM core_v0.12.1, megatron/training/arguments.py."""

from __future__ import annotations

import math

from mindspeed_dryrun.megatron.arguments import Arguments

# MindSpeed-LLM's `--geglu` and `--gelu-tanh` make a gated unit of the MLP, as `--swiglu` does.
# `geglu`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/arguments.py#L545
GATED = ("--swiglu", "--geglu", "--gelu-tanh")
# Mixed precision: 16-bit weights, 32-bit gradients, and 32-bit main weights with two Adam moments.
# `shard_fp32_from_float16_groups`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/optimizer/distrib_optimizer.py#L309
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
# `--reuse-fp32-param`: a main weight is its 16-bit weight and 16 bits of residual.
# `reuse_fp32_param_distrib_optimizer_init_wrapper`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/memory/reuse_param/adaptor.py#L93
SHARED_MAIN_WEIGHT_BYTES = 2


def padded_vocabulary(size: int, divisible_by: int, tp: int) -> int:
    """The vocabulary with the rows that make it divisible over tensor-parallel ranks."""
    # `_vocab_size_with_padding`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/tokenizer/tokenizer.py#L109
    multiple = divisible_by * tp
    return math.ceil(size / multiple) * multiple


def read_padded_vocabulary(arguments: Arguments, tp: int) -> int | None:
    """The vocabulary that the arguments name; None where only the tokenizer knows it."""
    padded = arguments.number("--padded-vocab-size")
    if padded:
        return padded
    size = arguments.number("--vocab-size")
    return padded_vocabulary(size, arguments.positive("--make-vocab-size-divisible-by", 128), tp) if size else None


def is_gated(arguments: Arguments) -> bool:
    """The MLP has a gate: its first product is twice as wide."""
    return arguments.has_any(GATED)


def ffn_size(arguments: Arguments) -> int:
    """The width of the MLP: as given, else four times the hidden size, or two thirds of it for SwiGLU."""
    # `args.ffn_hidden_size = int(`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L675
    given = arguments.number("--ffn-hidden-size")
    if given:
        return given
    hidden = arguments.positive("--hidden-size", 1)
    return int(4 * hidden * 2 / 3 / 64) * 64 if arguments.has("--swiglu") else 4 * hidden


def head_size(arguments: Arguments) -> int:
    """The width of one attention head."""
    # `args.kv_channels = `: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L681
    hidden, heads = arguments.positive("--hidden-size", 1), arguments.positive("--num-attention-heads", 1)
    return arguments.number("--kv-channels") or hidden // heads


def query_groups(arguments: Arguments) -> int:
    """Heads of keys and values."""
    # `kw_args['num_query_groups']`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L1035
    heads = arguments.positive("--num-attention-heads", 1)
    groups = arguments.number("--num-query-groups") if arguments.has("--group-query-attention") else None
    return groups or heads


def recompute_granularity(arguments: Arguments) -> str | None:
    """`full`, `selective` or None; `--recompute-activations` means selective, whatever else is said."""
    # `recompute_activations`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L379
    return "selective" if arguments.has("--recompute-activations") else arguments.text("--recompute-granularity")


def recompute_words(arguments: Arguments) -> str | None:
    """`full uniform 1`, `selective`, or None."""
    granularity = recompute_granularity(arguments)
    if granularity is None:
        return None
    more = (arguments.text("--recompute-method"), arguments.text("--recompute-num-layers"))
    return " ".join(word for word in (granularity, *more) if word)
