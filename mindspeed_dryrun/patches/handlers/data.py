"""Samples without a data set: their shapes are the script's, their values are nobody's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def sample_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Indices of Megatron's mock data set in which each sample is one token and padding up to the sequence length.

    The real ones need helpers in C++ that Megatron compiles inside its own source tree.
    """

    @functools.wraps(original)
    def call(self: Any) -> Any:
        import numpy

        samples = max(self.num_samples or 1, 1)
        document_index = numpy.zeros(1, dtype=numpy.int32)
        sample_index = numpy.zeros((samples + 1, 2), dtype=numpy.int32)
        return document_index, sample_index, numpy.arange(samples, dtype=numpy.uint32)

    return call
