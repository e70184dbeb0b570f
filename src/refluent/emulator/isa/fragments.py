"""ldmatrix, stmatrix and mma.sync: matrices of one warp. Source: PTX ISA, the sections of these names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator.isa import CONTINUE, Handler, Modifiers, Outcome, fragment_maps, handles, numeric
from refluent.emulator.isa.registers import converged, read_rows, vector, write_rows
from refluent.emulator.memory import MemoryFault, shared_offset
from refluent.emulator.ptx import Addr, Instruction, Kernel

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

ROW_BYTES = 16


@handles("ldmatrix", "stmatrix")
def prepare_matrix_move(instr: Instruction, kernel: Kernel) -> Handler:
    """{ld,st}matrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16"""
    modifiers = Modifiers(instr, kernel)
    modifiers.choose(["sync"])
    modifiers.choose(["aligned"])
    modifiers.choose(["m8n8"])
    count = int(modifiers.choose(["x1", "x2", "x4"])[1:])
    transposed = modifiers.flag("trans")
    modifiers.choose(["shared", "shared::cta"])
    modifiers.choose(["b16"])
    modifiers.done()
    load = instr.opcode == "ldmatrix"
    registers, address = instr.operands if load else instr.operands[::-1]
    rows = vector(registers)
    if len(rows) != count or not isinstance(address, Addr):
        raise modifiers.refuse(f"{count} registers and an address expected")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        addresses = warp.locate(address)[: 8 * count].astype(np.int64)
        offsets = np.array([shared_offset(int(a)) for a in addresses])
        _check_rows(cta, offsets, instr)
        machine.check.warp_access(warp, cta, offsets, ROW_BYTES, write=not load, lanes=np.arange(8 * count))
        chunks = cta.shared.view(np.complex128)
        if load:
            matrices = chunks[offsets >> 4].view(np.uint16).reshape(count, 8, 8)
            write_rows(warp, rows, fragment_maps.unpack_matrices(matrices, transposed))
        else:
            packed = fragment_maps.pack_matrices(read_rows(warp, rows), transposed)
            chunks[offsets >> 4] = packed.reshape(-1).view(np.complex128)
        return CONTINUE

    return handler


def _check_rows(cta: CTA, offsets: np.ndarray, instr: Instruction) -> None:
    if (offsets & (ROW_BYTES - 1)).any():
        raise MemoryFault(f"{instr.name}: a row address is not a multiple of {ROW_BYTES} bytes")
    if (offsets + ROW_BYTES > cta.shared_end).any():
        raise MemoryFault(f"{instr.name}: a row lies outside shared memory ({cta.shared_end:#x} bytes)")


_MMA_SHAPES = {("m16n8k16", 2): 4, ("m16n8k8", 2): 2, ("m16n8k8", 4): 4, ("m16n8k32", 1): 4}


@handles("mma")
def prepare_mma(instr: Instruction, kernel: Kernel) -> Handler:
    """mma.sync.aligned.m16n8k*.row.col.{f32,f16}.{f16,bf16,tf32,e4m3,e5m2}...: dense, one warp."""
    modifiers = Modifiers(instr, kernel)
    modifiers.choose(["sync"])
    modifiers.choose(["aligned"])
    shape = modifiers.choose(["m16n8k16", "m16n8k8", "m16n8k32"])
    modifiers.choose(["row"])
    modifiers.choose(["col"])
    types = modifiers.left
    if len(types) != 4 or types[0] != types[3] or types[0] not in ("f32", "f16"):
        raise modifiers.refuse(f"types {types} are not of the form D.A.B.C with f32 or f16 accumulators")
    f16, a_type, b_type = types[0] == "f16", types[1], types[2]
    if a_type not in numeric.DECODE or (shape, numeric.ELEMENT_BYTES[a_type]) not in _MMA_SHAPES:
        raise modifiers.refuse(f"{shape} of {a_type} is not executed")
    d_rows, a_rows, b_rows, c_rows = (vector(operand) for operand in instr.operands)
    if len(a_rows) != _MMA_SHAPES[shape, numeric.ELEMENT_BYTES[a_type]]:
        raise modifiers.refuse(f"{len(a_rows)} registers of A")
    unpack_a = fragment_maps.a_fragment_words if len(a_rows) == 4 else fragment_maps.a_fragment_words_k8

    product = numeric.Product(a_type, b_type, f16)

    def decode(words: np.ndarray, kind: str) -> np.ndarray:
        return numeric.DECODE[kind](words.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[numeric.ELEMENT_BYTES[kind]]))

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        a = decode(unpack_a(read_rows(warp, a_rows)), a_type)
        b = decode(fragment_maps.b_fragment_words(read_rows(warp, b_rows)), b_type)
        c = fragment_maps.read_accumulator(read_rows(warp, c_rows), f16)
        d = numeric.multiply_accumulate(a, b, c, machine.accumulator, product)
        write_rows(warp, d_rows, fragment_maps.write_accumulator(d, f16))
        return CONTINUE

    return handler
