"""Vectors of registers as arrays, and the rule of .aligned instructions, for the handlers of matrix instructions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator.ptx import Addr, Composite, Dual, Imm, Instruction, Kernel, Operand, Pred, Reg, Vec
from refluent.emulator.state import FULL_MASK

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine


def vector(operand: Operand) -> np.ndarray:
    """Indices (in the 32-bit class) of a vector of 32-bit registers, or of one register."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    indices = []
    for item in items:
        if not isinstance(item, Reg) or item.storage != 32:
            raise ValueError(f"a 32-bit register expected, got {item!r}")
        indices.append(item.index)
    return np.array(indices, np.int64)


def read_rows(warp: MachineWarp, rows: np.ndarray) -> np.ndarray:
    """(len(rows), 32) uint32 copies of registers."""
    return warp.regs32[rows]


def write_rows(warp: MachineWarp, rows: np.ndarray, values: np.ndarray) -> None:
    """Write (len(rows), 32) uint32 into registers, all lanes."""
    warp.regs32[rows] = values


def converged(machine: Machine, cta: CTA, warp: MachineWarp, mask: int, instr: Instruction) -> None:
    """.sync.aligned: every lane of the warp must execute the instruction."""
    if mask != FULL_MASK:
        machine.finding(
            "divergence",
            f"{instr.name} is .aligned but only lanes {mask:#010x} execute it",
            cta=cta,
            warp=warp,
            instr=instr.index,
        )


def first_use(kernel: Kernel, instr: Instruction, registers: Operand) -> int | None:
    """Index of the first instruction after `instr`, in the order of the text, that reads one of `registers`."""
    wanted = set(_leaves(registers))
    for later in kernel.instructions[instr.index + 1 :]:
        if any(leaf in wanted for operand in later.operands for leaf in _leaves(operand)):
            return later.index
    return None


def _leaves(operand: Operand) -> Iterator[Reg]:
    """The registers of an operand."""
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Vec | Composite):
        for item in operand.items:
            yield from _leaves(item)
    elif isinstance(operand, Dual):
        yield from _leaves(operand.first)
        yield from _leaves(operand.second)
    elif isinstance(operand, Addr):
        yield from _leaves(operand.base)


def flag(warp: MachineWarp, operand: Operand, lane: int) -> bool:
    """A predicate operand, or an immediate in its place, as one lane sees it."""
    if isinstance(operand, Imm | Reg | Pred):
        return bool(warp.predicate(operand) >> lane & 1)
    raise ValueError(f"a predicate expected, got {operand!r}")


def lane_value(warp: MachineWarp, operand: Operand, lane: int) -> int:
    """Raw bits of a register, or an immediate's value, in one lane."""
    if isinstance(operand, Imm):
        return operand.value
    if isinstance(operand, Reg):
        return int(warp.view(operand)[lane])
    raise ValueError(f"a register or immediate expected, got {operand!r}")


def lanes_of(mask: int) -> list[int]:
    """The lanes of a mask, ascending."""
    return [lane for lane in range(32) if mask >> lane & 1]
