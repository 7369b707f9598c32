"""Workspace of products fused with a collective (MC2), by their public tilings (hicann/ops-transformer, mc2/)."""

from __future__ import annotations

from mindspeed_dryrun.rank.torch_npu.objects import TensorOnDevice, described, element_bytes
from mindspeed_dryrun.rank.torch_npu.workspace import SYSTEM, workspace

_BLOCK, _ROW = 512, 256  # bytes: of an address, of a row of the rearranged weight


@workspace("ppppqqqpp", "aclnnAllGatherMatmul")
def all_gather_matmul(x: int, weight: int, bias: int, group: int, side: int, *rest: int) -> int:
    """all_gather_matmul_tiling.cpp:387: the weight rearranged, and what is gathered where it is no output."""
    *_, result, gathered = rest
    a, b, output, wanted = (described(handle) for handle in (x, weight, result, gathered))
    if not all(isinstance(one, TensorOnDevice) and len(one.shape) == 2 for one in (a, b, output)):
        return SYSTEM
    size = SYSTEM + _rearranged(b)
    if isinstance(wanted, TensorOnDevice) and wanted.elements:
        return size
    ranks: int = output.shape[0] // max(a.shape[0], 1)
    return size + _up(a.size, _BLOCK) * ranks


@workspace("pppppqqp", "aclnnMatmulReduceScatter")
def matmul_reduce_scatter(x: int, weight: int, bias: int, group: int, operation: int, *rest: int) -> int:
    """matmul_reduce_scatter_tiling.cpp:608: the weight rearranged, and the product before it is scattered."""
    a, b = described(x), described(weight)
    if not all(isinstance(one, TensorOnDevice) and len(one.shape) == 2 for one in (a, b)):
        return SYSTEM
    return SYSTEM + _rearranged(b) + _up(a.shape[0] * b.shape[1] * element_bytes(a.dtype), _BLOCK)


def _rearranged(weight: TensorOnDevice) -> int:
    each = element_bytes(weight.dtype)
    terms, columns = (_up(size, _ROW // each) for size in weight.shape)
    return terms * columns * each


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
