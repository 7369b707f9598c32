"""Operators that MindSpeed compiles against NNAL (ATB, LCAL), a package beside CANN that is not there.

They write into tensors that the caller has made, and return nothing (mindspeed/ops/npu_matmul_add.py, npu_groupmatmul_add.py,
lcal_functional.py). What they take for a moment is known: copies of strided inputs, and ATB's workspace, both from the caching
allocator in any mode (mindspeed/ops/csrc/atb/utils/atb_adapter.cpp, `ParamSetter::Input` and `RunAtbCmd`). The workspace is by
ATB's public host code for CANN 8.5.0 (hicann/ascend-transformer-boost, branch br_release_cann_8.5.0_20260527).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank.torch_npu import workspace

_ALIGNED = 512  # bytes: WORKSPACE_ALIGN (operation_base.cpp:36), and ALIGN_BYTES of a row (lcoc_args.h:23)
_LONGEST = 65535  # columns: MATMUL_TRANSPOSE_THRESHOLD (linear_ops_runner.cpp:27)


def product_added(x: Any, weight: Any, total: Any) -> int:
    """`npu_matmul_add_fp32`: src/ops/ops_infer/linear/linear_ops_runner.cpp:456: gradients of many columns are transposed."""
    wide = x.dim() == 2 and x.size(1) > _LONGEST
    return workspace.rounded_up(x.numel() * x.element_size(), _ALIGNED) if wide else 0


def grouped_product_added(*inputs: Any) -> int:
    """`npu_groupmatmul_add_fp32`: src/kernels/mixkernels/gmm_add/tiling/gmm_add_tiling.cpp:249."""
    return 0


def fused_with_collective(x: Any, weight: Any, *rest: Any) -> int:
    """`Lcoc::GetWorkspaceSize` (src/kernels/lcal/src/lcoc.cpp:391): operands whose rows do not begin at 512 bytes are copied."""
    terms, each = x.size(-1), x.element_size()
    inner = weight.size(1) if terms == weight.size(0) else terms  # of the weight, as it lies
    operands = ((x.numel() // terms, terms * each), (weight.size(0), inner * each))
    return sum(count * workspace.rounded_up(row, _ALIGNED) for count, row in operands if row % _ALIGNED)


FORMULAS: dict[str, tuple[int, Callable[..., int]]] = {  # with the number of inputs
    "npu_matmul_add_fp32": (3, product_added),
    "npu_groupmatmul_add_fp32": (4, grouped_product_added),
    **dict.fromkeys(("all_gather_matmul", "all_gather_matmul_v2", "matmul_all_reduce", "matmul_reduce_scatter", "pure_matmul",
                     "all_gather_matmul_reduce_scatter"), (3, fused_with_collective)),
}  # fmt: skip


class OperatorsInPlace:
    """What a builder's `load` gives: functions that leave their outputs as they are."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in FORMULAS:
            return functools.partial(_run, name, *FORMULAS[name])
        if name.startswith("__"):
            raise AttributeError(name)
        raise DryRunError(f"This script uses {name} of NNAL (ATB), whose outputs a dry run does not know. Turn its flag off.")


def _run(name: str, count: int, size_of: Callable[..., int], *arguments: Any, **options: Any) -> None:
    for tensor in arguments[:count]:
        if tensor is not None:
            tensor.contiguous()  # and given back before the operator runs
    size = workspace.rounded_up(size_of(*arguments), _ALIGNED)
    workspace.note(name, size)
    if size:
        import torch

        arguments[0].new_empty(size, dtype=torch.uint8)


def load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AtbOpBuilder.load` without a compiler and without NNAL."""
    return lambda *args, **options: OperatorsInPlace()
