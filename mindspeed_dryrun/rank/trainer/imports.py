"""Everything that the embedded trainer imports, whatever job it will run: a warm server does this once for many ranks."""

from __future__ import annotations

import functools
import gc

from mindspeed_dryrun.rank.trainer import compatibility


@functools.cache
def load() -> None:
    """Imports torch (MSAdapter's), megatron-core and the trainer's own modules, with what stands for MindSpeed in place.

    Once in a process: what is replaced must not be replaced a second time.
    """
    # A quarter of a million objects come and stay: looking through them for garbage again and again takes a tenth of the time.
    gc.disable()
    try:
        compatibility.before_import()
        import torch  # noqa: F401

        compatibility.after_import()
        from mindspeed_dryrun.rank.trainer import layers, loop, model, optimizer, process_groups  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
