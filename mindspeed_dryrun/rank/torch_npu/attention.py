"""Workspace of fused attention, by the public host code of its tilings for Ascend 910B (hicann/ops-transformer, November 2025).

What is modelled: half precision, and sequences of 1024 and more (packed ones forward: documents of 1024 and more on average;
packed ones backward: all), by the tiling that such a call gets. Shorter ones and float32 take other tilings: there the gradients
in float32 are counted alone.
Of the gradient also what its host code copies: strided inputs, heads that a kernel takes only wider than they are, and inputs
whose tokens lie too far apart. With deterministic sums a kernel takes fewer widths of heads, and each core adds up on its own.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from mindspeed_dryrun.rank.torch_npu import inner_tensors
from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned
from mindspeed_dryrun.rank.torch_npu.objects import FLOAT32, TensorOnDevice, described, element_bytes, tensor_of
from mindspeed_dryrun.rank.torch_npu.workspace import cube_cores, deterministic, rounded_up, vector_cores, workspace

_FORWARD_SYSTEM = 16 << 20  # WORK_SPACE_RESERVE_SIZE, flash_attention_score_tiling_general.cpp:60
_SYSTEM, _MESSAGES = 20 << 20, 64 << 10  # WORKSPACE_BUFFER and MUL_CORE_SYNC_BUFFER of the gradient's tiling for long sequences
_LONG = 1024  # s2sizeLimitMin; SAB_TND_SIZE
_PACKED_LONG, _PACKED_TOKENS, _PACKED_SHORT = 5120, 8192, 512  # S2_REUSE_SIZE_5120, SAMEAB_TND_BASIC_SIZE, S2_REUSE_SIZE_512
_SPLIT = 512  # SAMEAB_S1_BASE, SAMEAB_S2_BASE
_BLOCK = 512  # GM_ALIGN
_SHORT_SYSTEM = 32 << 20  # WORKSPACE_BASE_CAL of flash_attention_score_grad_tiling_s1s2_bn2.cpp
_BASIC_SYSTEM, _BASIC_BLOCKS = 2 * 16 << 20, 16 * 128 * 128  # WORKSPACE_RSV_BYTE, twice, and matmulSize of _basic.cpp
_BASIC_WIDTH, _BASIC_LONGEST, _MASK = 128, 32768, 2048  # SPECIAL_HEADDIM_128, S_MAX and ATTEN_MASK_NUM of the same
_SHORT_MESSAGES, _SHORT_BLOCK = 16 << 10, (128, 64)  # MUL_CORE_SYNC_BUFFER and INITIAL_S1/S2_SPLIT_NUM of _s1s2_bn2gs1s2.cpp
_ROW_BYTES = 189 << 10  # TOTAL_SIZE: what a core has for the sums of its rows
_APART = 65535  # MAX_BSN_DIMS_SIZE
_UNPADDED = (192, 128)  # widths of keys and of values that a kernel takes as they are where sums need not be deterministic


class Call(NamedTuple):
    """What the tilings look at."""

    batch: int
    heads: int
    groups: int  # query heads for each head of keys
    queries: int  # tokens, the longest document's where they are packed
    keys: int
    width: int
    value_width: int
    rows: int  # batch × heads × queries
    blocks: int  # documents' blocks of 128 or 256 queries; 0 where nothing is packed
    layout: str
    dtype: int
    basic: bool = False  # packed, and with nothing that the basic tiling of a gradient does not take


def forward_size(call: Call) -> int:
    """`GetWorkspaceSize` of the tilings of flash_attention_score_tiling_general.cpp for long sequences; 0 for others."""
    if call.dtype == FLOAT32:
        return 0
    if call.layout == "TND":
        return _packed_forward(call)
    short = call.keys <= _LONG
    if _same_ab(call):  # :3495, FlashAttentionScoreTilingS1s2Bn2gs1SameAB
        rows, cores, times, width = min(256, rounded_up(call.queries, 16)), cube_cores(), 3, call.value_width
    elif short:
        return 0
    else:  # :3034, FlashAttentionScoreTilingS1s2Bn2gs1
        rows = min(64, rounded_up(call.queries, 16))
        if call.batch * call.heads * call.groups * -(-call.queries // rows) > vector_cores():
            rows = min(128, rounded_up(call.queries, 16))
        cores, times, width = vector_cores(), 3 if call.keys % 64 else 2, call.width
    return _FORWARD_SYSTEM + cores * _of_a_core(rows, _ratio(call), times, width)


def _same_ab(call: Call) -> bool:
    uneven = (call.width % 16 != 0 or call.width == 96) and call.keys >= 512
    wide = call.keys > _LONG and 128 < call.width < 196
    return uneven or wide or (call.width == 64 and call.keys % 64 != 0 and 2 * _LONG < call.keys < 18432)


def _ratio(call: Call) -> int:
    """`CalcNRatio`: blocks of keys that are taken at once."""
    if call.keys // 128 == 8 and 0 < call.keys % 128 <= 16:
        return 5
    if call.width == 64 and call.layout == "BNSD" and 2049 <= call.keys <= 2304:
        return 6
    return min(8, -(-call.keys // 128))


def _of_a_core(rows: int, ratio: int, times: int, width: int) -> int:
    return 4 * (ratio * rows * 128 * times + 4 * rows * rounded_up(width, 16))


def _packed_forward(call: Call) -> int:
    """:3617, FlashAttentionVarLenScoreTiling."""
    several = call.batch >= 4 and call.rows // call.heads >= _PACKED_TOKENS and min(call.queries, call.keys) >= _PACKED_SHORT
    same_ab = (several or min(call.queries, call.keys) > _PACKED_LONG) and call.heads > 1
    rows = min(256 if same_ab else 128, rounded_up(call.queries, 16))
    cores = min(call.blocks * call.heads, cube_cores() if same_ab else vector_cores())
    return _FORWARD_SYSTEM + cores * _of_a_core(rows, min(8, -(-call.keys // 128)), 3, call.width)


def backward_size(call: Call, gradients: tuple[int, ...], fixed: bool = False) -> int:
    """`GetWorkspaceSize` of flash_attention_score_grad_tiling_s1s2_bn2gs1s2_sab.cpp:1418, with whole blocks for each core.

    `gradients`: elements of those of query, key and value, which are added up in float32. `fixed`: deterministic sums, for which
    each cube core has two blocks of each gradient (:1489); long documents among short ones decide the tiling then.
    """
    size = sum(4 * elements for elements in gradients)
    if call.layout == "TND" and call.dtype != FLOAT32 and not fixed:
        if call.basic:
            return _basic_size(call, size)
        if call.rows // call.heads // call.batch < _LONG:
            return _short_packed_size(call, size)
    long = max(call.queries, call.keys)
    if call.dtype == FLOAT32 or long < _LONG:
        return (_SHORT_SYSTEM if fixed else _SYSTEM) + size
    width, value_width = rounded_up(call.width, 16), rounded_up(call.value_width, 16)
    side = _SPLIT
    if fixed and -(-_SPLIT // (vector_cores() // 3)) * width * 4 * 2 > _ROW_BYTES:  # AdjustCvInner
        side = _SPLIT // 2
    parts = _MESSAGES + size + _BLOCK * len(gradients) + rounded_up(32 * call.rows, _BLOCK)
    sums = 2 * cube_cores() * side * 4 * (2 * width + value_width) if fixed else 0
    return _SYSTEM + parts + vector_cores() * side * side * 4 * 2 + sums


def _basic_size(call: Call, size: int) -> int:
    """flash_attention_score_grad_tiling_s1s2_bn2gs1s2_basic.cpp:303: whatever the documents' lengths."""
    return _BASIC_SYSTEM + size + rounded_up(32 * call.rows, _BLOCK) + 2 * cube_cores() * _BASIC_BLOCKS * 4 * 2 + 6 * _BLOCK


