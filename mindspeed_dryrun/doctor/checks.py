"""The checks of `doctor`: each looks at one thing and says what it found, what is wanted, and the command that fixes it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from mindspeed_dryrun.cache import cache_root
from mindspeed_dryrun.devices.local import local_device
from mindspeed_dryrun.engines import packages
from mindspeed_dryrun.engines.cann.real import find_real_cann, npus
from mindspeed_dryrun.engines.mindspore.engine import find_mindspore
from mindspeed_dryrun.engines.torch_npu.engine import find_torch_npu
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.releases import MINDSPORE_VERSIONS, RELEASES, TREES
from mindspeed_dryrun.launch.stack import CORE_MS, missing_packages
from mindspeed_dryrun.rank import installed, upstream_errors

_LAST_RELEASE = [name for name in RELEASES if name != installed.MASTER][-1]
TORCH_NPU_KNOWN = "2.13.0"
DISK_WANTED_GB = 5
MEMORY_WANTED_GB = 2


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of `doctor`. State: `ok`, `note` (works, but not what upstream tested), `absent` (optional), `wrong`."""

    name: str
    found: str
    wanted: str
    state: str
    fix: str | None = None


def all_checks(environ: Mapping[str, str] | None = None) -> Iterator[Check]:
    """Every check but the engine's trial, in the order of the data's way: interpreter, engine, upstream, machine."""
    environ = os.environ if environ is None else environ
    yield python()
    yield from (mindspore(), torch_npu())
    yield from (msadapter(), megatron())
    yield from upstream(environ)
    yield from (cann(environ), cards(), disk(), memory(), cores())


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    state = "ok" if sys.version_info[:2] == (3, 10) else "note" if sys.version_info >= (3, 10) else "wrong"
    fix = None if state == "ok" else "MindSpeed-LLM is tested on 3.10: python3.10 -m venv .venv"
    return Check(name="Python", found=version, wanted="3.10", state=state, fix=fix)


def mindspore() -> Check:
    install = f"pip install mindspore=={MINDSPORE_VERSIONS[0]}"
    wanted = f"{MINDSPORE_VERSIONS[0]}–{MINDSPORE_VERSIONS[-1]}"
    try:
        folder, version = find_mindspore()
    except DryRunError:
        state = "wrong" if torch_npu().state == "absent" else "absent"  # torchrun scripts do not need it
        return Check(name="MindSpore", found="not installed", wanted=wanted, state=state, fix=install)
    if not list(folder.glob("lib/plugin/libmindspore_ascend.so*")):
        return Check(
            name="MindSpore", found=f"{version}, CPU-only build", wanted=wanted, state="wrong", fix=f"{install} --force-reinstall"
        )
    known = version in MINDSPORE_VERSIONS
    return Check(name="MindSpore", found=version, wanted=wanted, state="ok" if known else "note", fix=None if known else install)


def torch_npu() -> Check:
    """For scripts that call torchrun; msrun scripts do not need it."""
    try:
        _, version = find_torch_npu()
    except DryRunError:
        return Check(
            name="torch_npu",
            found="not installed",
            wanted=TORCH_NPU_KNOWN,
            state="absent",
            fix="pip install 'mindspeed-dryrun[torch]'",
        )
    return Check(name="torch_npu", found=version, wanted=TORCH_NPU_KNOWN, state="ok" if version == TORCH_NPU_KNOWN else "note")


def msadapter() -> Check:
    return _private("MSAdapter", "msadapter", "0.5.0b1")


def megatron() -> Check:
    return _private("Megatron (megatron-core)", "megatron_core", "0.12.1")


def upstream(environ: Mapping[str, str]) -> Iterator[Check]:
    """The trees of the real MindSpeed-LLM and what they import. All optional: without them the embedded trainer is used."""
    root = environ.get(CORE_MS)
    fetch = f"mindspeed-dryrun setup --stack {_LAST_RELEASE} --into DIR, then export {CORE_MS}=DIR"
    wanted = ", ".join(RELEASES)
    if root and not Path(root).is_dir():
        found = message(f"{CORE_MS}={root} is not a directory")
        yield Check(name="Upstream release", found=found, wanted=wanted, state="wrong", fix=fetch)
        return
    where = [Path(root)] if root else []
    where += [Path(entry).parent for entry in environ.get("PYTHONPATH", "").split(":") if entry]
    trees = {name: _tree_in(where, name) for name in TREES}
    llm = trees["MindSpeed-LLM"]
    if llm is None:
        yield Check(name="Upstream release", found="none; the embedded trainer is used", wanted=wanted, state="absent", fix=fetch)
    else:
        release = installed.mindspeed_llm_release(llm) or "unknown"
        broken = upstream_errors.broken_tree(llm)
        state = "ok" if release in RELEASES and not broken else "note"
        yield Check(name="Upstream release", found=release, wanted=wanted, state=state, fix=broken)
    for name, tree in trees.items():
        reference = RELEASES[_release_name(llm)].references[name]
        found = f"{_tree_version(tree) or message('version unknown')}, {tree}" if tree else message("not found")
        yield Check(
            name=name,
            found=found,
            wanted=reference,
            state="ok" if tree else "wrong" if llm else "absent",
            fix=fetch if llm and not tree else None,
        )
    if llm is not None:
        yield _packages_of_upstream(Path(root) if root else None)


