"""Fits the hardware's efficiencies to a user's own training logs.

Three factors are fitted: how much faster (or slower) than the hardware file says its cards compute, communicate, and
exchange activations between pipeline stages. Each has a prior around 1, so that one log moves all a little and several
tell them apart.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.optimize import least_squares

from mindspeed_dryrun.devices.hardware import Hardware
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.estimate.operators import Operators, read_operators
from mindspeed_dryrun.estimate.strategy import Strategy, read_strategy
from mindspeed_dryrun.estimate.time_model import USUAL, iteration_seconds
from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape

# Prior spread of the factors (logarithmic; little is known of the last) and spread of a measured iteration.
_FACTOR_SPREADS = (0.35, 0.35, 1.2)
_TIME_SPREAD = 0.03
# A fit is never claimed to be better than this.
_LEAST_ERROR = 0.05

_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?![0-9.])"
_ELAPSED = re.compile(rf"elapsed time per iteration \(ms\):\s*({_NUMBER})")
_THROUGHPUT = re.compile(rf"throughput per GPU \(TFLOP/s/GPU\):\s*({_NUMBER})")
# Megatron prints its arguments as `  name .......... value`.
_ARGUMENT = re.compile(r"^\s*(?:\[[^\]]*\]:?\s*)?([a-z][a-z0-9_]*) \.{3,} (.*?)\s*$")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A measured iteration of a known job."""

    name: str
    shape: ModelShape
    strategy: Strategy
    seconds: float
    operators: Operators = USUAL


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The calibrated hardware with the error of every row, and what leaving a row out says of the rest."""

    hardware: Hardware
    compute: float
    communication: float
    exchange: float
    residuals: tuple[tuple[str, float], ...]  # relative: predicted over measured, minus 1
    held_out: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TrainingLog:
    """What a training log says: arguments (rank 0 prints them), iteration times, throughput."""

    args: tuple[str, ...]
    world: int | None
    iteration_s: tuple[float, ...]
    tflops: tuple[float, ...]

    @property
    def seconds(self) -> float | None:
        """The median iteration; the first one (compilation, allocation) is left out when there are more."""
        times = self.iteration_s[1:] or self.iteration_s
        return statistics.median(times) if times else None


def read_log(path: Path) -> TrainingLog:
    """Any worker log of Megatron or MindSpeed-LLM."""
    args: list[str] = []
    world: int | None = None
    times: list[float] = []
    tflops: list[float] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                match = _ARGUMENT.match(line)
                if match:
                    name, value = match[1], match[2]
                    if name == "world_size" and value.isdigit():
                        world = int(value)
                    args += _as_flag(name, value)
                if found := _ELAPSED.search(line):
                    times.append(float(found[1]) / 1000)
                if found := _THROUGHPUT.search(line):
                    tflops.append(float(found[1]))
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    if not times:
        raise UsageError(f"{path} has no line 'elapsed time per iteration (ms)': give the log of a real training run.")
    return TrainingLog(tuple(args), world, tuple(times), tuple(tflops))


def _as_flag(name: str, value: str) -> list[str]:
    """An argument as Megatron dumps it, back as a flag."""
    if value in ("None", "False", "[]", "{}"):
        return []
    if name == "noop_layers":
        value = re.sub(r"[{}\[\] ]", "", value)
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value == "True" else [flag, value]


def row_of_log(path: Path, args: Sequence[str] = (), world: int | None = None) -> MeasuredRun:
    """A row from a log; `args` are the script's where the log (of another rank than 0) does not print them."""
    log = read_log(path)
    used = tuple(args) or log.args
    size = world or log.world
    if not used or not size:
        raise UsageError(
            f"{path} does not print the trainer's arguments (only rank 0 does): give worker_0.log as well, or name the "
            "script with --script."
        )
    shape = read_shape(used)
    seconds = log.seconds
    assert seconds is not None
    return MeasuredRun(
        name=path.name, shape=shape, strategy=read_strategy(used, size), seconds=seconds, operators=read_operators(used)
    )


def fit(rows: Sequence[MeasuredRun], hardware: Hardware) -> Fit:
    """The most likely factors, their error on each row, and the error of each row when it is left out."""
    if not rows:
        raise UsageError("There is nothing to calibrate with: give at least one training log.")
    factors = _factors(rows, hardware)
    scaled = hardware.scaled(*factors)
    residuals = _errors(rows, scaled)
    held_out: list[tuple[str, float]] = []
    for index, row in enumerate(rows):
        rest = [*rows[:index], *rows[index + 1 :]]
        if rest:
            held_out += _errors([row], hardware.scaled(*_factors(rest, hardware)))
    worst = max(abs(error) for _, error in [*residuals, *held_out])
    if len(rows) == 1:
        worst = max(worst, 2 * _FACTOR_SPREADS[0] / 3)
    done = dataclasses.replace(
        scaled, calibrated=tuple(row.name for row in rows), error=round(max(worst, _LEAST_ERROR), 4), mixture_error=None
    )
    compute, communication, exchange = factors
    return Fit(
        hardware=done,
        compute=compute,
        communication=communication,
        exchange=exchange,
        residuals=tuple(residuals),
        held_out=tuple(held_out),
    )


def _errors(rows: Iterable[MeasuredRun], hardware: Hardware) -> list[tuple[str, float]]:
    return [(row.name, _seconds(row, hardware) / row.seconds - 1) for row in rows]


def _seconds(row: MeasuredRun, hardware: Hardware) -> float:
    return iteration_seconds(row.shape, row.strategy, hardware, row.operators)


def _factors(rows: Sequence[MeasuredRun], hardware: Hardware) -> tuple[float, float, float]:
    """The most likely factors: least squares on their logarithms, each held by its prior."""

    def residuals(logs: Sequence[float]) -> list[float]:
        scaled = hardware.scaled(*map(math.exp, logs))
        misses = [math.log(_seconds(row, scaled) / row.seconds) / _TIME_SPREAD for row in rows]
        return misses + [log / spread for log, spread in zip(logs, _FACTOR_SPREADS, strict=True)]

    compute, communication, exchange = map(math.exp, least_squares(residuals, [0.0, 0.0, 0.0]).x)
    return compute, communication, exchange
