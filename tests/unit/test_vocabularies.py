"""Vocabularies of public models, by the name that a script gives its tokenizer."""

from __future__ import annotations

import pytest

from mindspeed_dryrun.launch.vocabularies import public_vocabulary
from mindspeed_dryrun.megatron.arguments import Arguments


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tokenizer-name-or-path /data/models/llama3/hf/llama-3-8b-hf/", ("llama3", 128256)),
        ("--tokenizer-name-or-path ./Meta-Llama-3.1-8B", ("llama3", 128256)),
        ("--tokenizer-model /models/baichuan2/hf/baichuan2-13B-hf/tokenizer.model", ("baichuan2", 125696)),
        ("--tokenizer-model /models/mamba2/hf/mamba2-2.7b-hf/mamba2_2.7b.model", ("mamba2", 256000)),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file x", ("GPT2BPETokenizer", 50257)),
        ("--tokenizer-model /models/llama2/hf/llama-2-7b-hf/tokenizer.model", None),
        ("--tokenizer-model /home/llama3-team/a/b/c/tokenizer.model", None),  # a folder far above says nothing
        ("--tokenizer-type Llama2Tokenizer", None),
    ],
)
def test_a_public_model_is_known_by_its_folder(words: str, expected: tuple[str, int] | None) -> None:
    assert public_vocabulary(Arguments(tuple(words.split()))) == expected
