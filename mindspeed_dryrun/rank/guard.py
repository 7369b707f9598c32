"""The process that holds one tree of processes together: a rank's, a captured script's.

Run as `python -I -S guard.py [--leave] TIMEOUT[+LINGER] COMMAND…`

Standard library only. It starts the command in a session of its own, with its own stderr as the command's stdout and
stderr, and is the reaper of whatever the command leaves behind: a process that forks twice or changes its session is
still a descendant of this one. It ends the whole tree when the command ends, when the time is up, on SIGTERM, SIGINT
or SIGHUP, and when its stdin closes, which the kernel does for a launcher that dies, however it dies. LINGER is how many
seconds the rest of the tree gets to end by itself after the command; none by default.

A warm rank has the same guard: `warm_server` forks it from a process that has imported everything, and the rank is a
function that the guard's child calls where a cold one executes a command.

With --leave it leaves its launcher's side: a Ray worker that is killed takes its children with it, and a guard that is killed
cannot end its tree.

On stdout, JSON lines: `{"rss_mb": 512}` now and then, and one last `{"ended": "exit|timeout|stopped", …}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False  # `typing` costs as much to import as the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# In the environment of all that a guard starts: tells its tree from all other processes should the guard itself be killed.
MARK = "MINDSPEED_DRYRUN_TASK"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 0.05
_SAMPLE_S = 1.0
_KILL_S = 10.0  # a process in uninterruptible sleep cannot be waited for any longer
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "--leave":
        words = words[1:]
        if os.fork():
            os._exit(0)
    timeout_s, linger_s = (float(part or 0) for part in words[0].partition("+")[::2])
    watch(timeout_s, lambda: _execute(words[1:]), linger_s)


def watch(timeout_s: float, run: Callable[[], NoReturn], linger_s: float = 0.0) -> None:
    """Calls `run` in a child and says on stdout how it went, when nothing of its tree is left."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_write)
    for number in (*_ENDING, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    begun = time.monotonic()
    child = _start(run, prctl, (wake_read, wake_write))
    ended, status, peak_mb, sampled, until = "exit", None, 0, 0.0, 0.0
    while True:
        readable, _, _ = select.select([0, wake_read], [], [], _TICK_S)
        caught = os.read(wake_read, 4096) if wake_read in readable else b""
        status = _reap(child) if status is None else status
        now = time.monotonic()
        if status is not None:
            until = until or now + linger_s
            if now >= until or not descendants():
                break
        if 0 in readable or any(number in caught for number in _ENDING):
            ended = "stopped"
            break
        if status is None and now - begun > timeout_s:
            ended = "timeout"
            break
        if now - sampled > _SAMPLE_S:
            sampled = now
            peak_mb = max(peak_mb, sum(descendants().values()))
            _say(rss_mb=peak_mb)
    seconds = time.monotonic() - begun
    left = _end_tree()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    _say(
        ended=ended,
        exit_status=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
        seconds=round(seconds, 3),
        cpu_seconds=round(usage.ru_utime + usage.ru_stime, 3),
        rss_mb=max(peak_mb, usage.ru_maxrss // 1024),
        left=left,
    )


def _start(run: Callable[[], NoReturn], prctl: ctypes._NamedFuncPointer, own: tuple[int, ...]) -> int:
    """The child that runs the rank; what the guard has open for itself (`own`) is closed in it."""
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should this guard itself be killed
        if os.getppid() != guard:
            os._exit(1)
        no_input()
        os.dup2(2, 1)
        signal.set_wakeup_fd(-1)
        for number in (*_ENDING, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in own:
            os.close(descriptor)
        run()
    finally:
        os._exit(127)


def no_input() -> None:
    """This process's stdin becomes empty."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _execute(command: list[str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and its children would
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, 256)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"mindspeed-dryrun: error: cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _reap(child: int) -> int | None:
    """Takes what has ended; the status of the command itself, once it has."""
    result = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                result = status
    return result


def _end_tree() -> list[int]:
    """Kills until there is nobody left to wait for. Returns what could not be killed."""
    deadline = time.monotonic() + _KILL_S
    while True:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic() > deadline:
            return sorted(descendants())
        time.sleep(0.01)


def descendants() -> dict[int, int]:
    """Everything below this process, with its resident memory in MB."""
    parent, memory = {}, {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (pathlib costs as much to import as the rest of this file)
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parent[int(name)] = int(fields[1])
        memory[int(name)] = int(fields[21]) * _PAGE >> 20
    found: dict[int, int] = {}
    wave = {os.getpid()}
    while wave := {pid for pid, up in parent.items() if up in wave and pid not in found}:
        found.update((pid, memory[pid]) for pid in wave)
    return found


def end_marked(mark: str) -> None:
    """Kills what a guard that was killed itself has left behind."""
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/environ", "rb") as stream:
                    if wanted in stream.read().split(b"\0"):
                        os.kill(int(name), signal.SIGKILL)


def _say(**fields: object) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(1, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    main()
