"""An installed CANN: where it is, its version, and whether it is complete enough to run on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.rank.activation import STAND_IN_LIBRARY

_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_AICPU_PATH")
_PLACES = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann/latest",
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/latest",
)
_VERSION_FILES = ("version.info", "compiler/version.info", "runtime/version.info", "version.cfg")
_VERSION = re.compile(r"(?im)^(?:package_)?version(?:_dir)?\s*=\s*\[?([\w.:]+)")
# Without these MindSpore's Ascend plugin does not load; with them it does.
_ESSENTIAL = ("libascendcl.so", "libge_runner.so", "libgraph.so", "libhccl.so", "libregister.so")


@dataclass(frozen=True)
class RealCann:
    """An installed CANN. `missing` names what keeps it from being used."""

    home: Path
    version: str
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing

    def variables(self) -> dict[str, str]:
        """What its own set_env.sh would set, for shells that did not source it."""
        return {"ASCEND_HOME_PATH": str(self.home), "ASCEND_OPP_PATH": str(self.home / "opp")}

    def search_paths(self) -> dict[str, list[str]]:
        """What its own set_env.sh would put on the search paths."""
        driver = Path("/usr/local/Ascend/driver/lib64")
        return {
            "LD_LIBRARY_PATH": [str(self.home / "lib64"), str(driver), str(driver / "common"), str(driver / "driver")],
            "PATH": [str(self.home / "bin"), str(self.home / "compiler/ccec_compiler/bin")],
            "PYTHONPATH": [
                str(self.home / "python/site-packages"),
                str(self.home / "opp/built-in/op_impl/ai_core/tbe"),
            ],
        }


def find_real_cann(environ: Mapping[str, str] | None = None, places: tuple[str, ...] = _PLACES) -> RealCann | None:
    """The CANN that this environment names, else the one in its usual place, else None."""
    environ = os.environ if environ is None else environ
    for place in (*(environ[name] for name in _HOMES if environ.get(name)), *places):
        home = Path(place)
        if (home / "lib64").is_dir() and not (home / "lib64" / STAND_IN_LIBRARY).exists():
            return RealCann(home, _version(home), _missing(home))
    return None


def npus() -> int:
    """How many NPUs this machine has: the device files of the driver."""
    return sum(1 for path in Path("/dev").glob("davinci[0-9]*"))


def _version(home: Path) -> str:
    for name in _VERSION_FILES:
        path = home / name
        if path.is_file():
            match = _VERSION.search(path.read_text(errors="replace"))
            if match:
                return match[1].split(":")[-1]
    return "unknown"


def _missing(home: Path) -> tuple[str, ...]:
    libraries = tuple(f"lib64/{name}" for name in _ESSENTIAL if not (home / "lib64" / name).exists())
    return libraries + (() if (home / "opp").is_dir() else ("opp",))
