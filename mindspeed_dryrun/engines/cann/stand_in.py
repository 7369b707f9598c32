"""The stand-in CANN: a folder with the libraries, modules and layout that MindSpore looks for, made once and kept."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.cache import VARIABLE, cache_root, make_once
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank.activation import STAND_IN_LIBRARY

# Goes up whenever the generator makes something else, so that a kept folder of an older one is not used.
GENERATOR = 3
SOC_NAME = "Ascend910B2"
# MindSpore finds CANN by cutting the path of this library at `latest` or `cann`: the first one, up to 2.7.2, the last one from
# 2.8 on. So our own names have one such word, the folder `latest`, and a cache folder with another one is refused.
_CUT_AT = {"2.7.0": ("latest",), "2.7.1": ("latest",), "2.7.2": ("latest", "cann")}

# MindSpore asks `hccl` and `te` for their version, MindSpeed asks `acl` for the chip. `te` answers that one question
# and must then look absent: MindSpore would go on to import `te.tik` otherwise.
_MODULES = {
    "hccl/__init__.py": "",
    "hccl/sys_version.py": '__sys_version__ = "{VERSION}"\n',
    "acl/__init__.py": f'def get_soc_name():\n    return "{SOC_NAME}"\n',
    "te/__init__.py": """import sys


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
""",
}
_FOLDERS = ("lib64", "opp/built-in/op_impl/ai_core/tbe", "opp_kernel", "compiler/ccec_compiler/bin")
_FILES = {"compiler/version.info": "Version={VERSION}\n", "version.info": "Version={VERSION}\n"}
# Where MindSpore keeps the CANN versions that it accepts; with another one it warns and waits three seconds.
_ACCEPTED = re.compile(r"class AscendEnvChecker\b.*?self\.version = \[([^\]]*)\]", re.DOTALL)
_FALLBACK_VERSION = "8.3"


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
    folder = cache_root() / "stand_in" / f"{version}-{_fingerprint(mindspore)}"
    _refuse_misleading(folder, version)
    return StandIn(make_once(folder, lambda temporary: _build(temporary / "latest", mindspore)) / "latest")


def _refuse_misleading(folder: Path, version: str) -> None:
    for word in _CUT_AT.get(version, ()):
        if word in str(folder):
            raise DryRunError(
                f"MindSpore {version} would look for CANN in the wrong place, because the cache folder {cache_root()} has "
                f"'{word}' in its path. Name another one: export {VARIABLE}=DIR"
            )


def _build(home: Path, mindspore: Path) -> None:
    # Only the first run of all reads and writes libraries.
    from mindspeed_dryrun.engines.cann.library_writer import write_library
    from mindspeed_dryrun.engines.cann.required_symbols import find_required_symbols

    required = find_required_symbols(mindspore)
    for folder in _FOLDERS:
        (home / folder).mkdir(parents=True, mode=0o755)
    library = write_library(required.symbols, required.architecture, STAND_IN_LIBRARY, SOC_NAME)
    _write(home / "lib64" / STAND_IN_LIBRARY, library)
    for soname in required.sonames:
        (home / "lib64" / soname).symlink_to(STAND_IN_LIBRARY)
    version = _accepted_version(mindspore)
    for name, text in {**{f"python/{name}": text for name, text in _MODULES.items()}, **_FILES}.items():
        _write(home / name, text.replace("{VERSION}", f"{version}.0").encode())


def _accepted_version(mindspore: Path) -> str:
    """The newest CANN that this MindSpore accepts, such as 8.5."""
    checker = mindspore / "run_check" / "_check_version.py"
    found = _ACCEPTED.search(checker.read_text(encoding="utf-8")) if checker.is_file() else None
    accepted = re.findall(r"\d+\.\d+", found[1]) if found else []
    return max(accepted, key=lambda text: [int(part) for part in text.split(".")], default=_FALLBACK_VERSION)


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
