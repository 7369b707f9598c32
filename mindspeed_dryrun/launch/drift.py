"""Drift of upstream against the patch catalogue, found by reading source text: no MindSpore, nothing imported, seconds.

For each target: is it there, does it take the arguments it took in the releases that are recorded, and does MindSpeed's patch
manager now replace something beside it (a function that is replaced no longer calls what we patch)?
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_dryrun.rank import installed

# Folders of a checkout in which packages lie; a folder of site-packages is one itself. MSAdapter's wheel carries a stale
# `torch` and `torch_npu` beside the ones in `msa_thirdparty`.
ROOTS = ("MSAdapter/msa_thirdparty", "msa_thirdparty", "MindSpeed-LLM", "MindSpeed", "Megatron-LM", "MSAdapter", "")
_REGISTERED = re.compile(r"register(?:_patch)?\(\s*\(?\s*['\"]([\w.]+)['\"]")
_DISTRIBUTIONS = ("mindspore-", "msadapter-", "megatron_core-", "torch_npu-")
_FOLLOW_LIMIT = 5  # imports of imports


@dataclass
class Recorded:
    """What was seen in the releases that work: signatures by target, and what upstream itself replaces."""

    signatures: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # target → signature → releases
    replaced: dict[str, list[str]] = field(default_factory=dict)  # module.function → releases

    @classmethod
    def read(cls, file: Path) -> Recorded:
        """The file, or nothing where there is none yet."""
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else cls()

    def text(self) -> str:
        """The content of the file."""
        content = {"signatures": self.signatures, "replaced": self.replaced}
        return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def add(self, checkout: Checkout, patches: Iterable[Mapping[str, Any]]) -> None:
        """Notes a checkout as one that works."""
        release = checkout.label
        for patch in patches:
            if (target := checkout.target(patch)) and (signature := checkout.signature(target)):
                _note(self.signatures.setdefault(target, {}), signature, release)
        for name in checkout.replaced_beside(patches):
            _note(self.replaced, name, release)


def _note(known: dict[str, list[str]], key: str, release: str) -> None:
    releases = known.setdefault(key, [])
    if release not in releases:
        releases.append(release)


@dataclass(frozen=True)
class Finding:
    """One thing to look at. Kinds: `missing`, `changed`, `new` (not recorded yet), `replaced`."""

    kind: str
    name: str  # of the patch, or what upstream replaces
    text: str

    @property
    def breaks(self) -> bool:
        """Whether a run would stop, or count something that nobody has looked at."""
        return self.kind != "new"


@dataclass(frozen=True)
class Checkout:
    """A folder with upstream's trees."""

    folder: Path

    @property
    def release(self) -> str | None:
        """Of MindSpeed-LLM."""
        return installed.mindspeed_llm_release(self.folder / "MindSpeed-LLM")

    @property
    def label(self) -> str:
        """The release, or the distributions of ours that were installed into the folder."""
        names = sorted(path.name.removesuffix(".dist-info") for path in self.folder.glob("*.dist-info"))
        return self.release or ", ".join(name for name in names if name.startswith(_DISTRIBUTIONS)) or str(self.folder)

    def roots(self) -> list[Path]:
        return [self.folder / root for root in ROOTS if (self.folder / root).is_dir()]

    def has(self, package: str) -> bool:
        """Whether a package lies here."""
        return any((root / package.replace(".", "/")).is_dir() for root in self.roots())

    def file(self, module: str) -> Path | None:
        """The source of a module."""
        path = module.replace(".", "/")
        places = (root / name for root in self.roots() for name in (f"{path}.py", f"{path}/__init__.py"))
        return next((place for place in places if place.is_file()), None)

    def target(self, patch: Mapping[str, Any]) -> str | None:
        """The target that this checkout has to have; None where the patch is for other releases or packages."""
        if "hide" in patch or not self.has(str(patch["package"])):
            return None
        since = patch.get("since")
        by_release = isinstance(since, str) and self.release and patch["package"] == "mindspeed_llm"
        if by_release and installed.number(str(self.release)) < installed.number(str(since)):
            return None
        moved = [str(target) for target in patch.get("moved_to", ()) if self.signature(str(target))]
        return moved[0] if moved else str(patch["target"])

    def signature(self, target: str, depth: int = 0) -> str | None:
        """`(self, tokens, *args)` of `module:Class.method`, `class`, `value` or `inherited`; None where it is not there."""
        module, _, path = target.partition(":")
        file = self.file(module)
        if file is None:
            return None
        body = _body(file)
        node: ast.AST | None = None
        inherits = False  # a base may have it: text does not say
        for name in path.split("."):
            node = installed.names_of(body).get(name)
            if isinstance(node, ast.ImportFrom) and depth < _FOLLOW_LIMIT:
                rest = path[path.index(name) :]
                return self._imported(module, node, rest, file, depth)
            if node is None:
                return "inherited" if inherits else self._starred(module, body, path, file, depth)
            inherits = isinstance(node, ast.ClassDef) and bool(node.bases)
            body = getattr(node, "body", [])
        return _signature(node)

    def _imported(self, module: str, node: ast.ImportFrom, path: str, file: Path, depth: int) -> str | None:
        first, _, rest = path.partition(".")
        alias = next(alias for alias in node.names if (alias.asname or alias.name) == first)
        source = _absolute(module, node, file)
        return self.signature(f"{source}:{alias.name}{'.' + rest if rest else ''}", depth + 1)

    def _starred(self, module: str, body: Sequence[ast.stmt], path: str, file: Path, depth: int) -> str | None:
        for node in body if depth < _FOLLOW_LIMIT else ():
            if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*":
                continue
            if found := self.signature(f"{_absolute(module, node, file)}:{path}", depth + 1):
                return found
        return None

    def replaced_beside(self, patches: Iterable[Mapping[str, Any]]) -> set[str]:
        """What MindSpeed's patch manager replaces in the modules of our targets."""
        modules = {str(patch["target"]).partition(":")[0] for patch in patches if "hide" not in patch}
        return {name for name in _registered(self.folder) if any(name.startswith(module + ".") for module in modules)}


