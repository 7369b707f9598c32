"""Ranks that have been counted before: their folders, kept in the user's cache folder and put back into a new record.

A rank is the same when everything that decides its figures is: this package's version and the source that runs inside a
rank, the engine with the libraries below it, the patches, the whole command, and every environment variable but those of a
login session. Only ranks of the embedded trainer are kept: what else a script's own trainer reads nobody knows.
A rank that is put back says so in its `result.json` and in the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import mindspeed_dryrun
from mindspeed_dryrun.cache import cache_root, private_folder
from mindspeed_dryrun.errors import DryRunError
from mindspeed_dryrun.files import json_text
from mindspeed_dryrun.launch.trainers import EMBEDDED
from mindspeed_dryrun.record.store import place_files, rank_folder

if TYPE_CHECKING:
    from mindspeed_dryrun.launch.plan import Plan, RankTask

# Set in the environment, no command uses the cache: `--no-cache` for a whole test run.
NO_CACHE = "MINDSPEED_DRYRUN_NO_CACHE"
LIMIT_MB = 256
MOST_ENTRIES = 4096
_LARGEST_MB = 64  # of one entry: a quarter of the whole
_LARGEST_UNPACKED_MB = 4096  # a table of allocations packs well; a zip bomb packs better
# History: 1, first version.
_FORMAT = 1
# Of a login session and of a shell: no figure depends on them.
_SESSION = (
    "_", "SHLVL", "PWD", "OLDPWD", "TERM", "TERM_PROGRAM", "COLORTERM", "LS_COLORS", "COLUMNS", "LINES", "DISPLAY", "WINDOWID",
    "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS",
    "TMUX", "TMUX_PANE", "STY", "HISTSIZE", "HISTFILE", "PS1", "PROMPT_COMMAND", "EDITOR", "PAGER", "LESSOPEN", "LESSCLOSE",
)  # fmt: skip


def open_cache(plan: Plan, wanted: bool) -> RankCache | None:
    """The cache for this plan, if it is to be used."""
    return RankCache(plan) if wanted and not os.environ.get(NO_CACHE) else None


class RankCache:
    """Results of the ranks of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.folder = cache_root() / "ranks"
        engine = dataclasses.asdict(plan.engine.summary) if plan.engine else None
        self.common = [_FORMAT, mindspeed_dryrun.__version__, rank_source(), engine, list(plan.patches)]

    def key(self, task: RankTask) -> str | None:
        """What the rank is known by; None for one that is not kept."""
        if EMBEDDED not in task.argv[:4]:
            return None
        env = {name: value for name, value in sorted(task.env.items()) if name not in _SESSION}
        data = [self.common, list(task.argv), env, task.rank, task.iterations]
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()

    def restore(self, task: RankTask, record: Path) -> bool:
        """Puts the rank's folder back into the record, if it was counted before."""
        key = self.key(task)
        if key is None:
            return False
        entry = self.folder / f"{key}.zip"
        try:
            files = read_entry(entry)
            result = json.loads(files.pop("result.json"))
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(result["counted"])))
            result |= {
                "represents": list(task.represents),
                "stage": task.stage,
                "why": task.why,
                "start": "cache",
                "note": f"counted on {when} and reused; --no-cache counts it again",
            }
            place_files({**files, "result.json": json_text(result).encode()}, rank_folder(record, task.rank))
            os.utime(entry)  # the last ones used stay
        except (OSError, ValueError, KeyError, TypeError, RecursionError, DryRunError):
            return False
        return True

    def keep(self, tasks: Iterable[RankTask], record: Path) -> None:
        """Remembers those of the ranks that were counted well. A cache that cannot be written is no error."""
        stored = False
        for task in tasks:
            key = self.key(task)
            with contextlib.suppress(OSError, ValueError, KeyError, DryRunError):
                folder = rank_folder(record, task.rank)
                result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
                if key and result["status"] == "ok" and not result["note"] and result["start"] != "cache":
                    stored = self._store(key, folder, result) or stored
        if stored:
            self.trim()

    def _store(self, key: str, folder: Path, result: Mapping[str, Any]) -> bool:
        private_folder(self.folder)
        counted = {**result, "counted": time.time()}
        content = write_entry(folder, {"result.json": json.dumps(counted).encode()})
        if len(content) > _LARGEST_MB << 20:
            return False
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".tmp", delete=False) as stream:
            try:
                stream.write(content)
                stream.close()
                Path(stream.name).rename(self.folder / f"{key}.zip")
            except OSError:
                Path(stream.name).unlink(missing_ok=True)
                raise
        return True

    def trim(self, limit_mb: int = LIMIT_MB, most: int = MOST_ENTRIES) -> None:
        """The entries that were used longest ago go, until the rest is within bounds."""
        found = []
        for path in self.folder.glob("*.zip"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = 0
        for number, (_, size, path) in enumerate(sorted(found, reverse=True)):
            total += size
            if total > limit_mb << 20 or number >= most:
                with contextlib.suppress(OSError):
                    path.unlink()


def write_entry(folder: Path, instead: Mapping[str, bytes]) -> bytes:
    """The files below a rank's folder as a zip file; `instead` replaces some."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not path.is_symlink() and name not in instead:
                archive.write(path, name)
        for name, data in instead.items():
            archive.writestr(name, data)
    return content.getvalue()


def read_entry(path: Path) -> dict[str, bytes]:
    """The files of an entry, by name. `DryRunError` for a damaged entry and for a name that leads out of the folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise DryRunError(f"{path} holds a file with the name {name}.")
            if sum(item.file_size for item in archive.infolist()) > _LARGEST_UNPACKED_MB << 20:
                raise DryRunError(f"{path} unpacks to more than {_LARGEST_UNPACKED_MB} MB.")
            return {name: archive.read(name) for name in archive.namelist()}
    # RuntimeError: encrypted; NotImplementedError: another compression
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, RuntimeError, NotImplementedError) as error:
        raise DryRunError(f"{path} is damaged: {error}.") from error


@functools.cache
def rank_source() -> str:
    """A digest of the source that runs inside a rank: it may change without a new version."""
    root = Path(mindspeed_dryrun.__file__).parent
    digest = hashlib.sha256()
    for folder in ("rank", "megatron"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
