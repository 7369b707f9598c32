"""What the trainer has dropped before training begins, and only the garbage collector frees: objects that refer to themselves.

When the collector looks at all objects depends on how many a process has made, and a real process makes more than a dry run: it
reads a tokenizer, data and checkpoints. So a dry run lets it look once, before the first iteration, and says how much went. On
upstream's own CI that is what the NPU shows: the experts that LongCat builds twice are gone after one iteration, to the kilobyte
(docs/real_npu.md).
"""

from __future__ import annotations

import gc
from typing import Any

from mindspeed_dryrun.rank.engine import rank_engine

_WORTH_SAYING = 1 << 20  # bytes
_freed = 0
_waiting = 0


def collect() -> None:
    """Before the first iteration. In a forked rank, too, all objects count from here on, as in a process of its own."""
    global _freed
    gc.unfreeze()
    before = rank_engine().allocated()
    gc.collect()
    _freed += max(0, before - rank_engine().allocated())


def look() -> None:
    """After the last iteration: what the iterations left behind, which a long run adds to until the collector gets there."""
    global _waiting
    before = rank_engine().allocated()
    gc.collect()
    _waiting = max(0, before - rank_engine().allocated())


def told() -> dict[str, Any]:
    """What is said of it at the end: megabytes, where it is worth a word."""
    sizes = {"collected_mb": _freed, "uncollected_mb": _waiting}
    return {name: round(size / 2**20) for name, size in sizes.items() if size >= _WORTH_SAYING}
