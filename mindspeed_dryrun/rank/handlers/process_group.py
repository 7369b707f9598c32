"""MSAdapter's process group in simulation, where msrun starts no scheduler and sets no MS_ROLE."""

from __future__ import annotations

import functools
import inspect
import os
import socket
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.rank import callback_pause, mindspore_rank

ROLE = "MS_ROLE"


def init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives it a `tcp://` init method, and lets it believe that msrun started it.

    Without MS_ROLE MSAdapter starts a scheduler of its own; with it MindSpore looks for one. So the role is there for
    MSAdapter's question and gone before MindSpore's initialisation asks.
    """
    names = inspect.unwrap(original).__globals__

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The last moment before devices are opened; the trainer may have changed the environment.
        mindspore_rank.check_simulation()
        if len(args) < 2 and kwargs.get("init_method") is None:
            kwargs["init_method"] = f"tcp://127.0.0.1:{_free_port()}"
        start_engine = names["init"]

        @functools.wraps(start_engine)
        def start_without_role(*arguments: Any, **options: Any) -> Any:
            os.environ.pop(ROLE, None)
            return start_engine(*arguments, **options)

        names["init"] = start_without_role
        os.environ[ROLE] = "MS_WORKER"
        try:
            result = original(*args, **kwargs)
        finally:
            os.environ.pop(ROLE, None)
            names["init"] = start_engine
        callback_pause.rest_actors()
        return result

    return call


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
