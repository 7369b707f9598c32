"""CANN's runtime and communication libraries: devices, memory, versions, communicators (acl_rt.h, hccl.h).

Device memory is address space that nobody can write to: one reservation of zero pages. Copies to the device are dropped,
copies from it give zeros, so whatever an operator would have computed reads as zero, and no stale value is ever seen.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank.torch_npu.slots import answers, store, store_text
from mindspeed_dryrun.rank.torch_npu.streams import new_handle
from mindspeed_dryrun.rank.torch_npu.workspace import cube_cores, vector_cores

CANN_VERSION = "8.5.0"
HBM_BYTES = 64 << 30
DEVICES = 8
_BLOCK = 2 << 20  # what a real device allocates in
_OUT_OF_MEMORY = 207001  # ACL_ERROR_RT_MEMORY_ALLOCATION, acl/error_codes/rt_error_codes.h
_ON_DEVICE, _NOT_REGISTERED = 1, 2  # aclrtMemLocationType
_libc = ctypes.CDLL(None, use_errno=True)


_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_NO_RESERVE = 0x4000  # MAP_NORESERVE


def _map(size: int, access: int) -> int | None:
    """Address space of zeros; None where there is none."""
    found: int | None = _libc.mmap(None, size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1, 0)
    return None if found in (None, ctypes.c_void_p(-1).value) else found


class DeviceMemory:
    """Addresses for the device. They only grow: a run asks for far less than the reservation in all."""

    def __init__(self) -> None:
        self.base = self.end = self.top = 0

    def reserve(self) -> None:
        """Takes the address space; less of it where a limit (`ulimit -v`) allows less."""
        for size in (1 << bits for bits in range(45, 39, -1)):
            found = _map(size, mmap.PROT_READ)
            if found is not None:
                self.base = self.top = -(-found // _BLOCK) * _BLOCK
                self.end = found + size
                return
        raise DryRunError("No address space for the simulated device: 1 TiB cannot be reserved. Raise `ulimit -v`.")

    def take(self, size: int, block: int = _BLOCK) -> int | None:
        """A fresh range of zeros, or None when the reservation is used up."""
        start = self.top
        if start + size > self.end or not self.base:
            return None
        self.top = start + -(-size // block) * block
        return start

    def holds(self, address: int | None) -> bool:
        """Is this an address of the device?"""
        return address is not None and self.base <= address < self.end


class HostMemory:
    """Pinned host memory in blocks of its own, whose zeros take no memory: `--swap-optimizer` keeps whole optimizers there."""

    least = 1 << 20  # smaller ones come from malloc

    def __init__(self) -> None:
        self.starts: list[int] = []  # in order
        self.sizes: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Fresh pages of zeros, which are there only when something is written to them."""
        found = _map(size, mmap.PROT_READ | mmap.PROT_WRITE)
        if found is not None:
            bisect.insort(self.starts, found)
            self.sizes[found] = size
        return found

    def give_back(self, address: int) -> bool:
        """Whether it was one of these."""
        size = self.sizes.pop(address, None)
        if size is None:
            return False
        self.starts.remove(address)
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        return True

    def clear(self, address: int, size: int) -> None:
        """Sets memory to zeros; whole pages of a block are given back to the system, and read as zeros from then on."""
        index = bisect.bisect_right(self.starts, address) - 1
        start = self.starts[index] if index >= 0 else 0
        first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        inside = index >= 0 and address + size <= start + self.sizes[start]
        if (
            not inside
            or last <= first
            or _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
        ):
            ctypes.memset(address, 0, size)
            return
        ctypes.memset(address, 0, first - address)
        ctypes.memset(last, 0, address + size - last)


memory = DeviceMemory()
host = HostMemory()
communicators: list[tuple[int, int]] = []  # (size, this rank in it) of each communicator that was made
_device = 0


# -- devices and versions (acl_rt.h, acl_base_rt.h) ---------------------------------------------------------------------


@answers("p", "aclrtGetDeviceCount")
def device_count(count: int) -> int:
    """As many as the node has ranks: a rank takes the device of its number, the twelfth of 16 on an A3."""
    return store(count, max(DEVICES, int(os.environ.get("LOCAL_WORLD_SIZE", 0))), ctypes.c_uint32)


@answers("i", "aclrtSetDevice")
def set_device(device: int) -> int:
    global _device
    _device = device
    return 0


