"""Packed samples: what upstream reads back from the device is one document of full length."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mindspeed_dryrun.rank.handlers import documents, msadapter

SEQUENCE = 8


class FakeTensor:
    """Knows its shape and its type; every value read back is 0, as in simulation."""

    def __init__(self, *shape: int, dtype: str = "Int64") -> None:
        self.shape, self.dtype, self.device = shape, dtype, "npu"

    def __getitem__(self, key: Any) -> FakeTensor:
        if isinstance(key, slice):
            return FakeTensor(len(range(*key.indices(self.shape[0]))), dtype=self.dtype)
        raise RuntimeError("the output shape depends on the actual execution")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError("the output shape depends on the actual execution")

    def __ne__(self, other: object) -> FakeTensor:  # type: ignore[override]
        return FakeTensor(*self.shape, dtype="Bool")

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    def dim(self) -> int:
        return len(self.shape)

    def repeat_interleave(self, repeats: Any) -> FakeTensor:
        return FakeTensor(0, dtype=self.dtype)

    def tolist(self) -> list[int]:
        return [0] * self.numel()


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules that a rank would have imported, with as much in them as the handlers ask for."""
    args = SimpleNamespace(
        micro_batch_size=2, seq_length=SEQUENCE, attention_mask_type="causal", context_parallel_algo="megatron_cp_algo"
    )
    torch, training = ModuleType("torch"), ModuleType("megatron.training")
    utils = ModuleType("mindspeed.core.context_parallel.get_batch_utils")
    vars(torch).update(
        Tensor=FakeTensor,
        float32="Float32",
        empty=lambda *shape, dtype, device: FakeTensor(*shape, dtype=dtype),
        zeros=lambda *shape, dtype: FakeTensor(*shape, dtype=dtype),
        tensor=lambda values: FakeTensor(len(values)),
    )
    vars(training).update(get_args=lambda: args)
    vars(utils).update(get_ring_degree=lambda: 4)
    for module in (torch, training, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for package in ("megatron", "mindspeed", "mindspeed.core", "mindspeed.core.context_parallel"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    return args


def test_of_the_padded_list_of_ends_one_is_left_in_a_block_that_has_room_for_all(args: SimpleNamespace) -> None:
    def get_batch() -> FakeTensor:  # as sft_trainer.py does from 26.0.0 on
        listed = FakeTensor(SEQUENCE)
        return listed[listed != -1]

    with pytest.raises(RuntimeError, match="depends on the actual execution"):
        get_batch()
    assert documents.packed_batch(get_batch)().shape == (1,)
    with pytest.raises(RuntimeError, match="depends on the actual execution"):
        get_batch()  # nothing is left behind


def test_the_search_for_ends_of_documents_finds_none_and_changes_nothing(args: SimpleNamespace) -> None:
    def masks(data: FakeTensor, eod: int) -> tuple[int, ...]:  # as gpt_dataset.py of MindSpeed does from 2.3.0 on
        loss_mask = FakeTensor(SEQUENCE)
        loss_mask[data != eod] = 0.0
        return data[data != eod].shape

    assert documents.masks_of_one_document(masks)(FakeTensor(SEQUENCE), 0) == (0,)


@pytest.mark.parametrize(("mask_type", "expected"), [("causal", [2, 4]), ("general", [8, 16])], ids=["ring shares", "whole"])
def test_ends_are_known_on_the_host(args: SimpleNamespace, mask_type: str, expected: list[int]) -> None:
    args.attention_mask_type = mask_type
    kept: list[Any] = []
    documents.known_ends(kept.append)(FakeTensor(2))
    assert kept[0].tolist() == expected
    documents.known_ends(kept.append)(FakeTensor(3, 2))  # multi-token prediction: a row for each depth
    assert kept[1].tolist() == [expected] * 3
    documents.known_ends(kept.append)([5])  # what is on the host stays what it is
    assert kept[2] == [5]


def test_a_rank_without_a_batch_sizes_its_list_of_ends_by_the_batch(args: SimpleNamespace) -> None:
    assert documents.broadcast_ends(lambda item: item)(None).shape == (2,)


def test_a_context_parallel_rank_takes_its_slices_of_a_full_document(
    args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("mindspeed.core.context_parallel.get_batch_utils")
    framework = SimpleNamespace(arange=lambda *ends: list(range(*ends)), cat=lambda parts: [*itertools.chain(*parts)])
    vars(module).update(torch=framework)
    # As upstream does: two slices of every document, by values that read as 0.
    exec(
        "def take(batch, ends):\n"
        "    index = torch.cat([torch.arange(0, end) for end in ends.tolist() for _ in range(2)])\n"
        "    return {name: values[: len(index)] for name, values in batch.items()}\n",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["mindspeed.core.context_parallel"], "get_batch_utils", module, raising=False)
    args.context_parallel_size = 2
    batch, take = {"tokens": "x" * 2 * SEQUENCE}, vars(module)["take"]
    assert take(batch, FakeTensor(2)) == {"tokens": ""}
    taken = documents.slices_of_one_document(take)(batch, FakeTensor(2))
    assert len(taken["tokens"]) == 2 * SEQUENCE // 2 and vars(module)["torch"] is framework


def test_the_mask_of_a_ring_block_has_a_document_number_for_each_token(args: SimpleNamespace) -> None:
    def compute_mask(cls: Any, ends: list[int]) -> FakeTensor:
        return FakeTensor(1).repeat_interleave(FakeTensor(1))

    call = documents.mask_of_documents(compute_mask)
    assert call(SimpleNamespace(batch_size=2), [8, 16]).shape == (8,)
    assert compute_mask(None, []).shape == (0,)


def test_only_tensors_of_32_bits_are_converted(args: SimpleNamespace) -> None:
    def fp32_to_float16(value: Any, convertor: Any) -> Any:  # MSAdapter: every tensor is a torch.cuda.FloatTensor
        return tuple(convertor(tensor) for tensor in value)

    mask, hidden = FakeTensor(4, dtype="Bool"), FakeTensor(4, dtype="Float32")
    converted = msadapter.convert_float32_only(fp32_to_float16)((mask, hidden), lambda tensor: "bfloat16")
    assert converted == (mask, "bfloat16")


def test_attention_has_as_many_results_as_in_pytorch() -> None:
    seen = []
    msadapter.all_attention_results(lambda q, kv, results, rest: seen.append(results))(0, 0, ("out", "max", "sum"), None)
    assert len(seen[0]) == 7
