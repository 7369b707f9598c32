"""torch_npu's own memory history: recorded from the start of a rank, kept as it is and as the table that `explain` reads.

`memory_snapshot.pickle` is what PyTorch's memory_viz opens. `memory_block.csv` has the columns of MindSpore's tracker: one row
for each block, with the Python stack that asked for it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dryrun.rank.torch_npu import SNAPSHOT_VARIABLE

BLOCKS = "memory_block.csv"
COLUMNS = ("start_time_stamp", "end_time_stamp", "device_addr", "size", "type", "node_name", "python_stack")
_NEVER = 2**63 - 1
# What the caching allocator makes of a size: 32 bytes of padding, then whole blocks (NPUCachingAllocator.cpp, `round_size`).
# `round_size`: https://github.com/Ascend/pytorch/blob/v7.3.0-pytorch2.7.1/torch_npu/csrc/core/npu/NPUCachingAllocator.cpp#L2389
_PADDING, _BLOCK = 32, 512
_CALL = re.compile(r"([A-Za-z_]\w*)\(")
# Autograd's own threads run the backward pass; Python is only in their stacks where a function is written in Python.
_AUTOGRAD = "File:<autograd>;Line:1;Function:backward|"
_WRAPPER = re.compile(r"/(torch|torch_npu)/")  # they pass a call on
_OWN = "/mindspeed_dryrun/rank/"


def start() -> None:
    """Begins to record, if this rank is to be explained. The stack of each allocation is taken, in Python only."""
    if os.environ.get(SNAPSHOT_VARIABLE):
        import torch_npu

        torch_npu.npu.memory._record_memory_history("all", context="alloc", stacks="python")


def write() -> None:
    """Writes both files into the working directory, the rank's own folder, if there was a recording."""
    name, torch = os.environ.get(SNAPSHOT_VARIABLE), sys.modules.get("torch")
    if not name or torch is None or not torch.npu.is_initialized():
        return
    import pickle

    snapshot = torch.npu.memory._snapshot()
    with open(name, "wb") as stream:
        pickle.dump(snapshot, stream)
    events: list[dict[str, Any]] = max(snapshot["device_traces"], key=len, default=[])
    with Path(BLOCKS).open("w", encoding="utf-8") as stream:
        stream.write(",".join(COLUMNS) + "\n")
        stream.writelines(row + "\n" for row in rows(events))


def rows(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each allocation, in order; an event's number is its time."""
    alive: dict[int, int] = {}
    ends: dict[int, int] = {}
    for time, event in enumerate(events, 1):
        if event["action"] == "alloc":
            alive[event["addr"]] = time
        elif event["action"] == "free_completed" and event["addr"] in alive:
            ends[alive.pop(event["addr"])] = time
    for time, event in enumerate(events, 1):
        if event["action"] == "alloc":
            size = -(-(event["size"] + _PADDING) // _BLOCK) * _BLOCK
            node, stack = described(event.get("frames") or ())
            yield f"{time},{ends.get(time, _NEVER)},{event['addr']},{size},PyNativeOutput,{node},{stack}"


def described(frames: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The operator that the innermost line calls, as far as the line tells, and the stack, outermost frame first."""
    program = [frame for frame in frames if _OWN not in frame["filename"]]
    text = "".join(
        f"File:{_plain(frame['filename'])};Line:{frame['line']};Function:{_plain(frame['name'])}|" for frame in reversed(program)
    )
    rooted = bool(program) and program[-1]["name"] in ("<module>", "_run_module_as_main", "_run_code")
    return _operator(program), text if rooted else _AUTOGRAD + text


def _operator(frames: Sequence[Mapping[str, Any]]) -> str:
    if not frames:
        return "backward of an operator"
    source = next((frame for frame in frames if not _WRAPPER.search(frame["filename"])), frames[0])
    calls = _CALL.findall(linecache.getline(source["filename"], source["line"]))
    fused = [name for name in calls if name.startswith("npu_")]
    return str((fused or calls or [_plain(source["name"])])[0])


def _plain(text: str) -> str:
    return re.sub(r"[,;|\n\r]", "_", text)
