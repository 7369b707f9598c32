"""Writes one ELF shared library that defines every symbol of the stand-in.

No compiler is needed: the library is a symbol table over a handful of functions (`machine_code`). Its layout is the
plainest the loader accepts: a read-only part (headers, symbols, relocations), a page of code, a page of data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elftools.construct import Container
from elftools.elf.constants import P_FLAGS, SH_FLAGS
from elftools.elf.enums import ENUM_RELOC_TYPE_AARCH64, ENUM_RELOC_TYPE_x64
from elftools.elf.structs import ELFStructs

from mindspeed_dryrun.engines.cann import machine_code as code

_PAGE = 0x10000  # aarch64 kernels may use pages of 64 KiB
_SEGMENTS = 5
_DATA_SYMBOL_BYTES = 512
_RELATIVE = {
    "x86_64": ENUM_RELOC_TYPE_x64["R_X86_64_RELATIVE"],
    "aarch64": ENUM_RELOC_TYPE_AARCH64["R_AARCH64_RELATIVE"],
}
_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
_SECTION_NAMES = ("", ".hash", ".dynsym", ".dynstr", ".rela.dyn", ".text", ".data", ".dynamic", ".shstrtab")
_ELF = ELFStructs(little_endian=True, elfclass=64)
_ELF.create_basic_structs()
_ELF.create_advanced_structs(e_type="ET_DYN")
_SYMBOL = struct.Struct("<IBBHQQ")  # one of thousands: pyelftools' Elf_Sym, packed at once


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A section of the library and its content."""

    name: str
    kind: str
    at: int
    content: bytes
    flags: int = 0
    link: str = ""
    info: int = 0
    align: int = 16
    entry: int = 0

    @property
    def end(self) -> int:
        return self.at + len(self.content)


def write_library(
    symbols: Sequence[str],
    architecture: str,
    soname: str,
    soc_name: str,
    behaviour_of: Callable[[str], code.Behaviour] = code.behaviour_of,
) -> bytes:
    """The bytes of the library. Functions of equal behaviour share their code; data symbols get zeroed memory."""
    names = sorted(symbols)
    strings, offsets = _strings([soname, *names])
    data, places, pointers = _data(soc_name, [name for name in names if code.is_data(name)])
    alloc = SH_FLAGS.SHF_ALLOC
    chains = _Part(
        name=".hash", kind="SHT_HASH", at=_align(_ELF.Elf_Ehdr.sizeof() + _SEGMENTS * _ELF.Elf_Phdr.sizeof()),
        content=_hash_table(names), flags=alloc, link=".dynsym", align=8, entry=4,
    )  # fmt: skip
    symbols_at = _align(chains.end)
    strings_at = symbols_at + (len(names) + 1) * _SYMBOL.size
    rela_at = _align(strings_at + len(strings))
    text_at = _align(rela_at + len(pointers) * _ELF.Elf_Rela.sizeof(), _PAGE)
    data_at = text_at + _PAGE
    address_of = {place: data_at + offset for place, offset in places.items()}
    behaviours = {name: behaviour_of(name) for name in names if not code.is_data(name)}
    text, functions = _text(behaviours.values(), architecture, address_of, text_at)
    assert len(text) <= _PAGE
    words = {data_at + offset: address_of[place] if place else functions[code.RETURN_0] for offset, place in pointers}
    rela = b"".join(_relocation(at, _RELATIVE[architecture], target) for at, target in words.items())
    addresses = {**address_of, **{name: functions[behaviour] for name, behaviour in behaviours.items()}}
    table = _symbol_table(names, offsets, addresses)
    parts = [
        chains,
        _Part(name=".dynsym", kind="SHT_DYNSYM", at=symbols_at, content=table, flags=alloc, link=".dynstr", info=1, align=8,
              entry=_SYMBOL.size),
        _Part(name=".dynstr", kind="SHT_STRTAB", at=strings_at, content=strings, flags=alloc, align=1),
        _Part(name=".rela.dyn", kind="SHT_RELA", at=rela_at, content=rela, flags=alloc, link=".dynsym", align=8,
              entry=_ELF.Elf_Rela.sizeof()),
        _Part(name=".text", kind="SHT_PROGBITS", at=text_at, content=text, flags=alloc | SH_FLAGS.SHF_EXECINSTR),
        _Part(name=".data", kind="SHT_PROGBITS", at=data_at, content=data, flags=alloc | SH_FLAGS.SHF_WRITE),
    ]  # fmt: skip
    dynamic = _dynamic(parts, offsets[soname])
    names_of_sections, _ = _strings(_SECTION_NAMES[1:])
    parts += [dynamic, _Part(name=".shstrtab", kind="SHT_STRTAB", at=dynamic.end, content=names_of_sections, align=1)]
    return _image(architecture, parts)


