"""Patches and handlers of the torch_npu engine that need no torch."""

from __future__ import annotations

import math
import os
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch import patch_catalogue
from mindspeed_dryrun.rank.activation import Activation
from mindspeed_dryrun.rank.handlers import disaggregated, moe, training
from mindspeed_dryrun.rank.handlers.tensor_methods import owner_of, replaced_method
from mindspeed_dryrun.rank.torch_npu import atb, lone_rank
from mindspeed_dryrun.rank.torch_npu import rank as torch_rank


def test_an_engine_may_replace_a_shared_patch() -> None:
    by_engine = {
        engine: {patch["name"]: patch for patch in patch_catalogue.compile(engine=engine)}
        for engine in ("mindspore", "torch_npu")
    }
    assert by_engine["mindspore"]["mindspeed-atb-builder"].get("skip") is True
    assert by_engine["torch_npu"]["mindspeed-atb-builder"]["handler"] == "mindspeed_dryrun.rank.torch_npu.atb:load"
    assert "mindspeed-llm-do-train" in by_engine["torch_npu"] and "msadapter-device-count" not in by_engine["torch_npu"]


class Half:
    """A tensor of 2-byte elements that notes what is taken for a moment beside it."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.taken = shape, []  # type: tuple[int, ...], list[int | str]

    def dim(self) -> int:
        return len(self.shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return 2

    def contiguous(self) -> None:
        self.taken.append("copy")

    def new_empty(self, size: int, dtype: Any) -> None:
        self.taken.append(size)


def test_operators_in_place_take_what_they_need_and_unknown_ones_stop_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(uint8=None))  # type: ignore[arg-type]
    operators = atb.load(lambda self: None)(object())
    narrow, wide, total = Half(4096, 32000), Half(4096, 152064), Half(1, 1)
    operators.npu_matmul_add_fp32(narrow, Half(4096, 1024), total)
    assert narrow.taken == ["copy"] == total.taken
    operators.npu_matmul_add_fp32(wide, Half(4096, 1024), total)
    assert wide.taken == ["copy", 4096 * 152064 * 2]
    with pytest.raises(DryRunError, match="rms_norm of NNAL"):
        operators.rms_norm(1)


@pytest.mark.parametrize(
    ("x", "weight", "expected"),
    [
        (Half(512, 4096), Half(2752, 4096), 0),  # transposed, and all rows begin at 512 bytes
        (Half(4096, 1376), Half(4096, 1376), (4096 + 4096) * 1536 * 2),
        (Half(512, 4096), Half(4096, 1376), 4096 * 1536 * 2),  # as it lies
    ],
)
def test_products_fused_with_a_collective_copy_operands_with_uneven_rows(x: Half, weight: Half, expected: int) -> None:
    assert atb.fused_with_collective(x, weight, None) == expected


def test_a_method_of_a_c_class_is_replaced_in_the_class_above_it() -> None:
    class Tensor(bytearray):  # as torch.Tensor is above torch._C.TensorBase
        pass

    class Parameter(Tensor):
        pass

    assert owner_of(Parameter, "find") is Tensor and owner_of(Tensor, "find") is Tensor
    with replaced_method(Parameter, "find", lambda method: lambda self, what: method(self, what) + 1):
        assert Parameter(b"ab").find(b"b") == Tensor(b"ab").find(b"b") == 2
    assert Tensor(b"ab").find(b"b") == 1 and "find" not in Tensor.__dict__


def test_counts_of_tokens_are_put_wherever_a_dispatcher_keeps_the_same_ones() -> None:
    class Dispatcher:
        on_host: Any = (0, 0)
        on_device: Any = on_host

    dispatcher = Dispatcher()
    moe._put(dispatcher, [4, 4], "on_host", "on_device")
    assert (dispatcher.on_host, dispatcher.on_device) == ([4, 4], [4, 4])
    other = Dispatcher()
    other.on_device = [0]
    moe._put(other, [4, 4], "on_host", "on_device")
    assert (other.on_host, other.on_device) == ([4, 4], [0])  # a tensor of its own, which counts
    moe._put(other, [4, 4], "missing", "none")
    assert not hasattr(other, "missing")


def test_what_lies_on_the_host_is_sent_to_nobody() -> None:
    sent: list[str] = []
    send = lone_rank.isend(lambda tensor, dst: sent.append(tensor.device.type))
    for device in ("npu", "cpu"):
        work = send(SimpleNamespace(device=SimpleNamespace(type=device)), dst=1)
    assert sent == ["npu"] and work.wait() and work.is_completed()


def test_counts_of_tokens_that_are_compared_on_the_device_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(torch_rank._FINALIZE)
    exec("def check(values):\n    assert all(value == 1 for value in values)\n", module.__dict__)
    monkeypatch.setitem(sys.modules, torch_rank._FINALIZE, module)
    with pytest.raises(AssertionError):
        module.check([0])
    torch_rank._agree_on_tokens()
    module.check([0])


def test_gradients_are_clipped_where_their_norm_reads_as_zero() -> None:
    seen = []

    def clip(parameters: object, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
        seen.append(max_norm / (total_norm + 1.0e-6))

    training.clipped(clip)([], 1.0, 0.0)
    training.clipped(clip)([], max_norm=0.5, total_norm=0.0, use_decoupled_grad=True)
    training.clipped(clip)([], 1.0, 8.0)
    assert [round(value, 3) for value in seen] == [0.5, 0.5, 0.125]


def nodes_of(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    for name, value in Activation(mode="rank", nodes=sizes).to_env().items():
        monkeypatch.setenv(name, value)


def test_ranks_gather_the_sizes_of_the_nodes_and_nothing_else_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, 1, 2)
    asked: list[Any] = []
    group = SimpleNamespace(all_gather=lambda gathered, mine: asked.append(mine))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=group, tensor=list))  # type: ignore[arg-type]
    original = group.all_gather

    def detect(mine: int) -> list[Any]:
        gathered: list[Any] = [0, 0, 0]
        group.all_gather(gathered, mine)
        return gathered

    assert disaggregated.node_sizes(detect)(2) == [[1], [2], [2]]
    assert asked == [2] and group.all_gather is original


def test_every_rank_works_out_the_edge_as_its_first_rank_does(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, 1, 3)
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    seen = disaggregated.as_edge(lambda: (os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"]))
    assert seen() == ("0", "1")
    assert (os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "3")


def test_what_the_edge_says_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"reset_position_ids": False, "reset_attention_mask": False, "variable_seq_lengths": False}
    args = SimpleNamespace(micro_batch_size=2, seq_length=64, context_parallel_size=2, no_pad_to_seq_lengths=True, **plain)
    assert disaggregated.sample_sizes(args) == [2, 32, 0, 1, 0, 1, 0]
    for name, value in Activation(mode="rank", sample_length=20).to_env().items():
        monkeypatch.setenv(name, value)
    assert disaggregated.sample_sizes(args) == [2, 10, 0, 1, 0, 1, 0]
    args.reset_attention_mask = True  # packed: the sequence is full, whatever is told
    assert disaggregated.sample_sizes(args)[:3] == [2, 32, 128]
