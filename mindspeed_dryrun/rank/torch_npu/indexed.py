"""Workspace of operators that take elements by an index, or put them there, by the public host code of CANN 8.5.0 for Ascend
910B (hicann/ops-nn, branch 8.5.0, index/). What a sort keeps for itself is not public, and not counted.
"""

from __future__ import annotations

from math import prod

from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned, copies
from mindspeed_dryrun.rank.torch_npu.objects import BFLOAT16, FLOAT16, FLOAT32, TensorOnDevice, described, tensor_of
from mindspeed_dryrun.rank.torch_npu.workspace import SYSTEM, deterministic, vector_cores, workspace

_HALVES = (BFLOAT16, FLOAT16)
_ON_THE_CORES = (FLOAT32, FLOAT16, BFLOAT16)
_MANY, _NARROW = 20000, 128  # INDICES_BASE, SLICESIZE_BASE
_MORE, _WIDER = 100000, 1024  # INDICES_LIMIT, SLICESIZE_LIMIT
_SOME, _WIDE_HALVES = 100, 30000  # INDICES_MIN_LIMIT, SLICESIZE_FP16_LIMIT
_LARGE, _BYTES_IN_BOTH = 250 << 20, 6  # MEMORY_LIMIT; of an element in half precision and in float32
_FEW_COLUMNS = 32  # TAIL_SIZE_LIMIT


def _tensor(handle: int) -> TensorOnDevice | None:
    """None for an empty one, too."""
    found = tensor_of(handle)
    return found if found and found.elements else None


def _sorted(count: int) -> int:
    """The index in 32 bits, whose place the kernel's own workspace takes; sorted, and where each came from."""
    return max(aligned(SYSTEM), aligned(4 * count)) + 2 * aligned(4 * count)


def _repeats_rows(index: TensorOnDevice) -> bool:
    """An index of rows, expanded to the columns: only its first column is read."""
    return len(index.shape) > 1 and index.strides[-1] == 0 and index.strides[-2] == 1


def _axis(tensor: TensorOnDevice, axis: int) -> int:
    return axis % len(tensor.shape)


@workspace("ppp", "aclnnIndex")
def take(source: int, indices: int, output: int) -> int:
    """index/index/op_api/aclnn_index.cpp; where axes before those of the index are kept, all is transposed and back."""
    tensor, result = _tensor(source), _tensor(output)
    if tensor is None or result is None:
        return 0
    parts = described(indices) or ()
    size = copies(source, *parts, output)
    skipped = [part for part in parts if _tensor(part) is None]
    rest = prod(tensor.shape[len(parts) :])
    if skipped and len(skipped) < len(parts) and rest < _FEW_COLUMNS:
        size += aligned(tensor.size) + aligned(result.size)
    return size


@workspace("pqpp", "aclnnGather")
def gather(source: int, axis: int, index: int, output: int) -> int:
    """index/gather_elements_v2/op_host/op_api/aclnn_gather.cpp: rows are taken as rows; else what is not last is transposed."""
    tensor, places, result = _tensor(source), _tensor(index), _tensor(output)
    if tensor is None or places is None or result is None:
        return 0
    place = _axis(tensor, axis)
    if len(places.shape) == 2 and place == 0 and _repeats_rows(places) and places.shape[1] == tensor.shape[1]:
        return copies(source, output) + aligned(8 * places.shape[0])
    narrowed = aligned(4 * places.elements) if tensor.dtype in _ON_THE_CORES else 0
    size = copies(source, index, output) + narrowed
    if place != len(tensor.shape) - 1:
        size += aligned(tensor.size) + aligned(places.size) + aligned(result.size)
    return size + (aligned(SYSTEM) if narrowed else 0)


@workspace("pqppp", "aclnnScatterAdd")
def scatter_add(target: int, axis: int, index: int, source: int, output: int) -> int:
    """index/scatter_elements_v2/op_host/op_api/aclnn_scatter.cpp: rows are sorted; else the index is narrowed, axes swapped."""
    return _scatter(target, axis, index, source, output)


