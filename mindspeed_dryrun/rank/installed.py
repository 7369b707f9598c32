"""What of upstream is installed, found on the path without importing any of it. Standard library only."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def has_package(name: str) -> bool:
    """Whether a package, or a module of one, is on the path (or already imported)."""
    return name in sys.modules or _find(name) is not None


def origin(name: str) -> Path | None:
    """The source file of a module, or None where there is none."""
    spec = _find(name)
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _find(name: str) -> ModuleSpec | None:
    # Part by part with a list of folders in hand: `importlib.util.find_spec` would import the parents.
    path: list[str] | None = None
    spec = None
    for index, part in enumerate(name.split(".")):
        if index and path is None:
            return None
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return spec


@cache
def version(package: str) -> str | None:
    """Installed version of a package: its distribution's, else what its own source tree says, else None."""
    top = package.split(".")[0]
    if top == "megatron":
        return _megatron_version()
    spec = _find(top)
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    if folder and top == "mindspeed_llm" and (found := mindspeed_llm_release(folder.parent)):
        return found
    if folder and (found := _assigned_version(folder.parent / "setup.py")):
        return found
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return None


# What setup.py says in several releases, and a module that came with each of them: the newest first, `master` after the last
# release. 0.0.1 stands in the tags up to v2.3.0 (their branches say 2.2.0 and 2.3.0), 26.0.0dev0 in all that came later.
MASTER = "master"
_LLM_SIGNS = {
    "26.0.0dev0": (
        (MASTER, "features_manager/memory/swap_layer_input.py"),
        ("26.1.0", "core/models/deepseek4/deepseek4_model.py"),
    ),
    "0.0.1": (
        ("2.3.0", "core/datasets/dataset_preprocess.py"),
        ("2.2.0", "features_manager/ai_framework/ms_patch_feature.py"),
    ),
}


def mindspeed_llm_release(tree: Path) -> str | None:
    """The release of a tree of MindSpeed-LLM: what setup.py says, or what the tree holds where setup.py does not tell."""
    said = _assigned_version(tree / "setup.py")
    for release, module in _LLM_SIGNS.get(said or "", ()):
        if (tree / "mindspeed_llm" / module).is_file():
            return release
    return said and said.partition("dev")[0]


def keeps_checkpoints(tree: Path) -> bool:
    """Whether what a recomputed layer saves stays until Python's garbage collector runs, in this tree of MindSpeed-LLM.

    Its `checkpoint_forward_wrapper` makes a function that `ctx` holds, and that holds `ctx`. So it is at the tags v26.0.0 and
    v26.1.0, not in 2.3.0, and no more on the branches 26.1.0 and master since 11 August 2026.
    """
    # `wrapped_run_func`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/core/tensor_parallel/layers.py#L244
    nodes = _syntax(tree / "mindspeed_llm" / "core" / "tensor_parallel" / "layers.py")
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "wrapped_run_func")
    return any(isinstance(part, ast.Name) and part.id == "ctx" for node in functions for part in ast.walk(node))


def hooks_blocks_only(tree: Path) -> bool:
    """Whether, with LoRA, embeddings ask for a gradient only under --recompute-method block, in this tree of MindSpeed-LLM.

    Under uniform, the recomputed layers of the first stage have no backward pass then, and their adapters do not learn. So it is
    in all releases up to the tag v26.1.0, and no more on the branches 26.1.0 and master since 14 August 2026.
    """
    # `_create_hooks`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v26.1.0/mindspeed_llm/training/training.py#L213
    nodes = _syntax(tree / "mindspeed_llm" / "training" / "training.py")
    choices = (node for node in nodes if isinstance(node, ast.If) and "_create_hooks" in _names(node.body))
    return any("recompute_method" in _names([node.test]) for node in choices)


def unpadding_flags(release: str) -> tuple[str, ...]:
    """With which samples keep their own length in this release of MindSpeed-LLM; either, where it is not known (empty).

    Since 2.3.0 samples are padded to the sequence length under the older flag.
    """
    # `no_pad_to_seq_lengths`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.3.0/mindspeed_llm/features_manager/finetune/finetune.py#L42
    newer, older = "--no-pad-to-seq-lengths", "--variable-seq-lengths"
    if not release:
        return newer, older
    return (newer,) if number(release) >= number("2.3.0") else (older,)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """Of variables and attributes."""
    parts = (part for node in nodes for part in ast.walk(node))
    return {part.id if isinstance(part, ast.Name) else part.attr for part in parts if isinstance(part, (ast.Name, ast.Attribute))}


def _syntax(source: Path) -> Iterable[ast.AST]:
    """All nodes of a file; none where it cannot be read."""
    try:
        return ast.walk(ast.parse(source.read_text(encoding="utf-8", errors="replace")))
    except (OSError, SyntaxError, ValueError):
        return ()


def _megatron_version() -> str | None:
    source = origin("megatron.core.package_info")
    if source is None:
        return None
    text = source.read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(number.group(1) for number in numbers if number)


def _assigned_version(file: Path) -> str | None:
    if not file.is_file():
        return None
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", file.read_text(encoding="utf-8", errors="replace"), re.M)
    return found.group(1) if found else None


def number(text: str) -> tuple[int, ...]:
    """`2.3.0` or `26.0.0dev0` as numbers that can be compared; what has no number is later than all that have one."""
    if text == MASTER:
        return (sys.maxsize,)
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("dev")[0]))


def reaches(since: object, package: str) -> bool:
    """Whether what is installed is not older than `since`: a version of `package`, or versions by package.

    What is of unknown version counts as new enough.
    """
    wanted = since if isinstance(since, Mapping) else {package: since} if since else {}
    found = {name: version(name) for name in wanted}
    return all(number(found[name] or MASTER) >= number(str(least)) for name, least in wanted.items())


def mentions(module: str, path: str) -> bool:
    """Whether a module could have `a.b.c`: its source names `a`, or does not say (star imports, `__getattr__`, C).

    A look at the text: a rank asks this of every target before it starts, and parsing them would take a second.
    """
    if not has_package(module):
        return False
    file = origin(module)
    if file is None:
        return True
    text = file.read_bytes()
    if b"import *" in text or b"__getattr__" in text:
        return True
    # A pattern that begins with letters is found ten times as fast as one that begins with \b.
    words = re.finditer(rb"%s\b" % re.escape(path.split(".")[0].encode()), text)
    return any(not re.match(rb"\w", text[max(0, word.start() - 1) : word.start()]) for word in words)


def has_attribute(module: str, path: str) -> bool | None:
    """Whether a module's source defines or imports `a.b.c`; None where the source does not say (star imports, C)."""
    file = origin(module)
    if file is None:
        return None
    try:
        body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8", errors="replace")).body
    except SyntaxError:
        return None
    for index, name in enumerate(path.split(".")):
        found = names_of(body)
        if name not in found:
            return None if "*" in found or index else False
        definition = found[name]
        if not isinstance(definition, ast.ClassDef):
            return True if index == path.count(".") else None
        body = definition.body
    return True


def names_of(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Names bound at the top of a body, also inside `if`, `try` and `with` there."""
    names: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names[(alias.asname or alias.name).split(".")[0]] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        names[name.id] = node
        else:
            for part in ("body", "orelse", "finalbody"):
                names.update(names_of(getattr(node, part, [])))
            for handler in getattr(node, "handlers", []):
                names.update(names_of(handler.body))
    return names
