"""A library that takes the spinning out of a simulated rank.

MindSpore starts a thread for each stream that waits for the device's callbacks in `aclrtProcessReport`. In simulation
that call returns at once, so the threads call it again and again: nine tenths of the processor time of a rank's
iterations went into them. The library has the same function with a short sleep in it, under the name by which MindSpore's
own libraries look it up; a rank loads it first (`rank/callback_pause.py`). No figure depends on these threads.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from pathlib import Path

from mindspeed_dryrun.cache import cache_root, make_once
from mindspeed_dryrun.rank.callback_pause import LIBRARY

_GENERATOR = 1
_NAME = re.compile(rb"_ZN9mindspore[A-Za-z0-9_]*SimuFuncIaclrtProcessReport[A-Za-z0-9_]*(?=\0)")


def pause_folder(mindspore: Path, version: str) -> Path:
    """The folder with the library for this MindSpore, for LD_LIBRARY_PATH; empty where there is no such function."""
    library = mindspore / "lib" / "plugin" / "ascend" / "libmindspore_ascend_res_manager.so"
    size = library.stat().st_size if library.is_file() else 0
    digest = hashlib.sha256(f"{_GENERATOR} {os.uname().machine} {size}".encode()).hexdigest()[:12]
    return make_once(cache_root() / "pause" / f"{version}-{digest}", lambda folder: _build(folder, library))


def _build(folder: Path, library: Path) -> None:
    from mindspeed_dryrun.engines.cann.elf import SharedLibrary
    from mindspeed_dryrun.engines.cann.library_writer import write_library

    names = spinning_functions(library)
    if names:
        target = folder / LIBRARY
        target.write_bytes(write_library(names, SharedLibrary(library).architecture, LIBRARY, ""))
        target.chmod(0o644)


def spinning_functions(library: Path) -> list[str]:
    """The simulated `aclrtProcessReport` as the library's symbol table spells it."""
    if not library.is_file():
        return []
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return sorted({name.decode() for name in _NAME.findall(content)})
