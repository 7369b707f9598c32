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


def collect() -> None:
    """Before the first iteration. In a forked rank, too, all objects count from here on, as in a process of its own."""
    global _freed
    gc.unfreeze()
    before = rank_engine().allocated()
    gc.collect()
    _freed += max(0, before - rank_engine().allocated())


def told() -> dict[str, Any]:
    """What is said of it at the end: megabytes, where it is worth a word."""
    return {"collected_mb": round(_freed / 2**20)} if _freed >= _WORTH_SAYING else {}