def _symbol_table(names: Sequence[str], offsets: dict[str, int], addresses: dict[str, int]) -> bytes:
    table = [bytes(_SYMBOL.size)]
    for name in names:
        data = code.is_data(name)
        info = 0x11 if data else 0x12  # STB_GLOBAL with STT_OBJECT or STT_FUNC
        section = _SECTION_NAMES.index(".data" if data else ".text")
        table.append(_SYMBOL.pack(offsets[name], info, 0, section, addresses[name], _DATA_SYMBOL_BYTES if data else 4))
    return b"".join(table)


def _relocation(at: int, kind: int, target: int) -> bytes:
    return _built(_ELF.Elf_Rela, r_offset=at, r_info=kind, r_info_sym=0, r_info_type=kind, r_addend=target)


def _dynamic(parts: Sequence[_Part], soname: int) -> _Part:
    """The table that the loader starts from."""
    at = {part.name: part.at for part in parts}
    size = {part.name: len(part.content) for part in parts}
    entries = [
        ("DT_SONAME", soname), ("DT_HASH", at[".hash"]), ("DT_STRTAB", at[".dynstr"]), ("DT_SYMTAB", at[".dynsym"]),
        ("DT_STRSZ", size[".dynstr"]), ("DT_SYMENT", _SYMBOL.size), ("DT_RELA", at[".rela.dyn"]),
        ("DT_RELASZ", size[".rela.dyn"]), ("DT_RELAENT", _ELF.Elf_Rela.sizeof()), ("DT_NULL", 0),
    ]  # fmt: skip
    content = b"".join(_built(_ELF.Elf_Dyn, d_tag=tag, d_val=value, d_ptr=value) for tag, value in entries)
    start, flags = _align(parts[-1].end), SH_FLAGS.SHF_ALLOC | SH_FLAGS.SHF_WRITE
    return _Part(name=".dynamic", kind="SHT_DYNAMIC", at=start, content=content, flags=flags, link=".dynstr", align=8, entry=16)


def _image(architecture: str, parts: Sequence[_Part]) -> bytes:
    """Header, segments, the parts, and the table of sections at the end."""
    sections_at = _align(parts[-1].end)
    header = _built(
        _ELF.Elf_Ehdr,
        e_ident=Container(EI_MAG=[0x7F, *b"ELF"], EI_CLASS="ELFCLASS64", EI_DATA="ELFDATA2LSB", EI_VERSION="EV_CURRENT",
                          EI_OSABI="ELFOSABI_SYSV", EI_ABIVERSION=0),
        e_type="ET_DYN", e_machine=_MACHINES[architecture], e_version="EV_CURRENT", e_entry=0, e_flags=0,
        e_phoff=_ELF.Elf_Ehdr.sizeof(), e_shoff=sections_at, e_ehsize=_ELF.Elf_Ehdr.sizeof(),
        e_phentsize=_ELF.Elf_Phdr.sizeof(), e_phnum=_SEGMENTS, e_shentsize=_ELF.Elf_Shdr.sizeof(),
        e_shnum=len(parts) + 1, e_shstrndx=len(parts),
    )  # fmt: skip
    _, offsets = _strings(_SECTION_NAMES[1:])
    image = bytearray(sections_at)
    image[: len(header)] = header
    segments = b"".join(_segments({part.name: part for part in parts}))
    image[len(header) : len(header) + len(segments)] = segments
    for part in parts:
        image[part.at : part.end] = part.content
    image += bytes(_ELF.Elf_Shdr.sizeof())
    for part in parts:
        image += _built(
            _ELF.Elf_Shdr, sh_name=offsets[part.name], sh_type=part.kind, sh_flags=part.flags,
            sh_addr=part.at if part.flags else 0, sh_offset=part.at, sh_size=len(part.content),
            sh_link=_SECTION_NAMES.index(part.link), sh_info=part.info, sh_addralign=part.align, sh_entsize=part.entry,
        )  # fmt: skip
    return bytes(image)


