"""Checks the time model against published throughput, and fits the figures that the hardware file names as fitted.

    python benchmarks/time_accuracy.py ROWS.jsonl [--hardware FILE] [--fit]

A row of ROWS.jsonl is `{"model", "params", "published", "cards", "argv"}`: the published tokens a second and card, and
the launcher call of the script. Errors are those of predicted throughput. `--fit` fits the named figures to all rows and
prints them, and the errors of each family of models when it is left out of the fit: what the band must cover.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from mindspeed_dryrun.devices.hardware import Hardware, Range, read_hardware
from mindspeed_dryrun.estimate.operators import Operators, read_operators
from mindspeed_dryrun.estimate.strategy import Strategy, read_strategy
from mindspeed_dryrun.estimate.time_model import iteration_seconds
from mindspeed_dryrun.megatron.model_shape import ModelShape, read_shape

# Figures that are fitted, with the value believed before (sources: the hardware file) and its spread (logarithmic).
PRIORS = {
    "matmul_tflops": (280.0, 0.08),
    "memory_gb_s": (1000.0, 0.3),
    "attention_gscores_s": (330.0, 0.25),
    "link_gb_s": (18.6, 0.15),
    "overlap": (0.7, 0.4),
    "exchange_ms": (2.0, 1.0),
}
# Spread of published rows: two tables give 902 and 810 tokens a second for one and the same script.
ROW_SPREAD = 0.07
COVERAGE = 0.9


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A job with its published time."""

    name: str
    family: str
    shape: ModelShape
    strategy: Strategy
    operators: Operators
    seconds: float

    def error(self, hardware: Hardware) -> float:
        """Predicted over published throughput, minus 1."""
        return self.seconds / iteration_seconds(self.shape, self.strategy, hardware, self.operators) - 1


def read_published(path: Path) -> list[PublishedRow]:
    """The rows of a file."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        words = data["argv"]
        args = words[max(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]
        shape = read_shape(args)
        rows.append(
            PublishedRow(
                name=f"{data['model']} {data['params']}",
                family=data["model"],
                shape=shape,
                strategy=read_strategy(args, data["cards"]),
                operators=read_operators(args),
                seconds=shape.global_batch * shape.seq / data["published"] / data["cards"],
            )
        )
    return rows


def fit(rows: Sequence[PublishedRow], hardware: Hardware) -> Hardware:
    """The hardware with the most likely figures."""

    def moved(logs: Sequence[float]) -> Hardware:
        values = {name: start * math.exp(log) for (name, (start, _)), log in zip(PRIORS.items(), logs, strict=True)}
        changes = {name: Range(value, value, value) for name, value in values.items()}
        return dataclasses.replace(hardware, **changes)  # type: ignore[arg-type]

    def residuals(logs: Sequence[float]) -> list[float]:
        here = moved(logs)
        known = [log / spread for log, (_, spread) in zip(logs, PRIORS.values(), strict=True)]
        return [math.log1p(row.error(here)) / ROW_SPREAD for row in rows] + known

    return moved(least_squares(residuals, np.zeros(len(PRIORS))).x.tolist())


def left_out(rows: Sequence[PublishedRow], hardware: Hardware) -> list[float]:
    """The error of each row with figures fitted to the other families only."""
    families = dict.fromkeys(row.family for row in rows)
    fits = {family: fit([row for row in rows if row.family != family], hardware) for family in families}
    return [row.error(fits[row.family]) for row in rows]


def band(errors: Sequence[float], coverage: float = COVERAGE) -> float:
    """The error that the next row stays within with this probability: the conformal quantile of what was seen."""
    seen = sorted(math.exp(abs(math.log1p(error))) - 1 for error in errors)
    return seen[min(len(seen), math.ceil((len(seen) + 1) * coverage)) - 1]


def summary(errors: Sequence[float]) -> str:
    """Median, worst and how many within 15 %."""
    seen = [abs(error) for error in errors]
    return (
        f"median {100 * statistics.median(seen):.1f} %, worst {100 * max(seen):.1f} %, "
        f"within 15 %: {sum(error <= 0.15 for error in seen)} of {len(seen)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--hardware", default="ascend910b-64g")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args(argv)
    rows, hardware = read_published(options.rows), read_hardware(options.hardware)
    errors = [row.error(hardware) for row in rows]
    held = left_out(rows, hardware) if options.fit else None
    print("| job | tokens | strategy | published s | error |" + (" left out |" if held else ""))
    print("|---|---:|---|---:|---:|" + ("---:|" if held else ""))
    for index, (row, error) in enumerate(zip(rows, errors, strict=True)):
        more = f" {100 * held[index]:+.1f} % |" if held else ""
        print(f"| {row.name} | {row.shape.seq} | {row.strategy.name} | {row.seconds:.2f} | {100 * error:+.1f} % |{more}")
    print(f"\nHardware file: {summary(errors)}")
    if held:
        fitted = fit(rows, hardware)
        values = {name: round(getattr(fitted, name).typical, 3) for name in PRIORS}
        print(f"Fitted figures: {values}")
        print(f"Fitted to all rows: {summary([row.error(fitted) for row in rows])}")
        print(f"Each family left out: {summary(held)}; band for {COVERAGE:.0%}: {100 * band(held):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
