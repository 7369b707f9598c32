"""Workspace of the embedding's gradient, by the public host code of CANN for Ascend 910B."""

from __future__ import annotations

from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned
from mindspeed_dryrun.rank.torch_npu.objects import FLOAT32, INT32, TensorOnDevice, described
from mindspeed_dryrun.rank.torch_npu.workspace import deterministic, workspace

_LARGE, _FEW_ROWS = 100 << 20, 512  # MEMORY_THRESHOLD and GRAD_ROW_LIMIT
_NARROW, _MANY_ROWS = 512, 1 << 24  # SMALL_DIM_THRESHOLD and CAST_MAX_NUM
_SYSTEM, _VECTOR_CORES = 16 << 20, 48


@workspace("ppQQbp", "aclnnEmbeddingDenseBackward")
def embedding(gradient: int, indices: int, rows: int, padding: int, by_frequency: bool, output: int) -> int:
    """ops-nn, branch 8.5.0, index/embedding_dense_grad_v2/op_host/op_api/aclnn_embedding_dense_backward.cpp:230 and 303."""
    source, result = described(gradient), described(output)
    if not isinstance(source, TensorOnDevice) or not isinstance(result, TensorOnDevice) or not source.elements:
        return 0
    size = 0 if source.contiguous else aligned(source.size)
    columns = source.shape[-1]
    tokens = source.elements // columns
    small = 2 * (source.elements + result.elements) < _LARGE or tokens < _FEW_ROWS
    widened = source.dtype != FLOAT32 and (small or by_frequency)
    if widened:
        size += aligned(4 * source.elements) + aligned(4 * result.elements)
    chosen = described(indices)
    if isinstance(chosen, TensorOnDevice) and chosen.dtype != INT32:
        size += aligned(4 * tokens)
    narrow = columns <= _NARROW and rows <= _MANY_ROWS and not deterministic()
    if not narrow and tokens > 1:
        size += 2 * aligned(4 * tokens)  # the tokens in order, and where they were
    return size + _kernel(columns, rows, widened or source.dtype == FLOAT32, narrow)


def _kernel(columns: int, rows: int, full: bool, narrow: bool) -> int:
    """embedding_dense_grad_v2_tiling.cpp:224, `CalcWorkSpaceSize`, but for what the sort before it takes, which is not public."""
    if full:
        return _SYSTEM
    if narrow:
        return _SYSTEM + 4 * rows * columns
    return _SYSTEM + 2 * _VECTOR_CORES * 4 * (columns + 1)  # two rows of sums for each core, and whose they are
