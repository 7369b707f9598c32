"""Shapes and dtypes of tracked blocks, from the `tracker_graph.ir` that MindSpore writes beside memory_block.csv."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path

# Two lines of an operator: `(%116, %117) = Name(%3), task_info: …` and `    (BFloat16:[76032, 3584], …) <- (…)`.
_OUTPUTS = re.compile(rb"^\(((?:%\d+(?:, )?)+)\) = ")
_TENSOR = re.compile(rb"(\w+):\[([\d, ]*)\]")
_BITS = {"bool": 8, "int4": 4}


@dataclass(frozen=True)
class Shape:
    """A tensor's dtype (`BFloat16`) and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        digits = re.search(r"\d+$", self.dtype)
        bits = _BITS.get(self.dtype.lower()) or (int(digits[0]) if digits else 32)
        return self.elements * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


def read_shapes(path: Path, starts: Collection[int], most_bytes: int = 2**28) -> dict[int, Shape]:
    """start_time_stamp → shape for the blocks asked for, as far as the first `most_bytes` of the file name them."""
    wanted = {str(start).encode() for start in starts}
    found: dict[int, Shape] = {}
    if not wanted or not path.is_file():
        return found
    names: list[bytes] = []
    left = most_bytes
    with path.open("rb") as file:
        for line in file:
            left -= len(line)
            if left < 0 or len(found) == len(wanted):
                break
            if names:
                for name, (dtype, dims) in zip(names, _TENSOR.findall(line.partition(b"<-")[0]), strict=False):
                    if name in wanted and int(name) not in found:  # later lines are views and in-place writes
                        shape = tuple(int(dim) for dim in dims.split(b",") if dim.strip())
                        found[int(name)] = Shape(dtype.decode(), shape)
                names = []
            elif line[:2] == b"(%" and (match := _OUTPUTS.match(line)):
                outputs = [name.strip()[1:] for name in match[1].split(b",")]
                names = outputs if not wanted.isdisjoint(outputs) else []
    return found
