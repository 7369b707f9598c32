"""The patch engine on modules made for the test: apply, aliases, undo, drift, order with MindSpeed's manager."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.rank import patcher as engine

HANDLERS = "patch_test_handlers"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes modules into a folder that is on the path; afterwards the process is as it was."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(**modules: str) -> None:
        for name, text in modules.items():
            *package, module = name.split("__")
            file = tmp_path.joinpath(*package, module + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            if package:
                (file.parent / "__init__.py").touch()
            file.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    write(patch_test_handlers="def loud(function):\n    return lambda *args: ('loud', function(*args))\n")
    yield write
    engine.undo()
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("upstream", "user", "other", "mindspeed", HANDLERS):
            del sys.modules[name]


def patch(name: str, target: str, **action: Any) -> dict[str, Any]:
    return {"name": name, "target": target, "versions": ["1.0"], **action}


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_a_patch_waits_for_its_module_and_is_in_force_when_the_import_ends(project: Callable[..., None]) -> None:
    project(upstream="def f():\n    return 1\n", user="from upstream import f\nvalue = f()\n")
    engine.install([patch("p", "upstream:f", **{"return": 2})])
    assert "upstream" not in sys.modules
    assert imported("user").value == 2
    assert engine.applied_names() == ["p"]


def test_names_bound_before_the_patch_are_replaced_and_restored(project: Callable[..., None]) -> None:
    project(upstream="def f():\n    return 1\n", user="from upstream import f\n", other="from upstream import f as g\n")
    user, other = imported("user"), imported("other")
    original = imported("upstream").f
    engine.install([patch("p", "upstream:f", **{"return": 2})])
    assert (user.f(), other.g(), imported("upstream").f()) == (2, 2, 2)
    engine.undo()
    assert user.f is original and other.g is original and imported("upstream").f is original


def test_undo_restores_every_kind_of_attribute_to_the_object_it_was(project: Callable[..., None]) -> None:
    project(
        upstream="""
        LEVEL = 3
        def f(): return 1
        class Base:
            def inherited(self): return 'base'
        class C(Base):
            def method(self): return 'method'
            @staticmethod
            def static(x): return x
            @classmethod
            def made(cls): return cls
        """
    )
    module = imported("upstream")
    before = (dict(vars(module)), dict(vars(module.C)))
    engine.install(
        [
            patch("set", "upstream:LEVEL", set=7),
            patch("skip", "upstream:f", skip=True),
            patch("method", "upstream:C.method", handler=f"{HANDLERS}:loud"),
            patch("inherited", "upstream:C.inherited", handler=f"{HANDLERS}:loud"),
            patch("static", "upstream:C.static", handler=f"{HANDLERS}:loud"),
            patch("class", "upstream:C.made", **{"return": None}),
        ]
    )
    instance = module.C()
    assert (module.LEVEL, module.f()) == (7, None)
    assert instance.method() == ("loud", "method")
    assert instance.inherited() == ("loud", "base") and module.Base().inherited() == "base"
    assert module.C.static(5) == ("loud", 5) and module.C.made() is None
    engine.undo()
    for now, then in zip((vars(module), vars(module.C)), before, strict=True):
        assert set(now) == set(then)
        assert all(now[name] is then[name] for name in then)


def test_installing_twice_applies_once(project: Callable[..., None]) -> None:
    project(upstream="def f():\n    return 1\n")
    patches = [patch("p", "upstream:f", handler=f"{HANDLERS}:loud")]
    engine.install(patches)
    engine.install(patches)
    engine.install([dict(patches[0])])
    assert imported("upstream").f() == ("loud", 1)
    assert sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path) == 1


def test_undo_stops_waiting(project: Callable[..., None]) -> None:
    project(upstream="def f():\n    return 1\n")
    engine.install([patch("p", "upstream:f", **{"return": 2})])
    engine.undo()
    assert imported("upstream").f() == 1
    assert not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path)


def test_a_target_that_is_gone_names_patch_target_and_version(project: Callable[..., None], tmp_path: Path) -> None:
    project(upstream__core="def g():\n    return 1\n", setup="__version__ = '2.5'\n")
    with pytest.raises(engine.DriftError, match=r"Patch needs-f.*upstream\.core:f.*2\.5.*1\.0") as error:
        engine.install([patch("needs-f", "upstream.core:f", skip=True)])
    assert engine.failures() == [error.value]


def test_a_module_that_is_gone_stops_before_the_trainer_starts(project: Callable[..., None]) -> None:
    project(upstream__here="")
    with pytest.raises(engine.DriftError, match=r"needs-f.*no module upstream\.moved"):
        engine.install([patch("needs-f", "upstream.moved:f", skip=True)])


def test_a_project_that_is_not_installed_needs_no_patch(project: Callable[..., None]) -> None:
    engine.install([patch("p", "no_such_project.core:f", skip=True)])
    engine.install([patch("q", "json.tool.extra:f", package="no_such_project.training", skip=True)])
    assert engine.applied_names() == []


def test_drift_that_upstream_swallows_is_remembered(project: Callable[..., None]) -> None:
    project(upstream="def f(): ...\ndel f\n", user="try:\n    import upstream\nexcept Exception:\n    pass\n")
    engine.install([patch("p", "upstream:f", skip=True)])
    imported("user")
    assert len(engine.failures()) == 1


def test_a_hidden_module_is_not_importable_until_undo(project: Callable[..., None]) -> None:
    project(other="x = 1\n")
    engine.install([patch("hide", "other", hide=True)])
    with pytest.raises(ModuleNotFoundError):
        imported("other")
    engine.undo()
    assert imported("other").x == 1


def test_return_argument_gives_back_what_it_got(project: Callable[..., None]) -> None:
    project(upstream="def fill(tensor, value=0):\n    raise RuntimeError\n")
    engine.install([patch("p", "upstream:fill", return_argument=0)])
    token = object()
    assert imported("upstream").fill(token) is token
    assert imported("upstream").fill(tensor=token) is token


def test_the_loader_is_left_as_it_was(project: Callable[..., None]) -> None:
    project(upstream="def f():\n    return 1\n")
    engine.install([patch("p", "upstream:f", skip=True)])
    loader = imported("upstream").__spec__.loader
    assert "exec_module" not in vars(loader)


MANAGER = """
import importlib, sys