@workspace("pqppqp", "aclnnScatter")
@workspace("pqppqp", "aclnnScatterValue")
def scatter(target: int, axis: int, index: int, source: int, reduce: int, output: int) -> int:
    """index/scatter_elements_v2/op_host/op_api/aclnn_scatter.cpp: a number is spread out to the shape of the index."""
    return _scatter(target, axis, index, source, output)


@workspace("pqppq", "aclnnInplaceScatter")
@workspace("pqppq", "aclnnInplaceScatterValue")
def scatter_in_place(target: int, axis: int, index: int, source: int, reduce: int) -> int:
    """index/scatter_elements_v2/op_host/op_api/aclnn_scatter.cpp: without a copy of what was there."""
    return _scatter(target, axis, index, source, target)


def _scatter(target: int, axis: int, index: int, source: int, output: int) -> int:
    """Rows are sorted; else what is not on the last axis is transposed, and the index is made one of 32 bits.

    A number is spread out to the shape of the index. Where the output is another tensor, what was there is copied first."""
    tensor, places = _tensor(target), _tensor(index)
    if tensor is None or places is None:
        return 0
    given = _tensor(source)
    spread = aligned(places.elements * tensor.size // tensor.elements) if given is None else 0
    place = _axis(tensor, axis)
    size = copies(target, source, output) + spread
    if place != len(tensor.shape) - 1 and _repeats_rows(places) and len(places.shape) in (2, 3):
        return size + _sorted(places.elements // places.shape[-1])
    size += copies(index) + aligned(4 * places.elements) + aligned(SYSTEM)
    if place != len(tensor.shape) - 1:
        values = given.size if given else places.elements * tensor.size // tensor.elements
        size += 2 * aligned(tensor.size) + aligned(places.size) + aligned(values)
    return size + (aligned(tensor.size) if output != target else 0)


@workspace("pqpppp", "aclnnIndexAdd")
def index_add(target: int, axis: int, index: int, source: int, alpha: int, output: int) -> int:
    """index/inplace_scatter_add/op_host/op_api/aclnn_index_add.cpp: rows of bfloat16 are sorted, columns added in float32."""
    tensor, places, given = _tensor(target), _tensor(index), _tensor(source)
    if tensor is None or places is None or given is None:
        return 0
    size = copies(target, source, index, output)
    if tensor.dtype != BFLOAT16:
        return size
    if _axis(tensor, axis) == 0:
        return size + _sorted(places.elements)
    return size + aligned(4 * tensor.elements) + aligned(4 * given.elements)


@workspace("pppbb", "aclnnIndexPutImpl")
def put(target: int, indices: int, values: int, accumulate: bool, unsafe: bool) -> int:
    """index/index_put_v2/op_api/aclnn_index_put_impl.cpp: halves are added up in float32; or a sort, always if deterministic."""
    tensor, given = _tensor(target), _tensor(values)
    places = [part for part in described(indices) or () if _tensor(part)]
    first = _tensor(places[0]) if places else None
    if tensor is None or given is None or first is None:
        return 0
    size = copies(target, values, *places)
    fixed = deterministic() and tensor.dtype in _ON_THE_CORES
    if not accumulate and not fixed:
        return size
    width = prod(tensor.shape[len(places) :])
    if fixed or _sorting_is_better(tensor, given, first.elements, width):
        return size + _sorted(first.elements) + 2 * vector_cores() * 4 * width
    if tensor.dtype in _HALVES:
        size += aligned(4 * tensor.elements) + aligned(4 * given.elements)
    return size


def _sorting_is_better(tensor: TensorOnDevice, given: TensorOnDevice, count: int, width: int) -> bool:
    """`IndexPutWithSortBetter`, index/index_put_with_sort/op_host/op_api/index_put_with_sort.cpp."""
    if count >= _MANY and width <= _NARROW:
        return tensor.dtype in _ON_THE_CORES
    if tensor.dtype == FLOAT32:
        return count >= _MORE and width <= _WIDER
    if tensor.dtype not in _HALVES:
        return False
    if count >= _MORE or width >= _MORE or (count >= _SOME and width >= _WIDE_HALVES):
        return True
    return _BYTES_IN_BOTH * (tensor.elements + given.elements) > _LARGE
