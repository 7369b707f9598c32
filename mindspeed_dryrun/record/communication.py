"""What a rank sent and received in its dry run: the engine lists every collective in `comm_execute_order.csv`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.record.store import rank_folder


@dataclass(frozen=True)
class Collective:
    """One call. `bytes` is the larger end: what is gathered, or what is scattered."""

    primitive: str  # as MindSpore names it: DistCommAllGatherIntoTensor, DistCommIsend, …
    ranks: tuple[int, ...]
    bytes: int


def read_collectives(record: Path, rank: int) -> Iterator[Collective]:
    """In the order of execution; nothing where the rank left no list."""
    path = rank_folder(record, rank) / f"rank_{rank}" / "execute_order" / "comm_execute_order.csv"
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as stream:
        for row in csv.DictReader(stream):
            try:
                ranks = tuple(int(word) for word in row["comm_rank"].split())
                size = max(int(row["input_size"] or 0), int(row["output_size"] or 0))
            except (KeyError, TypeError, ValueError):
                continue  # a line that was cut off
            yield Collective(row["primitive"], ranks, size)
