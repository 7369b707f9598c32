"""Finds the installed torch_npu and knows the environment that a rank needs to run on it."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_dryrun.engines.cann.real import find_real_cann
from mindspeed_dryrun.engines.cann.stand_in import StandIn
from mindspeed_dryrun.engines.torch_npu.stand_in import torch_npu_stand_in
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank.torch_npu import ENGINE, ENGINE_VARIABLE

_FIND = "import importlib.util as u; s = u.find_spec('torch_npu'); print(s.submodule_search_locations[0] if s else '')"


@dataclass(frozen=True)
class TorchEngine:
    """torch_npu on the stand-in CANN."""

    torch_npu: str
    base: StandIn = field(repr=False)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a simulated rank, made from the user's."""
        environ = {**base, **self.base.variables(), ENGINE_VARIABLE: ENGINE}
        environ["ASCEND_TOOLKIT_HOME"] = str(self.base.home)
        # Without the queue each call comes from the thread that makes it: quick, repeatable, and the same peaks.
        environ["TASK_QUEUE_ENABLE"] = "0"
        for name, folders in self.base.search_paths().items():
            environ[name] = ":".join(part for part in (*folders, environ.get(name, "")) if part)
        return environ


def choose_torch_engine(python: str, environ: Mapping[str, str] | None = None) -> TorchEngine:
    """The engine for the torch_npu that this Python would import. A real CANN is refused: cards would be used."""
    real = find_real_cann(environ)
    if real is not None:
        raise DryRunError(
            f"There is a real CANN at {real.home}, and torch_npu on it would run on real cards: it has no simulation. "
            "Dry-run torchrun scripts on a machine or in a container without CANN."
        )
    package, version = find_torch_npu(python)
    return TorchEngine(version, torch_npu_stand_in(package, version))


def find_torch_npu(python: str) -> tuple[Path, str]:
    """The package folder and version of the torch_npu that this Python would import, without importing it."""
    found = subprocess.run([python, "-c", _FIND], capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        raise DryRunError(f"torch_npu is not installed for {python}. Install it: pip install torch torch-npu")
    folder = Path(found)
    for distribution in importlib.metadata.distributions(path=[str(folder.parent)]):
        if (distribution.metadata["Name"] or "").lower().replace("-", "_") == "torch_npu":
            return folder, distribution.version
    return folder, "unknown"
