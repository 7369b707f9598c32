"""Several torchrun calls of one script that are one job: one call for each node, and nodes may have different sizes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.captured_call import TORCHRUN, CapturedCall
from mindspeed_dryrun.launch.no_call import more_than_once
from mindspeed_dryrun.launch.read_call import read_call
from mindspeed_dryrun.megatron.arguments import Arguments
from mindspeed_dryrun.megatron.flags import with_tag

# torchrun's options by which nodes find each other: the same in every call of a job.
_MEETING = ("nnodes", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
# A node's files are its own: no dry run reads them.
_FILES = frozenset(with_tag("input", "tokenizer", "output"))
# Exports that change what is counted.
_COUNTED = ("PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE", "HCCL_BUFFSIZE", "MULTI_STREAM_MEMORY_REUSE", "CLOSE_MATMUL_K_SHIFT")


def may_be_one_job(lines: Sequence[str]) -> bool:
    """Whether these calls, a JSON line each, may belong to one job: what comes next is of interest, and there is an end to it."""
    with contextlib.suppress(ValueError):  # the last line is still being written
        calls = [json.loads(line) for line in lines]
        if any(call["program"] != TORCHRUN for call in calls):
            return False
        try:
            read = [read_call(call["program"], call["argv"], call["cwd"], call["env"]) for call in calls]
        except UsageError:
            return False
        return _belong_together(read)
    return True


def one_job(script: Path, calls: Sequence[CapturedCall]) -> CapturedCall:
    """The call of the job, with the size of each node; `UsageError` where the calls are not one job, or not all of it."""
    if len(calls) == 1:
        return calls[0]
    if not _belong_together(calls):
        raise more_than_once(script, calls[0].launcher)
    nodes = _nodes(calls[0])
    ordered = sorted(calls, key=lambda call: int(call.options["node_rank"]))
    if len(calls) < nodes:
        there = ", ".join(call.options["node_rank"] for call in ordered)
        raise UsageError(
            f"{script} calls torchrun for {len(calls)} of the {nodes} nodes of its job (--node_rank {there}): "
            "start the scripts of all nodes, or keep one call."
        )
    first = ordered[0]
    for other in ordered[1:]:
        if difference := _difference(first, other):
            raise UsageError(
                f"{script} starts the nodes of its job with different values of {difference}: a dry run takes one for all. "
                "Files may differ (--data-path, --load, --save)."
            )
    sizes = tuple(call.local_world_size for call in ordered)
    told = ", ".join(map(str, sizes))
    notes = [f"one job of {nodes} nodes with {told} ranks: torchrun is called for each"]
    notes += dict.fromkeys(note for call in ordered for note in call.notes)
    dropped = dict.fromkeys(words for call in ordered for words in call.dropped)
    return replace(first, world_size=sum(sizes), node_sizes=sizes, notes=tuple(notes), dropped=tuple(dropped))


def _belong_together(calls: Sequence[CapturedCall]) -> bool:
    """The same meeting place and program, and a node of its own for each."""
    first = calls[0]
    ranks = [call.options.get("node_rank", "") for call in calls]
    return (
        all(call.launcher == TORCHRUN for call in calls)
        and all(call.options.get(name) == first.options.get(name) for call in calls for name in _MEETING)
        and all(call.program == first.program and call.cwd == first.cwd for call in calls)
        and all(rank.isdigit() and int(rank) < _nodes(first) for rank in ranks)
        and len(set(map(int, ranks))) == len(calls)
    )


def _nodes(call: CapturedCall) -> int:
    return call.world_size // call.local_world_size


def _difference(one: CapturedCall, other: CapturedCall) -> str:
    """The first flag or exported variable that differs and decides what is counted; empty where none does."""
    mine, theirs = (_deciding(call) for call in (one, other))
    return next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), "")


def _deciding(call: CapturedCall) -> Mapping[str, Any]:
    flags = {name: words for name, words in Arguments(call.program_args).values.items() if name not in _FILES}
    return {**flags, **{name: call.env[name] for name in _COUNTED if name in call.env}}
