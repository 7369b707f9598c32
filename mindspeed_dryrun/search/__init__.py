"""The fastest parallel strategy that fits.

The package itself can be called: `from mindspeed_dryrun import search` finds a package of that name, whoever imported it first,
and `search(FILE)` must run a search either way.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_dryrun.search.search import SearchResult


class _CallablePackage(ModuleType):
    def __call__(self, file: str | Path, out: str | Path | None = None) -> SearchResult:
        """Runs a search file; `winners` of the result fit by dry run, the fastest first. Results are written to `out`."""
        from mindspeed_dryrun.search.run_search import run_search

        return run_search(Path(file), Path(out or f"search-{Path(file).stem}")).result


sys.modules[__name__].__class__ = _CallablePackage
