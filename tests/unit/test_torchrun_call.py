"""torchrun's words are read as torchrun reads them."""

from __future__ import annotations

import pytest

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.captured_call import CapturedCall
from mindspeed_dryrun.launch.torchrun_call import OPTIONS, SWITCHES, read_torchrun_call


def read(text: str, **env: str) -> CapturedCall:
    return read_torchrun_call(text.split(), "/here", env)


def test_nodes_and_processes_make_the_world() -> None:
    call = read("--nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr localhost --master_port 6000 pretrain_gpt.py --bf16")
    assert (call.world_size, call.local_world_size) == (16, 8)
    assert (call.program, call.program_args) == ("pretrain_gpt.py", ("--bf16",))
    assert call.options["master_port"] == "6000"


def test_dashes_equals_signs_abbreviations_and_switches() -> None:
    call = read("--nproc-per-node=4 --standalone --rdzv-backend=c10d -r 3 --max-restarts 0 train.py --nproc-per-node 9")
    assert call.world_size == 4 and call.program_args == ("--nproc-per-node", "9")
    assert read("--nproc_per=2 train.py").world_size == 2
    assert read("-m --nproc_per_node 2 some.module x").program == "some.module"
    assert read("--no-python --nproc_per_node 2 python -u train.py x").program == "train.py"


def test_without_a_number_it_is_one_process_or_what_the_environment_says() -> None:
    assert read("train.py").world_size == 1
    assert read("train.py", PET_NPROC_PER_NODE="8", PET_NNODES="2").world_size == 16


def test_an_elastic_job_and_a_counted_node_are_told() -> None:
    call = read("--nnodes 1:4 --nproc_per_node auto train.py")
    assert call.world_size == 32 and len(call.notes) == 2


def test_an_empty_variable_of_an_address_is_forgiven_and_one_of_a_size_is_not() -> None:
    call = read("--nproc_per_node 8 --node_rank --master_addr pretrain_gpt.py")
    assert (call.program, call.world_size, len(call.notes)) == ("pretrain_gpt.py", 8, 2)
    with pytest.raises(UsageError, match="nproc_per_node has no value"):
        read("--nproc_per_node --nnodes 1 pretrain_gpt.py")


@pytest.mark.parametrize(
    "text",
    [
        "--master_addr your master node IP --nproc_per_node 8 train.py --lr 1",
        "--nproc_per_node 8 --master_addr the IP train.py --lr 1",
    ],
)
def test_a_placeholder_that_the_shell_splits_is_no_program(text: str) -> None:
    call = read(text)
    assert (call.program, call.program_args, call.world_size) == ("train.py", ("--lr", "1"), 8)
    assert len(call.dropped) == 1 and "placeholder" in call.dropped[0]


def test_a_program_that_is_not_python_is_one() -> None:
    call = read("--no-python --master_port 6000 run.sh --config train.py")
    assert (call.program, call.program_args, call.dropped) == ("run.sh", ("--config", "train.py"), ())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--gpus 8 a.py", "no option --gpus"),
        ("--nproc_per_nod3 8 a.py", "did you mean --nproc_per_node"),
        ("--rdzv x a.py", "could be"),
        ("--nproc_per_node eight a.py", "expects a number of ranks"),
        ("--nnodes 0 a.py", "expects a number of nodes"),
        ("--nproc_per_node 8", "names no program"),
        ("--no-python python", "without a program"),
    ],
)
def test_each_mistake_has_its_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read(text)


def test_every_option_of_the_installed_torchrun_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch_npu would look for CANN
    run = pytest.importorskip("torch.distributed.run", reason="no PyTorch here")
    names = {name.lstrip("-").replace("-", "_") for action in run.get_args_parser()._actions for name in action.option_strings}
    assert {name for name in names if len(name) > 1} - {"help"} <= {*OPTIONS, *SWITCHES}
