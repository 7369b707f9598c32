"""Rows to calibrate with, from a YAML file: which variant of the script took how long."""

from __future__ import annotations

from pathlib import Path

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.calibration import MeasuredRun, read_log
from mindspeed_dryrun.estimate.operators import read_operators
from mindspeed_dryrun.estimate.strategy import read_strategy
from mindspeed_dryrun.estimate.time_model import logged_flops
from mindspeed_dryrun.megatron.model_shape import read_shape
from mindspeed_dryrun.sweep.sweep import Variant, read_release, variant_job
from mindspeed_dryrun.yaml_file import Section, read_yaml

_MEASURED = ("log", "iteration_ms", "tflops_per_card")


def read_rows(path: Path) -> list[MeasuredRun]:
    """Every row with its time in seconds."""
    section = Section(read_yaml(path), str(path), ("script", "set", "args", "trainer_release", "rows"))
    script = path.parent / section.text("script")
    release = read_release(section)
    items = section.data.get("rows")
    if not isinstance(items, list) or not items:
        raise UsageError(f"{path}: 'rows' must be a list of measured variants.")
    rows = []
    for index, item in enumerate(items, 1):
        one = Section(item, f"{path}: row {index}", ("name", "set", "args", *_MEASURED))
        given = [key for key in _MEASURED if one.has(key)]
        if len(given) != 1:
            raise UsageError(f"{one.where} needs exactly one of {', '.join(_MEASURED)}.")
        sets = {**section.variables("set"), **one.variables("set")}
        job = variant_job(script, Variant("", sets, (*section.words("args"), *one.words("args"))))
        shape = read_shape(job.args)
        strategy = read_strategy(job.args, job.world_size)
        if given[0] == "log":
            seconds = read_log(path.parent / one.text("log")).seconds or 0.0
        elif given[0] == "iteration_ms":
            seconds = one.number("iteration_ms") / 1000
        else:
            flops = logged_flops(shape, strategy, release)
            seconds = flops / (one.number("tflops_per_card") * 1e12 * job.world_size)
        rows.append(MeasuredRun(one.text("name", f"row {index}"), shape, strategy, seconds, read_operators(job.args)))
    return rows
