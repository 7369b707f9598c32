"""What this machine can give to ranks: cores and memory, as the scheduler and the control groups allow."""

from __future__ import annotations

import os
from pathlib import Path

_MB = 1 << 20


def usable_cores() -> int:
    """Cores that this process may run on, at most the control group's quota; at least one."""
    cores = len(os.sched_getaffinity(0))
    for folder in _groups("cpu"):
        quota, period = _words(folder / "cpu.max"), _words(folder / "cpu.cfs_quota_us")
        if len(quota) == 2 and quota[0].isdigit():
            cores = min(cores, -(-int(quota[0]) // int(quota[1])))
        elif period and period[0].isdigit():
            cores = min(cores, -(-int(period[0]) // int((_words(folder / "cpu.cfs_period_us") or ["100000"])[0])))
    return max(1, cores)


def available_mb() -> int:
    """Memory that new processes may take: the machine's, and what every control group above us leaves."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    left = int(meminfo["MemAvailable"].split()[0]) << 10
    for folder in _groups("memory"):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0].isdigit():
            left = min(left, int(limit[0]) - int(used[0]) + _file_cache(folder))
    return max(0, left // _MB)


def _groups(controller: str) -> list[Path]:
    """The folders of this process's control group and of those above it, version 1 or 2."""
    folders = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup", controllers) if controllers else Path("/sys/fs/cgroup")
        if controllers and controller not in controllers.split(","):
            continue
        inner = root / path.lstrip("/")
        # In a container the group's own path may not be mounted; its limits are then in the root folder.
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir()]
    return folders


def _file_cache(folder: Path) -> int:
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
