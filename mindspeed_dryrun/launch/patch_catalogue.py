"""The patch catalogue: YAML files, one per upstream project, checked and turned into plain JSON for the workers.

A file:

    project: MSAdapter                 # how people call it
    package: msadapter                 # the importable package; where it is absent the patches are not needed
    versions: ["0.5.0b1"]              # versions that every patch of the file is known on
    engine: mindspore                  # the engine it belongs to (mindspore, torch_npu); default: every engine
    patches:
      - name: msadapter-device-count   # unique
        target: msadapter.cuda:device_count
        return: 8                      # or one of: set: VALUE, skip: true, return_argument: N, handler: MODULE:FUNCTION;
                                       # hide: true with a bare module as target makes that module not importable
        why: what it is for
        without: what happens without it
        trainers: [script, embedded]   # default: both
        called: always                 # or never (default), or a list of conditions on flags (`rank/patch_calls.py`): a
                                       # patch that should have been called and was not stops the run
        purpose: batch sizes           # patches of one purpose stand for each other: one of them must have been called
        as_is: true                    # what the handler returns is bound itself, where its identity matters; not counted
        moved_to: [MODULE:ATTRIBUTE]   # where later releases have the target; the first that is there is taken
        since: 2.3.0                   # first release of the package that needs it; or by package: {mindspore: 2.8.0}
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.rank.patch_calls import Called
from mindspeed_dryrun.rank.patcher import drift
from mindspeed_dryrun.yaml_file import read_own, read_yaml

_ONE_PATH = threading.Lock()  # a sweep plans its variants in threads, and sys.path is one for all
ACTIONS = ("return", "set", "skip", "return_argument", "handler", "hide")
TRAINERS = ("script", "embedded")
ENGINES = ("mindspore", "torch_npu")
_FILE_FIELDS = {"project", "package", "versions", "engine", "patches"}
_PATCH_FIELDS = {"name", "target", "package", "versions", "why", "without", "trainers", "called", "purpose", "moved_to",
                 "since", "as_is", *ACTIONS}  # fmt: skip


def built_in_files() -> list[Path]:
    """The catalogue shipped with the program: inside the installed package, or `patches/` of a source checkout."""
    package = Path(__file__).parent
    for folder in (package.parent / "catalogue", package.parents[1] / "patches"):
        files = sorted(folder.glob("*.yaml"))
        if files:
            return files
    raise UsageError("The patch catalogue is missing from this installation; install mindspeed-dryrun again.")


def signatures_file() -> Path:
    """Signatures of the targets in the releases that work (`drift.py`), beside the catalogue."""
    return built_in_files()[0].parent / "signatures.json"


def compile(files: Iterable[Path] | None = None, extra: Sequence[Path] = (), engine: str = ENGINES[0]) -> list[dict[str, Any]]:
    """The built-in catalogue (or `files`) and the user's own files as JSON-able patches for `engine`, in file order."""
    patches: dict[str, dict[str, Any]] = {}
    ours = built_in_files() if files is None else []
    for file in [*ours, *(files or ()), *extra]:
        for patch in _read(Path(file), ours=file in ours):
            if engine in patch["engines"]:
                patches.pop(patch["name"], None)  # a user's patch of the same name replaces ours
                patches[patch["name"]] = patch
    return list(patches.values())


def state(patch: dict[str, Any]) -> str:
    """`applies`, `applies, version not known`, `not needed`, `target missing` or `not installed`, without importing upstream."""
    module, _, attribute = str(patch["target"]).partition(":")
    package = str(patch["package"])
    if not installed.has_package(package):
        return "not installed"
    if "hide" in patch:
        return "applies"
    if not installed.reaches(patch.get("since"), package):
        return "not needed"
    for target in patch.get("moved_to", ()):
        if installed.mentions(*str(target).split(":")):
            module, _, attribute = str(target).partition(":")
            break
    if not installed.has_package(module) or installed.has_attribute(module, attribute) is False:
        return "target missing"
    known = patch["versions"]
    return "applies" if not known or installed.version(package) in known else "applies, version not known"


