"""What a command costs: wall time, CPU time and host memory of its whole process tree."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil


def measure(command: list[str], environ: dict[str, str], cwd: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and the peak of the host memory of the whole tree, in MB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environ, cwd=cwd, stdout=quiet, stderr=quiet, start_new_session=True)
    peak = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.5):
            try:
                tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                peak = max(peak, sum(item.memory_info().rss for item in tree if item.is_running()) / 2**20)
            except psutil.Error:
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        process.wait()
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):  # an interrupted benchmark leaves nothing running
            os.killpg(process.pid, signal.SIGKILL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - started, cpu, peak
