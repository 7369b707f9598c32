"""Workspace of the embedding's gradient, by the public host code of CANN for Ascend 910B."""

from __future__ import annotations

from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned
from mindspeed_dryrun.rank.torch_npu.objects import FLOAT32, TensorOnDevice, described
from mindspeed_dryrun.rank.torch_npu.workspace import workspace

_LARGE, _FEW_ROWS = 100 << 20, 512  # MEMORY_THRESHOLD and GRAD_ROW_LIMIT


@workspace("ppQQbp", "aclnnEmbeddingDenseBackward")
def embedding(gradient: int, indices: int, rows: int, padding: int, by_frequency: bool, output: int) -> int:
    """ops-nn, branch 8.5.0, index/embedding_dense_grad_v2/op_host/op_api/aclnn_embedding_dense_backward.cpp:230 and 303."""
    source, result = described(gradient), described(output)
    if not isinstance(source, TensorOnDevice) or not isinstance(result, TensorOnDevice) or not source.elements:
        return 0
    size = 0 if source.contiguous else aligned(source.size)
    small = 2 * (source.elements + result.elements) < _LARGE or source.elements // source.shape[-1] < _FEW_ROWS
    if source.dtype != FLOAT32 and (small or by_frequency):
        size += aligned(4 * source.elements) + aligned(4 * result.elements)
    return size
