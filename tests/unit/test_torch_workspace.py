"""Workspace by formula: each case was worked out by hand from the operator's host code, none from a measured figure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mindspeed_dryrun.rank.torch_npu import inner_tensors, objects
from mindspeed_dryrun.rank.torch_npu.objects import BFLOAT16, FLOAT32, INT64, TensorOnDevice

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
