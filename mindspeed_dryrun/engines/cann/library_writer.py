"""Writes one ELF shared library that defines every symbol of the stand-in.

No compiler is needed: the library is a symbol table over a handful of functions (`machine_code`). Its layout is the
plainest the loader accepts: a read-only part (headers, symbols, relocations), a page of code, a page of data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

from mindspeed_dryrun.engines.cann import machine_code as code

_PAGE = 0x10000  # aarch64 kernels may use pages of 64 KiB
_MACHINES = {"x86_64": (62, 8), "aarch64": (183, 1027)}  # e_machine, the number of its RELATIVE relocation
_HEADER, _SEGMENT, _SECTION = (
    struct.Struct("<16sHHIQQQIHHHHHH"),
    struct.Struct("<IIQQQQQQ"),
    struct.Struct("<IIQQQQIIQQ"),
)
_SYMBOL, _RELA, _DYNAMIC = struct.Struct("<IBBHQQ"), struct.Struct("<QQq"), struct.Struct("<QQ")
_R, _W, _X = 4, 2, 1
_SECTION_NAMES = ("", ".hash", ".dynsym", ".dynstr", ".rela.dyn", ".text", ".data", ".dynamic", ".shstrtab")
_TEXT_INDEX, _DATA_INDEX = 5, 6


def write_library(
    symbols: Sequence[str],
    architecture: str,
    soname: str,
    soc_name: str,
    behaviour_of: Callable[[str], code.Behaviour] = code.behaviour_of,
) -> bytes:
    """The bytes of the library. Functions of equal behaviour share their code; data symbols get zeroed memory."""
    machine, relative = _MACHINES[architecture]
    names = sorted(symbols)
    strings, offsets = _strings([soname, *names])
    hash_size = 4 * (2 + _buckets(len(names)) + len(names) + 1)
    hash_at = _align(_HEADER.size + 5 * _SEGMENT.size)
    symbols_at = _align(hash_at + hash_size)
    strings_at = symbols_at + (len(names) + 1) * _SYMBOL.size
    rela_at = _align(strings_at + len(strings))
    data, places, pointers, words = _data(soc_name, [name for name in names if code.is_data(name)])
    text_at = _align(rela_at + len(pointers) * _RELA.size, _PAGE)
    data_at = text_at + _PAGE
    address_of = {place: data_at + offset for place, offset in places.items()}
    behaviours = {name: behaviour_of(name) for name in names if not code.is_data(name)}
    text, functions = _text(behaviours.values(), architecture, address_of, text_at)
    assert len(text) <= _PAGE
    for offset, place in pointers:
        words[offset] = address_of[place] if place else functions[code.RETURN_0]
    rela = b"".join(_RELA.pack(data_at + offset, relative, target) for offset, target in words.items())
    dynamic_at = _align(data_at + len(data), 16)
    table = [bytes(_SYMBOL.size)]
    for name in names:
        if code.is_data(name):
            table.append(_SYMBOL.pack(offsets[name], 0x11, 0, _DATA_INDEX, address_of[name], _DATA_SYMBOL_BYTES))
        else:
            table.append(_SYMBOL.pack(offsets[name], 0x12, 0, _TEXT_INDEX, functions[behaviours[name]], 4))
    entries = [
        (14, offsets[soname]), (4, hash_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, _SYMBOL.size),
        (7, rela_at), (8, len(rela)), (9, _RELA.size), (0, 0),
    ]  # fmt: skip
    dynamic = b"".join(_DYNAMIC.pack(*entry) for entry in entries)
    end = dynamic_at + len(dynamic)
    segments = [
        (1, _R, 0, rela_at + len(rela), _PAGE),
        (1, _R | _X, text_at, len(text), _PAGE),
        (1, _R | _W, data_at, end - data_at, _PAGE),
        (2, _R | _W, dynamic_at, len(dynamic), 8),
        (0x6474E551, _R | _W, 0, 0, 16),  # the stack is not executable
    ]
    section_strings, section_offsets = _strings(list(_SECTION_NAMES[1:]))
    sections = [
        (".hash", 5, 2, hash_at, hash_size, 2, 0, 8, 4), (".dynsym", 11, 2, symbols_at, len(table) * _SYMBOL.size, 3, 1, 8, 24),
        (".dynstr", 3, 2, strings_at, len(strings), 0, 0, 1, 0), (".rela.dyn", 4, 2, rela_at, len(rela), 2, 0, 8, 24),
        (".text", 1, 6, text_at, len(text), 0, 0, 16, 0), (".data", 1, 3, data_at, len(data), 0, 0, 16, 0),
        (".dynamic", 6, 3, dynamic_at, len(dynamic), 3, 0, 8, 16), (".shstrtab", 3, 0, end, len(section_strings), 0, 0, 1, 0),
    ]  # fmt: skip
    sections_at = _align(end + len(section_strings))
    image = bytearray(sections_at + (len(sections) + 1) * _SECTION.size)

    def put(at: int, content: bytes) -> None:
        image[at : at + len(content)] = content

    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    put(0, _HEADER.pack(ident, 3, machine, 1, 0, _HEADER.size, sections_at, 0, _HEADER.size, _SEGMENT.size, len(segments), _SECTION.size, len(sections) + 1, len(sections)))  # fmt: skip  # noqa: E501
    for index, (kind, flags, at, size, align) in enumerate(segments):
        put(_HEADER.size + index * _SEGMENT.size, _SEGMENT.pack(kind, flags, at, at, at, size, size, align))
    for at, content in ((hash_at, _hash_table(names)), (symbols_at, b"".join(table)), (strings_at, strings), (rela_at, rela),
                        (text_at, text), (data_at, data), (dynamic_at, dynamic), (end, section_strings)):  # fmt: skip
        put(at, content)
    for index, (name, kind, flags, at, size, link, info, align, entry) in enumerate(sections, 1):
        address = at if flags else 0
        header = _SECTION.pack(section_offsets[name], kind, flags, address, at, size, link, info, align, entry)
        put(sections_at + index * _SECTION.size, header)
    return bytes(image)


_DATA_SYMBOL_BYTES = 512


def _data(
    soc_name: str, data_symbols: Sequence[str]
) -> tuple[bytes, dict[str, int], list[tuple[int, str]], dict[int, int]]:
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
    return bytes(content), places, pointers, {}


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
