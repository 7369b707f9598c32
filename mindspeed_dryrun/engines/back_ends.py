"""The engine of a job: which one its launcher asks for, as it is installed here."""

from __future__ import annotations

from mindspeed_dryrun.engines.mindspore.engine import choose_engine
from mindspeed_dryrun.engines.protocol import Engine

# The engine of each back end of MindSpeed-LLM, for those who only need its name.
NAMES = {"mindspore": "mindspore", "torch": "torch_npu"}


def engine_for(back_end: str, level: int = 1) -> Engine:
    """`mindspore` or `torch`. `DryRunError` where that engine is not installed or cannot be used here."""
    if back_end != "torch":
        return choose_engine(level)
    from mindspeed_dryrun.engines.torch_npu.engine import choose_torch_engine

    return choose_torch_engine(level)
