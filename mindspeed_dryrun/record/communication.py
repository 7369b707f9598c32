"""What a rank sent and received in its dry run: the engine lists every collective in `comm_execute_order.csv`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.layout import Layout
from mindspeed_dryrun.record.model import Communicator
from mindspeed_dryrun.record.store import rank_folder

# A communicator has buffers of its own for sending and receiving, 2 × HCCL_BUFFSIZE (default 200 MB), outside the
# framework's pool: https://www.hiascend.com/document/detail/en/canncommercial/850/commlib/hcclug/hcclug_000076.html
_DEFAULT_BUFFER_MB = 200


@dataclass(frozen=True)
class Collective:
    """One call. `bytes` is the larger end: what is gathered, or what is scattered."""

    primitive: str  # as MindSpore names it: DistCommAllGatherIntoTensor, DistCommIsend, …
    group: str
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
                yield Collective(row["primitive"], row["group"], ranks, size)
            except (KeyError, TypeError, ValueError):
                continue  # a line that was cut off


def used_groups(record: Path, rank: int) -> dict[str, tuple[int, ...]]:
    """The groups that a rank really communicated in, with their ranks. HCCL makes a communicator when it is first used."""
    return {call.group: call.ranks for call in read_collectives(record, rank)}


def communicators(
    groups: Mapping[str, Sequence[int]], layout: Layout | None, arguments: Arguments, environment: Mapping[str, str]
) -> tuple[Communicator, ...]:
    """The groups with what each is for and the buffers that it takes."""
    sizes = _sizes_by_kind(arguments.text("--hccl-group-buffer") or "")
    usual = _number(environment.get("HCCL_BUFFSIZE")) or _DEFAULT_BUFFER_MB
    found = []
    for name, ranks in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        kind = layout.kind_of_group(ranks) if layout else "group"
        found.append(Communicator(name, kind, len(ranks), 2 * sizes.get(kind, usual)))
    return tuple(found)


def _sizes_by_kind(text: str) -> dict[str, int]:
    """`dp:200;tp:300` as MindSpeed reads it (mindspeed/core/hccl_buffer/hccl_adaptive_func.py); commas separate, too."""
    # `parse_hccl_buffer_string`: https://gitcode.com/Ascend/MindSpeed/blob/v2.2.0_core_r0.12.1/mindspeed/core/parallel_state.py#L75
    pairs = (part.partition(":") for part in text.replace(",", ";").split(";"))
    return {name.strip(): size for name, _, number in pairs if (size := _number(number))}


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isdigit() and int(text) > 0 else None
