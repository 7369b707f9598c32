"""Errors of upstream's own that stop a script on an NPU too: what is wrong, and the flag that helps.

Each entry was shown to come from code that runs on the host before any kernel does, so a real run meets it as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.rank.confinement import kernel_confines
from mindspeed_dryrun.rank.patch_calls import Called


@dataclass(frozen=True, kw_only=True)
class UpstreamError:
    """`error` is searched in the text of the exception; `when` are conditions on the trainer's flags (`patch_calls.py`).

    With `since`, the first release of MindSpeed-LLM that fails so with `flags`, the error is known before a run. After
    `until` it is another error.
    """

    error: str
    when: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    flags: str = ""
    because: str
    add: str = ""  # the flag that helps, where one does
    instead: str = ""  # what to do where none does
    tree: tuple[str, ...] = ()  # a file of MindSpeed-LLM and one that it imports: if only the first is there, known before a run


KNOWN = (
    UpstreamError(
        error=r"'Namespace' object has no attribute 'transformer_impl'",
        since="26.0.0",
        flags="--context-parallel-size>1 !--transformer-impl",
        # features_manager/context_parallel/context_parallel_feature.py:115 of MindSpeed-LLM 26.1.0
        because="from MindSpeed-LLM 26.0.0 on context parallelism reads --transformer-impl before its default is known",
        add="--transformer-impl local",
    ),
    UpstreamError(
        error=r"Target module MindSpeedTE\w+\(.*\) is not supported",
        # peft knows Megatron's ColumnParallelLinear and RowParallelLinear only; up to 2.3.0 MindSpeed-LLM set `local`.
        because="peft has no LoRA for the layers of --transformer-impl transformer_engine, the default from "
        "MindSpeed-LLM 26.0.0 on",
        add="--transformer-impl local",
    ),
    UpstreamError(
        error=r"'GroupedMatmulV4'.*the size of x and weight should both be 1",
        # te/pytorch/module/grouped_linear.py:60 of MindSpeed 26.1.0; MindSpore 2.7.1 to 2.10.0 infer no shape for it.
        because="MindSpore's grouped product takes one weight, and --transformer-impl transformer_engine, the default from "
        "MindSpeed-LLM 26.0.0 on, hands it one for each expert",
        add="--transformer-impl local",
    ),
    UpstreamError(
        # The same batch on MindSpore 2.7.1, on 2.9.0, and on 2.8.0, which meets it in the backward pass.
        error=r"For 'Split', x_shape\[1\] must be divisible by output_num = 2|"
        r"For 'SplitWithSize', +the sum of split_size should be equal to 1\(|"
        r"grad tensor should be broadcast to expected shape",
        when=("--stage=dpo --pipeline-model-parallel-size>1 !--no-pad-to-seq-lengths",),
        since="2.3.0",
        flags="--stage=dpo --pipeline-model-parallel-size>1 !--no-pad-to-seq-lengths",
        # Megatron's validate_args sets variable_seq_lengths to False; features_manager/finetune/finetune.py restores it
        # with that flag only.
        because="from MindSpeed-LLM 2.3.0 on DPO with several pipeline stages exchanges its doubled batches only with "
        "--no-pad-to-seq-lengths; --variable-seq-lengths alone has no effect",
        add="--no-pad-to-seq-lengths",
    ),
    UpstreamError(
        error=r"The 'mc2' feature requires both",
        # features_manager/tensor_parallel/mc2.py:24 of MindSpeed 26.1.0, when arguments are checked.
        because="--use-ascend-mc2 needs tensor and sequence parallelism",
        instead="Leave out --use-ascend-mc2, or set --tensor-model-parallel-size above 1.",
    ),
    UpstreamError(
        error=r"'NoneType' object is not callable",
        when=("--lora-target-modules --num-experts !--moe-grouped-gemm",),
        until="2.2.0",
        # core/transformer/moe/moe_layer.py:233 of v2.2.0 has no `else`; commit bab5b9d2 of the branch 2.2.0 adds it.
        because="in the tag v2.2.0 of MindSpeed-LLM LoRA of a mixture builds no experts without --moe-grouped-gemm",
        instead="Use the branch 2.2.0 since 13 November 2025 (commit bab5b9d2), or a later release.",
    ),
    UpstreamError(
        error=r"save_for_backward\(\) only support None and tensor, but got \[",
        when=("--moe-alltoall-overlap-comm",),
        until="2.2.0",
        # mindspore/core/transformer/moe/moe_feature/tp_extend_ep/token_dispatcher.py:365 of v2.2.0_core_r0.12.1 makes an array,
        # and core/transformer/moe/moe_feature/overlap/token_dispatcher.py:230 saves it.
        because="in the tag v2.2.0_core_r0.12.1 of MindSpeed the overlapping dispatcher of experts saves an array, which "
        "MindSpore refuses",
        instead="Use its branch 2.2.0_core_r0.12.1 since 3 November 2025 (commit 9f23d29c), or a later release.",
    ),
    UpstreamError(
        error=r"not all arguments converted during string formatting",
        when=("!--ai-framework",),
        # core/datasets/blended_megatron_dataset_builder.py:57 divides torch.cuda.current_device(): in MSAdapter a name.
        because="without --ai-framework mindspore MindSpeed-LLM takes MSAdapter for PyTorch",
        add="--ai-framework mindspore",
    ),
    UpstreamError(
        error=r"Try to backward the graph twice",
        when=("--moe-alltoall-overlap-comm --n-shared-experts",),
        # MindSpore 2.7.1 goes back through `x.view(…)` from two graphs, 2.7.2 to 2.9.0 do not, whatever runs the kernels.
        because="MindSpeed's overlapping dispatcher goes back through one view from two graphs where there are shared experts, "
        "which MindSpore refuses from 2.7.2 on",
        instead="Use MindSpore 2.7.1, or leave out --moe-alltoall-overlap-comm.",
    ),
    UpstreamError(
        error=r"Require set `--reset-attention-mask` when `--neat-pack` is set",
        # features_manager/megatron_basic/training_basic.py:55 of MindSpeed-LLM 26.1.0, when arguments are checked.
        because="--neat-pack asks for --reset-attention-mask",
        add="--reset-attention-mask",
    ),
    UpstreamError(
        error=r"cannot import name 'FusedSGD' from 'apex\.optimizers'",
        when=("--o2-optimizer",),
        # features_manager/megatron_basic/requirements_basic.py:29 of MindSpeed-LLM 26.1.0 leaves it out with that flag, and
        # core/optimizer/__init__.py:10 imports it.
        because="with --o2-optimizer MindSpeed-LLM puts nothing in the place of apex's FusedSGD, which it imports at start",
        instead="Leave out --o2-optimizer.",
    ),
    UpstreamError(
        error=r"No module named 'mindspeed_llm\.tasks\.checkpoint\.models'",
        # mindspeed_llm/mindspore/tasks/checkpoint/models.py:11 of master imports it still.
        because="MindSpeed-LLM's commit f107818f removed a module that its own MindSpore adaptor imports at start",
        instead="Use a release (26.1.0), or a commit before or after that has both or neither.",
        tree=("mindspeed_llm/mindspore/tasks/checkpoint/models.py", "mindspeed_llm/tasks/checkpoint/models.py"),
    ),
)
_CANN_OPERATORS = "cann_ops_transformer"  # mindspeed_llm/ops/npu_mhc.py, npu_sparse_flash_mla.py of 26.1.0
_UPSTREAM = ("mindspeed", "mindspeed_llm", "megatron")  # trees, whose modules no package index has
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "PyYAML", "PIL": "pillow"}  # where the name to install is another


def foreseen(args: Sequence[str], release: str) -> tuple[str, ...]:
    """What will stop these arguments in a release of MindSpeed-LLM, for a dry run that does not meet it."""
    arguments = Arguments(tuple(args))
    return tuple(
        f"MindSpeed-LLM {release} itself fails with these arguments: {known.because}. {_remedy(known)}"
        for known in KNOWN
        if known.since
        and installed.number(release) >= installed.number(known.since)
        and Called((known.flags,)).asked_for(arguments)
    )


def broken_tree(tree: Path) -> str | None:
    """What stops every script on MindSpore in this tree of MindSpeed-LLM, before a rank is started for it."""
    for known in KNOWN:
        if known.tree and (tree / known.tree[0]).is_file() and not (tree / known.tree[1]).is_file():
            return f"No script of this MindSpeed-LLM runs on MindSpore, nor on an NPU: {known.because}. {_remedy(known)}"
    return None


def _remedy(known: UpstreamError) -> str:
    return f"Add it to the command: -- {known.add}" if known.add else known.instead


def of_a_parser(error: str) -> str | None:
    """The same of what argparse says of arguments that no part of upstream declares."""
    _, found, words = error.partition("unrecognized arguments: ")
    flags = [word for word in words.split() if word.startswith("--")]
    if not found or not flags:
        return None
    names = ", ".join(flags)
    return f"This script fails on an NPU too: its trainer does not know {names}. Use a release that does, or leave it out."


def _said(error: BaseException | None) -> Iterator[str]:
    """What an exception says, and those that it was made from: Megatron raises one of its own for whatever a data set did."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def explain(error: BaseException, args: Sequence[str]) -> str | None:
    """A sentence for the person at the keyboard, or None where the error is not one of these."""
    text, arguments = "\n".join(_said(error)), Arguments(tuple(args))
    for known in KNOWN:
        later = known.until and installed.number(installed.version("mindspeed_llm") or "") > installed.number(known.until)
        if re.search(known.error, text) and not later and (not known.when or Called(known.when).asked_for(arguments)):
            return f"This script fails on an NPU too: {known.because}. {_remedy(known)}"
    if isinstance(error, RuntimeError) and "Permission denied" in text and kernel_confines():
        # torch.save opens its file in C++, where Python's own refusal (`confinement.py`) is not asked.
        return "A dry run writes below its record only, and a library of the script's was refused a file elsewhere. Turn it off."
    if isinstance(error, (ImportError, AttributeError)) and _CANN_OPERATORS in text:
        return (
            f"This script uses operators of {_CANN_OPERATORS}, a package beside CANN, and what they allocate is not known here. "
            "Leave out the flags that ask for them (--use-fused-mhc and others of --use-fused-…)."
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if not installed.has_package(package):
            name = _DISTRIBUTIONS.get(package, package)
            return f"The script imports {package}, which is not installed here. Run: pip install {name}"
        if package not in _UPSTREAM and (version := installed.version(package)):
            return (
                f"The script imports {error.name}, which {package} {version} does not have. Install another version "
                f"of {package}: MindSpeed-LLM's requirements.txt names it, or take one of the time of that release."
            )
    return None
