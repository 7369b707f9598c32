"""Workspace of the embedding's gradient, by the public host code of CANN for Ascend 910B (hicann/ops-nn, branch 8.5.0,
index/embedding_dense_grad_v2/op_host). What the sort of the tokens keeps for itself is not public, and not counted.
"""

from __future__ import annotations

from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned
from mindspeed_dryrun.rank.torch_npu.objects import FLOAT32, INT32, tensor_of
from mindspeed_dryrun.rank.torch_npu.workspace import SYSTEM, deterministic, rounded_up, vector_cores, workspace

_LARGE, _FEW_ROWS = 100 << 20, 512  # MEMORY_THRESHOLD and GRAD_ROW_LIMIT
_NARROW, _MANY_ROWS = 512, 1 << 24  # SMALL_DIM_THRESHOLD and CAST_MAX_NUM
_WIDEST = 10992  # columns that a core sums up at once, in halves: CalMaxFormerNum with 192 KiB


@workspace("ppQQbp", "aclnnEmbeddingDenseBackward")
def embedding(gradient: int, indices: int, rows: int, padding: int, by_frequency: bool, output: int) -> int:
    """index/embedding_dense_grad_v2/op_host: tokens in 32 bits, sorted; a small gradient summed up in float32."""
    source, result, tokens = tensor_of(gradient), tensor_of(output), tensor_of(indices)
    if not source or not result or not source.elements:
        return 0
    width = source.shape[-1]
    count = source.elements // width
    size = 0 if source.contiguous else aligned(source.size)
    few = 2 * (source.elements + result.elements) < _LARGE or count < _FEW_ROWS
    widened = source.dtype != FLOAT32 and (few or by_frequency)
    if widened:
        size += aligned(4 * source.elements) + aligned(4 * result.elements)
    kernel = aligned(_kernel(width, rows, source.dtype == FLOAT32 or widened, by_frequency))
    narrowed = 0 if tokens and tokens.dtype == INT32 else aligned(4 * count)
    if _narrow(width, rows):
        return size + narrowed + kernel
    return size + max(narrowed, kernel) + 2 * aligned(4 * count)  # the kernel's takes the place of the tokens before the sort


def _kernel(width: int, rows: int, in_float: bool, by_frequency: bool) -> int:
    """`CalcWorkSpaceSize`, embedding_dense_grad_v2_tiling.cpp:224."""
    size = SYSTEM + (4 * rounded_up(rows, 8) if by_frequency else 0)
    if in_float:
        return size
    if _narrow(width, rows):
        return size + 4 * rows * width
    return size + 2 * vector_cores() * 4 * (min(width, _WIDEST) + 1)


def _narrow(width: int, rows: int) -> bool:
    return width <= _NARROW and rows <= _MANY_ROWS and not deterministic()
