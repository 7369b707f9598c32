"""Operators that MindSpeed compiles against NNAL (ATB, LCAL), a package beside CANN that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.errors import DryRunError

# They write into tensors that the caller has made, and return nothing (mindspeed/ops/npu_matmul_add.py, npu_groupmatmul_add.py,
# lcal_functional.py). What they need inside is not known, and is listed as not counted.
_IN_PLACE = ("npu_matmul_add_fp32", "npu_groupmatmul_add_fp32", "all_gather_matmul", "all_gather_matmul_v2", "matmul_all_reduce",
             "matmul_reduce_scatter", "pure_matmul", "all_gather_matmul_reduce_scatter")  # fmt: skip


class OperatorsInPlace:
    """What a builder's `load` gives: functions that leave their outputs as they are."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _IN_PLACE:
            return lambda *args, **options: None
        if name.startswith("__"):
            raise AttributeError(name)
        raise DryRunError(f"This script uses {name} of NNAL (ATB), whose outputs a dry run does not know. Turn its flag off.")


def load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AtbOpBuilder.load` without a compiler and without NNAL."""
    return lambda *args, **options: OperatorsInPlace()
