"""The training loop: that it trains, that finished iterations are counted, that it touches no file of the user's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.megatron.flags import FLAGS, with_tag
from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank import collector, progress

# Attributes of parsed arguments that are not named after a flag of their own, or that are not simply switched off.
_QUIET = {"enable_one_logger": False, "num_workers": 0}


def _quiet_values() -> dict[str, Any]:
    """Parsed arguments that make a trainer read or write files, with the value that keeps it from it."""
    named = {FLAGS[name].key: None if FLAGS[name].takes else False for name in with_tag("input", "output")}
    return named | _QUIET


def parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Parsed arguments without checkpoints, data sets, logs and profiles."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        for name, value in _quiet_values().items():
            if hasattr(parsed, name):
                setattr(parsed, name, value)
        if getattr(parsed, "padded_vocab_size", None) or getattr(parsed, "vocab_size", None):
            parsed.tokenizer_name_or_path = None  # its place is taken by a tokenizer of that size
        if hasattr(parsed, "data_cache_path"):
            parsed.data_cache_path = os.path.join(config.current().scratch, "data_cache")
        return parsed

    return call


def build_train_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """`do_train` is decided before the data flags are read back from the device, where they are 0 in simulation."""

    @functools.wraps(original)
    def call(args: Any, *rest: Any) -> Any:
        if os.environ.get("MS_DRY_RUN") == "1":
            args.do_train = True
        progress.phase("building")
        return original(args, *rest)

    return call


def train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Counts an iteration when forward, backward and optimizer step have returned."""
    finished = 0

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal finished
        if not finished:
            collector.collect()
        result = original(*args, **kwargs)
        finished += 1
        progress.iteration(finished, config.current().iterations)
        if finished == config.current().iterations:
            collector.look()
        return result

    return call


def times_of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """No times for the log where they cannot be told from those of ranks that took none."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if "depends on the actual execution" not in str(error):
                raise
            return {}

    return call


def clipped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients are scaled down: a norm above the limit in place of the one that reads as zero."""

    @functools.wraps(original)
    def call(parameters: Any, max_norm: float, total_norm: float, *args: Any, **options: Any) -> Any:
        return original(parameters, max_norm, max(total_norm, 2.0 * max_norm), *args, **options)

    return call
