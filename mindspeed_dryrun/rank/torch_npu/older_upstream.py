"""Where an older MindSpeed and today's torch do not agree on a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def without_arguments(original: Callable[[], Any]) -> Callable[..., Any]:
    """A function that upstream wrote without parameters in place of one of torch's that has some."""

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return original()

    return call
