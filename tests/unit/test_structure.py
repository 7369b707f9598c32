"""What the structure promises, kept by tools: layers, names that do not collide, functions that fit a screen."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mindspeed_dryrun"
LONGEST = 60  # lines of a function
POSITIONAL = 4  # fields that a dataclass may take by their order


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("megatron/layout.py", "from mindspeed_dryrun.launch import plan"),
        ("record/summary.py", "from mindspeed_dryrun.report import view"),
        ("rank/guard.py", "import yaml"),
    ],
)
def test_an_import_that_points_back_breaks_a_contract(module: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "mindspeed_dryrun", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / "mindspeed_dryrun" / module, "a", encoding="utf-8") as file:
        file.write(f"\n{line}  # noqa\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "BROKEN" in done.stdout, done.stdout + done.stderr


def test_no_function_is_longer_than_a_screen() -> None:
    functions = (
        (node.end_lineno - node.lineno + 1, f"{file}:{node.lineno} {node.name}")
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
    )
    assert [where for lines, where in functions if lines > LONGEST] == []


def test_public_classes_have_names_of_their_own() -> None:
    names = Counter(
        node.name
        for _, tree in parsed()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_dataclass_of_many_fields_takes_them_by_name() -> None:
    by_order = [
        f"{file}:{node.lineno} {node.name}"
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in (text := ast.unparse(one)) and "kw_only" not in text for one in node.decorator_list)
        and sum(isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation) for part in node.body)
        > POSITIONAL
    ]
    assert by_order == []
