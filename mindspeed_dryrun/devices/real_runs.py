"""Dry runs that were run for real as well: the margin that a verdict should leave is what they needed more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs
import yaml

from mindspeed_dryrun.files import cannot_write, write_text
from mindspeed_dryrun.yaml_file import read_own

_PUBLISHED = Path(__file__).with_name("real_runs.yaml")
# This many runs of their own describe a user's cluster better than what others published.
_ENOUGH = 3


@dataclass(frozen=True)
class Peaks:
    """The two figures that the engine prints."""

    used_peak_mb: int
    actual_peak_mb: int


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """One rank, dry and real."""

    job: str
    engine: str
    device: str
    dry: Peaks
    real: Peaks
    source: str = "compare --save"
    layout: str | None = None
    versions: str | None = None

    @property
    def excess(self) -> float:
        """What the real run needed above the dry one, as a share of the dry one; with fragments."""
        return (self.real.actual_peak_mb - self.dry.actual_peak_mb) / self.dry.actual_peak_mb


@dataclass(frozen=True)
class Excess:
    """The largest share that real runs needed above their dry runs, and whose runs they were."""

    share: float
    runs: int
    whose: str  # "published" or "your own"


def user_file() -> Path:
    """Where `compare --save` keeps this user's runs."""
    return Path(platformdirs.user_data_dir("mindspeed_dryrun", appauthor=False)) / "real_runs.yaml"


def read_runs(file: Path) -> list[RealRun]:
    """The runs of a file; none where it is missing."""
    from mindspeed_dryrun.schema import read_as
    from mindspeed_dryrun.yaml_file import load_yaml

    if not file.exists():
        return []
    data = read_own(file) if file == _PUBLISHED else load_yaml(file)
    return read_as(list[RealRun], data or [], str(file))


def save_run(run: RealRun, file: Path | None = None) -> Path:
    """Adds a run to the user's file."""
    file = file or user_file()
    data: list[dict[str, Any]] = [asdict(known) for known in [*read_runs(file), run]]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(file, error) from None
    write_text(file, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    return file


def seen_excess(engine: str, own: Sequence[RealRun] | None = None) -> Excess | None:
    """What real runs of this engine were seen to need above a dry run; None where nobody has compared."""
    mine = [run for run in (read_runs(user_file()) if own is None else own) if run.engine == engine]
    published = [run for run in read_runs(_PUBLISHED) if run.engine == engine]
    runs, whose = (mine, "your own") if len(mine) >= _ENOUGH else (mine + published, "published")
    if not runs:
        return None
    return Excess(max(0.0, *(run.excess for run in runs)), len(runs), whose)
