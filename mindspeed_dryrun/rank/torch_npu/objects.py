"""The tensors, lists and numbers that torch_npu describes to CANN before it calls an operator (aclnn/acl_meta.h).

A handle is a number; what it stands for is kept here from `aclCreate…` to `aclDestroy…`.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, NamedTuple

from mindspeed_dryrun.rank.torch_npu.slots import answers

# aclDataType → bytes of an element (acl_base_rt.h)
_BYTES = {0: 4, 1: 2, 2: 1, 3: 4, 4: 1, 6: 2, 7: 2, 8: 4, 9: 8, 10: 8, 11: 8, 12: 1, 16: 8, 17: 16, 27: 2}
FLOAT32, FLOAT16, INT32, INT64, BOOL, BFLOAT16 = 0, 1, 3, 9, 12, 27
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p


class TensorOnDevice(NamedTuple):
    """What `aclCreateTensor` was told."""

    shape: tuple[int, ...]
    dtype: int  # aclDataType
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Its elements."""
        result = 1
        for size in self.shape:
            result *= size
        return result

    @property
    def size(self) -> int:
        """Its bytes, as if it were contiguous."""
        return self.elements * element_bytes(self.dtype)

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


_handles = itertools.count(0x10000, 0x10)
_objects: dict[int, Any] = {}


def element_bytes(dtype: int) -> int:
    """Bytes of an element of this aclDataType; 4 for one that is not known."""
    return _BYTES.get(dtype, 4)


def described(handle: int | None) -> Any:
    """The tensor, list or number behind a handle; None for a null pointer."""
    return _objects.get(handle) if handle else None


def tensor_of(handle: int | None) -> TensorOnDevice | None:
    """The tensor behind a handle; None for anything else."""
    found = described(handle)
    return found if isinstance(found, TensorOnDevice) else None


def _keep(value: Any) -> int:
    handle = next(_handles)
    _objects[handle] = value
    return handle


def _numbers(address: int | None, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_int64 * count).from_address(address)) if address and count else ()


@answers("pQipqipQp>p", "aclCreateTensor")
def create_tensor(dims: int | None, count: int, dtype: int, strides: int | None, *rest: int) -> int:
    return _keep(TensorOnDevice(_numbers(dims, count), dtype, _numbers(strides, count)))


@answers("pQ>p", "aclCreateTensorList", "aclCreateScalarList", "aclCreateIntArray")
def create_numbers(values: int | None, count: int) -> int:
    """Lists hold handles, arrays hold numbers: 64 bits each."""
    return _keep(_numbers(values, count))


@answers("p", "aclDestroyTensor", "aclDestroyIntArray")
def destroy(handle: int | None) -> int:
    _objects.pop(handle or 0, None)
    return 0


@answers("p", "aclDestroyTensorList", "aclDestroyScalarList")
def destroy_list(handle: int | None) -> int:
    for item in _objects.pop(handle or 0, ()):
        _objects.pop(item, None)
    return 0


@answers("ppp", "aclGetViewShape")
def view_shape(handle: int | None, dims: int, count: int) -> int:
    """The shape of an output that depends on values (`nonzero`, `unique`): the largest that it can have, as it was allocated."""
    tensor = tensor_of(handle)
    shape = tensor.shape if tensor else ()
    place = _libc.malloc(ctypes.c_size_t(8 * max(len(shape), 1)))  # the caller frees it
    (ctypes.c_int64 * len(shape)).from_address(place)[:] = list(shape)
    ctypes.c_uint64.from_address(dims).value = place
    ctypes.c_uint64.from_address(count).value = len(shape)
    return 0
