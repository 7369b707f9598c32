"""The user's cache folder: what is made once, kept, and only writable by its owner."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from mindspeed_dryrun.errors import DryRunError

VARIABLE = "MINDSPEED_DRYRUN_CACHE"


def cache_root() -> Path:
    """`$MINDSPEED_DRYRUN_CACHE`, else `$XDG_CACHE_HOME/mindspeed_dryrun`, else `~/.cache/mindspeed_dryrun`."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("mindspeed_dryrun")


def make_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, made by `build(temporary)` if it is not there yet, and moved into place whole.

    Processes that ask at the same time wait for the first; one that is killed half way leaves nothing that could be
    taken for the whole, and the next one clears it away. What is found there must belong to this user alone.
    """
    if folder.is_dir():
        _refuse_if_others_can_write(folder)
        return folder
    try:
        for missing in reversed([path for path in (folder.parent, *folder.parent.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would give those above the umask's mode
        with FileLock(folder.parent / f"{folder.name}.lock"):
            if not folder.is_dir():
                for left_over in folder.parent.glob(f"{folder.name}.tmp-*"):
                    shutil.rmtree(left_over, ignore_errors=True)
                temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
                try:
                    build(temporary)
                    _take_from_others(temporary)
                    temporary.rename(folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DryRunError(
            f"Cannot write the cache folder {folder.parent} ({error.strerror}). Name another one: export {VARIABLE}=DIR"
        ) from error
    _refuse_if_others_can_write(folder)
    return folder


def private_folder(folder: Path) -> Path:
    """Returns `folder` below the cache root, made if it is not there; `DryRunError` if others can write into it."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    _refuse_if_writable(cache_root(), folder)
    return folder


def _take_from_others(folder: Path) -> None:
    """Only the owner may write here, whatever the umask was while it was built."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def _refuse_if_others_can_write(folder: Path) -> None:
    """Libraries and modules in this folder are loaded into the user's processes: nobody else may be able to plant one."""
    _refuse_if_writable(cache_root(), *_between(cache_root(), folder), *folder.rglob("*"))


def _refuse_if_writable(*paths: Path) -> None:
    for path in paths:
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        writable = not stat.S_ISLNK(found.st_mode) and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if writable or found.st_uid not in (os.getuid(), 0):
            raise DryRunError(
                f"{path} can be written by other users, and its libraries would be loaded into your processes. "
                f"Fix it (chmod -R go-w {cache_root()}) or name another folder: export {VARIABLE}=DIR"
            )


def refuse_writable(folder: Path) -> None:
    """A folder that the user has named: its owner is the user's choice, but nobody else may be able to write in it."""
    # Thousands of files, looked at before every plan: pathlib would take ten times as long.
    for path, mode in _modes(str(folder)):
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(mode):
            raise DryRunError(
                f"{path} can be written by other users, and its modules would be loaded into your processes. "
                f"Revoke that: chmod -R go-w {folder}"
            )


def _modes(folder: str) -> Iterator[tuple[str, int]]:
    """A folder and all that is in it; links are not followed."""
    waiting = [folder]
    yield folder, os.lstat(folder).st_mode
    while waiting:
        with contextlib.suppress(PermissionError), os.scandir(waiting.pop()) as entries:  # nor can anything be imported from it
            for entry in entries:
                yield entry.path, entry.stat(follow_symlinks=False).st_mode
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _between(root: Path, folder: Path) -> list[Path]:
    return [parent for parent in (folder, *folder.parents) if root in parent.parents]
