"""What every trainer of a script's own imports, whatever its arguments are: a warm server does this once for many ranks.

MindSpeed reads the arguments when it is imported, and patches the rest by them: it is each rank's own to import. So are
libraries that read at their import where they may write (transformers, datasets): each rank has its own place for that.
"""

from __future__ import annotations

import contextlib
import importlib

from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank.engine import TORCH_NPU

_FRAMEWORK = ("torch", "torch_npu")
_LARGE = ("sklearn.metrics",)  # with scipy and pandas: what transformers imports where they are installed
_COMPILER = ("torch._inductor.compile_fx",)  # torch_npu.contrib.transfer_to_npu, MindSpeed's first import; MSAdapter has none


def load() -> None:
    """Imports the framework and what is large beside it; what is not installed is not missed."""
    compiler = _COMPILER if config.current().engine == TORCH_NPU else ()
    for name in (*_FRAMEWORK, *compiler, *_LARGE):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
