"""The stand-in CANN: a folder with the libraries, modules and layout that MindSpore looks for, made once and kept."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.cache import cache_root, make_once
from mindspeed_dryrun.cann.lacks import find_lacks
from mindspeed_dryrun.cann.writer import write_library

# Goes up whenever the generator makes something else, so that a kept folder of an older one is not used.
GENERATOR = 2
VERSION = "8.3.0"
SOC_NAME = "Ascend910B2"
_LIBRARY = "libstandin_cann.so"

# MindSpore asks `hccl` and `te` for their version, MindSpeed asks `acl` for the chip. `te` answers that one question
# and must then look absent: MindSpore would go on to import `te.tik` otherwise.
_MODULES = {
    "hccl/__init__.py": "",
    "hccl/sys_version.py": f'__sys_version__ = "{VERSION}"\n',
    "acl/__init__.py": f'def get_soc_name():\n    return "{SOC_NAME}"\n',
    "te/__init__.py": f'''import sys


def _asked_by(file_name):
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(file_name):
            return True
        frame = frame.f_back
    return False


if _asked_by("_quant_ops.py"):
    raise ImportError("the stand-in has no te operators")


class _Version:
    version = "{VERSION}"


def __getattr__(name):
    if name == "version":
        sys.modules.pop("te", None)
        return _Version
    raise AttributeError(name)
''',
}
_FOLDERS = ("lib64", "opp/built-in/op_impl/ai_core/tbe", "opp_kernel", "compiler/ccec_compiler/bin")
_FILES = {"compiler/version.info": f"Version={VERSION}\n", "version.info": f"Version={VERSION}\n"}


@dataclass(frozen=True)
class StandIn:
    """A stand-in that lies ready; `home` is what ASCEND_HOME_PATH names."""

    home: Path

    def variables(self) -> dict[str, str]:
        """What to set."""
        return {"ASCEND_HOME_PATH": str(self.home), "ASCEND_OPP_PATH": str(self.home / "opp")}

    def search_paths(self) -> dict[str, list[str]]:
        """What to put first on which search path."""
        return {
            "LD_LIBRARY_PATH": [str(self.home / "lib64")],
            "PATH": [str(self.home / "compiler/ccec_compiler/bin")],
            "PYTHONPATH": [str(self.home / "python"), str(self.home / "opp/built-in/op_impl/ai_core/tbe")],
        }


def stand_in_for(mindspore: Path, version: str) -> StandIn:
    """The stand-in for the MindSpore package folder given: kept from last time, or made now (seconds)."""
    folder = cache_root() / "cann" / f"{version}-{_fingerprint(mindspore)}"
    # MindSpore finds CANN by a folder called `latest`.
    return StandIn(make_once(folder, lambda temporary: _build(temporary / "latest", mindspore)) / "latest")


def _build(home: Path, mindspore: Path) -> None:
    lacks = find_lacks(mindspore)
    for folder in _FOLDERS:
        (home / folder).mkdir(parents=True, mode=0o755)
    library = write_library(lacks.symbols, lacks.architecture, _LIBRARY, SOC_NAME)
    _write(home / "lib64" / _LIBRARY, library)
    for soname in lacks.sonames:
        (home / "lib64" / soname).symlink_to(_LIBRARY)
    for name, text in {**{f"python/{name}": text for name, text in _MODULES.items()}, **_FILES}.items():
        _write(home / name, text.encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    path.write_bytes(content)
    path.chmod(0o644)


def _fingerprint(mindspore: Path) -> str:
    """One per build of MindSpore and version of the generator: a reinstalled MindSpore gets a stand-in of its own."""
    digest = hashlib.sha256(f"{GENERATOR} {os.uname().machine}".encode())
    for path in sorted((mindspore / "lib" / "plugin").rglob("*.so*")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()[:12]
