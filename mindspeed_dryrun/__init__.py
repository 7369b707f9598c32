"""Dry runs of MindSpeed-LLM training scripts: every rank's peak memory, no NPU needed.

`dry_run`, `compare` and `search` are the Python interface. They are imported when they are first used: a rank imports this
package too, and must load the standard library only.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is an import long enough to be interrupted, before there is anything to handle it
if TYPE_CHECKING:
    from typing import Any

    from mindspeed_dryrun import search
    from mindspeed_dryrun.api import compare, dry_run

__all__ = ["__version__", "compare", "dry_run", "search"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ("compare", "dry_run", "search"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"{__name__}.{'search' if name == 'search' else 'api'}")
    return module if name == "search" else getattr(module, name)
