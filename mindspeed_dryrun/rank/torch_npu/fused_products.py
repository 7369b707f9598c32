"""Workspace of products fused with a collective (MC2), by their public tilings (hicann/ops-transformer, mc2/)."""

from __future__ import annotations

from mindspeed_dryrun.rank.torch_npu.objects import TensorOnDevice, element_bytes, tensor_of
from mindspeed_dryrun.rank.torch_npu.workspace import SYSTEM, rounded_up, workspace

_BLOCK, _ROW = 512, 256  # bytes: of an address, of a row of the rearranged weight


@workspace("ppppqqqpp", "aclnnAllGatherMatmul")
def all_gather_matmul(x: int, weight: int, bias: int, group: int, side: int, *rest: int) -> int:
    """all_gather_matmul_tiling.cpp:387: the weight rearranged, and what is gathered where it is no output."""
    *_, result, gathered = rest
    a, b, output = _matrix(x), _matrix(weight), _matrix(result)
    if not a or not b or not output:
        return SYSTEM
    size, wanted = SYSTEM + _rearranged(b), tensor_of(gathered)
    if wanted and wanted.elements:
        return size
    ranks = output.shape[0] // max(a.shape[0], 1)
    return size + rounded_up(a.size, _BLOCK) * ranks


@workspace("pppppqqp", "aclnnMatmulReduceScatter")
def matmul_reduce_scatter(x: int, weight: int, bias: int, group: int, operation: int, *rest: int) -> int:
    """matmul_reduce_scatter_tiling.cpp:608: the weight rearranged, and the product before it is scattered."""
    a, b = _matrix(x), _matrix(weight)
    if not a or not b:
        return SYSTEM
    return SYSTEM + _rearranged(b) + rounded_up(a.shape[0] * b.shape[1] * element_bytes(a.dtype), _BLOCK)


def _matrix(handle: int) -> TensorOnDevice | None:
    found = tensor_of(handle)
    return found if found and len(found.shape) == 2 else None


def _rearranged(weight: TensorOnDevice) -> int:
    each = element_bytes(weight.dtype)
    terms, columns = (rounded_up(size, _ROW // each) for size in weight.shape)
    return terms * columns * each