def first_drift(patches: Iterable[dict[str, Any]], trainer: str, folders: Sequence[str]) -> str | None:
    """The first patch of this trainer whose target is gone from what a rank with these folders on its path would import."""
    with _ONE_PATH:
        before = list(sys.path)
        sys.path[:0] = folders
        installed.version.cache_clear()
        try:
            for patch in patches:
                if trainer in patch["trainers"] and (gone := drift(patch)):
                    return str(gone)
        finally:
            sys.path[:] = before
            installed.version.cache_clear()
        return None


def state_in(patch: dict[str, Any], release: str) -> str:
    """`applies`, `applies, version not known` or `not needed` in a release of MindSpeed-LLM, whatever is installed."""
    since = patch.get("since")
    if isinstance(since, dict):
        return "applies from " + " and ".join(f"{package} {version}" for package, version in since.items()) + " on"
    if str(patch["package"]) != "mindspeed_llm":
        return "applies"
    if since and installed.number(release) < installed.number(str(since)):
        return "not needed"
    return "applies" if release in patch["versions"] else "applies, version not known"


def _read(file: Path, ours: bool) -> list[dict[str, Any]]:
    content = read_own(file) if ours else read_yaml(file)
    if not isinstance(content.get("patches"), list):
        raise UsageError(f"The patch file {file} has no list `patches`.")
    _refuse_unknown(content, _FILE_FIELDS, str(file))
    return [_checked(entry, content, file) for entry in content["patches"]]


def _checked(entry: Any, content: dict[str, Any], file: Path) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise UsageError(f"A patch in {file} has no name.")
    where = f"patch {entry['name']} in {file}"
    _refuse_unknown(entry, _PATCH_FIELDS, where)
    module, colon, attribute = str(entry.get("target", "")).partition(":")
    if not module or bool(attribute) == ("hide" in entry) or bool(colon) != bool(attribute):
        raise UsageError(f"{where}: `target` must be `module:attribute`, or a bare module to hide.")
    actions = [action for action in ACTIONS if action in entry]
    if len(actions) != 1:
        raise UsageError(f"{where}: needs exactly one of {', '.join(ACTIONS)}.")
    if "handler" in entry and ":" not in str(entry["handler"]):
        raise UsageError(f"{where}: `handler` must be `module:function`.")
    if entry.get("as_is") and entry.get("called", "never") != "never":
        raise UsageError(f"{where}: the calls of a patch that is bound `as_is` are not counted, so `called` can say nothing.")
    try:
        Called.read(entry.get("called", "never"))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return {
        **entry,
        "project": content.get("project", file.stem),
        "package": entry.get("package") or content.get("package") or module.split(".")[0],
        "versions": _texts(entry.get("versions") or content.get("versions") or [], f"{where}: `versions`"),
        **({"moved_to": _texts(entry["moved_to"], f"{where}: `moved_to`")} if "moved_to" in entry else {}),
        "trainers": _chosen(entry.get("trainers", list(TRAINERS)), TRAINERS, f"{where}: `trainers`"),
        "engines": _chosen([content["engine"]] if "engine" in content else list(ENGINES), ENGINES, f"{file}: `engine`"),
    }


def _texts(items: Any, where: str) -> list[str]:
    if not isinstance(items, list) or not all(isinstance(item, (str, int, float)) for item in items):
        raise UsageError(f"{where} must be a list of texts.")
    return [str(item) for item in items]


def _chosen(names: Any, known: Sequence[str], where: str) -> list[str]:
    if not isinstance(names, list) or not set(map(str, names)) <= set(known):
        raise UsageError(f"{where} must be one of {', '.join(known)}.")
    return names


def _refuse_unknown(fields: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(map(str, set(fields) - known))
    if unknown:
        raise UsageError(f"{where}: unknown field {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
