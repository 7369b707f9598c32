"""The Python interface: what `from mindspeed_dryrun import …` gives, beside the package `search`.

Semantic versioning covers these names and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_dryrun.launch.run import dry_run as _dry_run
from mindspeed_dryrun.record.model import Report
from mindspeed_dryrun.record.run_spec import RunSpec
from mindspeed_dryrun.report.compare import Comparison
from mindspeed_dryrun.report.compare import compare as _compare
from mindspeed_dryrun.report.compared_runs import read_run
from mindspeed_dryrun.units import parse_size_mb

Location = str | Path


def dry_run(
    script: Location,
    args: Sequence[str] = (),
    *,
    variables: Mapping[str, str | int] | None = None,
    out: Location | None = None,
    device: str | None = None,
    budget: str | None = None,
    trainer: str = "auto",
) -> Report:
    """Dry-runs a script. `args` are trainer arguments, as after `--`; `variables` are the script's, as with `--set`.

    The record is in `out`, or in the first free `dryrun-NAME` folder. What a user can cause raises `errors.DryRunError`; a
    rank that failed does not: it is `failed` in the report.
    """
    spec = RunSpec(
        sets={name: str(value) for name, value in (variables or {}).items()},
        overrides=tuple(args),
        device=device,
        budget_mb=parse_size_mb(budget) if budget else None,
        trainer=trainer,
    )
    return _dry_run(Path(script), spec, None if out is None else Path(out).absolute())


def compare(a: Location, b: Location, labels: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compares two records, folders of worker logs or `report.json` files, rank by rank."""
    return _compare(read_run(Path(a), labels[0]), read_run(Path(b), labels[1]))
