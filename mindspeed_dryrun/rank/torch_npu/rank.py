"""A rank on torch_npu: the stand-in answers for CANN, and torch_npu's own caching allocator says what was used."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank import patcher
from mindspeed_dryrun.rank.activation import ERROR_PREFIX, STAND_IN_LIBRARY
from mindspeed_dryrun.rank.torch_npu import answers, history, slots, triton_stand_in, workspace

_NOT_STARTED = "the trainer was not started, so that no NPU is touched. Start it through mindspeed-dryrun."
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
# What a process of torch_npu loads of CANN; on the stand-in each is a link to one library.
_OF_CANN = re.compile(r"/lib(ascendcl|hccl|ge_runner|opapi|runtime|acl_op_compiler)\.so")


def check_simulation() -> None:
    """The stand-in must be what torch_npu will load, and nothing else."""
    home = Path(os.environ.get("ASCEND_HOME_PATH", ""))
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if not (home / "lib64" / STAND_IN_LIBRARY).is_file():
        raise DryRunError(f"ASCEND_HOME_PATH ({home}) does not name the stand-in CANN; {_NOT_STARTED}")
    if folders[0] != str(home / "lib64"):
        raise DryRunError(f"The stand-in CANN is not first on LD_LIBRARY_PATH; {_NOT_STARTED}")


def prepare() -> None:
    """Fills the stand-in's slots before torch_npu can call them, and looks at what was loaded once it is imported.

    A rank that is forked from a process which has done this already finds it done.
    """
    if answers.memory.base:
        return
    answers.install(str(Path(os.environ["ASCEND_HOME_PATH"], "lib64", STAND_IN_LIBRARY)))
    triton_stand_in.install()
    patcher.when_imported("torch_npu", _stop_unless_stand_in)
    patcher.when_imported("torch_npu", history.start)
    patcher.when_imported("torch_npu", _cann_operators)
    patcher.when_imported("torch_npu", _leave_memory_untouched)
    patcher.when_imported("torch_npu", lambda: slots.observe.append(_allocated))
    patcher.when_imported("torch.distributions.distribution", _accept_zeros)
    patcher.when_imported(_FINALIZE, _agree_on_tokens)


def _cann_operators() -> None:
    """Needs torch, which is not imported before."""
    importlib.import_module("mindspeed_dryrun.rank.torch_npu.cann_operators").install()


def _leave_memory_untouched() -> None:
    """In deterministic mode torch fills whatever it makes: parameters on the host, of which only the shapes are needed.

    FSDP2 makes each parameter there before it moves it to the meta device, gigabytes for the experts of a layer.
    """
    sys.modules["torch"].utils.deterministic.fill_uninitialized_memory = False


def _accept_zeros() -> None:
    """Bounds of distributions lie on the device and read as zeros: they are not checked (the router of Phi-3.5-MoE makes one)."""
    sys.modules["torch.distributions.distribution"].Distribution.set_default_validate_args(False)


def _agree_on_tokens() -> None:
    """With `--calculate-per-token-loss` stages assert that their counts of tokens agree; on the device that reads as False.

    It is the only use of `all` in that module (Megatron-LM core_v0.12.1, finalize_model_grads.py:324).
    """
    sys.modules[_FINALIZE].__dict__["all"] = lambda values: True


def memory() -> dict[str, Any]:
    """torch_npu's own figures so far, in bytes, and the peak in MB for the progress line."""
    figures = _figures()
    peak = figures.get("max_allocated")
    return {"memory_mb": None if peak is None else round(peak / 2**20), "allocator": figures}


def allocated() -> int:
    """Bytes in use now."""
    return _figures().get("allocated", 0)


def finish() -> dict[str, Any]:
    """The figures of the whole run, and the communicators that were made in it."""
    history.write()
    figures = _figures()
    peak = figures.get("max_allocated", 0)
    return {
        "allocator": figures,
        "groups": _groups(),
        "workspace": dict(sorted(answers.workspaces.items())),
        "workspace_unknown": sorted(slots.called),
        "workspace_room": {name: peak - size for name, size in sorted(slots.launched_at.items())} if workspace.counted() else {},
        "kernels_not_run": sorted(triton_stand_in.launched),
    }


def _allocated() -> int:
    return int(sys.modules["torch_npu"].npu.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"])


def _figures() -> dict[str, int]:
    npu = getattr(sys.modules.get("torch"), "npu", None)
    if npu is None or not npu.is_initialized():
        return {}
    return {
        "allocated": int(npu.memory_allocated()),
        "max_allocated": int(npu.max_memory_allocated()),
        "reserved": int(npu.memory_reserved()),
        "max_reserved": int(npu.max_memory_reserved()),
    }


def _groups() -> dict[str, list[int]]:
    """The process groups that a communicator was made for, with their ranks; HCCL makes one when a group is first used.

    Pairs of ranks that send to each other have a communicator of their own, which no process group knows.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return {}
    import torch

    me, world, groups = dist.get_rank(), dist.distributed_c10d._world, {}
    for group, name in world.pg_names.items():
        with contextlib.suppress(Exception):  # a group on the host, or one of other ranks
            backend = group._get_backend(torch.device("npu"))
            if backend.get_hccl_comm_name(dist.get_rank(group), init_comm=False):
                groups[str(name)] = sorted(world.pg_group_ranks[group])
    pairs = [size for size, _ in answers.communicators][len(groups) :]
    return groups | {f"pair_{number}": [me] * size for number, size in enumerate(pairs)}


def _stop_unless_stand_in() -> None:
    foreign = sorted(foreign_libraries(Path("/proc/self/maps").read_text()))
    if foreign:
        # At once: an exception could be swallowed by whoever imports torch_npu.
        what = f"torch_npu has loaded {foreign[0]}, which is not the stand-in CANN"
        print(f"{ERROR_PREFIX}{what}; {_NOT_STARTED}", file=sys.stderr, flush=True)
        os._exit(DryRunError.exit_status)


def foreign_libraries(maps: str) -> set[str]:
    """Libraries of CANN in this memory map that are not the stand-in: its links are mapped under its own name."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if line.count("/")}
    return {path for path in paths if _OF_CANN.search(path) and not path.endswith(STAND_IN_LIBRARY)}