def _packages_of_upstream(root: Path | None) -> Check:
    missing = missing_packages(root)
    fix = f"pip install {' '.join(missing)}" if missing else None
    found = message(f"missing: {', '.join(missing)}" if missing else "all there")
    return Check(
        name="Upstream's packages", found=found, wanted="all that scripts import", state="note" if missing else "ok", fix=fix
    )


def _tree_in(where: list[Path], name: str) -> Path | None:
    return next((path / name for path in where if (path / name / TREES[name]).is_dir()), None)


def _release_name(llm: Path | None) -> str:
    release = installed.mindspeed_llm_release(llm) if llm else None
    return release if release in RELEASES else _LAST_RELEASE


def cann(environ: Mapping[str, str]) -> Check:
    real = find_real_cann(environ)
    if real is None:
        return Check(name="CANN", found="none; the stand-in is used", wanted="8.2", state="ok")
    if not real.complete:
        found = f"{real.version} at {real.home}, incomplete ({', '.join(real.missing)} missing); the stand-in is used"
        return Check(name="CANN", found=found, wanted="8.2", state="note", fix="reinstall CANN, or unset ASCEND_HOME_PATH")
    return Check(
        name="CANN",
        found=f"{real.version} at {real.home}",
        wanted="8.2",
        state="ok" if real.version.startswith("8.2") else "note",
    )


def cards() -> Check:
    """A verdict is about the default device wherever it is made; here is what this machine's own card would be."""
    count = npus()
    if not count:
        return Check(name="NPUs", found=message("none"), wanted="none needed", state="ok")
    try:
        device = local_device()
        found = f"{count}, {device.title}: {device.total_mb}M in all, {device.usable_mb}M usable ({device.source})"
    except DryRunError as error:
        return Check(name="NPUs", found=str(count), wanted="none needed", state="note", fix=str(error))
    return Check(
        name="NPUs",
        found=found,
        wanted="none needed",
        state="ok",
        fix="mindspeed-dryrun launch SCRIPT --device here judges by this card",
    )


def disk() -> Check:
    place = next(path for path in (cache_root(), *cache_root().parents) if path.exists())
    free = shutil.disk_usage(place).free / 2**30
    fix = message("free some room, or export MINDSPEED_DRYRUN_CACHE=DIR on a larger disk")
    return _room(message("Disk"), free, DISK_WANTED_GB, message(f"{free:.0f} GB free at {place}"), fix)


def memory() -> Check:
    free = psutil.virtual_memory().available / 2**30
    fix = message("a rank takes 0.6 GB: close other programs")
    return _room(message("Memory"), free, MEMORY_WANTED_GB, message(f"{free:.1f} GB free"), fix)


def _room(name: str, free_gb: float, wanted_gb: int, found: str, fix: str) -> Check:
    enough = free_gb >= wanted_gb
    state = "ok" if enough else "wrong"
    return Check(name=name, found=found, wanted=f"{wanted_gb} GB", state=state, fix=None if enough else fix)


def cores() -> Check:
    return Check(name=message("Cores"), found=str(len(os.sched_getaffinity(0))), wanted="1", state="ok")


def _private(label: str, distribution: str, wanted: str) -> Check:
    version, fix = packages.version_in(packages.packages_folder(), distribution), message("mindspeed-dryrun setup")
    if version is None:
        return Check(name=label, found="not installed", wanted=wanted, state="wrong", fix=fix)
    found, known = message(f"{version}, private folder"), version == wanted
    return Check(name=label, found=found, wanted=wanted, state="ok" if known else "note", fix=None if known else fix)


def _tree_version(tree: Path) -> str | None:
    """The branch or tag a tree was checked out at, else what its setup.py or package_info says."""
    head = tree / ".git" / "HEAD"
    readers: tuple[tuple[Path, str], ...] = (
        (head, r"ref: refs/heads/(\S+)"),
        (tree / "megatron/core/package_info.py", r"(?s)MAJOR = (\d+).*?MINOR = (\d+).*?PATCH = (\d+)"),
        (tree / "setup.py", r"__version__ = ['\"]([^'\"]+)"),
        (tree / "setup.py", r"version=['\"]([^'\"]+)"),
    )
    for path, pattern in readers:
        if path.is_file():
            match = re.search(pattern, path.read_text(errors="replace"))
            if match:
                return ".".join(match.groups())
    return None
