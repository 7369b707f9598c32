"""A process that has imported a trainer once and forks ranks from there: `python -m mindspeed_dryrun.rank.warm_server`.

Standard library only, beside what the trainer imports. Its stdin is a socket to the launcher. The first message names
the module to import, which has a function `load`; each later one is a rank, with three open files: the
guard's stdin and stdout, and the rank's log. For each the server forks a guard (`guard.watch`), and the guard forks the
rank. So a warm rank has the same guard as a cold one, and lives on when this server dies.

What a rank sees is what a cold one sees: its own environment, working directory, arguments, log (with what the imports
said at its beginning), session and signals. A server whose imports cannot serve every rank says so and forks nothing:
when they started Python threads, or read a variable that differs between ranks.

The server ends when its socket closes, which the kernel does for a launcher that dies, however it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.rank import guard, worker
from mindspeed_dryrun.rank.engine import rank_engine
from mindspeed_dryrun.rank.leave import run_and_leave

# What differs between the ranks of a job: an import that reads one of these is an import for one rank only.
OF_ONE_RANK = ("RANK_ID", "RANK", "RANK_SIZE", "WORLD_SIZE", "MS_WORKER_NUM", "DEVICE_ID", "LOCAL_RANK",
               "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")  # fmt: skip
# MSAdapter's first lines set these two from msrun's names, and do nothing else with them: a forked rank sets them again.
_SET_BY_ADAPTER = {"RANK": "RANK_ID", "WORLD_SIZE": "MS_WORKER_NUM"}
_ADAPTER = "msadapter"
_LOOKS_AT_ALL = ("tqdm.utils", "networkx.utils.backends")  # for those that start with TQDM_ or NETWORKX_
NO_MARK = "0" * 32
_LONGEST = 1 << 20  # bytes of a message: an environment and a command line
_FIRST_STEPS_S = 0.02  # until a thread that the imports started last is seen: before it runs it has no Python frame
_ASLEEP_S = 2.0  # how long native threads may take to come to rest


class CannotFork(Exception):
    """Ranks of this trainer must be started one by one; the text is the reason."""


def main() -> NoReturn:
    """Imports, then serves until the socket closes."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    launcher = socket.socket(fileno=os.dup(0))
    guard.no_input()
    said = os.memfd_create("said")
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.close(said)
    order, _ = receive(launcher)
    try:
        changed = prepare(order)
    except BaseException as error:
        send(launcher, {"failed": str(error) or type(error).__name__})
        os._exit(1)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    send(launcher, {"ready": True, "rss_mb": usage.ru_maxrss >> 10, "cpu_seconds": usage.ru_utime + usage.ru_stime})
    serve(launcher, changed, _content(1))


def prepare(order: Mapping[str, Any]) -> dict[str, str]:
    """Imports what the order names. Returns the variables that the imports set; `CannotFork` if ranks cannot share them."""
    before = _first_environment()
    with readers_noted(OF_ONE_RANK) as readers:
        rank_engine().check_simulation()
        worker.prepare()
        importlib.import_module(order["imports"]).load()
    for module, name in sorted(readers):
        if module not in _LOOKS_AT_ALL and (module != _ADAPTER or name not in _SET_BY_ADAPTER.values()):
            raise CannotFork(f"{module} reads {name} when it is imported, and that differs between ranks")
    time.sleep(_FIRST_STEPS_S)
    gc.freeze()  # a rank's collections leave alone what was here before it, and its pages stay shared
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {name: value for name, value in changed.items() if name not in OF_ONE_RANK}


def _first_environment() -> dict[str, str]:
    """The variables that this process was started with; Python itself adds one in some locales (PEP 538)."""
    with open("/proc/self/environ", "rb") as stream:
        pairs = [os.fsdecode(entry).partition("=") for entry in stream.read().split(b"\0") if entry]
    return {name: value for name, _, value in pairs}


@contextlib.contextmanager
def readers_noted(names: Sequence[str]) -> Iterator[set[tuple[str, str]]]:
    """Which modules read which of these environment variables meanwhile; C code is not seen."""
    readers: set[tuple[str, str]] = set()
    kind = type(os.environ)
    get = kind.__getitem__

    def noted(self: Any, name: str) -> str:
        if name in names:
            readers.add((_caller(), name))
        return get(self, name)

    kind.__getitem__ = noted  # type: ignore[method-assign]
    try:
        yield readers
    finally:
        kind.__getitem__ = get  # type: ignore[method-assign]