class Patch:
    def __init__(self, name, new):
        self.orig_module_name, self.orig_func_name = name.rsplit('.', 1)
        self.new, self.orig = new, None

    def apply_patch(self):
        module = importlib.import_module(self.orig_module_name)
        current = getattr(module, self.orig_func_name)
        if self.orig is None:
            self.orig = current
        setattr(module, self.orig_func_name, self.new)
        for other in list(sys.modules.values()):
            if getattr(other, self.orig_func_name, None) is current:
                setattr(other, self.orig_func_name, self.new)

    def remove_patch(self):
        setattr(importlib.import_module(self.orig_module_name), self.orig_func_name, self.orig)
"""


@pytest.mark.parametrize("imported_first", [True, False])
def test_our_patches_stay_on_top_of_mindspeeds(project: Callable[..., None], imported_first: bool) -> None:
    project(
        mindspeed__patch_utils=MANAGER,
        upstream="def f():\n    return 'megatron'\n",
        user="from upstream import f\n",
    )
    engine.install([patch("p", "upstream:f", handler=f"{HANDLERS}:loud")])
    if imported_first:
        assert imported("user").f() == ("loud", "megatron")
    manager = imported("mindspeed.patch_utils")

    def mindspeeds() -> str:
        return "mindspeed"

    theirs = manager.Patch("upstream.f", mindspeeds)
    theirs.apply_patch()
    upstream = imported("upstream")
    assert upstream.f() == ("loud", "mindspeed")
    assert imported("user").f() == ("loud", "mindspeed")
    assert theirs.orig() == "megatron", "the manager must see upstream without our patch"
    theirs.apply_patch()  # as MindSpeed does for every feature
    assert upstream.f() == ("loud", "mindspeed")
    engine.undo()
    assert upstream.f is mindspeeds and imported("user").f is mindspeeds


def test_a_class_replaced_by_the_manager_is_patched_anew(project: Callable[..., None]) -> None:
    project(
        mindspeed__patch_utils=MANAGER,
        upstream="class Model:\n    def run(self):\n        return 'old'\n",
    )
    engine.install([patch("p", "upstream:Model.run", handler=f"{HANDLERS}:loud")])
    upstream = imported("upstream")

    class Better:
        def run(self) -> str:
            return "new"

    imported("mindspeed.patch_utils").Patch("upstream.Model", Better).apply_patch()
    assert upstream.Model is Better
    assert upstream.Model().run() == ("loud", "new")


def test_the_manager_is_shown_every_module_that_can_have_the_name(project: Callable[..., None]) -> None:
    """Upstream asks each of thousands of modules; those that certainly say no are left out."""

    class Lazy(ModuleType):
        pass

    class _LazyTorchair:  # torch_npu's, which asks the package "other" and all modules for each name
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    project(
        mindspeed__patch_utils="""
        import sys
        class Patch:
            def __init__(self, name): self.orig_module_name, self.orig_func_name, self.seen = "upstream", name, set()
            def apply_patch(self):
                self.seen = {key for key, module in sys.modules.copy().items()}
                self.whole = "other" in sys.modules and sys.modules["other"] and sys.path
                sys.modules["upstream.dummy"] = sys.modules["other"]
            def remove_patch(self): self.seen = set(sys.modules.copy())
        """,
        upstream="def f(): ...\n",
        user="def __getattr__(name): raise AttributeError(name)\n",
        other="def g(): ...\n",
    )
    engine.install([])
    manager = imported("mindspeed.patch_utils")
    for name in ("upstream", "user", "other"):
        imported(name)
    sys.modules["upstream.lazy"] = Lazy("upstream.lazy")
    sys.modules["upstream.proxy"] = _LazyTorchair()  # type: ignore[assignment]
    theirs = manager.Patch("f")
    theirs.apply_patch()
    assert {"upstream", "user", "upstream.lazy"} <= theirs.seen and not {"other", "upstream.proxy", "textwrap"} & theirs.seen
    assert theirs.whole == sys.path and sys.modules["upstream.dummy"] is sys.modules["other"]
    assert manager.sys is sys
    theirs.remove_patch()
    assert {"other", "textwrap"} <= theirs.seen, "a removal looks for other names as well"


CALLED = ["--stage=sft --tensor-model-parallel-size>1"]
ASKED = ["--micro-batch-size", "1", "--stage", "sft", "--tensor-model-parallel-size", "2"]


@pytest.mark.parametrize(("called", "args", "stops"), [
    ("always", ASKED, True), ("always", [], False), ("never", ASKED, False), (CALLED, ASKED, True),
    (CALLED, ["--stage", "dpo", "--tensor-model-parallel-size", "2"], False), (CALLED, ["--stage", "sft"], False),
])  # fmt: skip
def test_a_patch_that_upstream_no_longer_calls_stops_the_run(
    project: Callable[..., None], called: Any, args: list[str], stops: bool
) -> None:
    project(upstream="def f():\n    return 1\ndef train(call):\n    return f() if call else 0\n")
    engine.install([patch("p", "upstream:f", skip=True, called=called)])
    train = imported("upstream").train
    train(False)
    if stops:
        with pytest.raises(engine.DriftError, match="Patch p was never called"):
            engine.check_calls(args)
    else:
        engine.check_calls(args)
    train(True)
    engine.check_calls(args)
    assert engine.calls() == {"p": 1}


def test_patches_of_one_purpose_stand_for_each_other(project: Callable[..., None]) -> None:
    project(upstream="def old(): ...\ndef new(): ...\n")
    both = [patch(name, f"upstream:{name}", skip=True, called="always", purpose="sizes") for name in ("old", "new")]
    engine.install(both)
    imported("upstream").new()
    engine.check_calls(ASKED)


def test_a_target_that_moved_is_missed_even_where_its_old_module_is_never_imported(project: Callable[..., None]) -> None:
    project(upstream__api="", upstream__graph="def jit(): ...\n")
    with pytest.raises(engine.DriftError, match=r"Patch p.*upstream\.api has no jit"):
        engine.install([patch("p", "upstream.api:jit", skip=True)])
    engine.install([patch("q", "upstream.api:jit", moved_to=["upstream.graph:jit"], **{"return": 5})])
    assert imported("upstream.graph").jit() == 5


def test_a_patch_for_later_releases_is_left_out_of_an_earlier_one(project: Callable[..., None]) -> None:
    project(other__here="def f(): ...\n", setup="__version__ = '2.2.0'\n")
    engine.install([patch("p", "other.not_yet:f", skip=True, since="2.3.0")])
    assert engine.calls() == {}


def test_a_patch_may_need_a_release_of_another_package(project: Callable[..., None]) -> None:
    project(other__here="", upstream="def f():\n    return 1\n", setup="__version__ = '2.8.0'\n")
    installed.version.cache_clear()
    engine.install([
        patch("too-early", "upstream:f", since={"other": "2.10.0"}, **{"return": 2}),
        patch("late-enough", "upstream:f", since={"other": "2.8.0"}, **{"return": 3}),
    ])  # fmt: skip
    assert imported("upstream").f() == 3 and set(engine.calls()) == {"late-enough"}


def test_what_is_bound_as_it_is_keeps_its_identity(project: Callable[..., None]) -> None:
    project(
        upstream="class Function:\n    @staticmethod\n    def setup(): ...\n",
        user="def mine(): ...\ndef handler(original):\n    return mine\n",
    )
    engine.install([patch("p", "upstream:Function.setup", handler="user:handler", as_is=True)])
    assert imported("upstream").Function.setup is imported("user").mine
