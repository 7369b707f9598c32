"""Workspace of operators that work element by element: the tensors that their host code makes inside (hicann/ops-math, ops-nn).

An operator's executor lays its inner tensors into the workspace, each rounded up; a result that is copied to a contiguous output
is written there at once and takes nothing (hicann/opbase, composite_op/mem_mgr/memory_allocator.cpp). Kernels of Ascend 910B take
no strided input: `l0op::Contiguous` makes a copy of it.
"""

from __future__ import annotations

from typing import Any

from mindspeed_dryrun.rank.torch_npu.objects import BFLOAT16, FLOAT16, FLOAT32, TensorOnDevice, described, element_bytes
from mindspeed_dryrun.rank.torch_npu.workspace import workspace

_EXTRA, _ALIGNMENT = 32, 512  # memory_allocator.h:17
_DSA = 512  # what the device's generator of random numbers needs (aclnn_engine/dsa_task.cpp)
_HALVES = (BFLOAT16, FLOAT16)


def aligned(size: int) -> int:
    """What a tensor of this many bytes takes in a workspace."""
    return -(-(size + _EXTRA) // _ALIGNMENT) * _ALIGNMENT


def _copied(tensor: TensorOnDevice) -> int:
    return 0 if tensor.contiguous else aligned(tensor.size)


def _computed(output: TensorOnDevice) -> int:
    """A result that cannot be written to a strided output at once."""
    return _copied(output)


def elementwise(inputs: tuple[TensorOnDevice, ...], output: TensorOnDevice, mixes: bool = True) -> int:
    """Copies of strided inputs, and of those of another type; some kernels take one half precision together with float32."""
    total = _computed(output)
    mixed = mixes and {tensor.dtype for tensor in inputs} <= {FLOAT32, *_HALVES}
    for tensor in inputs:
        total += _copied(tensor)
        if tensor.dtype != output.dtype and tensor.elements > 1 and not mixed:
            total += aligned(tensor.elements * element_bytes(output.dtype))
    return total


def _tensors(*handles: int | None) -> tuple[TensorOnDevice, ...]:
    return tuple(tensor for handle in handles if isinstance(tensor := described(handle), TensorOnDevice))


@workspace("pffqq", "aclnnInplaceNormal")
def inplace_normal(handle: int, *parameters: Any) -> int:
    """ops-math, random/dsa_random_normal/op_host/op_api/aclnn_normal.cpp: on 910B made in float32, then cast."""
    (tensor,) = _tensors(handle)
    made = 0 if tensor.dtype == FLOAT32 and tensor.contiguous else aligned(4 * tensor.elements)
    narrow = 0 if tensor.contiguous or tensor.dtype == FLOAT32 else aligned(tensor.size)
    return made + narrow + _copied(tensor) + aligned(_DSA)


@workspace("pp", "aclnnSilu")
@workspace("pp", "aclnnNeg")
@workspace("pp", "aclnnExp")
def unary(handle: int, output: int) -> int:
    """ops-nn, activation/swish/op_api/aclnn_silu.cpp; ops-math, math/neg/op_api/aclnn_neg.cpp, math/exp/op_api/aclnn_exp.cpp."""
    return elementwise(_tensors(handle), _tensors(output)[0])


@workspace("ppp", "aclnnMul")
@workspace("ppp", "aclnnMuls")
@workspace("ppp", "aclnnSiluBackward")
def binary(first: int, second: int, output: int) -> int:
    """ops-math, math/mul/op_api/aclnn_mul.cpp; ops-nn, activation/silu_grad/op_api/aclnn_silu_backward.cpp."""
    return elementwise(_tensors(first, second), _tensors(output)[0])


@workspace("pppp", "aclnnAdd")
@workspace("pppp", "aclnnAdds")
def addition(first: int, second: int, alpha: int, output: int) -> int:
    """ops-math, math/add/op_api/aclnn_add.cpp."""
    return elementwise(_tensors(first, second), _tensors(output)[0])


@workspace("pp", "aclnnInplaceMul")
@workspace("pp", "aclnnInplaceMuls")
@workspace("ppp", "aclnnInplaceAdd")
@workspace("ppp", "aclnnInplaceAdds")
def in_place(first: int, second: int, *alpha: int) -> int:
    """The same files: the first input is the output, too. One that is strided is copied, computed, and copied back."""
    return elementwise(_tensors(first, second), _tensors(first)[0])


@workspace("pppp", "aclnnSub")
@workspace("pppp", "aclnnSubs")
@workspace("ppp", "aclnnDiv")
@workspace("ppp", "aclnnDivs")
def difference(first: int, second: int, *rest: int) -> int:
    """ops-math, math/{sub,div}/op_api/aclnn_*.cpp: both inputs in one type."""
    return elementwise(_tensors(first, second), _tensors(rest[-1])[0], mixes=False)


@workspace("ppp", "aclnnInplaceSub")
@workspace("ppp", "aclnnInplaceSubs")
@workspace("pp", "aclnnInplaceDiv")
@workspace("pp", "aclnnInplaceDivs")
def difference_in_place(first: int, second: int, *alpha: int) -> int:
    """The same files."""
    return elementwise(_tensors(first, second), _tensors(first)[0], mixes=False)


@workspace("pip", "aclnnCast")
def cast(handle: int, dtype: int, output: int) -> int:
    """ops-math, math/cast/op_api/aclnn_cast.cpp."""
    (tensor,), (result,) = _tensors(handle), _tensors(output)
    return _copied(tensor) + _computed(result)


@workspace("pp", "aclnnInplaceCopy")
def inplace_copy(target: int, source: int) -> int:
    """ops-math, conversion/view_copy/op_api/aclnn_copy.cpp: a copy of a strided source is the result where no cast follows."""
    (result,), (tensor,) = _tensors(target), _tensors(source)
    if tensor.dtype == result.dtype and result.contiguous:
        return 0
    total = _copied(tensor)
    if tensor.dtype != result.dtype and not result.contiguous:
        total += aligned(tensor.elements * element_bytes(result.dtype))
    return total
