"""Workspace of operators whose kernels keep nothing: the tensors that their host code makes inside (hicann/ops-math, ops-nn).

An operator's executor lays its inner tensors into the workspace, each rounded up; a result that is copied to a contiguous output
is written there at once and takes nothing (hicann/opbase, composite_op/mem_mgr/memory_allocator.cpp). Kernels of Ascend 910B take
no strided input: `l0op::Contiguous` makes a copy of it.
"""

from __future__ import annotations

from typing import Any

from mindspeed_dryrun.rank.torch_npu.objects import (
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    TensorOnDevice,
    described,
    element_bytes,
    tensor_of,
)
from mindspeed_dryrun.rank.torch_npu.workspace import rounded_up, workspace

_EXTRA, _ALIGNMENT = 32, 512  # memory_allocator.h:17
_DSA = 512  # what the device's generator of random numbers needs (aclnn_engine/dsa_task.cpp)
_HALVES = (BFLOAT16, FLOAT16)


def aligned(size: int) -> int:
    """What a tensor of this many bytes takes in a workspace."""
    return rounded_up(size + _EXTRA, _ALIGNMENT)


def _copied(tensor: TensorOnDevice) -> int:
    return 0 if tensor.contiguous else aligned(tensor.size)


def _computed(output: TensorOnDevice) -> int:
    """A result that cannot be written to a strided output at once."""
    return _copied(output)


def in_one_type(inputs: tuple[TensorOnDevice, ...], dtype: int) -> int:
    """Copies of strided inputs, and of all that are of another type."""
    casts = sum(aligned(each.elements * element_bytes(dtype)) for each in inputs if each.dtype != dtype and each.elements > 1)
    return sum(map(_copied, inputs)) + casts


def elementwise(inputs: tuple[TensorOnDevice, ...], output: TensorOnDevice, mixes: bool = True) -> int:
    """Inputs in the type of the output; some kernels take one half precision together with float32."""
    mixed = mixes and {tensor.dtype for tensor in inputs} <= {FLOAT32, *_HALVES}
    return _computed(output) + (sum(map(_copied, inputs)) if mixed else in_one_type(inputs, output.dtype))


def _tensors(*handles: int | None) -> tuple[TensorOnDevice, ...]:
    return tuple(tensor for handle in handles if (tensor := tensor_of(handle)))


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
    """ops-math, math/{add,mul}/op_api: the first input is the output, too. A strided one is copied, computed, and copied back."""
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
    """ops-math, math/{sub,div}/op_api: both inputs in the type of the first."""
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


def copies(*handles: int | None) -> int:
    """Of all strided tensors among them, outputs too: a result is copied to a strided one."""
    return sum(map(_copied, _tensors(*handles)))


@workspace("pp", "aclnnSigmoid")
@workspace("pp", "aclnnGelu")
@workspace("pqp", "aclnnSoftmax")
@workspace("ppqp", "aclnnSoftmaxBackward")
@workspace("ppp", "aclnnSigmoidBackward")
@workspace("ppp", "aclnnEmbedding")
@workspace("pqpp", "aclnnIndexSelect")
@workspace("pqqqp", "aclnnRepeatInterleaveIntWithDim")
@workspace("pppp", "aclnnConstantPadNd")
def as_they_lie(*parameters: int) -> int:
    """ops-nn, activation/{sigmoid,gelu,softmax_v2,softmax_grad,sigmoid_grad}, index/{gather_v2,repeat_interleave}; ops-math,
    conversion/pad_v3: inputs and outputs of one type."""
    return copies(*parameters)


@workspace("pqp", "aclnnLogSoftmax")
@workspace("ppbip", "aclnnReduceSum")
@workspace("ppbip", "aclnnMean")
@workspace("ppp", "aclnnMaximum")
@workspace("pppp", "aclnnSWhere")
def in_the_type_of_the_output(*parameters: int) -> int:
    """ops-nn, activation/logsoftmax_v2; ops-math, math/{reduce_sum_op,reduce_mean,maximum,select}/op_api."""
    *inputs, output = _tensors(*parameters)
    masks = [tensor for tensor in inputs if tensor.dtype == BOOL]  # which stay what they are
    others = tuple(tensor for tensor in inputs if tensor.dtype != BOOL)
    return elementwise(others, output, mixes=False) + sum(map(_copied, masks))


_AT_ONCE = 32  # inputs that a kernel puts together


@workspace("pqp", "aclnnCat")
@workspace("pqp", "aclnnStack")
def together(inputs: int, axis: int, output: int) -> int:
    """ops-math, conversion/concat_d/op_api/aclnn_cat.cpp, conversion/pack/op_api/aclnn_stack.cpp: of more than 32, in steps."""
    (result,) = _tensors(output)
    parts = tuple(part for part in _tensors(*(described(inputs) or ())) if part.elements)
    if len(parts) == 1:
        return 0 if result.contiguous and parts[0].dtype == result.dtype else in_one_type(parts, result.dtype)
    return elementwise(parts, result, mixes=False) + (aligned(result.size) if len(parts) > _AT_ONCE else 0)
