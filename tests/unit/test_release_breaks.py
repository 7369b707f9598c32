"""What later releases of MindSpeed-LLM broke, on fakes that fail as they did, with the patches of the catalogue.

The other rows: packed samples in `test_mock_samples.py` and `test_documents.py`, masks in `test_documents.py`, and upstream's own
errors in `test_upstream_errors.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_patch_engine import imported
from test_patch_engine import project as project

from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.rank import installed, patcher
from mindspeed_dryrun.rank.handlers import data, msadapter, training

FINE_TUNING = ["--micro-batch-size", "2", "--stage", "sft"]
SIZES = "megatron.core.tensor_parallel.data:_build_key_size_numel_dictionaries"


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Megatron's arguments of a fine-tuning job."""
    found = SimpleNamespace(
        micro_batch_size=2, seq_length=8, reset_position_ids=False, reset_attention_mask=False, variable_seq_lengths=False
    )
    training = ModuleType("megatron.training")
    training.get_args = lambda: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    return found


@pytest.mark.usefixtures("args")
def test_sizes_of_a_batch_are_the_loaders_own() -> None:
    read_back = data.batch_sizes(lambda keys, batch: ({}, {}, 0))
    batch = {"labels": SimpleNamespace(shape=(2, 5))}
    assert read_back(["labels"], batch) == ({"labels": [2, 5]}, {"labels": 10}, 10)
    assert read_back(["labels"], None) == ({"labels": [2, 8]}, {"labels": 16}, 16), "a rank that reads no data"


@pytest.fixture
def two_functions(project: Callable[..., None]) -> Any:
    """2.3.0 as far as batches go: `broadcast_data` was replaced, and calls a function of MindSpeed-LLM's own."""
    read_zeros = "(keys, data):\n    return {key: [] for key in keys}, {key: 0 for key in keys}, 0\n"
    project(
        setup="__version__ = '2.3.0'\n",
        megatron__training__arguments="",
        megatron__core__tensor_parallel__data=f"def _build_key_size_numel_dictionaries{read_zeros}",
        mindspeed_llm__mindspore__core__tensor_parallel__data=f"def local_build_key_size_numel_dictionaries{read_zeros}",
        mindspeed_llm__training__utils="def get_finetune_data_on_this_tp_rank(data_iterator): ...\n",
    )
    installed.version.cache_clear()
    before = set(sys.modules)
    patcher.install([patch for patch in catalogue.compile() if patch.get("purpose") == "batch sizes"])
    yield imported("megatron.core.tensor_parallel.data"), imported("mindspeed_llm.mindspore.core.tensor_parallel.data")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("megatron", "mindspeed_llm"):
            del sys.modules[name]
    installed.version.cache_clear()


def test_the_function_that_replaced_megatrons_is_patched_too(two_functions: Any, args: SimpleNamespace) -> None:
    new = two_functions[1]
    assert new.local_build_key_size_numel_dictionaries(["labels"], None) == ({"labels": [2, 8]}, {"labels": 16}, 16)
    patcher.check_calls(FINE_TUNING)  # one function of this purpose is enough


def test_a_release_that_calls_neither_stops_with_the_patchs_name(two_functions: Any) -> None:
    with pytest.raises(patcher.DriftError, match="Patch megatron-batch-sizes was never called"):
        patcher.check_calls(FINE_TUNING)
    patcher.check_calls(["--micro-batch-size", "2"])  # pretraining asks for none


def test_a_device_without_a_number_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_device_name(device: object = None) -> str:
        if not isinstance(device, int):
            raise TypeError(f"The argument 'device_id' must be int, but got {device}.")
        return "a card"

    acl = ModuleType("acl")
    acl.get_soc_name = lambda: "Ascend910B"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acl", acl)
    with pytest.raises(TypeError, match="must be int"):
        get_device_name()
    assert msadapter.name_of_this_device(get_device_name)() == "Ascend910B"


def test_a_fused_product_does_not_ask_for_the_index_of_a_device(project: Callable[..., None]) -> None:
    project(
        mindspeed__patch_utils="class Patch:\n    def apply_patch(self): ...\n    def remove_patch(self): ...\n",
        mindspeed__ops__lcal_functional="class CoCOperations:\n"
        + "".join(
            f"    @staticmethod\n    def {name}(left, right, output, more=None):\n        return left.index // 8\n"
            for name in ("all_gather_matmul", "all_gather_matmul_v2", "matmul_reduce_scatter", "matmul_all_reduce", "pure_matmul")
        ),
    )
    tensor = SimpleNamespace(index=None)
    operations = imported("mindspeed.ops.lcal_functional").CoCOperations
    with pytest.raises(TypeError, match="unsupported operand"):
        operations.all_gather_matmul(tensor, tensor, "output", "filled")
    patcher.install([patch for patch in catalogue.compile() if "lcal_functional" in str(patch["target"])])
    assert operations.all_gather_matmul(tensor, tensor, "output", "filled") == "filled"


def test_times_that_cannot_be_picked_on_the_device_are_left_out_of_the_log() -> None:
    def times(self: object, names: list[str]) -> dict[str, float]:
        raise RuntimeError(f"For aclnnNonzeroV2, the output shape depends on the actual execution, and it {names[0]}")

    assert training.times_of_all_ranks(times)(None, ["x"]) == {}
    assert training.times_of_all_ranks(lambda *args: {"x": 1.0})(None, ["x"]) == {"x": 1.0}
    with pytest.raises(RuntimeError, match="something else"):
        training.times_of_all_ranks(lambda *args: (_ for _ in ()).throw(RuntimeError("something else")))(None, [])
