"""Workspace of gradients that are added up in float32, by the public host code of CANN for Ascend 910B."""

from __future__ import annotations

from typing import Any

from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned
from mindspeed_dryrun.rank.torch_npu.objects import FLOAT32, TensorOnDevice, described
from mindspeed_dryrun.rank.torch_npu.workspace import workspace

_SYSTEM = 20 << 20  # WORKSPACE_BUFFER, flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp:84
_LARGE, _FEW_ROWS = 100 << 20, 512  # MEMORY_THRESHOLD and GRAD_ROW_LIMIT
_INPUTS = "p" * 13  # query … prefix


@workspace(_INPUTS + "ddqqqpqq" + "pppp", "aclnnFlashAttentionScoreGrad")
@workspace(_INPUTS + "ppddqqqpqqq" + "pppp", "aclnnFlashAttentionScoreGradV2")
@workspace(_INPUTS + "ppddqqqpqq" + "pppp", "aclnnFlashAttentionUnpaddingScoreGrad")
@workspace(_INPUTS + "ppppddqqqpqqq" + "pppp", "aclnnFlashAttentionUnpaddingScoreGradV2")
def attention(*parameters: Any) -> int:
    """hicann/ops-transformer, attention/flash_attention_score_grad, `GetWorkspaceSize` of each of its tilings.

    The gradients of query, key and value in float32. The least there is: what each core keeps beside it depends on the tiling.
    """
    results = (described(handle) for handle in parameters[-4:-1])
    return _SYSTEM + sum(4 * tensor.elements for tensor in results if isinstance(tensor, TensorOnDevice))


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
