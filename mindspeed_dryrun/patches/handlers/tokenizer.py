"""A tokenizer that needs no files: a dry run needs its vocabulary's size and its special ids, nothing else."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.errors import DryRunError


class SizedTokenizer:
    """Knows how many tokens there are."""

    chat_template = None
    padding_side = "right"
    eod = eos = eos_token_id = eod_token_id = 0
    bos = bos_token_id = 1
    pad = pad_token_id = 0
    unk_token_id = 0
    additional_special_tokens_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.unique_identifiers = OrderedDict({"class": type(self).__name__, "vocab_size": vocab_size})
        self.tokenizer = self

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, **options: Any) -> list[int]:
        return [2]

    tokenize = encode

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return 2 if isinstance(tokens, str) else [2] * len(tokens)


def build_tokenizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `SizedTokenizer` where the arguments say how large the vocabulary is; the real one only where they do not."""

    @functools.wraps(original)
    def call(args: Any, *rest: Any, **kwargs: Any) -> Any:
        padded = getattr(args, "padded_vocab_size", None)
        size = padded or getattr(args, "vocab_size", None)
        if size:
            if not padded:
                multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
                args.padded_vocab_size = math.ceil(size / multiple) * multiple
            return SizedTokenizer(int(size))
        try:
            return original(args, *rest, **kwargs)
        except Exception as error:
            raise DryRunError(
                f"The size of the vocabulary is unknown: the tokenizer cannot be loaded ({error}). "
                f"Add `-- --padded-vocab-size N` to the command."
            ) from error

    return call