def _segments(parts: dict[str, _Part]) -> Iterable[bytes]:
    """What the loader maps: the read-only part, code, data; where its table lies; a stack that is not executable."""
    text, data, dynamic = parts[".text"], parts[".data"], parts[".dynamic"]
    read, write, execute = P_FLAGS.PF_R, P_FLAGS.PF_W, P_FLAGS.PF_X
    for kind, flags, at, size, align in (
        ("PT_LOAD", read, 0, parts[".rela.dyn"].end, _PAGE),
        ("PT_LOAD", read | execute, text.at, len(text.content), _PAGE),
        ("PT_LOAD", read | write, data.at, dynamic.end - data.at, _PAGE),
        ("PT_DYNAMIC", read | write, dynamic.at, len(dynamic.content), 8),
        ("PT_GNU_STACK", read | write, 0, 0, 16),
    ):
        yield _built(
            _ELF.Elf_Phdr, p_type=kind, p_flags=flags, p_offset=at, p_vaddr=at, p_paddr=at, p_filesz=size, p_memsz=size,
            p_align=align,
        )  # fmt: skip


def _built(structure: Any, **fields: Any) -> bytes:
    return bytes(structure.build(Container(**fields)))


def _data(soc_name: str, data_symbols: Sequence[str]) -> tuple[bytes, dict[str, int], list[tuple[int, str]]]:
    """The data segment; where things lie in it; which of its words are pointers, and to what ("" is the plain function)."""
    content = bytearray()
    places: dict[str, int] = {}
    pointers: list[tuple[int, str]] = []

    def place(name: str, value: bytes) -> int:
        content.extend(bytes(-len(content) % 16))
        places[name] = len(content)
        content.extend(value)
        return places[name]

    place(code.EMPTY_TEXT, bytes(16))
    place(code.SOC_NAME, soc_name.encode() + b"\0")
    place(code.TYPE_SIZES, code.DATA_TYPE_SIZES)
    place(code.SCRATCH, bytes(256))
    # A table of virtual functions that do nothing, destructors first.
    table = place(code.OPERATOR_TABLE, bytes(8 * 8))
    pointers += [(table + 8 * slot, "") for slot in range(8)]
    # std::string, old ABI: length, capacity, reference count, text. The count is so high that nobody frees it.
    rep = place("string_rep", struct.pack("<QQq8x", 0, 0, 0x3FFFFFFF))
    places[code.EMPTY_STRING] = rep + 24
    # std::map: comparator, then the header node whose left and right are itself; node count 0.
    empty_map = place(code.EMPTY_MAP, bytes(64))
    places["map_header"] = empty_map + 8
    pointers += [(empty_map + 24, "map_header"), (empty_map + 32, "map_header")]
    for name in data_symbols:
        place(name, bytes(_DATA_SYMBOL_BYTES))
    return bytes(content), places, pointers


def _text(
    behaviours: Iterable[code.Behaviour], architecture: str, address_of: dict[str, int], start: int
) -> tuple[bytes, dict[code.Behaviour, int]]:
    text = bytearray()
    functions: dict[code.Behaviour, int] = {}
    wanted = dict.fromkeys([code.RETURN_0, *behaviours])
    for behaviour in wanted:
        functions[behaviour] = start + len(text)
        text += code.assemble(behaviour, architecture, address_of, functions[behaviour])
        text += bytes(-len(text) % 16)
    return bytes(text), functions


def _strings(names: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    table = bytearray(b"\0")
    offsets = {}
    for name in names:
        offsets[name] = len(table)
        table += name.encode() + b"\0"
    return bytes(table), offsets


def _buckets(count: int) -> int:
    return max(1, count // 2) | 1


def _hash_table(names: Sequence[str]) -> bytes:
    """The classic DT_HASH table: bucket heads, then one chain link per symbol (index 0 is the null symbol)."""
    count = _buckets(len(names))
    heads, chain = [0] * count, [0] * (len(names) + 1)
    for index, name in enumerate(names, 1):
        bucket = _hash(name) % count
        chain[index], heads[bucket] = heads[bucket], index
    return struct.pack(f"<{2 + count + len(chain)}I", count, len(chain), *heads, *chain)


def _hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
    return value


def _align(value: int, to: int = 16) -> int:
    return -(-value // to) * to
