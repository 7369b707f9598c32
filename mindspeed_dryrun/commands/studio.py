"""Open a local page on a script: change the layout, the batch, the card, and see at once what the engine counts.

    mindspeed-dryrun studio pretrain_qwen25_7b_32k_ms.sh

The page is served on this machine only, at an address with a secret token; nothing leaves the machine. It changes flags
and the script's own variables, never a command, and the script itself stays untouched. Ctrl-C ends it and all it started.
Records of every try are in --out. Exit status: 2 wrong use, 128 + N ended by signal N.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_dryrun.commands.launch import add_trainer_arguments
from mindspeed_dryrun.errors import Interrupted, UsageError
from mindspeed_dryrun.language import t

if TYPE_CHECKING:
    import uvicorn

_LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The script, where to listen, where to keep records."""
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the shell script that calls msrun")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on this machine (default: any that is free)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the records (default: studio-SCRIPT)")
    add_trainer_arguments(parser)
    parser.add_argument("--no-browser", action="store_true", help="print the address, open nothing")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it."""
    try:
        import uvicorn

        from mindspeed_dryrun.studio.app import Studio, build
    except ModuleNotFoundError as error:
        raise UsageError(f"The studio needs {error.name}: pip install 'mindspeed-dryrun[studio]'") from None
    from mindspeed_dryrun.studio.choices import Choice, Subject
    from mindspeed_dryrun.studio.session import DEFAULT_DEVICE

    if not args.script.is_file():
        raise UsageError(f"There is no script {args.script}.")
    subject = Subject(args.script)
    job = subject.job(Choice())  # a script that cannot be understood is refused here, with the reason
    if not job.is_megatron:
        raise UsageError(f"{args.script}: the studio changes Megatron's arguments, and {job.program} has others.")
    with contextlib.closing(_listen(args.port)) as listener:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        hosts = frozenset(f"{name}:{port}" for name in (_LOOPBACK, "localhost"))
        studio = Studio(subject, (args.out or Path(f"studio-{args.script.stem}")).absolute(), args.trainer, args.jobs)
        try:
            address = f"http://{_LOOPBACK}:{port}/?token={token}"
            print(t(f"The studio is at {address}") + "\n" + t("Ctrl-C ends it."), file=sys.stderr, flush=True)
            if not args.no_browser:
                import webbrowser

                studio.session.ask(Choice(device=DEFAULT_DEVICE))  # what the page will ask for first; a browser takes a second
                webbrowser.open(address)
            config = uvicorn.Config(
                build(studio, token, hosts),
                log_level="warning",
                access_log=False,
                limit_concurrency=64,
                timeout_graceful_shutdown=1,
                server_header=False,
            )
            _serve(uvicorn.Server(config), listener)
        finally:
            studio.session.close()
    return 0


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serves until a signal. uvicorn ends on two of them by itself; a terminal that goes away sends a third."""
    caught: list[int] = []

    def end(number: int, frame: object) -> None:
        caught.append(number)
        server.should_exit = True

    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, end)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGHUP, before)
    if caught:
        raise Interrupted(caught[0])


def _listen(port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: give a number from 1 to 65535, or 0 for one that is free.")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_LOOPBACK, port))
        listener.listen(128)  # from now on whoever reads the address may connect
    except OSError as error:
        listener.close()
        raise UsageError(f"Cannot listen on port {port}: {error.strerror}. Choose another with --port.") from None
    return listener
