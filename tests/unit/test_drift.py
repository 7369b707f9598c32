"""A checkout of upstream is compared with the releases that work, by reading its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dryrun.commands import main
from mindspeed_dryrun.launch import drift, releases
from mindspeed_dryrun.launch import patch_catalogue as catalogue
from mindspeed_dryrun.rank import installed

PATCH = {"name": "p", "target": "mindspeed_llm.training:Trainer.step", "package": "mindspeed_llm"}


def checkout(root: Path, source: str, setup: str = "__version__ = '2.3.0'", **modules: str) -> drift.Checkout:
    """A tree of MindSpeed-LLM with one module; others by their path with `__` for `/`."""
    tree = root / "MindSpeed-LLM"
    (tree / "mindspeed_llm").mkdir(parents=True)
    (tree / "setup.py").write_text(setup)
    (tree / "mindspeed_llm" / "training.py").write_text(source)
    for name, text in modules.items():
        file = tree / "mindspeed_llm" / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return drift.Checkout(root)


def kinds(checkout: drift.Checkout, recorded: drift.Recorded) -> list[str]:
    return [finding.kind for finding in drift.check(checkout, [PATCH], recorded)]


STEP = "class Trainer:\n    def step(self, batch: int, *, last: bool = False):\n        pass\n"


def test_what_is_recorded_is_known_and_what_moves_is_found(tmp_path: Path) -> None:
    recorded = drift.Recorded()
    known = checkout(tmp_path / "a", STEP)
    assert kinds(known, recorded) == ["new"]
    recorded.add(known, [PATCH])
    assert recorded.signatures == {PATCH["target"]: {"(self, batch, *, last=False)": ["2.3.0"]}}
    assert kinds(known, recorded) == []
    annotated = checkout(tmp_path / "b", STEP.replace("batch: int", "batch"))
    assert kinds(annotated, recorded) == []  # an annotation changes no call
    assert kinds(checkout(tmp_path / "c", STEP.replace("batch: int", "batch, more")), recorded) == ["changed"]
    assert kinds(checkout(tmp_path / "d", STEP.replace("def step", "def steps")), recorded) == ["missing"]


def test_a_function_that_upstream_begins_to_replace_beside_a_target_is_found(tmp_path: Path) -> None:
    recorded = drift.Recorded()
    recorded.add(checkout(tmp_path / "a", STEP), [PATCH])
    feature = "manager.register_patch('mindspeed_llm.training.other', other)\nmanager.register_patch('torch.x', other)\n"
    moved = checkout(tmp_path / "b", STEP, feature=feature)
    assert [(f.kind, f.name) for f in drift.check(moved, [PATCH], recorded)] == [("replaced", "mindspeed_llm.training.other")]


def test_imports_are_followed(tmp_path: Path) -> None:
    followed = checkout(
        tmp_path, "from .inner import Base as Trainer\n", inner="from .deep import *\n", deep="class Base:\n    x = 1\n"
    )
    assert followed.signature("mindspeed_llm.training:Trainer") == "class"
    assert followed.signature("mindspeed_llm.training:Trainer.x") == "value"
    assert followed.signature("mindspeed_llm.training:Trainer.y") is None


def test_what_a_base_may_have_is_not_called_missing(tmp_path: Path) -> None:
    assert checkout(tmp_path, "class Trainer(Base): ...\n").signature("mindspeed_llm.training:Trainer.step") == "inherited"


@pytest.mark.parametrize(
    ("setup", "modules", "release"),
    [
        ("__version__ = '2.3.0'", {}, "2.3.0"),
        ("__version__ = '26.0.0dev0'", {}, "26.0.0"),
        ("__version__ = '26.0.0dev0'", {"core__models__deepseek4__deepseek4_model": ""}, "26.1.0"),
        (
            "__version__ = '26.0.0dev0'",
            {"core__models__deepseek4__deepseek4_model": "", "features_manager__memory__swap_layer_input": ""},
            "master",
        ),
        ("__version__ = '0.0.1'", {}, "0.0.1"),
        ("__version__ = '0.0.1'", {"features_manager__ai_framework__ms_patch_feature": ""}, "2.2.0"),
        (
            "__version__ = '0.0.1'",
            {"features_manager__ai_framework__ms_patch_feature": "", "core__datasets__dataset_preprocess": ""},
            "2.3.0",
        ),
    ],
)
def test_a_tree_tells_its_release(tmp_path: Path, setup: str, modules: dict[str, str], release: str) -> None:
    assert checkout(tmp_path, "", setup, **modules).release == release
    assert releases.release_of(tmp_path) == release


@pytest.mark.parametrize(("line", "keeps"), [("use(ctx.kinds)", True), ("use(kinds)", False)])
def test_a_tree_tells_whether_checkpoints_hold_themselves(tmp_path: Path, line: str, keeps: bool) -> None:
    tree = tmp_path / "MindSpeed-LLM"
    assert not installed.keeps_checkpoints(tree)
    source = tree / "mindspeed_llm" / "core" / "tensor_parallel" / "layers.py"
    source.parent.mkdir(parents=True)
    source.write_text(f"def wrapper(ctx, kinds):\n    def wrapped_run_func(*args):\n        {line}\n")
    assert installed.keeps_checkpoints(tree) is keeps


@pytest.mark.parametrize(
    ("condition", "only"),
    [
        ("args.recompute_method == 'block' and args.recompute_granularity == 'full'", True),
        ("args.recompute_granularity == 'full'", False),
    ],
)
def test_a_tree_tells_whose_embeddings_ask_for_a_gradient(tmp_path: Path, condition: str, only: bool) -> None:
    tree = tmp_path / "MindSpeed-LLM"
    assert not installed.hooks_blocks_only(tree)
    source = tree / "mindspeed_llm" / "training" / "training.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        f"def wrapper(args):\n    if {condition}:\n        _create_hooks(model, args.names)\n    if args.recompute_method: pass\n"
    )
    assert installed.hooks_blocks_only(tree) is only


def test_releases_have_an_order() -> None:
    numbers = [installed.number(name) for name in releases.RELEASES]
    assert numbers == sorted(numbers)


def test_the_recorded_signatures_cover_every_target_in_upstreams_trees() -> None:
    recorded = drift.Recorded.read(catalogue.signatures_file())
    for patch in catalogue.compile():
        if patch["package"] in ("mindspeed_llm", "mindspeed", "megatron.training", "megatron.core"):
            assert patch["target"] in recorded.signatures, patch["name"]


def test_a_release_has_a_table_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "--release", "2.2.0"]) == 0
    old = capsys.readouterr().out
    assert main(["patches", "--release", "26.1.0"]) == 0
    new = capsys.readouterr().out
    assert "2.2.0_core_r0.12.1" in old and "26.1.0_core_r0.12.1" in new
    line = next(line for line in old.splitlines() if "mindspeed-llm-packed-batch" in line)
    assert line.endswith("not needed") and "not needed" not in new


def test_check_reads_a_folder_and_its_exit_status_says_whether_something_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(tmp_path, STEP)
    assert main(["patches", "--check", str(tmp_path)]) == 1
    assert "mindspeed_llm.training.training:build_train_args is gone" in capsys.readouterr().out
    assert main(["patches", "--check", str(tmp_path / "none")]) == 2
