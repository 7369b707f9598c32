"""Workspace by formula: each case was worked out by hand from the operator's host code, none from a measured figure."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_dryrun.rank import activation as config
from mindspeed_dryrun.rank.torch_npu import (
    attention,
    fused_products,
    gradients,
    indexed,
    inner_tensors,
    objects,
    products,
    workspace,
)
from mindspeed_dryrun.rank.torch_npu.inner_tensors import aligned
from mindspeed_dryrun.rank.torch_npu.objects import BFLOAT16, BOOL, FLOAT32, INT32, INT64, TensorOnDevice

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20
PADDED = 512  # 32 bytes more, then whole blocks of 512


@pytest.fixture(autouse=True)
def _no_handles_left() -> Iterator[None]:
    before = set(objects._objects)
    yield
    for handle in set(objects._objects) - before:
        objects._objects.pop(handle)


def tensor(*shape: int, dtype: int = BFLOAT16, strides: tuple[int, ...] | None = None) -> int:
    plain = []
    step = 1
    for size in reversed(shape):
        plain.append(step)
        step *= size
    return objects._keep(TensorOnDevice(shape, dtype, strides or tuple(reversed(plain))))


def test_random_weights_in_half_precision_are_made_in_float32_first() -> None:
    half, full = tensor(1024, 1024), tensor(1024, 1024, dtype=FLOAT32)
    assert inner_tensors.inplace_normal(half, 0.0, 1.0, 0, 0) == 4 * MB + PADDED + 1024
    assert inner_tensors.inplace_normal(full, 0.0, 1.0, 0, 0) == 1024  # for the generator itself


def test_a_strided_input_is_copied_and_a_contiguous_one_is_not() -> None:
    whole, half = tensor(512, 2048), tensor(512, 1024, strides=(2048, 1))
    result = tensor(512, 1024)
    assert inner_tensors.unary(whole, tensor(512, 2048)) == 0
    assert inner_tensors.unary(half, result) == MB + PADDED
    assert inner_tensors.binary(half, half, result) == 2 * (MB + PADDED)
    assert inner_tensors.addition(half, result, 0, result) == MB + PADDED


def test_half_precision_and_float32_need_no_cast_and_integers_do() -> None:
    half, full, count = tensor(256, 1024), tensor(256, 1024, dtype=FLOAT32), tensor(256, 1024, dtype=INT64)
    assert inner_tensors.binary(half, full, full) == 0
    assert inner_tensors.binary(count, full, full) == MB + PADDED


def test_a_copy_with_a_cast_needs_the_strided_source_in_one_piece() -> None:
    source = tensor(512, 1024, strides=(2048, 1))
    assert inner_tensors.inplace_copy(tensor(512, 1024), source) == 0  # the copy is the result
    assert inner_tensors.inplace_copy(tensor(512, 1024, dtype=FLOAT32), source) == MB + PADDED
    strided = tensor(512, 1024, dtype=FLOAT32, strides=(2048, 1))
    assert inner_tensors.inplace_copy(strided, source) == 3 * MB + 2 * PADDED
    assert inner_tensors.cast(source, FLOAT32, tensor(512, 1024, dtype=FLOAT32)) == MB + PADDED


def matrix(rows: int, columns: int, *, transposed: bool = False, dtype: int = BFLOAT16) -> TensorOnDevice:
    return TensorOnDevice((rows, columns), dtype, (1, rows) if transposed else (columns, 1))


def test_a_product_that_lies_well_keeps_messages_only() -> None:
    weight = matrix(4096, 1024, transposed=True)
    assert products.product(matrix(2048, 4096), weight) == 20 * MB
    assert products.matmul(tensor(2048, 4096), tensor(4096, 1024), 0, 0) == 20 * MB


def test_an_inner_axis_above_65535_has_operands_and_result_in_blocks() -> None:
    gradient, hidden = matrix(100000, 1024, transposed=True), matrix(1024, 2048)
    operands = 2 * 100000 * 1024 + 2 * 1024 * 2048  # both are whole blocks of 16 by 16
    assert products.product(gradient, hidden) == operands + 2 * 100000 * 2048 + 3 * PADDED
    assert products.product(matrix(65535, 1024, transposed=True), hidden) < 200 * MB  # one less lies well, but for its rows
    narrow = matrix(4096, 100)  # under 128, and not a multiple of 16
    blocks = 2 * 4096 * 112 + 2 * 112 * 1024 + 2 * 4096 * 1024
    assert products.product(narrow, matrix(100, 1024)) == blocks + 3 * PADDED


def test_many_terms_are_added_up_in_float32_by_each_core() -> None:
    gradient, weight = matrix(2048, 100096), matrix(100096, 2560)
    parts = 4 * 2048 * 2560
    assert products.product(gradient, weight) == 20 * MB + parts + 2 * 2048 * 100096  # rows above 65535 are rearranged
    assert products.product(matrix(2048, 32768), matrix(32768, 2560)) == 20 * MB + parts
    assert products.product(matrix(2048, 27391), matrix(27391, 2560)) == 20 * MB + 2 * 2048 * 27392  # its rows are uneven


def test_rows_that_do_not_begin_at_256_bytes_are_rearranged() -> None:
    assert products.product(matrix(2048, 4000), matrix(4000, 4096)) == 20 * MB + 2 * 2048 * 4000
    assert products.product(matrix(2048, 4000, dtype=FLOAT32), matrix(4000, 4096, dtype=FLOAT32)) == 20 * MB


def test_strided_and_mixed_operands_are_copied_first() -> None:
    strided = TensorOnDevice((2048, 1024), BFLOAT16, (2048, 1))
    assert products.product(strided, matrix(1024, 1024)) == 20 * MB + 4 * MB + PADDED
    mixed = products.product(matrix(2048, 1024), matrix(1024, 1024, dtype=FLOAT32))
    assert mixed == 20 * MB + 8 * MB + PADDED


def layout(name: str) -> int:
    _kept.append(ctypes.create_string_buffer(name.encode()))
    return ctypes.addressof(_kept[-1])


_kept: list[ctypes.Array[ctypes.c_char]] = []


def attention_call(queries: int, keys: int, heads: int, groups: int, gradient: bool = False, name: str = "SBH") -> int:
    """One call with heads of 128, a mask, and nothing packed."""
    q, k, v = (tensor(length, 1, count * 128) for length, count in ((queries, heads), (keys, groups), (keys, groups)))
    before, rest = (10, attention.backward) if gradient else (5, attention.forward)
    return int(rest(q, k, v, *[0] * before, 1.0, 1.0, 0, 0, heads, layout(name), 0, 2, 0, 0, 0, 0))


def test_attention_keeps_the_scores_of_each_vector_core() -> None:
    a_core = 2 * 4 * 8 * 128 * 128 + 4 * 4 * 128 * 128  # eight blocks of scores, twice, and four of results, in float32
    assert attention_call(4096, 4096, 32, 8) == 16 * MB + 48 * a_core
    assert attention_call(2048, 2048, 1, 1) == 16 * MB + 48 * a_core // 2  # too few blocks of 128 rows for all cores
    assert attention_call(4096, 4000, 32, 8) == 16 * MB + 48 * (3 * 4 * 8 * 128 * 128 + 4 * 4 * 128 * 128)  # 4000 % 64
    assert attention_call(4096, 1024, 32, 8) == 0  # another tiling
    assert attention_call(4096, 4096, 32, 8, name="NTD") == attention_call(4096, 4096, 32, 8, name="BNSD") == 0  # not read


def test_wide_heads_share_a_cube_core() -> None:
    call = attention.Call(1, 32, 1, 4096, 4096, 192, 128, 32 * 4096, 0, "SBH", BFLOAT16)
    assert attention.forward_size(call) == 16 * MB + 24 * (3 * 4 * 8 * 256 * 128 + 4 * 4 * 256 * 128)


def test_attention_adds_up_its_gradients_in_float32() -> None:
    gradients = 4 * 4096 * (4096 + 1024 + 1024) + 3 * 512
    sums = 32 * 32 * 4096  # eight numbers for each row of each head
    assert attention_call(4096, 4096, 32, 8, gradient=True) == 20 * MB + 64 * 1024 + gradients + sums + 48 * 2 * MB
    assert attention_call(512, 512, 32, 8, gradient=True) == 20 * MB + 4 * 512 * (4096 + 1024 + 1024)  # the least there is


def test_deterministic_gradients_have_sums_of_their_own_on_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    as_ever = attention_call(4096, 4096, 32, 8, gradient=True)
    norm = workspace.rms_norm_grad(0, 0, 0, tensor(4096), 0, 0)
    monkeypatch.setattr(attention, "deterministic", lambda: True)
    monkeypatch.setattr(workspace, "deterministic", lambda: True)
    two_blocks = 2 * 24 * 512 * 128 * 4
    assert attention_call(4096, 4096, 32, 8, gradient=True) == as_ever + 3 * two_blocks
    assert attention_call(512, 512, 32, 8, gradient=True) == 32 * MB + 4 * 512 * (4096 + 1024 + 1024)
    assert workspace.rms_norm_grad(0, 0, 0, tensor(4096), 0, 0) == norm + 48 * 4 * 4096
    assert attention.forward_size(attention.Call(1, 4, 1, 4096, 4096, 128, 128, 4 * 4096, 0, "SBH", BFLOAT16)) > 0


def test_the_flag_is_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())  # type: ignore[arg-type]
    assert not workspace.deterministic()
    asked = types.SimpleNamespace(are_deterministic_algorithms_enabled=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", asked)  # type: ignore[arg-type]
    assert workspace.deterministic()


def gradient_call(layout_name: str, width: int, value_width: int, heads: int = 128, batch: int = 1) -> attention.Call:
    rows = batch * heads * 4096
    return attention.Call(batch, heads, 1, 4096, 4096, width, value_width, rows, 32, layout_name, BFLOAT16)


def test_a_gradient_s_kernel_takes_heads_of_some_widths_only() -> None:
    rows = 128 * 4096
    latent = (rows * 192, rows * 192, rows * 128)  # keys of 192 and values of 128: as they are
    assert attention.widened(gradient_call("SBH", 192, 128), latent, False) == (gradient_call("SBH", 192, 128), latent, 0)
    assert attention.widened(gradient_call("TND", 192, 128), latent, False).copies == 0
    values = 4 * (2 * rows * 192 + PADDED)  # output, its gradient, value, and its gradient, with heads of 192
    fixed = attention.widened(gradient_call("SBH", 192, 128), latent, True)
    assert fixed == (gradient_call("SBH", 192, 192), (rows * 192,) * 3, values)
    packed = attention.widened(gradient_call("TND", 192, 128), latent, True)
    assert packed == (gradient_call("TND", 256, 256), (rows * 256,) * 3, values + 8 * (2 * rows * 256 + PADDED))
    odd = attention.widened(gradient_call("SBH", 192, 64), (rows * 192, rows * 192, rows * 64), False)
    assert odd.copies == values
    assert attention.widened(gradient_call("BNSD", 100, 100, 4), (4 * 4096 * 100,) * 3, False).call.width == 112


def test_tokens_that_lie_far_apart_are_turned_first() -> None:
    rows = 16 * 32 * 4096
    near = attention.widened(gradient_call("SBH", 128, 128, 32, 15), (15 * 32 * 4096 * 128,) * 3, False)
    far = attention.widened(gradient_call("SBH", 128, 128, 32, 16), (rows * 128,) * 3, False)
    assert near.copies == 0 and far.copies == 8 * (2 * rows * 128 + PADDED)
    assert attention.widened(gradient_call("BNSD", 128, 128, 32, 16), (rows * 128,) * 3, False).copies == 0


def test_packed_documents_are_read_from_their_ends() -> None:
    q, k = tensor(8192, 4, 128), tensor(8192, 1, 128)
    ends = objects._keep((6000, 8192))
    size = attention.forward(q, k, k, *[0] * 5, ends, ends, 1.0, 1.0, 0, 0, 4, layout("TND"), 0, 3, 0, 0, 0, 0)
    assert size == 16 * MB + 24 * (3 * 4 * 8 * 256 * 128 + 4 * 4 * 256 * 128)  # the longest is above 5120
    short = objects._keep((2048, 4096, 6144, 8192)[:3])
    size = attention.forward(q, k, k, *[0] * 5, short, short, 1.0, 1.0, 0, 0, 4, layout("TND"), 0, 3, 0, 0, 0, 0)
    assert size == 16 * MB + 48 * (3 * 4 * 8 * 128 * 128 + 4 * 4 * 128 * 128)


def embedding(source: int, tokens: int, rows: int, result: int) -> int:
    return gradients.embedding(source, tokens, rows, -1, False, result)


def test_attention_turns_tokens_that_lie_far_apart() -> None:
    def copies(batch: int) -> int:
        q, k = tensor(4096, batch, 32 * 128), tensor(4096, batch, 8 * 128)
        call = attention.Call(batch, 32, 4, 4096, 4096, 128, 128, batch * 32 * 4096, 0, "SBH", BFLOAT16)
        size = attention.forward(q, k, k, *[0] * 5, 1.0, 1.0, 0, 0, 32, layout("SBH"), 0, 2, 0, 0, 0, 0)
        return size - attention.forward_size(call)

    assert copies(15) == 0
    assert copies(16) == 16 * 2 * 4096 * 128 * (2 * 32 + 2 * 8) + 4 * PADDED  # query and output, key and value


def packed_gradient(width: int, ends: tuple[int, ...], keep: float = 1.0, mask: int = 2048) -> int:
    """Heads of one width, 8192 tokens, and a causal mask that is shared by all documents."""
    q, k = tensor(8192, 4, width), tensor(8192, 1, width)
    both, shared = objects._keep(ends), tensor(mask, mask, dtype=BOOL)
    given = [q, k, k, 0, 0, 0, 0, shared, *[0] * 5]
    return attention.backward(*given, both, both, 1.0, keep, 0, 0, 4, layout("TND"), 0, 3, 0, 0, 0, 0)


def test_gradients_of_packed_documents_take_a_tiling_of_their_own() -> None:
    full = 4 * 8192 * 128 * 6 + 32 * 8192 * 4
    basic = 32 * MB + full + 2 * 48 * MB + 6 * 512
    assert packed_gradient(128, (8192,)) == packed_gradient(128, tuple(range(64, 8193, 64))) == basic
    wide = 4 * 8192 * 192 * 6
    long = 20 * MB + 64 * 1024 + wide + 3 * 512 + 32 * 8192 * 4 + 48 * 2 * MB
    assert packed_gradient(192, (4096, 8192)) == long  # wider heads than that tiling takes
    short = 20 * MB + 16 * 1024 + wide + 48 * 8 * 128 * 64 * 16 + 6 * 512
    assert packed_gradient(192, tuple(range(256, 8193, 256))) == short
    assert packed_gradient(128, (8192,), keep=0.9) == long - wide + 4 * 8192 * 128 * 6  # dropout
    assert packed_gradient(128, (8192,), mask=8192) == long - wide + 4 * 8192 * 128 * 6  # a mask of each token


def test_a_small_embedding_adds_up_in_float32_and_a_large_one_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tensor(2048, 1, dtype=INT64)
    kernel, in_order = 16 * MB + PADDED, 2 * aligned(4 * 2048)  # the tokens sorted, and where they were
    small = tensor(2048, 1, 1024), tensor(8192, 1024)
    assert embedding(small[0], tokens, 8192, small[1]) == kernel + in_order + 4 * 1024 * (2048 + 8192) + 2 * PADDED
    large = tensor(2048, 1, 4096), tensor(32000, 4096)
    parts = 48 * 2 * 4 * 4096  # two rows of sums for each core
    assert embedding(large[0], tokens, 32000, large[1]) == kernel + in_order + parts
    full = tensor(2048, 1, 4096, dtype=FLOAT32), tensor(32000, 4096, dtype=FLOAT32)
    assert embedding(full[0], tokens, 32000, full[1]) == kernel + in_order
    few = tensor(256, 1, 4096), tensor(256, 1, dtype=INT32)
    cast = 4 * 4096 * (256 + 32000) + 2 * PADDED
    assert embedding(few[0], few[1], 32000, large[1]) == kernel + 2 * aligned(4 * 256) + cast
    narrow = tensor(200_000, 512), tensor(8192, 512), tensor(200_000, dtype=INT32)
    assert embedding(narrow[0], narrow[2], 8192, narrow[1]) == kernel + 4 * 8192 * 512  # nothing is put in order
    monkeypatch.setattr(gradients, "deterministic", lambda: True)
    assert embedding(narrow[0], narrow[2], 8192, narrow[1]) == 16 * MB + 2 * aligned(4 * 200_000) + aligned(48 * 2 * 4 * 513)


def test_kernels_that_take_one_type_have_the_other_cast() -> None:
    half, full = tensor(256, 1024), tensor(256, 1024, dtype=FLOAT32)
    assert inner_tensors.in_place(full, half) == 0  # a gradient in half precision is added to one in float32
    assert inner_tensors.difference(full, half, 0, full) == MB + PADDED
    assert inner_tensors.difference_in_place(full, half) == MB + PADDED
    strided = tensor(256, 1024, dtype=FLOAT32, strides=(2048, 1))
    assert inner_tensors.in_place(strided, full) == 2 * (MB + PADDED)  # copied, and its result again


def test_batches_are_copied_where_they_are_strided() -> None:
    queries = TensorOnDevice((16, 1024, 128), BFLOAT16, (128, 2048, 1))  # heads inside of tokens
    keys = TensorOnDevice((16, 128, 1024), BFLOAT16, (131072, 1, 128))  # the last two axes swapped, a head after the other
    assert products.batched(queries, keys) == 2 * 16 * 1024 * 128 + PADDED
    inner = (
        TensorOnDevice((16, 1024, 100), BFLOAT16, (102400, 100, 1)),
        TensorOnDevice((16, 100, 1024), BFLOAT16, (102400, 1024, 1)),
    )
    blocks = 2 * 16 * (1024 * 112 + 112 * 1024 + 1024 * 1024)
    assert products.batched(*inner) == blocks + 3 * PADDED
    uneven = (
        TensorOnDevice((4, 1024, 1000), BFLOAT16, (1024000, 1000, 1)),
        TensorOnDevice((4, 1000, 1024), BFLOAT16, (1024000, 1024, 1)),
    )
    assert products.batched(*uneven) == 20 * MB + 2 * 4 * 1024 * 1008


def test_batches_in_a_plain_product_are_copied_where_they_are_strided() -> None:
    scores = tensor(1, 4, 1024, 512, strides=(4 * 1024 * 513, 1024 * 513, 513, 1))  # without the last column: a sink
    shared = tensor(1, 1, 512, 256)
    assert products.matmul(scores, shared, 0, 0) == max(4 * MB + PADDED, 20 * MB)
    many = tensor(1, 64, 1024, 512, strides=(64 * 1024 * 513, 1024 * 513, 513, 1))
    assert products.matmul(many, shared, 0, 0) == 64 * MB + PADDED
    permuted = tensor(64, 1024, 512, strides=(512, 64 * 512, 1))
    assert products.matmul(permuted, tensor(64, 512, 256), 0, 0) == 64 * MB + PADDED
    assert products.matmul(tensor(64, 1024, 512), tensor(64, 512, 256), 0, 0) == 20 * MB


def test_sorting_tokens_takes_six_numbers_for_each_choice() -> None:
    tokens, choices = tensor(4096, 2048), tensor(4096, 8, dtype=INT64)
    size = workspace.token_permute(tokens, choices, 0, False, 0, 0)
    assert size == 16 * MB + 6 * 4 * 4096 * 8 + 48 * 32 * 2
    assert workspace.constants["aclnnGroupedMatmulV4"] == workspace.system_only() == 16 * MB


def test_products_fused_with_a_collective_rearrange_the_weight() -> None:
    x, weight, result = tensor(2048, 4000), tensor(4000, 3584), tensor(8192, 3584)
    rearranged = 2 * 4096 * 3584
    whole, none = tensor(8192, 4000), tensor(0)
    assert fused_products.all_gather_matmul(x, weight, 0, 0, 0, 0, 1, result, whole) == 16 * MB + rearranged
    gathered = 4 * 2 * 2048 * 4000
    assert fused_products.all_gather_matmul(x, weight, 0, 0, 0, 0, 1, result, none) == 16 * MB + rearranged + gathered
    assert fused_products.matmul_reduce_scatter(x, weight, 0, 0, 0, 0, 1, 0) == 16 * MB + rearranged + 2 * 2048 * 3584


def test_parts_that_are_strided_or_of_another_type_are_copied_before_they_are_put_together() -> None:
    part, strided = tensor(1024, 64), tensor(1024, 64, strides=(128, 1))
    result = tensor(1024, 128)
    copy = 2 * 1024 * 64 + PADDED
    listed = objects._keep((part, strided))
    assert inner_tensors.together(listed, 1, result) == copy
    full = objects._keep((part, tensor(1024, 64, dtype=FLOAT32)))
    assert inner_tensors.together(full, 1, tensor(1024, 128, dtype=FLOAT32)) == 4 * 1024 * 64 + PADDED
    alone = objects._keep((strided,))
    assert inner_tensors.together(alone, 1, part) == 0  # the copy is the result


def test_a_sum_in_float32_casts_its_input_and_a_mask_is_not_cast() -> None:
    half, mask = tensor(1024, 512), tensor(1024, 512, dtype=BOOL)
    total = tensor(1024, dtype=FLOAT32)
    assert inner_tensors.in_the_type_of_the_output(half, 0, False, 0, total) == 2 * MB + PADDED
    assert inner_tensors.in_the_type_of_the_output(mask, half, half, half) == 0


def test_rows_that_an_expanded_index_names_are_not_copied_to_its_shape() -> None:
    rows, hidden, picked = 4096, 2048, 16384
    tokens, chosen = tensor(rows, hidden), tensor(picked, hidden)
    index = tensor(picked, hidden, dtype=INT64, strides=(1, 0))
    sort = 16 * MB + PADDED + 2 * (4 * picked + PADDED)
    assert indexed.gather(tokens, 0, index, chosen) == 8 * picked + PADDED
    assert indexed.scatter_add(tokens, 0, index, chosen, tokens) == sort
    assert indexed.index_add(tokens, 0, tensor(picked, dtype=INT64), chosen, 0, tokens) == sort


def test_an_index_of_single_elements_is_narrowed_and_axes_before_the_last_are_swapped() -> None:
    scores = tensor(1024, 64, dtype=FLOAT32)
    index = tensor(1024, 8, dtype=INT64)
    narrowed = 4 * 1024 * 8 + PADDED + 16 * MB + PADDED
    assert indexed.scatter_in_place(scores, 1, index, tensor(1024, 8, dtype=FLOAT32), 0) == narrowed
    assert indexed.scatter_in_place(scores, -1, index, 0, 0) == narrowed + 4 * 1024 * 8 + PADDED  # a number is spread out
    across = indexed.scatter_in_place(scores, 0, index, tensor(1024, 8, dtype=FLOAT32), 0)
    swapped = 2 * 4 * 1024 * 64 + (8 + 4) * 1024 * 8 + 4 * PADDED
    assert across == narrowed + swapped


def test_what_is_added_at_an_index_is_added_in_float32_or_sorted() -> None:
    def put(rows: int, width: int, count: int, accumulate: bool = True) -> int:
        places = objects._keep((tensor(count, dtype=INT64),))
        return indexed.put(tensor(rows, width), places, tensor(count, width), accumulate, False)

    assert put(1024, 2048, 1024, accumulate=False) == 0
    assert put(1024, 2048, 1024) == 2 * (4 * 1024 * 2048 + PADDED)
    assert put(16384, 2048, 16384) == 16 * MB + PADDED + 2 * (4 * 16384 + PADDED) + 2 * 48 * 4 * 2048  # above 250 MB


def test_a_product_added_to_another_is_made_in_float32() -> None:
    scores, queries = tensor(16, 1024, 1024), tensor(16, 1024, 128)
    keys = tensor(16, 128, 1024, strides=(131072, 1, 128))
    whole = 4 * 16 * 1024 * 1024 + PADDED
    assert products.batch_product_added(scores, queries, keys, 0, 0, scores) == 2 * whole


def test_axes_of_16384_have_the_second_operand_rearranged() -> None:
    plain = products.matmul(tensor(4096, 6656), tensor(6656, 16384))
    assert plain == 20 * MB + 2 * 6656 * 16384
    assert products.matmul(tensor(2048, 6656), tensor(6656, 16384)) == 20 * MB


def test_tokens_permuted_by_a_map_have_it_turned_over() -> None:
    routing, scores = tensor(4096, 64, dtype=BOOL), tensor(4096, 64, dtype=FLOAT32)
    size = 16 * MB + 16 * 32768 + 48 * 64 + 5 * 4096 * 64
    assert workspace.permute_by_map(tensor(4096, 2048), routing, scores, 32768, False, 0, 0, 0) == size
    assert workspace.permute_by_map(tensor(4096, 2048), routing, 0, 32768, False, 0, 0, 0) == size - 4 * 4096 * 64
    gradient = workspace.permute_by_map_grad(tensor(32768, 2048), 0, 0, routing, 64, 4096, False, 0, scores)
    assert gradient == 16 * MB + 13 * 4096 * 64
    assert workspace.permute_by_map_grad(tensor(32768, 2048), 0, 0, routing, 64, 4096, False, 0, 0) == 16 * MB


def test_the_page_of_operators_is_that_of_the_formulas() -> None:
    kept = (ROOT / "docs" / "workspace.md").read_text(encoding="utf-8")
    made = subprocess.run([sys.executable, ROOT / "benchmarks" / "workspace_page.py"], capture_output=True, text=True, check=True)
    assert kept == made.stdout, "python benchmarks/workspace_page.py > docs/workspace.md"


def test_every_formula_says_where_it_is_from() -> None:
    sources = re.compile(r"[a-z_]+/|\.cpp")
    assert [name for name, formula in workspace.formulas.items() if not sources.search(formula.__doc__ or "")] == []


def test_the_cores_of_the_named_card_share_out_what_attention_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = attention.Call(1, 8, 1, 4096, 4096, 128, 128, 8 * 4096, 0, "SBH", BFLOAT16)
    block = 4 * (8 * 128 * 128 * 2 + 4 * 128 * 128)
    assert attention.forward_size(call) == 16 * MB + 48 * block
    monkeypatch.setattr(config, "current", lambda: config.Activation(cube_cores=20))  # an Ascend 910B3
    assert attention.forward_size(call) == 16 * MB + 40 * block
