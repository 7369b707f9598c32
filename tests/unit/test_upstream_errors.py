"""Errors of upstream's own are said in a sentence with the flag that helps, and the sentence reaches the report."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest

from mindspeed_dryrun.rank import upstream_errors, worker
from mindspeed_dryrun.record.worker_log import read_worker_log

DPO = ["--stage", "dpo", "--pipeline-model-parallel-size", "4", "--variable-seq-lengths"]
SPLIT_OF_2_9 = ValueError("For 'SplitWithSize',  the sum of split_size should be equal to 1(input.shape[1]), but got split_sizes")
GRADIENT_OF_2_8 = RuntimeError(
    "For grad interface or custom function, grad tensor should be broadcast to expected shape, but got"
)
SPLIT = ValueError("For 'Split', x_shape[1] must be divisible by output_num = 2, but got 1")


@pytest.mark.parametrize(
    ("error", "args", "flag"),
    [
        (AttributeError("'Namespace' object has no attribute 'transformer_impl'"), [], "--transformer-impl local"),
        (
            ValueError("Target module MindSpeedTELayerNormColumnParallelLinear() is not supported. Currently, only"),
            [],
            "--transformer-impl local",
        ),
        (
            ValueError("For 'GroupedMatmulV4', when split_item is 3. the size of x and weight should both be 1, but got"),
            [],
            "--transformer-impl local",
        ),
        (SPLIT, DPO, "--no-pad-to-seq-lengths"),
        (SPLIT_OF_2_9, DPO, "--no-pad-to-seq-lengths"),
        (GRADIENT_OF_2_8, DPO, "--no-pad-to-seq-lengths"),
        (TypeError("not all arguments converted during string formatting"), [], "--ai-framework mindspore"),
        (ValueError("Require set `--reset-attention-mask` when `--neat-pack` is set."), [], "--reset-attention-mask"),
    ],
    ids=["context parallel", "LoRA", "experts", "DPO", "DPO on MindSpore 2.9", "DPO on MindSpore 2.8", "framework", "packing"],
)
def test_the_sentence_names_the_flag_to_add(error: Exception, args: list[str], flag: str) -> None:
    sentence = upstream_errors.explain(error, args)
    assert sentence and sentence.startswith("This script fails on an NPU too: ") and sentence.endswith(f"-- {flag}")


def test_an_error_that_only_looks_like_one_is_not_explained() -> None:
    assert upstream_errors.explain(ValueError("something else"), DPO) is None
    assert upstream_errors.explain(SPLIT, ["--stage", "sft", "--pipeline-model-parallel-size", "4"]) is None
    assert upstream_errors.explain(SPLIT, [*DPO, "--no-pad-to-seq-lengths"]) is None


def test_without_apex_the_o2_optimizer_cannot_start() -> None:
    error = ImportError("cannot import name 'FusedSGD' from 'apex.optimizers' (mindspeed.dummy_module.py)")
    sentence = upstream_errors.explain(error, ["--o2-optimizer", "--o2-gradient"])
    assert (
        sentence and sentence.startswith("This script fails on an NPU too: ") and sentence.endswith("Leave out --o2-optimizer.")
    )
    assert upstream_errors.explain(error, ["--bf16"]) is None


def test_a_module_that_upstream_removed_is_upstreams_error() -> None:
    missing = "mindspeed_llm.tasks.checkpoint.models"
    sentence = upstream_errors.explain(ModuleNotFoundError(f"No module named '{missing}'", name=missing), [])
    assert sentence and sentence.startswith("This script fails on an NPU too: ") and "26.1.0" in sentence


def test_a_missing_module_of_a_package_that_is_there_is_not_called_a_missing_package() -> None:
    assert upstream_errors.explain(ModuleNotFoundError("No module named 'json.nothing'", name="json.nothing"), []) is None


def test_a_package_that_has_moved_on_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_errors.installed, "has_package", lambda name: True)
    monkeypatch.setattr(upstream_errors.installed, "version", lambda name: "0.21.2")
    gone = "peft.tuners.lora.tp_layer"
    said = upstream_errors.explain(ModuleNotFoundError(f"No module named '{gone}'", name=gone), [])
    assert said and said.startswith(f"The script imports {gone}, which peft 0.21.2 does not have.")
    own = "mindspeed_llm.core.gone"
    assert upstream_errors.explain(ModuleNotFoundError(f"No module named '{own}'", name=own), []) is None


LORA = ["--lora-target-modules", "linear_qkv", "--num-experts", "8"]
NO_EXPERTS = TypeError("'NoneType' object is not callable")
ARRAY = RuntimeError("Please check your custom function, that save_for_backward() only support None and tensor, but got [[256")


@pytest.mark.parametrize(
    ("error", "args", "release", "commit"),
    [
        (NO_EXPERTS, LORA, "2.2.0", "bab5b9d2"),
        (NO_EXPERTS, LORA, "2.3.0", ""),
        (NO_EXPERTS, [*LORA, "--moe-grouped-gemm"], "2.2.0", ""),
        (ARRAY, ["--moe-alltoall-overlap-comm"], "2.2.0", "9f23d29c"),
        (ARRAY, ["--moe-alltoall-overlap-comm"], "26.1.0", ""),
    ],
)
def test_what_the_tag_of_a_release_got_wrong_is_told_of_that_release_alone(
    error: Exception, args: list[str], release: str, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_errors.installed, "version", lambda name: release)
    sentence = upstream_errors.explain(error, args) or ""
    assert (commit in sentence) if commit else not sentence


def test_arguments_that_no_release_of_upstream_knows_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)  # put back afterwards
    program = tmp_path / "posttrain_gpt.py"
    program.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["rank"])
    with pytest.raises(SystemExit):
        worker.run_program(str(program), ["--reward-tokens", "+", "-", "--placeholder-token", "x"])
    first = read_worker_log(io.BytesIO(capsys.readouterr().err.encode())).first_error
    assert first and first.startswith(
        "This script fails on an NPU too: its trainer does not know --reward-tokens, --placeholder-token."
    )
    assert upstream_errors.of_a_parser("argument --x: expected one argument") is None


def test_an_error_that_upstream_wraps_in_one_of_its_own_is_found() -> None:
    error = Exception("MockGPTDataset failed to build as a mock data generator")
    error.__cause__ = TypeError("not all arguments converted during string formatting")
    assert "--ai-framework mindspore" in (upstream_errors.explain(error, []) or "")


def test_one_view_in_two_graphs_is_mindspores_refusal() -> None:
    error = RuntimeError("Failure info [Try to backward the graph twice,  Specify retain_graph=True, if you want call again].")
    said = upstream_errors.explain(error, ["--moe-alltoall-overlap-comm", "--n-shared-experts", "2"]) or ""
    assert said.startswith("This script fails on an NPU too: ") and "MindSpore 2.7.1" in said
    assert upstream_errors.explain(error, ["--n-shared-experts", "2"]) is None


def test_fused_communication_without_tensor_parallelism_is_upstreams_error() -> None:
    error = AssertionError(
        "The 'mc2' feature requires both the Tensor Model Parallel (TP) size to be greater than 1 and sequence"
    )
    said = upstream_errors.explain(error, ["--use-ascend-mc2"])
    assert said and said.startswith("This script fails on an NPU too: ") and "--tensor-model-parallel-size" in said


def test_operators_beside_cann_are_not_called_a_package_to_install() -> None:
    missing = ModuleNotFoundError("No module named 'cann_ops_transformer'", name="cann_ops_transformer")
    for error in (missing, ImportError("cann_ops_transformer is required when --use-fused-mhc is enabled.")):
        said = upstream_errors.explain(error, []) or ""
        assert "--use-fused-mhc" in said and "pip install" not in said


def test_a_file_refused_to_a_library_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_errors, "kernel_confines", lambda: True)
    said = upstream_errors.explain(RuntimeError("open file failed with strerror: Permission denied"), []) or ""
    assert said.startswith("A dry run writes below its record only")


def test_a_missing_package_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_errors.installed, "has_package", lambda name: False)
    error = ModuleNotFoundError("No module named 'sklearn.cluster'", name="sklearn.cluster")
    assert upstream_errors.explain(error, []) == (
        "The script imports sklearn, which is not installed here. Run: pip install scikit-learn"
    )


def test_the_sentence_is_the_first_error_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "pretrain_gpt.py"
    program.write_text("from argparse import Namespace\nNamespace().transformer_impl\n")
    monkeypatch.setattr(worker.rank_engine(), "check_simulation", lambda: None)
    monkeypatch.setattr(worker, "prepare", lambda: None)
    monkeypatch.setattr(worker.patcher, "failures", list)
    monkeypatch.setattr(sys, "argv", ["rank"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(AttributeError):
        worker.main([str(program)])
    log = capsys.readouterr().err + (
        "Traceback (most recent call last):\n  File \"x\"\nAttributeError: 'Namespace' object has no attribute 'transformer_impl'\n"
    )
    first = read_worker_log(io.BytesIO(log.encode())).first_error
    assert first and first.startswith("This script fails on an NPU too: ")


@pytest.mark.parametrize(
    ("args", "release", "flag"),
    [
        ("--stage dpo --pipeline-model-parallel-size 4", "26.1.0", "--no-pad-to-seq-lengths"),
        ("--context-parallel-size 2", "26.1.0", "--transformer-impl local"),
    ],
)
def test_what_stops_upstream_is_said_where_it_does_not_run(args: str, release: str, flag: str) -> None:
    (sentence,) = upstream_errors.foreseen(args.split(), release)
    assert sentence.startswith(f"MindSpeed-LLM {release} itself fails") and sentence.endswith(f"-- {flag}")
    assert not upstream_errors.foreseen(args.split(), "2.2.0")
    assert not upstream_errors.foreseen([*args.split(), *flag.split()], release)
