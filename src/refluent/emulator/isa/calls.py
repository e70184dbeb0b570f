"""Calls of the functions that every device program has: vprintf and __assertfail.

Source: CUDA C++ Programming Guide, "Formatted Output" and "Assertion". Parameters of a call are registers here (as the
parser makes them); the arguments of vprintf lie in a structure of local memory, laid out as C would.
"""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator import runtime, state
from refluent.emulator.isa import CONTINUE, Handler, Modifiers, Outcome, handles
from refluent.emulator.isa.mbarrier import active
from refluent.emulator.memory import MemoryFault
from refluent.emulator.ptx import Instruction, Kernel, Reg, Symbol, Vec

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

_CONVERSION = re.compile(r"%([-+ #0]*)(\d*)((?:\.\d+)?)(hh|h|ll|l|z)?([a-zA-Z%])")


@handles("call")
def prepare_call(instr: Instruction, kernel: Kernel) -> Handler:
    """call{.uni} (result), vprintf, (format, arguments); and __assertfail (message, file, line, function, size)."""
    modifiers = Modifiers(instr, kernel)
    modifiers.flag("uni")
    modifiers.done()
    name = next((operand.name for operand in instr.operands if isinstance(operand, Symbol)), "")
    vectors = [operand for operand in instr.operands if isinstance(operand, Vec)]
    parameters = [item for item in (vectors[-1].items if vectors else ()) if isinstance(item, Reg)]
    if name == "vprintf" and len(parameters) == 2:
        result = vectors[0].items[0] if len(vectors) == 2 else None
        return _printf(parameters[0], parameters[1], result if isinstance(result, Reg) else None)
    if name == "__assertfail" and len(parameters) == 5:
        return _assertion(parameters)
    raise modifiers.refuse(f"calls {name or 'through a pointer'}: only vprintf and __assertfail are known")


def _printf(form: Reg, arguments: Reg, result: Reg | None) -> Handler:
    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        texts, places = warp.get(form), warp.get(arguments)
        counts = np.zeros(32, np.uint32)
        for lane in active(mask):
            text = _string(machine, int(texts[lane]))
            fields = layout(text)
            raw = _local(machine, warp, lane, int(places[lane]), fields[-1][0] + 8 if fields else 0)
            sys.stdout.write(render(text, raw))
            counts[lane] = len(fields)
        if result is not None:
            warp.set(result, counts, mask)
        return CONTINUE

    return handler


def _assertion(parameters: list[Reg]) -> Handler:
    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        lane = active(mask)[0]
        message, file, line, function, _ = (int(warp.get(register)[lane]) for register in parameters)
        where = f"{_string(machine, file)}:{line & 0xFFFFFFFF} in {_string(machine, function)}"
        raise machine.fault(warp, f"assertion failed: {_string(machine, message)} ({where}), lane {lane}")

    return handler


def _string(machine: Machine, address: int) -> str:
    """The C string at a global address."""
    block = machine.memory.find(address)
    raw = machine.memory.view(address, block.end - address).tobytes()
    end = raw.find(b"\0")
    if end < 0:
        raise MemoryFault(f"the string at 0x{address:x} has no end inside {block.name or 'its block'}")
    return raw[:end].decode(errors="replace")


def _local(machine: Machine, warp: MachineWarp, lane: int, address: int, nbytes: int) -> bytes:
    """Up to `nbytes` bytes at a lane's generic address, in words: the structure may end before the last of them."""
    words = bytearray()
    for offset in range(0, nbytes, 4):
        addresses = np.full(32, address + offset, np.int64)
        data = np.zeros((1, 32), np.uint32)
        if runtime.locate_lanes(warp.address, 1 << lane, addresses.ctypes.data, 4, state.GENERIC, 0):
            break
        runtime.copy_lanes(warp.address, 1 << lane, data.ctypes.data, 4, 1, 0)
        words += struct.pack("<I", int(data[0, lane]))
    return bytes(words)


def layout(text: str) -> list[tuple[int, str]]:
    """(offset, struct code) of each argument that a format takes."""
    fields, at = [], 0
    for flags, _, _, length, conversion in _CONVERSION.findall(text):
        if conversion == "%":
            continue
        code = _code(conversion, length, flags)
        size = struct.calcsize(code)
        at = (at + size - 1) // size * size
        fields.append((at, code))
        at += size
    return fields


def _code(conversion: str, length: str, flags: str) -> str:
    wide = length in ("l", "ll", "z")
    if conversion in "di":
        return "q" if wide else "i"
    if conversion in "uxXo":
        return "Q" if wide else "I"
    if conversion in "eEfFgG":
        return "d"
    if conversion == "c":
        return "i"
    if conversion in "ps":
        return "Q"
    raise MemoryFault(f"vprintf: the conversion %{flags}{length}{conversion} is not known")


def render(text: str, raw: bytes) -> str:
    """A format with its arguments, as C's printf prints them."""
    values = iter(struct.unpack_from(f"<{code}", raw, at)[0] for at, code in layout(text))

    def one(match: re.Match[str]) -> str:
        flags, width, precision, _, conversion = match.groups()
        if conversion == "%":
            return "%"
        value = next(values)
        if conversion == "p":
            return f"{f'0x{value:x}':>{width or 1}}"
        if conversion == "s":
            raise MemoryFault("vprintf: %s is not supported")
        kind = {"u": "d", "i": "d"}.get(conversion, conversion)
        return f"%{flags}{width}{precision}{kind}" % (value & 0xFF if kind == "c" else value)

    return _CONVERSION.sub(one, text)