def check(checkout: Checkout, patches: Sequence[Mapping[str, Any]], recorded: Recorded) -> list[Finding]:
    """What a maintainer has to look at before this checkout can be called supported."""
    found = [finding for patch in patches if (finding := _check(checkout, patch, recorded))]
    for name in sorted(checkout.replaced_beside(patches) - set(recorded.replaced)):
        text = "MindSpeed replaces it now; see whether our patches of that module are still called."
        found.append(Finding("replaced", name, text))
    return found


def _check(checkout: Checkout, patch: Mapping[str, Any], recorded: Recorded) -> Finding | None:
    target = checkout.target(patch)
    if target is None:
        return None
    name, signature = str(patch["name"]), checkout.signature(target)
    if signature is None:
        return Finding("missing", name, f"{target} is gone.")
    known = recorded.signatures.get(target, {})
    if not known:
        return Finding("new", name, f"{target}{_shown(signature)} is not recorded yet.")
    if signature in known:
        return None
    last, releases = list(known.items())[-1]
    return Finding("changed", name, f"{target} was {_shown(last)} in {', '.join(releases)} and is {_shown(signature)}.")


def _shown(signature: str) -> str:
    return signature if signature.startswith("(") else f" ({signature})"


@cache
def _body(file: Path) -> list[ast.stmt]:
    try:
        return ast.parse(file.read_text(encoding="utf-8", errors="replace")).body
    except SyntaxError:
        return []


def _signature(node: ast.AST | None) -> str | None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        kind = [d.id for d in node.decorator_list if isinstance(d, ast.Name) and d.id in ("staticmethod", "classmethod")]
        return " ".join([f"({ast.unparse(node.args)})", *kind])
    if isinstance(node, ast.ClassDef):
        return "class"
    return None if node is None else "value"


def _absolute(module: str, node: ast.ImportFrom, file: Path) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (file.name == "__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _registered(folder: Path) -> frozenset[str]:
    """Every name that MindSpeed and MindSpeed-LLM hand to their patch manager."""
    names: set[str] = set()
    for tree in ("MindSpeed-LLM/mindspeed_llm", "MindSpeed/mindspeed"):
        for file in (folder / tree).rglob("*.py"):
            names.update(_REGISTERED.findall(file.read_text(encoding="utf-8", errors="replace")))
    return frozenset(names)
