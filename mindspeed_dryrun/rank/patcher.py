"""Applies patches to modules when they are imported, everywhere the old object is bound, and takes them back.

A patch is a plain dictionary (see `launch/patch_catalogue.py` for its fields); this module runs inside a training worker and is
standard library only. `install` is idempotent; `undo` leaves every attribute the object it was.

Patches of functions that MindSpeed's own patch manager also patches go on top of it: whenever the manager applies or
removes one of its patches, ours are lifted first and put back afterwards, so the manager sees the world without us and
the last word is ours.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.rank.few_modules import only_holders
from mindspeed_dryrun.rank.patch_calls import Called, sentence

MANAGER = "mindspeed.patch_utils"
_ABSENT = object()

Patch = Mapping[str, Any]


class DriftError(DryRunError):
    """A patch whose target is gone: upstream has moved on, and what the run would count is unknown."""


@dataclass(kw_only=True)
class _Applied:
    patch: Patch
    module: str
    owner: Any
    attribute: str
    original: Any  # the raw entry of the owner's `__dict__`, or _ABSENT where the attribute was inherited
    value: Any
    replacement: Any


@dataclass(kw_only=True)
class _State:
    waiting: dict[str, list[Patch]] = field(default_factory=dict)  # module → patches, in catalogue order
    known: set[str] = field(default_factory=set)
    applied: list[_Applied] = field(default_factory=list)
    failures: list[DriftError] = field(default_factory=list)
    held: int = 0
    queue: list[Patch] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)  # by patch name
    callbacks: dict[str, list[Callable[[], None]]] = field(default_factory=dict)  # by module
    finder: _Finder | None = None


def target_of(patch: Patch) -> tuple[str, str]:
    """`module:attribute.path` of a patch as two strings; the second is empty where a whole module is hidden."""
    module, _, attribute = str(patch["target"]).partition(":")
    return module, attribute


def install(patches: Sequence[Patch]) -> None:
    """Applies each patch now if its module is imported, else as soon as it is. Patches already installed are left.

    Raises DriftError for a target that the installed project does not have.
    """
    _start()
    _wait_for(patches)


def when_imported(module: str, function: Callable[[], None]) -> None:
    """Calls the function as soon as the module has been imported, now if it has been already."""
    _start()
    if module in sys.modules:
        function()
    else:
        _state.callbacks.setdefault(module, []).append(function)


def _start() -> None:
    if _state.finder is None:
        _state.finder = _Finder()
        sys.meta_path.insert(0, _state.finder)
        _wait_for(_MANAGER_PATCHES)


def undo() -> None:
    """Takes everything back, last applied first, and stops waiting for modules."""
    for applied in reversed(_state.applied):
        _restore(applied)
    if _state.finder in sys.meta_path:
        sys.meta_path.remove(_state.finder)
    _state.__init__()  # type: ignore[misc]


def applied_names() -> list[str]:
    """Names of the patches in force, in the order they were applied."""
    return [str(a.patch["name"]) for a in _state.applied if not a.patch.get("internal")]


def failures() -> list[DriftError]:
    """Drift met so far: upstream code may swallow the exception, the run must not count all the same."""
    return list(_state.failures)


def calls() -> dict[str, int]:
    """How often each patched function was called; 0 for a patch that waits for its module or was never reached."""
    waiting = [str(patch["name"]) for patches in _state.waiting.values() for patch in patches if not patch.get("internal")]
    return {name: _state.calls[name] for name in waiting}


def check_calls(args: Sequence[str]) -> None:
    """Raises DriftError for a patch that these trainer arguments ask for and that upstream never called.

    Patches of one `purpose` stand for each other: which of them upstream goes through differs by release.
    """
    arguments = Arguments(tuple(args))
    waiting = [patch for patches in _state.waiting.values() for patch in patches]
    reached = {patch.get("purpose") or patch["name"] for patch in waiting if _state.calls[str(patch["name"])]}
    for patch in waiting:
        called = Called.read(patch.get("called", "never"))
        if called.asked_for(arguments) and (patch.get("purpose") or patch["name"]) not in reached:
            raise DriftError(message(sentence(patch, called)))


def _resolved(patch: Patch) -> Patch:
    """The patch with the target that is there: `moved_to` names where later releases have it."""
    for target in patch.get("moved_to", ()):
        if installed.mentions(*str(target).split(":")):
            return {**patch, "target": target}
    return patch


def drift(patch: Patch) -> DriftError | None:
    """What the sources on the path say about the target, before anything is imported; None where it is there.

    Not left to the import: a module that upstream has moved may never be imported, and nobody would miss the patch.
    """
    package = _package(patch)
    if patch.get("hide") or not installed.reaches(patch.get("since"), package) or not installed.has_package(package):
        return None
    patch = _resolved(patch)
    module, attribute = target_of(patch)
    if not installed.has_package(module):
        return _drift(patch, f"there is no module {module}")
    return None if installed.mentions(module, attribute) else _drift(patch, f"{module} has no {attribute}")


def _wait_for(patches: Sequence[Patch]) -> None:
    for patch in patches:
        if patch["name"] in _state.known or not installed.reaches(patch.get("since"), _package(patch)):
            continue
        patch = patch if patch.get("hide") else _resolved(patch)
        module, _ = target_of(patch)
        if patch.get("hide"):
            _state.known.add(patch["name"])
            _state.hidden.add(module)
            continue
        loaded = module in sys.modules and not _is_being_imported(sys.modules[module])
        if not loaded and not installed.has_package(_package(patch)):
            continue
        if not loaded and (gone := drift(patch)):
            raise gone
        _state.known.add(patch["name"])
        _state.waiting.setdefault(module, []).append(patch)
        if loaded:
            _apply_or_queue(patch)


def _package(patch: Patch) -> str:
    return str(patch.get("package") or target_of(patch)[0].split(".")[0])


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _imported(module: str) -> None:
    for function in _state.callbacks.pop(module, ()):
        function()
    for patch in _state.waiting.get(module, ()):
        _apply_or_queue(patch)


def _apply_or_queue(patch: Patch) -> None:
    if _state.held and not patch.get("internal"):
        _state.queue.append(patch)
    else:
        _apply(patch)


def _drift(patch: Patch, what: str) -> DriftError:
    package = _package(patch)
    error = DriftError(
        f"Patch {patch['name']}: target {patch['target']} is gone ({what}; installed: {package} "
        f"{installed.version(package) or 'of unknown version'}, known on: {', '.join(patch.get('versions', ())) or '?'}). "
        f"Write a patch for this version and pass it with --patches, or use a version that is known."
    )
    _state.failures.append(error)
    return error


def _apply(patch: Patch) -> None:
    if any(a.patch is patch for a in _state.applied):
        return
    module_name, path = target_of(patch)
    *parents, attribute = path.split(".")
    owner: Any = sys.modules[module_name]
    for name in parents:
        if not hasattr(owner, name):
            raise _drift(patch, f"{module_name} has no {path}")
        owner = getattr(owner, name)
    value = getattr(owner, attribute, _ABSENT)
    if value is _ABSENT:
        raise _drift(patch, f"{module_name} has no {path}")
    original = vars(owner).get(attribute, _ABSENT)
    replacement = _replacement(patch, original if isinstance(original, (staticmethod, classmethod)) else value)
    applied = _Applied(
        patch=patch, module=module_name, owner=owner, attribute=attribute, original=original, value=value, replacement=replacement
    )
    setattr(owner, attribute, replacement)
    if not parents:
        _replace_aliases(value, replacement)
    _state.applied.append(applied)


def _replacement(patch: Patch, value: Any) -> Any:
    if "set" in patch:
        return patch["set"]
    kind = type(value) if isinstance(value, (staticmethod, classmethod)) else None
    function = value.__func__ if kind else value
    new = _new_function(patch, function)
    return kind(new) if kind else new


def _new_function(patch: Patch, function: Callable[..., Any]) -> Any:
    if "handler" in patch:
        module, _, name = str(patch["handler"]).partition(":")
        new = getattr(importlib.import_module(module), name)(function)
        return new if patch.get("internal") or patch.get("as_is") else _counted(str(patch["name"]), new)
    answer, argument = patch.get("return"), patch.get("return_argument")

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if argument is not None:
            return args[argument] if len(args) > argument else next(iter(kwargs.values()), None)
        return answer

    functools.update_wrapper(replaced, function, updated=())
    return _counted(str(patch["name"]), replaced)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    count = _state.calls

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        count[name] += 1
        return function(*args, **kwargs)

    return counted


def _restore(applied: _Applied) -> None:
    if applied.original is _ABSENT:
        delattr(applied.owner, applied.attribute)
    else:
        setattr(applied.owner, applied.attribute, applied.original)
    if isinstance(applied.owner, ModuleType):
        _replace_aliases(applied.replacement, applied.value)


def _replace_aliases(old: Any, new: Any) -> None:
    """Every module attribute that is `old` becomes `new` (`from x import f` binds a second name to the same object)."""
    if not callable(old):  # constants are shared by everybody: True in one module is True in all
        return
    is_old = functools.partial(operator.is_, old)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        # Seldom, and there are thousands of modules: this is the fastest way to ask. `id` would call the audit hook each time.
        if True in map(is_old, names.values()):
            for name in [name for name, value in names.items() if value is old]:
                names[name] = new
        # MSAdapter's `torch` modules remember every attribute they have looked up; they must look again.
        forget = getattr(getattr(type(module), "__getattr__", None), "cache_clear", None)
        if forget is not None:
            forget()


class _Finder:
    """Lets the other finders find a module that is waited for, and applies its patches when it has been executed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in _state.hidden:
            raise ModuleNotFoundError(f"No module named {fullname!r} (hidden by mindspeed-dryrun)", name=fullname)
        if fullname not in _state.waiting and fullname not in _state.callbacks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return self._hooked(spec)
        return None

    def _hooked(self, spec: ModuleSpec) -> ModuleSpec:
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is its old self again before the module's code can look at it
            execute(module)
            _imported(spec.name)

        # An attribute of this one loader instead of a wrapper around it: `inspect` and friends keep seeing the real one.
        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# -- MindSpeed's patch manager ---------------------------------------------------------------------------------------


