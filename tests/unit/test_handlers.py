"""The bodies of the patch handlers, on small stand-ins for the functions that they wrap."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.launch import patch_catalogue
from mindspeed_dryrun.rank import mindspore_rank, patcher
from mindspeed_dryrun.rank.activation import Activation
from mindspeed_dryrun.rank.handlers import fused_communication, process_group, tokenizer, training


def _parsed(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, **values)


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError("no such folder")


def test_a_tokenizer_of_the_padded_size_needs_no_file() -> None:
    found = tokenizer.build_tokenizer(_fails)(_parsed(padded_vocab_size=152064))
    assert (len(found), found.vocab_size, found.eod) == (152064, 152064, 0)


def test_a_vocabulary_is_padded_as_megatron_pads_it() -> None:
    args = _parsed(vocab_size=32001, padded_vocab_size=None)
    assert tokenizer.build_tokenizer(_fails)(args).vocab_size == 32001
    assert args.padded_vocab_size == 32256  # to a multiple of 128 * 2


def test_a_vocabulary_of_unknown_size_is_the_real_tokenizers_or_a_sentence() -> None:
    args = _parsed(vocab_size=None, padded_vocab_size=None)
    assert tokenizer.build_tokenizer(lambda args: "real")(args) == "real"
    with pytest.raises(DryRunError, match="--padded-vocab-size N"):
        tokenizer.build_tokenizer(_fails)(args)


def test_parsed_arguments_touch_no_file_of_the_user(mocker: MockerFixture) -> None:
    mocker.patch("mindspeed_dryrun.rank.activation.current", return_value=Activation(scratch="/record/scratch"))
    parsed = SimpleNamespace(
        save="ckpt", load="ckpt", tensorboard_dir="tb", data_path=["d"], tokenizer_name_or_path="t", vocab_size=8,
        data_cache_path="c", num_workers=4, hidden_size=64,
    )  # fmt: skip
    found = training.parse_args(lambda: parsed)()
    assert (found.save, found.load, found.tensorboard_dir, found.data_path) == (None, None, None, None)
    assert (found.num_workers, found.tokenizer_name_or_path, found.hidden_size) == (0, None, 64)
    assert found.data_cache_path == "/record/scratch/data_cache"


@pytest.mark.parametrize(("variable", "trains"), [("1", True), ("0", False)])
def test_a_dry_run_trains(mocker: MockerFixture, variable: str, trains: bool) -> None:
    mocker.patch.dict(os.environ, {"MS_DRY_RUN": variable})
    phase = mocker.patch("mindspeed_dryrun.rank.progress.phase")
    args = SimpleNamespace(do_train=False)
    assert training.build_train_args(lambda args, *rest: rest)(args, 1, 2) == (1, 2)
    assert args.do_train is trains
    phase.assert_called_once_with("building")


def test_an_iteration_counts_when_it_has_ended(mocker: MockerFixture) -> None:
    mocker.patch("mindspeed_dryrun.rank.activation.current", return_value=Activation(iterations=2))
    counted = mocker.patch("mindspeed_dryrun.rank.progress.iteration")
    step = training.train_step(lambda: counted.call_count)
    assert (step(), step()) == (0, 1), "the iteration is told after the step, not before"
    assert counted.call_args_list == [mocker.call(1, 2), mocker.call(2, 2)]
    with pytest.raises(OSError, match="no such folder"):
        training.train_step(_fails)()
    assert counted.call_count == 2


def test_nothing_is_saved() -> None:
    (patch,) = (patch for patch in patch_catalogue.compile() if patch["name"] == "mindspore-no-checkpoint")
    assert patcher._new_function(patch, _fails)("iteration", model=1) is None


@pytest.fixture
def adapter() -> ModuleType:
    """MSAdapter's `init_process_group`, as far as it asks for a role and starts the engine."""
    module = ModuleType("adapter")
    exec(
        "import os\n"
        "seen = {}\n"
        "def init(): seen['at the start'] = os.environ.get('MS_ROLE')\n"
        "def init_process_group(backend=None, init_method=None, fails=False):\n"
        "    seen.update(asked=os.environ.get('MS_ROLE'), method=init_method)\n"
        "    init()\n"
        "    if fails: raise ValueError('fails')\n",
        vars(module),
    )
    return module


def test_a_process_group_gets_a_tcp_address_and_the_engine_no_role(adapter: ModuleType, mocker: MockerFixture) -> None:
    checked = mocker.patch.object(mindspore_rank, "check_simulation")
    original_init = adapter.init
    call = process_group.init_process_group(adapter.init_process_group)
    call("hccl")
    assert adapter.seen["method"].startswith("tcp://127.0.0.1:")
    assert (adapter.seen["asked"], adapter.seen["at the start"]) == ("MS_WORKER", None)
    call("hccl", init_method="tcp://host:1")
    assert adapter.seen["method"] == "tcp://host:1"
    with pytest.raises(ValueError, match="fails"):
        call("hccl", None, True)
    assert adapter.init is original_init and "MS_ROLE" not in os.environ, "everything is put back"
    assert checked.call_count == 3


def test_a_process_group_that_is_not_simulated_is_never_made(adapter: ModuleType, mocker: MockerFixture) -> None:
    mocker.patch.object(mindspore_rank, "check_simulation", side_effect=DryRunError("not simulated"))
    with pytest.raises(DryRunError, match="not simulated"):
        process_group.init_process_group(adapter.init_process_group)("hccl")
    assert adapter.seen == {}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torch")
    fake.empty = lambda shape, dtype, device: SimpleNamespace(shape=tuple(shape), dtype=dtype, device=device)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)


def _tensor(*shape: int) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype="bf16", device="npu")


@pytest.mark.usefixtures("torch")
def test_a_fused_product_leaves_what_the_two_operators_would() -> None:
    product, gathered = fused_communication.gather_then_product(_fails)(_tensor(8, 16), _tensor(16, 32), "group", 4)
    assert (product.shape, gathered.shape, product.dtype) == ((32, 32), (32, 16), "bf16")
    _, none = fused_communication.gather_then_product(_fails)(_tensor(8, 16), _tensor(16, 32), "g", 4, gather_output=False)
    assert none.shape == (0,)
    assert fused_communication.product_then_scatter(_fails)(_tensor(8, 16), _tensor(16, 32), "group", 4).shape == (2, 32)
