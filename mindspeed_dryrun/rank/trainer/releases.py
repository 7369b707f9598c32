"""The release of MindSpeed-LLM that this trainer stands for: a few layers allocate differently from one to the next."""

from __future__ import annotations

from mindspeed_dryrun.rank import activation, installed


def since(release: str) -> bool:
    """Whether it is not older than `release`. Where the script's MindSpeed-LLM is not here, it counts as new."""
    return installed.number(activation.current().release or installed.MASTER) >= installed.number(release)
