"""The run directory. Every file is written to a temporary name and renamed; what is there is whole.

    DIR/job.json                   the job, the engine, the plan; written before the first rank starts
    DIR/patches.json               the patches, as the workers read them
    DIR/ranks/00000/result.json    written last of a rank's files: without it the rank has not been run
    DIR/report.json                the summary
    DIR/.lock                      locked by byte ranges: byte 0 for job.json and report.json, byte 1 + N while rank N runs

Several launches of one job may fill one record at the same time, each with ranks of its own (a Slurm array does).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.files import cannot_write, json_text, write_text
from mindspeed_dryrun.record.model import EngineSummary
from mindspeed_dryrun.record.run_spec import JobFile, PlannedRank

_OURS = {"job.json", "patches.json", "report.json", "report.html", "ranks", "deciding", "tries", ".lock"}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}  # some network file systems


@dataclass(frozen=True)
class Record:
    """A run directory that is there."""

    path: Path

    @classmethod
    def create(cls, path: Path, job: JobFile) -> Record:
        """Makes the record, or continues one of the same job (the same `fingerprint`); `UsageError` for another's."""
        path = Path(path).absolute()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; --out needs a folder.")
        if not _is_free(path):
            raise UsageError(f"{path} is not empty and holds no dry run; choose another folder for --out.")
        try:
            (path / "ranks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from None
        record = cls(path)
        with record.locked():
            old = record.job() if (path / "job.json").exists() else None
            if old is not None:
                record.refuse_if_changed(job, old)
            record.write_json("job.json", dataclasses.replace(job, plan=record._merged_plan(job, old)).to_json())
        return record

    @classmethod
    def open(cls, path: Path) -> Record:
        """The record in a folder; `UsageError` where there is none."""
        if not (Path(path) / "job.json").is_file():
            raise UsageError(f"{path} holds no dry run (no job.json).")
        return cls(Path(path).absolute())

    def job(self) -> JobFile:
        """What `job.json` holds."""
        path = self.path / "job.json"
        data = read_json(path)
        if not isinstance(data, dict):
            raise UsageError(f"{path} is damaged and cannot be read: remove its folder, or name another one.")
        return JobFile.from_json(data, str(path))

    def refuse_if_changed(self, job: JobFile, old: JobFile | None = None) -> None:
        """A record holds one job: ranks of two would make one wrong table."""
        old = self.job() if old is None else old
        if old.fingerprint != job.fingerprint:
            raise UsageError(
                f"{self.path} holds another job ({_difference(old, job)}); "
                "choose another folder for --out, or remove this one to start again."
            )

    def forget(self, ranks: Iterable[int]) -> None:
        """These ranks count as not run."""
        for rank in ranks:
            (self.rank_folder(rank) / "result.json").unlink(missing_ok=True)

    def rank_folder(self, rank: int) -> Path:
        """Where a rank runs and leaves its files."""
        return rank_folder(self.path, rank)

    def results(self) -> dict[int, dict[str, Any]]:
        """Every rank that has been run, whatever became of it: what its `result.json` holds."""
        found = {}
        for file in sorted(self.path.glob("ranks/*/result.json")):
            data = read_json(file)
            if file.parent.name.isdigit() and isinstance(data, dict):
                found[int(file.parent.name)] = data
        return found

    def ranks_done(self) -> set[int]:
        """Ranks that need not be run again. One that failed or timed out is tried again when the run continues."""
        return {rank for rank, result in self.results().items() if result.get("status") == "ok"}

    def write_json(self, name: str, data: Any) -> None:
        """Replaces a file of the record as a whole."""
        write_json(self.path / name, data)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with `job.json` and `report.json`; waits for other launches."""
        with self._lock_file() as descriptor:
            _lock(descriptor, 0, wait=True)
            yield

    @contextlib.contextmanager
    def claimed(self, ranks: Iterable[int]) -> Iterator[None]:
        """These ranks are run by us; `DryRunError` when another launch is running one of them."""
        with self._lock_file() as descriptor:
            for rank in ranks:
                if not _lock(descriptor, 1 + rank, wait=False):
                    raise DryRunError(
                        f"Another launch is running rank {rank} in {self.path}; wait for it, or choose another --out."
                    )
            yield

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _merged_plan(self, job: JobFile, old: JobFile | None) -> tuple[PlannedRank, ...]:
        """The new plan, and of the old one what has been run or is being run by another launch."""
        plan = {task.rank: task for task in job.plan}
        kept = {task.rank: task for task in old.plan} if old else {}
        run = self.results().keys()
        with self._lock_file() as descriptor:
            for rank in sorted(kept.keys() - plan.keys()):
                if rank in run or not _lock(descriptor, 1 + rank, wait=False):
                    plan[rank] = kept[rank]
        return tuple(plan[rank] for rank in sorted(plan))


def folder_for(stem: Path, fingerprint: str) -> Path:
    """`stem`, or `stem-2`, `stem-3`, …: the first that holds this job or nothing."""
    for number in itertools.count(1):
        path = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        if not path.exists() or (path.is_dir() and not (path / "job.json").exists() and _is_free(path)):
            return path
        data = read_json(path / "job.json")
        if isinstance(data, dict) and data.get("fingerprint") == fingerprint:
            return path
    raise AssertionError("there is always a next number")


def rank_folder(record: Path, rank: int) -> Path:
    """`ranks/00003` of a record."""
    return record / "ranks" / f"{rank:05d}"


def place_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Files by name into a rank's folder, which appears as a whole; an `OSError` leaves nothing of it."""
    incoming = folder.with_name(f".{folder.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    try:
        for name, content in files.items():
            (incoming / name).parent.mkdir(parents=True, exist_ok=True)
            (incoming / name).write_bytes(content)
        shutil.rmtree(folder, ignore_errors=True)
        incoming.rename(folder)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def folder_name(text: str) -> str:
    """A name that is safe as a folder's."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", text).strip("_")[:60] or "variant"


def read_json(path: Path) -> Any:
    """The file's JSON; None where it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_json_of_user(path: Path) -> Any:
    """The JSON of a file that the user named, or a `UsageError` that names the line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} line {error.lineno} is not JSON.") from None
    except (ValueError, RecursionError):  # not text, a number of thousands of digits, or nested without end
        raise UsageError(f"{path} is not JSON.") from None


def write_json(path: Path, data: Any) -> None:
    """JSON, whole or not at all."""
    write_text(path, json_text(data))


def _is_free(path: Path) -> bool:
    """Not there, empty, or a record (also one whose making was interrupted)."""
    if not path.exists() or (path / "job.json").exists():
        return True
    names = [item.name for item in path.iterdir()]
    return all(name in _OURS or (name.startswith(".") and name.endswith(".tmp")) for name in names)


def _lock(descriptor: int, byte: int, wait: bool) -> bool:
    """Locks one byte of the file for as long as it is open; False when somebody else has it.

    Open-file-description locks: unlike POSIX ones they do not vanish when the process closes the file elsewhere.
    """
    request = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _difference(old: JobFile, new: JobFile) -> str:
    """What sets two jobs apart, as far as job.json tells, in a few words."""
    for name in ("world_size", "trainer"):
        before, after = getattr(old.job, name), getattr(new.job, name)
        if before != after:
            return f"{name} {before}, now {after}"
    if old.engine != new.engine:
        return f"engine {_words(old.engine)}, now {_words(new.engine)}"
    if old.job.trainer_args != new.job.trainer_args:
        return f"trainer arguments differ: {_changed(list(old.job.trainer_args), list(new.job.trainer_args))}"
    if old.spec.explain != new.spec.explain:
        return "it was made with --explain" if old.spec.explain else "it was made without --explain"
    for variable in sorted({*old.environment, *new.environment}):
        before, after = old.environment.get(variable, "unset"), new.environment.get(variable, "unset")
        if before != after:
            return f"{variable} {before}, now {after}"
    for field in dataclasses.fields(new.spec):
        before, after = getattr(old.spec, field.name), getattr(new.spec, field.name)
        if before != after:
            return f"{field.name} {before}, now {after}"
    return "the code of the trainer or of mindspeed-dryrun changed"


def _changed(old: list[str], new: list[str]) -> str:
    """The first place where two argument lists part: `--seq-length 4096 → 8192`."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    flag = f"{new[at - 1]} " if 0 < at < len(new) and new[at - 1].startswith("-") else ""
    return f"{flag}{old[at] if at < len(old) else 'nothing'} → {new[at] if at < len(new) else 'nothing'}"


def _words(engine: EngineSummary) -> str:
    return " ".join(str(value) for value in dataclasses.astuple(engine) if value is not None)
