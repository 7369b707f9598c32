"""How many tokens the tokenizers of public models have, for scripts whose tokenizer is not on this machine.

Each is `vocab_size` of the model's own config.json at huggingface.co, but for the two that say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mindspeed_dryrun.megatron.arguments import Arguments

# What a folder's name contains, in small letters and digits only → tokens. The first that fits counts.
_PUBLIC = {
    "llama3": 128256,  # meta-llama/Meta-Llama-3-8B
    "baichuan2": 125696,  # baichuan-inc/Baichuan2-13B-Base
    "mamba2": 256000,  # nvidia/mamba2-8b-3t-4k: its SentencePiece model; MindSpeed-LLM's 2.7B jobs use it, too
    "gemma": 256000,  # google/gemma-2-9b
    "glm4": 151552,  # THUDM/glm-4-9b
    "chatglm3": 65024,  # THUDM/chatglm3-6b-base
    "internlm3": 128512,  # internlm/internlm3-8b-instruct
    "internlm2": 92544,  # internlm/internlm2-7b
    "qwen": 151936,  # Qwen/Qwen-7B, Qwen2-0.5B, Qwen3-8B; larger Qwen2 are padded further
    "deepseekv3": 129280,  # deepseek-ai/DeepSeek-V3
    "deepseekv2": 102400,  # deepseek-ai/DeepSeek-V2
    "minicpm": 122753,  # openbmb/MiniCPM-2B-sft-bf16
    "phi35": 32064,  # microsoft/Phi-3.5-MoE-instruct
    "bloom": 250880,  # bigscience/bloom-7b1
}
_BY_TYPE = {"GPT2BPETokenizer": 50257}  # GPT-2's own vocabulary, which Megatron names by type (openai-community/gpt2)
_FLAGS = ("--tokenizer-name-or-path", "--tokenizer-model")


def public_vocabulary(arguments: Arguments) -> tuple[str, int] | None:
    """The public model that the tokenizer's place or type speaks of, and its tokens; None where it names none."""
    for flag in _FLAGS:
        found = model_named("/".join(arguments.values.get(flag, ())[:1]), _PUBLIC)
        if found:
            return found, _PUBLIC[found]
    kind = " ".join(arguments.values.get("--tokenizer-type", ())[:1])
    return (kind, _BY_TYPE[kind]) if kind in _BY_TYPE else None


def model_named(place: str, known: Iterable[str]) -> str | None:
    """The first of these models whose name is in that of the folder; None where it names none.

    The last folders say it; those above are a machine's own, and may be named after anything.
    """
    known = list(known)
    for part in reversed([_plain(part) for part in place.rstrip("/").split("/")][-3:]):
        for model in known:
            if _plain(model) in part:
                return model
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
