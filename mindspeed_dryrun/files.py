"""How the program writes a file: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

from mindspeed_dryrun.errors import DryRunError, UsageError


def write_text(path: Path, text: str) -> None:
    """A temporary name, then a rename: nobody reads half of it, and on a full disk the old file stays."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_output(path: Path, text: str) -> None:
    """A file that the user named. A device or a pipe is written to: a rename would put a plain file in its place, for root even
    in that of /dev/null."""
    try:
        if not path.exists() or path.is_file() or path.is_dir():
            write_text(path, text)
            return
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
    except OSError as error:
        raise cannot_write(path, error) from None


def json_text(data: Any) -> str:
    """As the program writes and prints JSON: indented, ending in a newline."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def cannot_write(path: Path, error: OSError) -> DryRunError:
    """A sentence with the reason."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DryRunError(f"Cannot write {path}: {reason}. What was there before is unharmed; make room and run again.")
    return DryRunError(f"Cannot write {path}: {reason}. What was there before is unharmed.")


def check_output(option: str, path: Path) -> None:
    """`UsageError` for a file that could not be written after minutes of work."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {path.parent} does not exist.")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: give a file.")