def under_manager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Handler for the manager's `Patch.apply_patch` and `remove_patch`: runs them on a world without our patches."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = [self.orig_module_name, self.orig_func_name]
        # Its removal looks for other names as well.
        name = self.orig_func_name if function.__name__ == "apply_patch" else None
        with _lifted(".".join(part for part in parts if part)), only_holders(function, name):
            return function(self, *args, **kwargs)

    return call


@contextmanager
def _lifted(target: str) -> Iterator[None]:
    """Our patches of `target`, or of anything inside it, are off; modules imported meanwhile are patched at the end."""
    lifted = [a for a in _state.applied if _inside(".".join(target_of(a.patch)), target)]
    for applied in reversed(lifted):
        _restore(applied)
        _state.applied.remove(applied)
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
        again = [applied.patch for applied in lifted]
        if not _state.held:
            again, _state.queue = again + _state.queue, []
            for patch in again:
                _apply(patch)
        else:
            _state.queue = again + _state.queue


def _inside(name: str, target: str) -> bool:
    return name == target or name.startswith(target + ".")


_MANAGER_PATCHES: Sequence[Patch] = [
    {
        "name": f"after MindSpeed's {method}",
        "target": f"{MANAGER}:Patch.{method}",
        "handler": f"{__name__}:under_manager",
        "internal": True,
    }
    for method in ("apply_patch", "remove_patch")
]

_state = _State()
