"""A tokenizer that needs no files: a dry run needs its vocabulary's size and its special ids, nothing else."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.errors import DryRunError


class SizedTokenizer:
    """Knows how many tokens there are; `tokenizer` inside it can pad, as the collators of fine-tuning ask."""

    chat_template = None
    eod = eos = pad = 0
    bos = 1
    eos_token_id = eod_token_id = pad_token_id = unk_token_id = 0
    bos_token_id = 1
    additional_special_tokens_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.unique_identifiers = OrderedDict({"class": type(self).__name__, "vocab_size": vocab_size})

    @functools.cached_property
    def tokenizer(self) -> Any:
        """A tokenizer of the transformers library with two tokens; made only where somebody asks for it."""
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        words = models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>")
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words),
            pad_token="<pad>",
            unk_token="<unk>",
            eos_token="<pad>",
            bos_token="<unk>",
        )

    def __len__(self) -> int:
        return self.vocab_size

    def tokenize(self, text: str) -> list[int]:
        return [1]


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
        except DryRunError:
            raise
        except Exception as error:
            raise DryRunError(
                f"The size of the vocabulary is unknown: the tokenizer cannot be loaded ({error}). "
                f"Add `-- --padded-vocab-size N` to the command."
            ) from error

    return call
