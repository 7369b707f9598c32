"""MSAdapter and megatron-core, in a private folder that only simulated ranks have on their path.

MSAdapter's wheel carries top-level folders `torch`, `torch_npu`, `apex` and more: installed beside a real PyTorch it
would overwrite it. megatron-core asks pip for `torch`, gigabytes of it. So neither goes into the user's environment.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mindspeed_dryrun.cache import cache_root, make_once, refuse_writable
from mindspeed_dryrun.errors import DryRunError

# Pinned exactly: the patches and the embedded trainer are known on these.
PINS = ("msadapter==0.5.0b1", "megatron-core==0.12.1")
VARIABLE = "MINDSPEED_DRYRUN_PACKAGES"


def engine_path() -> list[str]:
    """The folders to put first on a rank's PYTHONPATH; `msa_thirdparty` holds the torch that is to be used."""
    folder = packages_folder()
    if not (folder / "msa_thirdparty").is_dir():
        raise DryRunError(f"The engine packages ({', '.join(PINS)}) are not installed. Run: mindspeed-dryrun setup")
    refuse_writable(folder)
    return [str(folder / "msa_thirdparty"), str(folder)]


def packages_folder() -> Path:
    """`$MINDSPEED_DRYRUN_PACKAGES`, else the private folder in the cache, one per Python version and set of pins."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}-{os.uname().machine}"
    return cache_root() / "packages" / "-".join((python, *(pin.replace("==", "-") for pin in PINS)))


def install(say: Callable[[str], None] = print) -> Path:
    """Fetches the packages (6 MB) from the package index into the private folder, once."""
    folder = packages_folder()
    if not folder.is_dir():
        say(f"Installing {' and '.join(PINS)} into {folder}")
    return make_once(folder, _fetch)


def _fetch(target: Path) -> None:
    command = [*installer(), "--quiet", "--no-deps", "--target", str(target), *PINS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise DryRunError(
            f"Could not install {' and '.join(PINS)}: {reason.strip()} "
            "Check that the package index can be reached (pip config list)."
        )
    # Ranks never write bytecode, and compiling 1400 files would be a third of a rank's time.
    compileall.compile_dir(target, quiet=2, workers=0)
    # The loader must not take another user's word for what lies here, whatever the umask was.
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o022)


def package_folder(name: str) -> Path | None:
    """The folder of the package that this Python would import, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def version_in(folder: Path, distribution: str) -> str | None:
    """The version of a distribution that is installed in a folder."""
    for found in importlib.metadata.distributions(path=[str(folder)]):
        if (found.metadata["Name"] or "").lower().replace("-", "_") == distribution:
            return found.version
    return None


def installer() -> list[str]:
    """The command that installs packages for this Python, up to its options."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    if shutil.which("uv"):
        return ["uv", "pip", "install", "--python", sys.executable]
    raise DryRunError("Neither pip nor uv is available to install the engine packages. Run: python -m ensurepip")
