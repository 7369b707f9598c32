"""Reads what the stand-in needs to know from shared libraries: symbols, needed libraries, names in their constants."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from mindspeed_dryrun.errors import DryRunError

_SYMBOL = struct.Struct("<IBBHQQ")
_UNDEFINED_SECTION = 0
_WEAK = 2
# Version indices 0 and 1 mean "no version": CANN's libraries have none, glibc's and libstdc++'s always do.
_FIRST_REAL_VERSION = 2
ARCHITECTURES = {"x64": "x86_64", "AArch64": "aarch64"}


@dataclass(frozen=True)
class Symbol:
    """One entry of a dynamic symbol table."""

    name: str
    defined: bool
    weak: bool
    versioned: bool


class SharedLibrary:
    """One ELF file, read lazily. pyelftools finds the sections; the symbol table itself is unpacked in bulk,
    because MindSpore's libraries hold hundreds of thousands of symbols."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _sections(self) -> dict[str, tuple[int, int]]:
        with self.path.open("rb") as stream:
            elf = self._elf(stream)
            return {section.name: (section["sh_offset"], section["sh_size"]) for section in elf.iter_sections()}

    @cached_property
    def architecture(self) -> str:
        """`x86_64` or `aarch64`; anything else is refused by name."""
        with self.path.open("rb") as stream:
            found = self._elf(stream).get_machine_arch()
        if found not in ARCHITECTURES:
            raise DryRunError(f"{self.path.name} is built for {found}; the stand-in knows x86_64 and aarch64.")
        return ARCHITECTURES[found]

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """The sonames this library asks the loader for."""
        with self.path.open("rb") as stream:
            dynamic = self._elf(stream).get_section_by_name(".dynamic")
            if dynamic is None:
                return ()
            return tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))  # type: ignore[attr-defined]

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        """The dynamic symbol table."""
        strings = self._section(".dynstr")
        versions = self._section(".gnu.version")
        return tuple(_symbols(self._section(".dynsym"), strings, versions))

    def names_matching(self, pattern: re.Pattern[bytes]) -> set[str]:
        """Whole NUL-terminated constants that match: the names a library looks up with dlsym."""
        found = set()
        constants = [name for name in self._sections if name.startswith(".rodata")]
        for section in (*constants, ".dynstr", ".data.rel.ro", ".data"):
            data = self._section(section)
            for match in pattern.finditer(data):
                start, end = match.span()
                if (start == 0 or data[start - 1] == 0) and end < len(data) and data[end] == 0:
                    found.add(match[0].decode())
        return found

    def _section(self, name: str) -> bytes:
        offset, size = self._sections.get(name, (0, 0))
        with self.path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def _elf(self, stream: Any) -> ELFFile:
        try:
            return ELFFile(stream)
        except ELFError as error:
            raise DryRunError(
                f"{self.path} is not a readable library ({error}). Reinstall: pip install --force-reinstall mindspore"
            ) from error


def _symbols(table: bytes, strings: bytes, versions: bytes) -> Iterator[Symbol]:
    for index, (name, info, _other, section, _value, _size) in enumerate(_SYMBOL.iter_unpack(table)):
        if not name:
            continue
        version = int.from_bytes(versions[2 * index : 2 * index + 2], "little") & 0x7FFF if versions else 0
        yield Symbol(
            name=strings[name : strings.index(b"\0", name)].decode(errors="replace"),
            defined=section != _UNDEFINED_SECTION,
            weak=info >> 4 == _WEAK,
            versioned=version >= _FIRST_REAL_VERSION,
        )
