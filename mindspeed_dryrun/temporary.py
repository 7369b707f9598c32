"""A temporary folder that goes when its process ends, however it ends.

Nothing of ours runs after a SIGKILL, so a small process of its own keeps the folder. It is there before the folder is, and
removes it when its stdin closes: the kernel closes it for a process that is killed. It leaves its parent's side, because a Ray
worker that is killed takes its children with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mindspeed_dryrun.errors import DryRunError

_PREFIX = "mindspeed-dryrun-"
# The word `done` comes from a process that has nothing below it any more. Without it something may still be writing here.
_KEEPER = r"""
trap '' TERM INT HUP PIPE
remove() {
    tries=0
    until rm -rf -- "$1" 2>/dev/null || [ $tries -ge 50 ]; do
        chmod -R u+rwx -- "$1" 2>/dev/null
        tries=$((tries + 1))
        sleep 0.1
    done
}
exec 3<&0
{
    mkdir -m 700 -- "$1" 2>&1 && echo made
    read -r word <&3 || { remove "$1"; sleep 0.5; }
    remove "$1"
} &
"""


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder for this user alone; `DryRunError` where none can be made."""
    folder = _place() / f"{_PREFIX}{secrets.token_hex(6)}"
    # An exported shell function could take the place of `rm`.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BASH_FUNC_")}
    environ["PATH"] = f"{environ.get('PATH', '')}{os.pathsep}{os.defpath}"
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "keeper", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environ,
        start_new_session=True,
    )
    assert keeper.stdin and keeper.stdout
    with keeper:
        try:
            said = keeper.stdout.readline()
            if said != b"made\n":
                raise DryRunError(f"Cannot make a temporary folder: {said.decode(errors='replace').strip()}.")
            yield folder
        finally:
            with contextlib.suppress(OSError):  # the keeper itself was killed
                keeper.stdin.write(b"done\n")
                keeper.stdin.flush()
            with contextlib.suppress(OSError):
                keeper.stdin.close()
            keeper.stdout.read()  # until the folder has gone
            shutil.rmtree(folder, ignore_errors=True)


def _place() -> Path:
    """Where the user keeps temporary files. Python's own look-up writes a file to try a place, and could be killed then."""
    wanted = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    for name in [*wanted, "/tmp", "/var/tmp"]:
        if name and Path(name).is_dir() and os.access(name, os.W_OK | os.X_OK):
            return Path(name).absolute()
    raise DryRunError("No folder for temporary files can be written: not /tmp either. Name one: export TMPDIR=DIR")
