"""What a rank tells its launcher while it runs: one JSON object per line, appended to `progress.jsonl`.

Phases: `importing`, `building`, `iteration` (with `done` and `total`), `finished`. A rank whose trainer never
reports a finished iteration has trained nothing, whatever its exit status says.
"""

from __future__ import annotations

import json
import os
import time

from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank.engine import rank_engine


def phase(name: str, **fields: object) -> None:
    """Appends one line; costs a system call, and nothing at all outside a rank of ours."""
    path = config.current().progress
    if not path:
        return
    line = json.dumps({"phase": name, "time": time.time(), **fields}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def iteration(done: int, total: int) -> None:
    """An iteration (forward, backward and optimizer step) has really finished."""
    phase("iteration", done=done, total=total, **rank_engine().memory())
