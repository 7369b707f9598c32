"""Graph mode: on small machines it gets the threads it needs; at O2 it is refused on the stand-in, before it crashes.

O2 hands the whole graph to GE, which is a part of CANN.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.rank.activation import STAND_IN_LIBRARY

_REFUSAL = "Graph mode {} compiles with GE, which only a real CANN has. Use jit_level O0 or O1, or an Ascend host."


def on_stand_in() -> bool:
    """Is the CANN of this process the generated one?"""
    return Path(os.environ.get("ASCEND_HOME_PATH", ""), "lib64", STAND_IN_LIBRARY).exists()


def set_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses `jit_config={"jit_level": "O2"}`."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_o2((kwargs.get("jit_config") or {}).get("jit_level"))
        return original(*args, **kwargs)

    return call


def jit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses `@jit(backend="GE")` and `@jit(jit_level="O2")`."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_o2(kwargs.get("jit_level"))
        if kwargs.get("backend") == "GE" and on_stand_in():
            raise DryRunError(message(_REFUSAL).format('with backend="GE"'))
        return original(*args, **kwargs)

    return call


def _refuse_o2(jit_level: object) -> None:
    if jit_level == "O2" and on_stand_in():
        raise DryRunError(message(_REFUSAL).format("O2"))


# -- threads ---------------------------------------------------------------------------------------------------------

CORES_FOR_TWO_THREADS = 12  # below it MindSpore's own choice is a single dispatch thread


def enough_threads() -> None:
    """Two dispatch threads: with one MindSpore cannot build a graph that has a condition inside. Figures do not change."""
    import mindspore

    if (os.cpu_count() or 1) < CORES_FOR_TWO_THREADS:
        mindspore.runtime.dispatch_threads_num(2)


def dispatch_threads_num(original: Callable[..., Any]) -> Callable[..., Any]:
    """The program's own choice, which MindSpore refuses when there has been one already, is left out then."""
    chosen = False

    @functools.wraps(original)
    def call(threads_num: int) -> Any:
        nonlocal chosen
        if chosen:
            return None
        chosen = True
        return original(threads_num)

    return call
