"""The few small functions of the stand-in, as machine code.

Nearly every CANN function may simply answer 0 in simulation. The exceptions return C++ objects or pointers, and a caller
would read rubbish: these fill the object in. They are so few and so short that writing them down beats needing a
compiler on the user's machine. The bytes are checked by the tests against a disassembler, and run on both architectures.

An object returned by value is written where the caller says: on x86_64 that address is the first argument (rdi) and is
also the return value; on aarch64 it arrives in x8. A constructor gets the object as its first argument on both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Places in the data segment that code refers to.
EMPTY_TEXT, SOC_NAME, OPERATOR_TABLE, EMPTY_STRING, EMPTY_MAP, SCRATCH = (
    "empty_text", "soc_name", "operator_table", "empty_string", "empty_map", "scratch",
)  # fmt: skip
HBM_BYTES = 64 << 30
DEVICES = 8
PAUSE_NS = 10_000_000


@dataclass(frozen=True)
class Behaviour:
    """What a stand-in function does: fills an object, or returns a value or an address."""

    kind: str  # "return", "address", "fill", "memory_info", "device_count", "data_type_size", "slot", "pause"
    value: int = 0  # "return": the value; "fill": how many 8-byte words; "pause": nanoseconds
    place: str | None = None  # "address": what to return; "fill": what the first word points at; "slot": holds the function
    by_value: bool = False  # "fill": the object is a return value, not `this`


RETURN_0 = Behaviour("return")

# In CANN's public headers these classes hold one shared_ptr (two words); GraphBuffer holds one pointer;
# Operator has a vtable before it. The wheel is built with the old libstdc++ ABI: std::string is one pointer.
_BY_NAME: tuple[tuple[str, Behaviour], ...] = (
    (r"_ZN2ge15OperatorFactory14CreateOperator.*", Behaviour("fill", 3, OPERATOR_TABLE, by_value=True)),
    (r"_ZN2ge8OperatorC[12].*", Behaviour("fill", 3, OPERATOR_TABLE)),
    (r"_ZN2ge(10TensorDesc|10TensorType|5Shape|6Tensor|7Promote|12AscendString|5Graph|5GNode)C[12].*", Behaviour("fill", 2)),
    (r"_ZN2ge11GraphBufferC[12].*", Behaviour("fill", 1)),
    (r"_ZNK2ge(10TensorDesc(8GetShape|14GetOriginShape)|6Tensor13GetTensorDesc|8Operator13GetOutputDesc)E.*",
     Behaviour("fill", 2, by_value=True)),
    (r"_ZN2ge7Session23GetCompiledGraphSummaryE.*", Behaviour("fill", 2, by_value=True)),
    (r"_ZNK2ge(5Shape7GetDims|5Graph13GetDirectNode|5GNode1[78]Get(In|Out)ControlNodes)E.*", Behaviour("fill", 3, by_value=True)),
    (r"_ZNK2ge5GNode2[78]Get(In|Out)DataNodesAndPortIndexsE.*", Behaviour("fill", 3, by_value=True)),
    (r"_ZNK2ge(8Operator7GetName|8Operator9GetOpType|5Graph7GetName)Ev", Behaviour("fill", 1, EMPTY_STRING, by_value=True)),
    (r"_ZNK2ge12AscendString9GetStringEv", Behaviour("address", place=EMPTY_TEXT)),
    (r"_ZN2ge13StatusFactory8InstanceEv", Behaviour("address", place=EMPTY_MAP)),
    (r"_ZN2ge24OpsKernelBuilderRegistry11GetInstanceEv|_ZNK2ge24OpsKernelBuilderRegistry6GetAllEv",
     Behaviour("address", place=EMPTY_MAP)),
    (r"aclrtGetSocName", Behaviour("address", place=SOC_NAME)),
    (r"aclGetRecentErrMsg", Behaviour("address", place=EMPTY_TEXT)),
    (r"aclCreateTensorDesc|aclCreateDataBuffer|aclopCreateAttr", Behaviour("address", place=SCRATCH)),
    (r"aclrtGetMemInfo", Behaviour("memory_info", HBM_BYTES)),
    (r"aclrtGetDeviceCount", Behaviour("device_count", DEVICES)),
    (r"aclDataTypeSize", Behaviour("data_type_size")),
    (r"_ZN9mindspore.*SimuFuncIaclrtProcessReport.*", Behaviour("pause", PAUSE_NS)),
)  # fmt: skip
_PATTERNS = tuple((re.compile(pattern), behaviour) for pattern, behaviour in _BY_NAME)
_DATA_SYMBOL = re.compile(r"_ZT[VIS].*|standin_slot_.*")


def behaviour_of(symbol: str) -> Behaviour:
    """What the stand-in function of this name does."""
    return next((behaviour for pattern, behaviour in _PATTERNS if pattern.fullmatch(symbol)), RETURN_0)


def is_data(symbol: str) -> bool:
    """Virtual tables, type information and slots for answers are data, not code."""
    return bool(_DATA_SYMBOL.fullmatch(symbol))


def assemble(behaviour: Behaviour, architecture: str, offset_of: dict[str, int], here: int) -> bytes:
    """The machine code at address `here`; `offset_of` gives the addresses of the data it refers to."""
    return (_x86_64 if architecture == "x86_64" else _aarch64)(behaviour, offset_of, here)


# aclDataType → bytes; what is not listed has 4 (8 for int64, uint64, double; 2 for the 16-bit ones; 1 for the 8-bit ones).
_TWO, _ONE, _EIGHT = (1, 6, 7, 27), (2, 4, 5, 12), (8, 9, 10, 11)
DATA_TYPE_SIZES = bytes(2 if n in _TWO else 1 if n in _ONE else 8 if n in _EIGHT else 4 for n in range(32))
TYPE_SIZES = "type_sizes"


def _x86_64(behaviour: Behaviour, offset_of: dict[str, int], here: int) -> bytes:
    code = bytearray()

    def lea_rax(place: str) -> None:
        code.extend(b"\x48\x8d\x05" + _i32(offset_of[place] - (here + len(code) + 7)))  # lea rax, [rip + x]

    ret = b"\xc3"
    match behaviour.kind:
        case "return":
            code += b"\x31\xc0" + ret  # xor eax, eax
        case "address":
            lea_rax(str(behaviour.place))
            code += ret
        case "fill":
            if behaviour.place:
                lea_rax(behaviour.place)
                code += b"\x48\x89\x07"  # mov [rdi], rax
            for word in range(1 if behaviour.place else 0, behaviour.value):
                code += b"\x48\xc7\x47" + bytes([8 * word]) + _i32(0)  # mov qword [rdi + 8*word], 0
            code += b"\x48\x89\xf8" + ret  # mov rax, rdi
        case "memory_info":
            code += b"\x48\xb8" + behaviour.value.to_bytes(8, "little")  # mov rax, value
            code += b"\x48\x89\x06\x48\x89\x02\x31\xc0" + ret  # mov [rsi], rax; mov [rdx], rax; xor eax, eax
        case "device_count":
            code += b"\xc7\x07" + _i32(behaviour.value) + b"\x31\xc0" + ret  # mov dword [rdi], value
        case "data_type_size":
            code += b"\x83\xe7\x1f"  # and edi, 31
            lea_rax(TYPE_SIZES)
            code += b"\x0f\xb6\x04\x38" + ret  # movzx eax, byte [rax + rdi]
        case "slot":
            code += b"\x48\x8b\x05" + _i32(offset_of[str(behaviour.place)] - (here + 7))  # mov rax, [rip + x]
            code += b"\x48\x85\xc0\x74\x02\xff\xe0\x31\xc0" + ret  # test rax, rax; jz +2; jmp rax; xor eax, eax
        case "pause":
            code += b"\x48\xc7\x44\x24\xf0" + _i32(0)  # mov qword [rsp - 16], 0
            code += b"\x48\xc7\x44\x24\xf8" + _i32(behaviour.value)  # mov qword [rsp - 8], value
            code += b"\x48\x8d\x7c\x24\xf0\x31\xf6"  # lea rdi, [rsp - 16]; xor esi, esi
            code += b"\xb8" + _i32(35) + b"\x0f\x05\x31\xc0" + ret  # mov eax, nanosleep; syscall; xor eax, eax
    return bytes(code)


def _aarch64(behaviour: Behaviour, offset_of: dict[str, int], here: int) -> bytes:
    code: list[int] = []

    def adr(register: int, place: str) -> None:
        distance = offset_of[place] - (here + 4 * len(code))
        assert -(1 << 20) <= distance < 1 << 20, "adr reaches one megabyte"
        code.append(0x10000000 | (distance & 3) << 29 | (distance >> 2 & 0x7FFFF) << 5 | register)

    ret = 0xD65F03C0
    match behaviour.kind:
        case "return":
            code += [0xD2800000, ret]  # mov x0, #0
        case "address":
            adr(0, str(behaviour.place))
            code.append(ret)
        case "fill":
            target = 8 if behaviour.by_value else 0
            if behaviour.place:
                adr(9, behaviour.place)
                code.append(0xF9000000 | target << 5 | 9)  # str x9, [target]
            for word in range(1 if behaviour.place else 0, behaviour.value):
                code.append(0xF9000000 | word << 10 | target << 5 | 31)  # str xzr, [target, 8*word]
            code.append(ret)
        case "memory_info":
            assert behaviour.value % (1 << 32) == 0 and behaviour.value >> 32 < 1 << 16
            code.append(0xD2C00000 | (behaviour.value >> 32) << 5 | 9)  # mov x9, #(value >> 32), lsl 32
            code += [0xF9000029, 0xF9000049, 0xD2800000, ret]  # str x9, [x1]; str x9, [x2]; mov x0, #0
        case "device_count":
            code.append(0x52800000 | behaviour.value << 5 | 9)  # mov w9, #value
            code += [0xB9000009, 0xD2800000, ret]  # str w9, [x0]; mov x0, #0
        case "data_type_size":
            code.append(0x92401000)  # and x0, x0, #31
            adr(9, TYPE_SIZES)
            code += [0x38606920, ret]  # ldrb w0, [x9, x0]
        case "slot":
            adr(16, str(behaviour.place))
            code += [0xF9400210, 0xB4000050, 0xD61F0200, 0xD2800000, ret]  # ldr x16, [x16]; cbz x16, +8; br x16; mov x0, #0
        case "pause":
            low, high = behaviour.value & 0xFFFF, behaviour.value >> 16
            code += [0xD10043FF, 0xF90003FF]  # sub sp, sp, #16; str xzr, [sp]
            code += [0xD2800009 | low << 5, 0xF2A00009 | high << 5, 0xF90007E9]  # mov x9, #value; str x9, [sp, #8]
            code += [0x910003E0, 0xD2800001, 0xD2800CA8, 0xD4000001]  # mov x0, sp; mov x1, #0; mov x8, nanosleep; svc #0
            code += [0xD2800000, 0x910043FF, ret]  # mov x0, #0; add sp, sp, #16
    return b"".join(word.to_bytes(4, "little") for word in code)


def _i32(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)
