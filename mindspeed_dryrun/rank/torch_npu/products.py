"""Workspace of matrix products, by the public host code of CANN 8.5.0 for Ascend 910B (hicann/ops-nn, branch 8.5.0, matmul/).

Two ways (common/op_host/op_api/matmul_util.cpp, `IsNdToNzOnTheFly`). As a rule a kernel reads its inputs as they lie. Where the
inner axis of a half-precision input is longer than 65535, or shorter than 128 and uneven, both inputs and the output are
copies in fractal blocks of 16 by 16: the gradient of a large vocabulary's output layer takes as much as its operands again.

What is not modelled, and may be more: a product with many terms and a small output, which all cores share
(`DETERMINISTIC_SPLIT_K`), outputs of fewer than 256 columns, and the tables of tilings that CANN is installed with.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned
from mindspeed_dryrun.rank.torch_npu.objects import BFLOAT16, FLOAT16, FLOAT32, TensorOnDevice, tensor_of
from mindspeed_dryrun.rank.torch_npu.workspace import cube_cores, rounded_up, workspace

_MESSAGES = 20 << 20  # what the cores keep for their messages (matmul_v3_common.h:65, RPC_WORKSIZE)
_LONGEST, _SHORTEST = 65535, 128  # inner axes that a kernel reads as they lie
_SPLIT_TERMS = 27392  # from here on a core adds up its product in parts, in float32 (SINGLE_CORE_SPLIT_K, SPLIT_K_THRES)
_SHARED_TERMS, _TILE = 15000, 128  # IsSplitKThenForbiddenNd2Nz
_CONFLICT = 16384  # nMataThread, kMataCond
_L2 = 192 << 20  # bytes of the cache that a batch of rearranged operands is cut for
_READ_AS_BLOCKS = (32, 64, 96, 128, 160, 192, 224, 256, 384)  # SUPPORT_ND2NZ_GM2L0, bytes of an inner axis


class Operand(NamedTuple):
    """A matrix as it lies in memory: `inner` is the axis whose elements are neighbours."""

    outer: int
    inner: int
    transposed: bool
    dtype: int
    copy: int  # bytes of the contiguous copy that is made of it first

    @property
    def bytes_each(self) -> int:
        """Of an element."""
        return 4 if self.dtype == FLOAT32 else 2

    @property
    def lies_well(self) -> bool:
        """Whether a kernel reads it as it is."""
        return _SHORTEST <= self.inner <= _LONGEST or (self.inner < _SHORTEST and self.inner % 16 == 0)

    @property
    def rearranged(self) -> int:
        """Bytes of its copy in blocks that the kernel itself makes, where rows do not begin at 256 bytes (`nd2nz`)."""
        row = self.inner * self.bytes_each
        if self.inner <= _LONGEST and (self.dtype == FLOAT32 or row % 256 == 0 or row in _READ_AS_BLOCKS):
            return 0
        return _blocks(self.outer, self.inner) * self.bytes_each


def product(first: TensorOnDevice, second: TensorOnDevice) -> int:
    """The workspace of `first @ second`, both at least two-dimensional; more dimensions are rows of the first."""
    a, b = _operand(first), _operand(second)
    rows, terms = (a.inner, a.outer) if a.transposed else (a.outer, a.inner)
    columns = b.outer if b.transposed else b.inner
    size = a.copy + b.copy
    if a.dtype != b.dtype:  # both in float32
        size += sum(aligned(4 * x.outer * x.inner) for x in (a, b) if x.dtype != FLOAT32)
        a, b = a._replace(dtype=FLOAT32), b._replace(dtype=FLOAT32)
    if a.dtype in (BFLOAT16, FLOAT16) and not _read_as_they_lie(a, b, rows, terms, columns):
        shapes = ((a.outer, a.inner), (b.outer, b.inner), (rows, columns))
        return size + sum(aligned(2 * _blocks(*shape)) for shape in shapes)
    parts = rows * rounded_up(columns, 256 // a.bytes_each) * 4 if terms >= _SPLIT_TERMS else 0
    second_rearranged = b.rearranged or (_conflicts(a, b, rows, terms, columns) and _blocks(b.outer, b.inner) * b.bytes_each)
    return size + _MESSAGES + parts + a.rearranged + second_rearranged


def _conflicts(a: Operand, b: Operand, rows: int, terms: int, columns: int) -> bool:
    """`GetNd2nzA` and `GetNd2nzB`: axes of 16384 that all cores would read from the same places of memory."""
    if a.dtype not in (BFLOAT16, FLOAT16):
        return False
    if not b.transposed:
        return columns % _CONFLICT == 0 and rows >= 4096 and terms >= 6656
    return not a.transposed and terms == _CONFLICT and 4096 <= rows <= 4480 and columns >= 7168


def batched(first: TensorOnDevice, second: TensorOnDevice) -> int:
    """The workspace of a product of batches: copies of strided ones, and blocks of each where they do not lie well."""
    counts = prod(first.shape[:-2]), prod(second.shape[:-2])
    count = max(counts)  # a batch of one is read again for each of the other's
    a, b = _batch(first), _batch(second)
    rows, terms = (a.inner, a.outer) if a.transposed else (a.outer, a.inner)
    columns = b.outer if b.transposed else b.inner
    size = a.copy + b.copy
    if a.dtype == b.dtype and a.dtype in (BFLOAT16, FLOAT16) and not _read_as_they_lie(a, b, rows, terms, columns):
        shapes = ((counts[0], a.outer, a.inner), (counts[1], b.outer, b.inner), (count, rows, columns))
        return size + sum(aligned(2 * matrices * _blocks(*shape)) for matrices, *shape in shapes)
    each = a.rearranged + b.rearranged
    at_once = _L2 // 4 // each if each else 0
    whole = 2 * at_once * each if each * count > _L2 and at_once > 1 else each * count
    return size + (_MESSAGES + whole if each else 0)


def _batch(tensor: TensorOnDevice) -> Operand:
    """One matrix of a batch; the copy is of the whole batch."""
    *outer, rows, last = tensor.shape
    size = rows * last
    expected: list[int] = []
    for count in reversed(outer):
        expected.insert(0, size)
        size *= count
    if tensor.strides == (*expected, 1, rows) and rows * last > 1:
        return Operand(last, rows, True, tensor.dtype, 0)
    return Operand(rows, last, False, tensor.dtype, 0 if tensor.contiguous else aligned(tensor.size))


def _read_as_they_lie(a: Operand, b: Operand, rows: int, terms: int, columns: int) -> bool:
    if terms == 1 or (a.outer * a.inner <= _LONGEST and b.outer * b.inner <= _LONGEST):
        return True
    few = (rows // _TILE) * (columns // _TILE) < cube_cores() // 2
    if terms >= _SHARED_TERMS and few and (a.transposed or not b.transposed):
        return True
    aligned_terms = terms * a.bytes_each % 256 == 0
    if terms >= max(_SPLIT_TERMS, 2 * rows, 2 * columns) and (aligned_terms or _bytes(a) + _bytes(b) < 2**31):
        return True  # CheckSupportSingleSplitKFp16Bf16
    return a.lies_well and b.lies_well


def _operand(tensor: TensorOnDevice) -> Operand:
    *outer, last = tensor.shape
    rows = prod(outer)
    if len(outer) == 1 and tensor.strides == (1, rows) and tensor.elements > 1:
        return Operand(last, rows, True, tensor.dtype, 0)
    return Operand(rows, last, False, tensor.dtype, 0 if tensor.contiguous else aligned(tensor.size))


def _bytes(operand: Operand) -> int:
    return operand.outer * operand.inner * operand.bytes_each


def _blocks(rows: int, columns: int) -> int:
    return rounded_up(rows, 16) * rounded_up(columns, 16)


@workspace("ppph", "aclnnMatmul")
@workspace("ppph", "aclnnMm")
def matmul(first: int, second: int, *parameters: int) -> int:
    """mat_mul_v3/op_host/op_api/aclnn_matmul.cpp and aclnn_mm.cpp; op_tiling/matmul_v3_base_tiling.cpp:485-511 and 2739-2789."""
    a, b = tensor_of(first), tensor_of(second)
    if not a or not b or min(len(a.shape), len(b.shape)) < 2:
        return _MESSAGES
    if not a.elements or not b.elements:
        return _MESSAGES
    return product(a, b) if len(b.shape) == 2 else max(batched(a, b), _MESSAGES)


@workspace("ppph", "aclnnBatchMatMul")
def batch_matmul(first: int, second: int, *parameters: int) -> int:
    """common/op_host/op_api/batch_matmul_util.cpp, `ExecBmmOpWithBiasV2`; batch_mat_mul_v3_base_tiling.cpp:768 and 1005."""
    a, b = tensor_of(first), tensor_of(second)
    if not a or not b or min(len(a.shape), len(b.shape)) < 3:
        return 0
    return batched(a, b) if a.elements and b.elements else 0


@workspace("ppppph", "aclnnBaddbmm")
def batch_product_added(addend: int, first: int, second: int, beta: int, alpha: int, output: int, *kind: int) -> int:
    """batch_mat_mul_v3/op_host/op_api/aclnn_baddbmm.cpp: the product in float32, scaled by alpha, or added to the addend by beta.

    The scalars are not known: as Megatron's attention calls it, beta is 0, and the addend is not read."""
    a, b, result = tensor_of(first), tensor_of(second), tensor_of(output)
    if not a or not b or not result or not a.elements or not b.elements:
        return 0
    last = _batch(b).copy or _batch(a).copy  # over when the product is scaled, which takes its place
    scaled = aligned(4 * result.elements)
    return batched(a, b) + scaled + max(scaled - last, 0)