@answers("p", "aclrtGetDevice")
def get_device(device: int) -> int:
    return store(device, _device, ctypes.c_int32)


@answers("p", "aclrtGetCurrentContext")
def current_context(context: int) -> int:
    return store(context, 0x100 + _device, ctypes.c_uint64)


@answers("p", "aclrtSetCurrentContext")
def set_context(context: int | None) -> int:
    return set_device((context or 0x100) - 0x100)


@answers("ipp", "aclrtGetPrimaryCtxState")
def primary_context(device: int, flags: int | None, active: int | None) -> int:
    store(flags, 0, ctypes.c_uint32)
    return store(active, int(device == _device), ctypes.c_int32)


@answers("Iip", "aclGetDeviceCapability")
def capability(device: int, info: int, value: int) -> int:
    answer = {0: cube_cores(), 1: vector_cores()}.get(info, 192 << 20)
    return store(value, answer, ctypes.c_int64)


@answers("Iip", "aclrtGetDeviceInfo")
def device_info(device: int, attribute: int, value: int) -> int:
    answer = {1: cube_cores(), 2: cube_cores(), 3: vector_cores()}.get(attribute, 0)
    return store(value, answer, ctypes.c_int64)


@answers("iip", "aclrtGetDeviceResLimit")
@answers("pip", "aclrtGetStreamResLimit")
def resource_limit(owner: int, kind: int, value: int) -> int:
    return store(value, cube_cores() if kind == 0 else vector_cores(), ctypes.c_uint32)


@answers("ip", "aclrtGetResInCurrentThread")
def thread_resource(kind: int, value: int) -> int:
    return resource_limit(0, kind, value)


@answers("ip", "aclrtGetLogicDevIdByUserDevId", "aclrtGetPhyDevIdByLogicDevId")
def same_device(device: int, answer: int) -> int:
    return store(answer, device, ctypes.c_int32)


@answers("pii", "aclrtDeviceCanAccessPeer")
def can_access_peer(answer: int, device: int, peer: int) -> int:
    return store(answer, 1, ctypes.c_int32)


@answers("p", "aclrtDeviceGetBareTgid")
def process_id(answer: int) -> int:
    return store(answer, os.getpid(), ctypes.c_int32)


@answers("ip", "aclrtGetSysParamOpt")
def system_parameter(option: int, value: int) -> int:
    return store(value, 0, ctypes.c_int64)


@answers("ip", "aclsysGetCANNVersion")
def cann_version(package: int, version: int) -> int:
    return store_text(version, CANN_VERSION)


@answers("pp", "aclsysGetVersionStr")
def version_text(package: int, version: int) -> int:
    return store_text(version, CANN_VERSION)


@answers("pp", "aclsysGetVersionNum")
def version_number(package: int, version: int) -> int:
    major, minor, patch = (int(part) for part in CANN_VERSION.split("."))
    return store(version, major * 10_000_000 + minor * 100_000 + patch * 1_000, ctypes.c_int32)


# -- memory ------------------------------------------------------------------------------------------------------------


@answers("pQi", "aclrtMalloc", "aclrtMallocAlign32")
def malloc(pointer: int, size: int, policy: int) -> int:
    found = memory.take(size)
    store(pointer, found or 0, ctypes.c_uint64)
    return 0 if found else _OUT_OF_MEMORY


@answers("pQQpQ", "aclrtReserveMemAddress")
def reserve_address(pointer: int, size: int, alignment: int, expected: int | None, flags: int) -> int:
    found = memory.take(size, 1 << 30)
    store(pointer, found or 0, ctypes.c_uint64)
    return 0 if found else _OUT_OF_MEMORY


@answers("pQpQ", "aclrtMallocPhysical")
def malloc_physical(handle: int, size: int, properties: int, flags: int) -> int:
    return new_handle(handle)


@answers("ipp", "aclrtGetMemInfo")
def memory_info(attribute: int, free: int, total: int) -> int:
    store(free, HBM_BYTES, ctypes.c_uint64)
    return store(total, HBM_BYTES, ctypes.c_uint64)


@answers("pQ", "aclrtMallocHost")
@answers("pQp", "aclrtMallocHostWithCfg")
def malloc_host(pointer: int, size: int, *settings: int) -> int:
    if size >= host.least:
        found = host.take(size)
        store(pointer, found or 0, ctypes.c_uint64)
        return 0 if found else _OUT_OF_MEMORY
    status = _libc.posix_memalign(ctypes.c_void_p(pointer), ctypes.c_size_t(4096), ctypes.c_size_t(max(size, 1)))
    return _OUT_OF_MEMORY if status else 0


