"""What every Megatron trainer of a script's own imports, whatever its arguments are: a warm server does this once for many ranks.

MindSpeed reads the arguments when it is imported, and patches the rest by them: it is each rank's own to import. So are
libraries that read at their import where they may write (transformers, datasets): each rank has its own place for that.
"""

from __future__ import annotations

import contextlib
import importlib

_FRAMEWORK = ("torch", "torch_npu")
_LARGE = ("sklearn.metrics",)  # with scipy and pandas: what transformers imports where they are installed


def load() -> None:
    """Imports the framework and what is large beside it; what is not installed is not missed."""
    for name in (*_FRAMEWORK, *_LARGE):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
