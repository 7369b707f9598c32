"""The real upstream stack in a folder: three trees of one release, and the Python packages that they import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from mindspeed_dryrun.cache import make_once
from mindspeed_dryrun.engines.packages import installer
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.releases import RELEASES, TREES, Release, missing_trees, release_of

CORE_MS = "MINDSPEED_CORE_MS_PATH"  # names the folder with the trees
PYTHON = "python"  # the folder for packages, beside the trees
ADDRESSES = {
    "MindSpeed-LLM": "https://gitcode.com/Ascend/MindSpeed-LLM",
    "MindSpeed": "https://gitcode.com/Ascend/MindSpeed",
    "Megatron-LM": "https://github.com/NVIDIA/Megatron-LM",
}
# What a rank imports, by the name to import. Pinned where upstream pins it (requirements.txt of MindSpeed-Core-MS).
PACKAGES: Mapping[str, str] = {
    "transformers": "transformers==4.51.0",
    "datasets": "datasets==2.21.0",
    "einops": "einops",
    "networkx": "networkx",
    "pandas": "pandas",
    "pyarrow": "pyarrow==17.0.0",  # later ones need numpy 2, and MindSpore numpy 1
    "regex": "regex",
    "scipy": "scipy",
    "sentencepiece": "sentencepiece",
    "sklearn": "scikit-learn",
    "sqlalchemy": "SQLAlchemy",
    "sympy": "sympy",
    "tiktoken": "tiktoken",
    "word2number": "word2number",
}
# These ask pip for PyTorch, gigabytes of it; on the MindSpore path MSAdapter's takes its place.
WITHOUT_TORCH: Mapping[str, str] = {
    "peft": "peft==0.7.1",
    "accelerate": "accelerate==1.9.0",
    "transformers_stream_generator": "transformers_stream_generator==0.0.5",
}


def requirements(folder: Path | None = None) -> dict[str, str]:
    """By the name to import. On torch_npu the transformers that MindSpeed-LLM's own requirements.txt asks for: FSDP2 needs it."""
    found = {**PACKAGES, **WITHOUT_TORCH}
    own = folder / "MindSpeed-LLM" / "requirements.txt" if folder else None
    if own and own.is_file() and importlib.util.find_spec("torch_npu"):
        pinned = re.search(r"^transformers==\S+", own.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        found["transformers"] = pinned[0] if pinned else found["transformers"]
    return found


def missing_packages(folder: Path | None = None) -> list[str]:
    """Requirements that neither this Python nor the stack's own folder has."""
    places = [str(folder / PYTHON)] if folder else []
    return [
        requirement
        for module, requirement in requirements(folder).items()
        if importlib.util.find_spec(module) is None and PathFinder.find_spec(module, places) is None
    ]


def prepare(
    release: Release,
    into: Path,
    *,
    source: Path | None = None,
    base_url: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Fills the folder with what is not in it yet, and returns it."""
    into.mkdir(parents=True, exist_ok=True)
    if source is not None:
        _link(release, source, into, say)
    else:
        for tree, reference in release.references.items():
            if not (into / tree).exists():
                address = f"{base_url.rstrip('/')}/{tree}" if base_url else ADDRESSES[tree]
                say(f"Cloning {address} at {reference}")
                _clone(address, reference, into / tree)
    if lacking := missing_packages(into):
        say(f"Installing {', '.join(lacking)} into {into / PYTHON}")
        _install(into / PYTHON, lacking)
    say("Compiling what ranks import")
    _compile(into)
    return into


def _compile(into: Path) -> None:
    """A rank writes no bytecode, and so would compile three thousand modules each time. Trees elsewhere are left as they are."""
    folders = [into / PYTHON, *(into / tree / package.partition("/")[0] for tree, package in TREES.items())]
    words = [str(folder) for folder in folders if folder.is_dir() and not folder.parent.is_symlink()]
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j0", *words], capture_output=True, check=False)


def _link(release: Release, source: Path, into: Path, say: Callable[[str], None]) -> None:
    source = source.absolute()
    if missing := missing_trees(source):
        raise UsageError(f"{source} has no {' and no '.join(missing)}.")
    found = release_of(source)
    if found in RELEASES and found != release.name:
        raise UsageError(f"{source} holds release {found}, not {release.name}. Use: --stack {found}")
    for tree in release.references:
        place = into / tree
        if not place.exists():
            say(f"Using {source / tree}")
            place.symlink_to(source / tree, target_is_directory=True)
    # Nothing is ever installed into a folder of the user's: one with gaps is not taken.
    if (source / PYTHON).is_dir() and not (into / PYTHON).exists() and not missing_packages(source):
        say(f"Using {source / PYTHON}")
        (into / PYTHON).symlink_to(source / PYTHON, target_is_directory=True)


def _clone(address: str, reference: str, place: Path) -> None:
    def clone(target: Path) -> None:
        command = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1", "--branch", reference]
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        _run([*command, address, str(target)], message(f"Could not clone {address} at {reference}"), environment)

    if shutil.which("git") is None:
        raise DryRunError("git is not installed. Install it, or use trees that are there already: --from DIR")
    make_once(place, clone)


def _install(folder: Path, requirements: Iterable[str]) -> None:
    plain = [name for name in requirements if name not in WITHOUT_TORCH.values()]
    alone = [name for name in requirements if name in WITHOUT_TORCH.values()]
    for names, options in ((plain, [*_keep_numpy()]), (alone, ["--no-deps"])):
        if names:
            command = [*installer(), "--quiet", "--target", str(folder), *options, *names]
            _run(command, message(f"Could not install {', '.join(names)}"))


def _keep_numpy() -> list[str]:
    """MindSpore is built for the numpy that is installed; a newer one in the stack's folder would hide it."""
    try:
        return [f"numpy=={importlib.metadata.version('numpy')}"]
    except importlib.metadata.PackageNotFoundError:
        return []


def _run(command: list[str], failure: str, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise DryRunError(f"{failure}: {reason.strip()}")