def _short_packed_size(call: Call, size: int) -> int:
    """flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp:1373, with whole blocks for each core."""
    rows, columns = (
        min(most, rounded_up(tokens, 16)) for most, tokens in zip(_SHORT_BLOCK, (call.queries, call.keys), strict=True)
    )
    scores = vector_cores() * (16 if call.width == 64 else 8) * rows * columns
    return _SYSTEM + _SHORT_MESSAGES + size + scores * (2 * 4 + 4 * 2) + 6 * _BLOCK


def _turned(call: Call, width: int) -> bool:
    """Whether heads come before tokens in the kernel's copies: where a token's neighbour lies too far away, with heads as wide as
    the kernel gets them (`needTranspose` in the host code of both directions)."""
    apart = call.heads * width * (call.batch if call.layout == "SBH" else 1)
    return call.layout in ("SBH", "BSH", "BSND") and apart > _APART


class Widened(NamedTuple):
    """A gradient's call as its kernel gets it."""

    call: Call
    gradients: tuple[int, ...]  # elements of those of query, key and value
    copies: int  # bytes


def widened(call: Call, gradients: tuple[int, int, int], fixed: bool) -> Widened:
    """op_api/aclnn_flash_attention_score_grad.cpp, `GetInputShapeInfo` and what follows from it.

    Of the tensors that are copied query, output, its gradient and the query's gradient have a row for each query head; key, value
    and their gradients one for each key head.
    """
    queries, keys, bytes_each = call.rows, gradients[1] // max(call.width, 1), element_bytes(call.dtype)
    width, value_width, packed = call.width, call.value_width, call.layout == "TND"
    wide = rounded_up(width, 16 if width < 128 else 128)
    turned = _turned(call, wide)

    def size(of_queries: int, of_keys: int, elements: int) -> int:
        return of_queries * aligned(bytes_each * queries * elements) + of_keys * aligned(bytes_each * keys * elements)

    copies = 0
    if value_width != width and (fixed or (width, value_width) != _UNPADDED):
        copies += size(2, 2, width)  # output and its gradient; value, and its gradient before it is cut
        value_width = width
    as_it_is = wide == width or (width == 192 and not packed and not turned) or (packed and width % 8 == 0 and not fixed)
    short = max(call.queries, call.keys) <= 4096 and call.groups == 1 and not turned
    if not as_it_is and not (width in (72, 88) and short and call.layout not in ("BNSD", "TND")):
        copies += size(4, 4, wide)
        width = value_width = wide
    if turned:
        copies += size(2, 2, width) + size(2, 2, value_width)
    return Widened(
        call._replace(width=width, value_width=value_width), (queries * width, keys * width, keys * value_width), copies
    )


