"""Rows to calibrate with, from a YAML file: which variant of the script took how long."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.calibration import MeasuredRun, read_log
from mindspeed_dryrun.estimate.operators import read_operators
from mindspeed_dryrun.estimate.strategy import read_strategy
from mindspeed_dryrun.estimate.time_model import Release, logged_flops
from mindspeed_dryrun.megatron.model_shape import read_shape
from mindspeed_dryrun.sweep.sweep import variant_job
from mindspeed_dryrun.sweep.sweep_file import Variant, read_release
from mindspeed_dryrun.user_file import Number, Text, UserFile, Variables, Words, read_file

_MEASURED = ("log", "iteration_ms", "tflops_per_card")


class RowSection(UserFile):
    """A variant and what was measured of it: one of `log`, `iteration_ms` and `tflops_per_card`."""

    name: Text | None = None
    set: Variables = Field(default_factory=dict, description="variables of the script")
    args: Words = Field(default=(), description="trainer arguments")
    log: Text | None = Field(default=None, description="of the real run, relative to this file")
    iteration_ms: Number | None = None
    tflops_per_card: Number | None = Field(default=None, description="as the trainer logs it")


class RowsFile(UserFile):
    """Measured variants of a script, to calibrate a hardware file with."""

    script: Text = Field(description="relative to this file")
    set: Variables = Field(default_factory=dict, description="variables of the script, for all rows")
    args: Words = Field(default=(), description="trainer arguments, for all rows")
    trainer_release: Text | None = Field(default=None, description="MindSpeed-LLM's, such as 2.1; default: the newest known")
    rows: list[RowSection] = Field(default_factory=list)


def read_rows(path: Path) -> list[MeasuredRun]:
    """Every row with its time in seconds."""
    file = read_file(RowsFile, path)
    if not file.rows:
        raise UsageError(f"{path}: 'rows' must be a list of measured variants.")
    release = read_release(file.trainer_release, str(path))
    return [_measured(file, row, index, path, release) for index, row in enumerate(file.rows, 1)]


def _measured(file: RowsFile, row: RowSection, index: int, path: Path, release: Release) -> MeasuredRun:
    if sum(getattr(row, key) is not None for key in _MEASURED) != 1:
        raise UsageError(f"{path}: row {index} needs exactly one of {', '.join(_MEASURED)}.")
    job = variant_job(path.parent / file.script, Variant("", {**file.set, **row.set}, (*file.args, *row.args)))
    shape, strategy = read_shape(job.args), read_strategy(job.args, job.world_size)
    if row.log is not None:
        seconds = read_log(path.parent / row.log).seconds or 0.0
    elif row.iteration_ms is not None:
        seconds = row.iteration_ms / 1000
    else:
        seconds = logged_flops(shape, strategy, release) / ((row.tflops_per_card or 1) * 1e12 * job.world_size)
    return MeasuredRun(
        name=row.name or f"row {index}", shape=shape, strategy=strategy, seconds=seconds, operators=read_operators(job.args)
    )