@answers("p", "aclrtFreeHost")
def free_host(pointer: int | None) -> int:
    if not host.give_back(pointer or 0):
        _libc.free(ctypes.c_void_p(pointer))
    return 0


@answers("pQip", "aclrtHostRegister")
def host_register(pointer: int, size: int, kind: int, device_pointer: int) -> int:
    return store(device_pointer, pointer, ctypes.c_uint64)


@answers("pp", "aclrtPointerGetAttributes")
def pointer_attributes(pointer: int | None, attributes: int) -> int:
    store(attributes, _device, ctypes.c_uint32)
    return store(attributes + 4, _ON_DEVICE if memory.holds(pointer) else _NOT_REGISTERED, ctypes.c_uint32)


@answers("pQpQi", "aclrtMemcpy")
@answers("pQpQip", "aclrtMemcpyAsync", "aclrtMemcpyAsyncWithCondition")
def copy(target: int | None, room: int, source: int | None, size: int, *kind: int) -> int:
    if size and target and source and not memory.holds(target):
        if memory.holds(source):
            host.clear(target, min(size, room))
        else:
            ctypes.memmove(target, source, min(size, room))
    return 0


@answers("pQiQ", "aclrtMemset")
@answers("pQiQp", "aclrtMemsetAsync")
def fill(target: int | None, room: int, value: int, size: int, *stream: int) -> int:
    if size and target and not memory.holds(target):
        ctypes.memset(target, value, min(size, room))
    return 0


# -- calls of the host, and options --------------------------------------------------------------------------------------


@answers("ppip", "aclrtLaunchCallback")
def launch_callback(function: int, data: int, blocks: int, stream: int) -> int:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)
    return 0


@answers("ppp", "aclrtLaunchHostFunc")
def launch_host_function(stream: int, function: int, data: int) -> int:
    return launch_callback(function, data, 0, stream)


@answers("ppp", "aclmdlRICaptureGetInfo")
def capture_info(stream: int, status: int | None, model: int | None) -> int:
    store(status, 0, ctypes.c_int32)
    return store(model, 0, ctypes.c_uint64)


@answers("ipQ", "aclGetCompileopt")
def compile_option(option: int, value: int, length: int) -> int:
    return store_text(value, "disable")


@answers("i>Q", "aclGetCompileoptSize")
def compile_option_size(option: int) -> int:
    return 256


# -- communicators (hccl.h) ----------------------------------------------------------------------------------------------


def _communicator(place: int, size: int, rank: int) -> int:
    communicators.append((size, rank))
    return store(place, len(communicators), ctypes.c_uint64)


@answers("p", "HcclGetRootInfo")
def root_info(info: int) -> int:
    return store_text(info, "stand-in")


@answers("IpIp", "HcclCommInitRootInfo")
def init_root_info(size: int, info: int, rank: int, place: int) -> int:
    return _communicator(place, size, rank)


@answers("IpIpp", "HcclCommInitRootInfoConfig")
def init_root_info_config(size: int, info: int, rank: int, settings: int, place: int) -> int:
    return _communicator(place, size, rank)


@answers("pIpp", "HcclCommInitClusterInfoConfig")
def init_cluster_info(file: int, rank: int, settings: int, place: int) -> int:
    return _communicator(place, 0, rank)


@answers("pIpQIpp", "HcclCreateSubCommConfig")
def sub_communicator(parent: int, size: int, ranks: int, number: int, rank: int, settings: int, place: int) -> int:
    return _communicator(place, size, rank)


@answers("pp", "HcclGetCommName")
def communicator_name(communicator: int | None, name: int) -> int:
    return store_text(name, f"standin_{communicator or 0}")


@answers("pp", "HcclGetRankSize")
def rank_size(communicator: int, size: int) -> int:
    return store(size, communicators[communicator - 1][0], ctypes.c_uint32)


@answers("pp", "HcclGetRankId")
def rank_id(communicator: int, rank: int) -> int:
    return store(rank, communicators[communicator - 1][1], ctypes.c_uint32)


@answers("pp", "HcclGetCommAsyncError")
def communicator_error(communicator: int, error: int) -> int:
    return store(error, 0, ctypes.c_int32)