def read(query: Any, key: Any, value: Any, heads: int, layout: str, ends: tuple[tuple[int, ...], ...] = ()) -> Call | None:
    """The call that these tensors make; `ends` of packed documents, of queries and of keys."""
    tensors = (query, key, value)
    readable = (isinstance(one, TensorOnDevice) and one.elements and len(one.shape) == len(layout) for one in tensors)
    if not heads or not all(readable):
        return None
    if layout != "TND" and not {"B", "S"} < set(layout):
        return None
    if layout == "TND":
        lengths, of_keys = (_lengths(each) for each in (*ends, (), ())[:2])
        queries, keys, batch = max(lengths or (query.shape[0],)), max(of_keys or (key.shape[0],)), len(lengths) or 1
        key_heads, width, value_width = key.shape[1], query.shape[2], value.shape[2]
        blocks = sum(-(-length // 128) for length in lengths or (query.shape[0],))
    else:
        axes = {name: layout.index(name) for name in layout}
        batch, queries, keys, blocks = query.shape[axes["B"]], query.shape[axes["S"]], key.shape[axes["S"]], 0
        if "H" in axes:
            width = query.shape[2] // heads
            key_heads = key.shape[2] // max(width, 1)
            value_width = value.shape[2] // max(key_heads, 1)
        else:
            key_heads, width, value_width = key.shape[axes["N"]], query.shape[3], value.shape[3]
    rows = query.elements // max(width, 1)
    groups = heads // max(key_heads, 1)
    return Call(batch, heads, groups, queries, keys, width, value_width, rows, blocks, layout, query.dtype)


def _lengths(ends: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False) if end > start)


def _text(address: int | None) -> str:
    return ctypes.string_at(address).decode() if address else ""


_FORWARD, _BACKWARD = "p" * 8, "p" * 13  # query … prefix


@workspace(_FORWARD + "ddqqqpqq" + "pppp", "aclnnFlashAttentionScore")
@workspace(_FORWARD + "ppddqqqpqqq" + "pppp", "aclnnFlashAttentionScoreV2")
@workspace(_FORWARD + "ppddqqqpqq" + "pppp", "aclnnFlashAttentionVarLenScore")
@workspace(_FORWARD + "ppppddqqqpqqq" + "pppp", "aclnnFlashAttentionVarLenScoreV2")
@workspace(_FORWARD + "ppddqqqpqqp" + "pppp", "aclnnFlashAttentionVarLenScoreV4")
def forward(*parameters: Any) -> int:
    """ops-transformer, attention/flash_attention_score/op_host, its tilings; copies of strided or turned inputs."""
    tensors = [tensor_of(handle) for handle in parameters[:3]]
    call = _call(tensors, parameters, 8)
    size = inner_tensors.copies(*parameters[:3])
    if call is None:
        return size
    query, key, value = (tensor.size for tensor in tensors if tensor)
    if _turned(call, rounded_up(call.width, 16 if call.width < 196 else 128)):
        size += sum(map(aligned, (query, key, value, query // call.width * call.value_width)))
    return size + forward_size(call)


@workspace(_BACKWARD + "ddqqqpqq" + "pppp", "aclnnFlashAttentionScoreGrad")
@workspace(_BACKWARD + "ppddqqqpqqq" + "pppp", "aclnnFlashAttentionScoreGradV2")
@workspace(_BACKWARD + "ppddqqqpqq" + "pppp", "aclnnFlashAttentionUnpaddingScoreGrad")
@workspace(_BACKWARD + "ppppddqqqpqqq" + "pppp", "aclnnFlashAttentionUnpaddingScoreGradV2")
@workspace(_BACKWARD + "ppddqqqpqq" + "ppppp", "aclnnFlashAttentionUnpaddingScoreGradV4")
def backward(*parameters: Any) -> int:
    """ops-transformer, attention/flash_attention_score_grad/op_host: gradients added up in float32."""
    tensors = [tensor_of(handle) for handle in parameters[:3]]
    call = _call(tensors, parameters, 13)
    elements = tuple(tensor.elements for tensor in tensors if tensor)
    if not call:
        return _SYSTEM + sum(4 * count for count in elements)
    fixed = deterministic()
    strided = inner_tensors.copies(*parameters[:4], parameters[11])  # with the output's gradient, and the output
    call = call._replace(basic=_is_basic(call, parameters))
    kernel = widened(call, (elements[0], elements[1], elements[2]), fixed)
    return strided + kernel.copies + backward_size(kernel.call, kernel.gradients, fixed)


def _is_basic(call: Call, parameters: tuple[Any, ...]) -> bool:
    """flash_attention_score_grad_tiling_s1s2_bn2gs1s2_basic.cpp, `IsCapable`."""
    scale = _scale(parameters, 13)
    mask, sparse = tensor_of(parameters[7]), parameters[scale + 7]
    fits = len(mask.shape) == 2 and _MASK in mask.shape and sparse in (2, 3) if mask else sparse == 0
    queries, keys = (described(handle) for handle in parameters[13:15])
    widths = call.width == call.value_width <= _BASIC_WIDTH and call.width % 16 == 0
    plain = not parameters[4] and not parameters[5] and parameters[scale + 1] == 1.0  # no bias, no dropout
    same = bool(queries) and queries == keys and max(call.queries, call.keys) <= _BASIC_LONGEST
    return call.layout == "TND" and widths and plain and same and fits


def _scale(parameters: tuple[Any, ...], first: int) -> int:
    """Where it is: the first float behind the parameters before `first`, which all versions share."""
    return next(index for index in range(first, len(parameters)) if isinstance(parameters[index], float))


def _call(tensors: list[TensorOnDevice | None], parameters: tuple[Any, ...], first: int) -> Call | None:
    """`first`: the number of parameters before those in which the versions differ. A pair of arrays, or none or two, precede
    the scale."""
    scale = _scale(parameters, first)
    layout = _text(parameters[scale + 5])
    ends = tuple(described(handle) or () for handle in parameters[first : first + 2]) if layout == "TND" else ()
    query, key, value = tensors
    return read(query, key, value, parameters[scale + 4], layout, ends)
