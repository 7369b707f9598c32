"""Warm ranks, on the launcher's side: servers that have imported a trainer, and guards that they fork on request.

One server for each set of things that imports depend on: the interpreter, what is imported, the patches, and every
environment variable that is the same for all ranks of a job. Servers belong to the process that started them and end with
it, however it ends; ranks that were forked already do not need them any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mindspeed_dryrun.launch.job import FSDP2_PROGRAM
from mindspeed_dryrun.rank import activation
from mindspeed_dryrun.rank.guard import MARK
from mindspeed_dryrun.rank.patch_calls import ALWAYS
from mindspeed_dryrun.rank.warm_server import NO_MARK, OF_ONE_RANK, receive, send

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.plan import RankTask

_RANK_MODULE = ("-m", "mindspeed_dryrun.rank")
_LIBRARIES = "mindspeed_dryrun.rank.libraries"  # of a trainer that a script brings
# Differ from shell to shell and decide nothing.
_OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD")
_KEPT = 2  # servers at once: each holds about half a gigabyte
_TICK_S = 0.1
_SECONDS_TO_IMPORT = 300.0
_SECONDS_TO_FORK = 30.0


@dataclass(frozen=True)
class Guard:
    """The guard of one rank, forked or started: closing `stdin` ends the rank, `stdout` says how it went."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    wait: Callable[[], object] = lambda: None  # a forked guard has another parent


class ColdStart(Exception):
    """This rank must be started by itself; the text is the reason."""


class Servers:
    """The servers of this process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}

    def fork(self, task: RankTask, environment: Mapping[str, str], folder: Path, log: int, stop: Callable[[], bool]) -> Guard:
        """A guard with the rank below it. `ColdStart` when this rank cannot be forked, or `stop` says so."""
        order = _import_order(task.argv, environment)
        request = {
            "argv": list(task.argv[3:]),
            "env": dict(environment),
            "folder": str(folder),
            "timeout_s": task.timeout_s,
        }
        for _ in range(2):  # a server that was killed is replaced once
            server = self._server(order)
            with contextlib.suppress(OSError):
                return server.fork(request, log, stop)
            self._drop(order.key, server)
        raise ColdStart("its warm server ended twice without a word")

    def close(self) -> None:
        """Ends the servers. Ranks that run are not touched."""
        with self._lock:
            servers, self._servers = list(self._servers.values()), {}
        for server in servers:
            server.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _server(self, order: _Order) -> _Server:
        with self._lock:
            server = self._servers.pop(order.key, None) or _Server(order=order)
            self._servers[order.key] = server  # the last one used comes last
            extra = [self._servers.pop(key) for key in list(self._servers)[:-_KEPT]]
        for old in extra:
            old.close()
        return server

    def _drop(self, key: str, server: _Server) -> None:
        with self._lock:
            if self._servers.get(key) is server:
                del self._servers[key]
        server.close()


@dataclass(frozen=True)
class _Order:
    """What a server is started with."""

    python: str
    imports: str  # a module with a function `load`
    environment: Mapping[str, str]

    @property
    def key(self) -> str:
        own = activation.Activation.from_env(self.environment)
        try:
            patches = hashlib.sha256(Path(own.patches).read_bytes()).hexdigest()
        except OSError:
            patches = ""
        fixed = {
            name: value
            for name, value in self.environment.items()
            if name not in (*OF_ONE_RANK, *_OF_THE_SHELL, activation.VARIABLE, MARK)
        }
        data = [self.python, self.imports, sorted(fixed.items()), own.trainer, patches]
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _imports(argv: tuple[str, ...]) -> str:
    if tuple(argv[1:3]) != _RANK_MODULE:
        raise ColdStart("it is not a Python program of ours")
    if not argv[3].endswith(".py"):
        return f"{argv[3]}.imports"
    if ALWAYS in argv or argv[3].endswith(f"/{FSDP2_PROGRAM}"):
        return _LIBRARIES
    raise ColdStart("what the script's own trainer imports depends on its arguments")


def _import_order(argv: tuple[str, ...], environment: Mapping[str, str]) -> _Order:
    rank = activation.Activation.from_env(environment)
    own = activation.Activation(mode=rank.mode, engine=rank.engine, trainer=rank.trainer, patches=rank.patches)
    return _Order(argv[0], _imports(argv), {**environment, **own.to_env(), MARK: NO_MARK})


@dataclass(kw_only=True)
class _Server:
    """One server process; started by the first rank that asks for it."""

    order: _Order
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: subprocess.Popen[bytes] | None = None
    line: socket.socket | None = None
    refused: str | None = None  # why no rank can be forked here

    def fork(self, request: Mapping[str, object], log: int, stop: Callable[[], bool]) -> Guard:
        """`OSError` when the server has gone."""
        with self.lock:
            if self.refused:
                raise ColdStart(self.refused)
            line = self.line or self._start(stop)
            with _pipes() as (stdin, guards_stdin, guards_stdout, stdout):
                send(line, request, (guards_stdin, guards_stdout, log))
                self._answer(line, lambda: False, _SECONDS_TO_FORK)
                return Guard(os.fdopen(os.dup(stdin), "wb"), os.fdopen(os.dup(stdout), "rb"))

    def close(self) -> None:
        """The server ends when its socket is closed, or is ended if it is in the middle of its imports."""
        with self.lock:
            line, process, self.line, self.process = self.line, self.process, None, None
        if line is not None:
            line.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.kill()
            process.wait()

    def _start(self, stop: Callable[[], bool]) -> socket.socket:
        line, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with far:
            self.process = subprocess.Popen(
                [self.order.python, "-m", "mindspeed_dryrun.rank.warm_server"],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=dict(self.order.environment),
                start_new_session=True,
            )
        self.line = line
        send(line, {"imports": self.order.imports})
        self._answer(line, stop, _SECONDS_TO_IMPORT)
        return line

    def _answer(self, line: socket.socket, stop: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not select.select([line], [], [], _TICK_S)[0]:
            if stop():
                raise ColdStart("the run was stopped")
            if time.monotonic() > deadline:
                raise OSError("no answer")
        answer, _ = receive(line)
        if not answer:
            raise OSError("gone")
        if "failed" in answer:
            self.refused = str(answer["failed"])
            raise ColdStart(self.refused)


@contextlib.contextmanager
def _pipes() -> Iterator[tuple[int, int, int, int]]:
    """(our end of its stdin, the guard's, the guard's stdout, our end of it); all are closed at the end."""
    guards_stdin, stdin = os.pipe()
    stdout, guards_stdout = os.pipe()
    ends = (stdin, guards_stdin, guards_stdout, stdout)
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)