def _caller() -> str:
    """The module that asked, behind `os` and the mapping's own methods."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def serve(launcher: socket.socket, changed: Mapping[str, str], said: bytes) -> NoReturn:
    """Forks a guard for every rank that is asked for."""
    while True:
        request, files = receive(launcher)
        _reap()
        if not request:
            os._exit(0)
        try:
            check_threads()
            pid = os.fork()
        except (CannotFork, OSError) as error:
            send(launcher, {"failed": str(error)})
        else:
            if pid == 0:
                launcher.close()
                _guard(request, files, changed, said)
            send(launcher, {"pid": pid})
        for descriptor in files:
            os.close(descriptor)


def _reap() -> None:
    """Guards tell the launcher themselves how they ended; waiting for them adds their time to this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def check_threads() -> None:
    """`CannotFork` if another thread runs: what it does, and the locks it holds, would be lost in the child.

    Native threads that sleep are those of pools without work; OpenBLAS and MindSpore start theirs anew after a fork.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sys._current_frames():
        if ident != threading.get_ident():
            raise CannotFork(f"the trainer's imports started the Python thread '{names.get(ident, ident)}'")
    deadline = time.monotonic() + _ASLEEP_S
    while (state := _busy_thread()) is not None:
        if time.monotonic() > deadline:
            raise CannotFork(f"a native thread that the trainer's imports started does not come to rest (state {state})")
        time.sleep(0.001)


def _busy_thread() -> str | None:
    own = threading.get_native_id()
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        if int(task) == own:
            continue
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/self/task/{task}/stat", "rb") as stream:
                state = stream.read().rpartition(b")")[2].split()[0].decode()
            if state != "S":
                return state
    return None


def _guard(request: Mapping[str, Any], files: Sequence[int], changed: Mapping[str, str], said: bytes) -> NoReturn:
    """The child of the server: a guard, with the rank as its own child."""
    try:
        os.setsid()
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["folder"])
        guard.watch(request["timeout_s"], lambda: _rank(request, changed, said))
    finally:
        os._exit(0)


def _rank(request: Mapping[str, Any], changed: Mapping[str, str], said: bytes) -> NoReturn:
    """The rank itself: from here on as if `python -m mindspeed_dryrun.rank` had just been started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update({**request["env"], **changed})
    if _ADAPTER in sys.modules:
        os.environ.update({name: os.environ[source] for name, source in _SET_BY_ADAPTER.items() if source in os.environ})
    _show_mark(request["env"][guard.MARK])
    sys.path[0] = os.getcwd()  # noqa: PTH109
    os.write(2, said)
    run_and_leave(lambda: worker.main(request["argv"]))


def _show_mark(mark: str) -> None:
    """Writes the mark where `/proc/PID/environ` shows it: that is the memory in which this process got its first variables."""
    with open("/proc/self/environ", "rb") as stream:
        at = stream.read().find(f"{guard.MARK}={NO_MARK}".encode())
    with open("/proc/self/stat", "rb") as stream:
        start = int(stream.read().rpartition(b")")[2].split()[47])  # env_start, proc(5)
    if at >= 0 and start and len(mark) == len(NO_MARK):
        ctypes.memmove(start + at + len(guard.MARK) + 1, mark.encode(), len(mark))


def _content(descriptor: int) -> bytes:
    sys.stdout.flush()
    sys.stderr.flush()
    size = os.lseek(descriptor, 0, os.SEEK_END)
    return os.pread(descriptor, size, 0)


# -- messages: a length in eight bytes, then JSON; open files travel with the length ---------------------------------------


def send(to: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """One message. `OSError` when nobody is there any more."""
    data = json.dumps(message).encode()
    socket.send_fds(to, [len(data).to_bytes(8, "big")], list(files))
    to.sendall(data)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its files; an empty one when the other side has gone."""
    head, files, _, _ = socket.recv_fds(source, 8, 3)
    size = int.from_bytes(head, "big")
    if len(head) < 8 or size > _LONGEST:
        return {}, files
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            return {}, files
        data += part
    message = json.loads(data)
    return message if isinstance(message, dict) else {}, files


if __name__ == "__main__":
    try:
        main()
    except DryRunError as error:
        sys.exit(f"mindspeed-dryrun: {error}")
