"""wgmma: the asynchronous warpgroup matrix products of sm_90a.

Source: PTX ISA, "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group". Each warp computes its
16 rows when it issues (a legal time for the read); the group's effects are published by wait_group, and until then the
checker holds its operands to be in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator.isa import CONTINUE, Handler, Modifiers, Outcome, fragment_maps, handles, numeric
from refluent.emulator.isa.mma_wgmma import WgmmaShape
from refluent.emulator.isa.operand import DescriptorError, MatrixDescriptor
from refluent.emulator.isa.registers import converged, flag, lane_value, read_rows, vector, write_rows
from refluent.emulator.memory import MemoryFault
from refluent.emulator.ptx import Imm, Instruction, Kernel, Operand, Vec

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

GROUPS = "wgmma"
WARPS = 4  # of a warpgroup
_K_OF = {"bf16": "k16", "f16": "k16", "tf32": "k8", "e4m3": "k32", "e5m2": "k32"}


@dataclass(eq=False)
class WarpGroups:
    """One warp's wgmma groups: how many were committed, how many are known complete, what is in flight."""

    committed: int = 0
    complete: int = 0
    open: bool = False  # operations issued since the last commit
    accumulators: dict[int, tuple[int, int]] = field(default_factory=dict)  # register -> (group, columns)
    issued: list[int] = field(default_factory=list)  # instructions, to compare within the warpgroup


def groups_of(warp: MachineWarp) -> WarpGroups:
    """The warp's bookkeeping, made on first use."""
    return warp.groups.setdefault(GROUPS, WarpGroups())


@dataclass(frozen=True)
class _Operands:
    """What the instruction text says; descriptors are registers of 64 bits."""

    shape: WgmmaShape
    d: np.ndarray
    a: Operand | np.ndarray  # descriptor, or the fragment's registers
    b: Operand
    scale_d: Operand

    @staticmethod
    def of(instr: Instruction, modifiers: Modifiers) -> _Operands:
        size = modifiers.take("m64n") or ""
        types = modifiers.left
        if len(types) != 3 or types[0] not in ("f32", "f16") or any(t not in _K_OF for t in types[1:]):
            raise modifiers.refuse(f"types {types} are not executed")
        columns, _, k = size[len("m64n") :].partition("k")
        if "k" + k != _K_OF[types[1]]:
            raise modifiers.refuse(f"shape {size} does not go with {types[1]}")
        d, a, b, scale_d, *rest = instr.operands
        scales = [item.value if isinstance(item, Imm) else None for item in rest]
        if None in scales or len(scales) < 2 or any(s not in (1, -1) for s in scales[:2]):
            raise modifiers.refuse("imm-scale-a and imm-scale-b of 1 or -1 expected")
        registers_a = isinstance(a, Vec)
        transposed = [bool(s) for s in scales[2:]]
        trans_a = transposed[0] if len(transposed) == 2 else False
        trans_b = transposed[-1] if transposed else False
        negate = [s == -1 for s in scales[:2]]
        shape = WgmmaShape(int(columns), types[1], types[2], types[0] == "f16", negate[0], negate[1], trans_a, trans_b)
        accumulators = vector(d)
        if len(accumulators) != shape.registers or (registers_a and len(vector(a)) != 4):
            raise modifiers.refuse(f"{shape.registers} accumulator registers expected")
        return _Operands(shape, accumulators, vector(a) if registers_a else a, b, scale_d)


@handles("wgmma.mma_async")
def prepare_wgmma(instr: Instruction, kernel: Kernel) -> Handler:
    """wgmma.mma_async.sync.aligned.m64nNkK.dtype.atype.btype {d}, a-desc | {a}, b-desc, scale-d, imm..."""
    modifiers = Modifiers(instr, kernel, skip=1)
    modifiers.choose(["sync"])
    modifiers.choose(["aligned"])
    operands = _Operands.of(instr, modifiers)
    shape = operands.shape
    product = numeric.Product.of_wgmma(shape.a_type, shape.b_type, shape.accumulate_f16)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        state = groups_of(warp)
        try:
            b = MatrixDescriptor.decode(lane_value(warp, operands.b, 0), machine.arch_number)
            a = None
            if not isinstance(operands.a, np.ndarray):
                a = MatrixDescriptor.decode(lane_value(warp, operands.a, 0), machine.arch_number)
        except DescriptorError as error:
            raise MemoryFault(f"{instr.name}: {error}") from None
        end = shape.operands_end(a, b)
        if end > cta.shared_end:
            raise MemoryFault(f"{instr.name}: an operand reaches {end:#x}, past shared memory")
        if machine.check.enabled:
            _check(machine, cta, warp, state, instr, operands, a, b)
        state.open = True
        state.issued.append(instr.index)
        slab = warp.index % 4
        values_a = _read_a(cta, warp, operands, a, slab)
        values_b = _read_b(cta, warp, len(state.issued), shape, b)
        old = read_rows(warp, operands.d)
        c = fragment_maps.read_accumulator(old, shape.accumulate_f16) if flag(warp, operands.scale_d, 0) else None
        d = numeric.multiply_accumulate(values_a, values_b, c, machine.accumulator, product)
        write_rows(warp, operands.d, fragment_maps.write_accumulator(d, shape.accumulate_f16))
        machine.count_flops(warp, shape.flops // 4)
        return CONTINUE

    return handler


def _read_a(cta: CTA, warp: MachineWarp, operands: _Operands, a: MatrixDescriptor | None, slab: int) -> np.ndarray:
    """The warp's 16 rows of A, float32."""
    if a is None:
        assert isinstance(operands.a, np.ndarray)
        return operands.shape.slab_from_registers(read_rows(warp, operands.a))
    return operands.shape.read_a(cta.shared, a, slab)


def _read_b(cta: CTA, warp: MachineWarp, number: int, shape: WgmmaShape, b: MatrixDescriptor) -> np.ndarray:
    """B, read once for the four warps of a warpgroup: by the first that executes its operation `number`."""
    operands: dict[int, list[Any]] = cta.groups.setdefault(f"wgmma B {warp.warpgroup}", {})
    entry = operands.get(number)
    if entry is None or entry[0] != (shape, b):
        operands[number] = entry = [(shape, b), shape.read_b(cta.shared, b), 0]
    entry[2] += 1
    if entry[2] == WARPS:
        del operands[number]
    return entry[1]


def _check(
    machine: Machine,
    cta: CTA,
    warp: MachineWarp,
    state: WarpGroups,
    instr: Instruction,
    operands: _Operands,
    a: MatrixDescriptor | None,
    b: MatrixDescriptor,
) -> None:
    group = state.committed + 1
    for register in operands.d.tolist():
        flight = state.accumulators.get(register)
        if flight is not None and flight[0] > state.complete and flight[1] != operands.shape.n:
            text = f"accumulator registers are in flight with n{flight[1]} and used with n{operands.shape.n}"
            machine.finding("wgmma", text, cta, warp, instr.index)
            break
    for register in operands.d.tolist():
        state.accumulators[register] = (group, operands.shape.n)
    shared = [operands.shape.b_addresses(b)]
    if a is not None:
        shared.append(operands.shape.a_addresses(a, warp.index % 4))
    machine.check.wgmma_reads(warp, cta, shared, 16)


@handles("wgmma.fence")
def prepare_fence(instr: Instruction, kernel: Kernel) -> Handler:
    """wgmma.fence.sync.aligned: registers change at once here, so only check/wgmma_flow.py looks for it."""
    _plain(instr, kernel)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        return CONTINUE

    return handler


@handles("wgmma.commit_group")
def prepare_commit(instr: Instruction, kernel: Kernel) -> Handler:
    """wgmma.commit_group.sync.aligned"""
    _plain(instr, kernel)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        state = groups_of(warp)
        state.committed += 1
        state.open = False
        if machine.check.enabled:
            machine.check.wgmma_commit(warp, state.committed)
        return CONTINUE

    return handler


@handles("wgmma.wait_group")
def prepare_wait(instr: Instruction, kernel: Kernel) -> Handler:
    """wgmma.wait_group.sync.aligned N: all but the newest N groups are complete."""
    _plain(instr, kernel)
    count = instr.operands[0]
    if not isinstance(count, Imm):
        raise Modifiers(instr, kernel).refuse("an immediate count expected")
    newest = count.value

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        state = groups_of(warp)
        if newest == 0 and state.open:
            text = "wgmma.wait_group 0 while operations were never committed: they are not waited for"
            machine.finding("wgmma", text, cta, warp, instr.index)
        state.complete = max(state.complete, state.committed - newest)
        if newest == 0:
            state.accumulators.clear()
        if machine.check.enabled:
            machine.check.wgmma_wait(warp, state.complete)
        return CONTINUE

    return handler


def _plain(instr: Instruction, kernel: Kernel) -> None:
    modifiers = Modifiers(instr, kernel, skip=1)
    modifiers.choose(["sync"])
    modifiers.choose(["aligned"])
    modifiers.done()


def unfinished(cta: CTA) -> list[str]:
    """What is wrong with the CTA's wgmma operations at its end, in words."""
    problems = []
    for first in range(0, len(cta.warps) - 3, 4):
        members = cta.warps[first : first + 4]
        if not any(GROUPS in warp.groups for warp in members):
            continue
        if len({tuple(groups_of(warp).issued) for warp in members}) > 1:
            problems.append(
                f"the warps {first}..{first + 3} of a warpgroup did not execute the same wgmma instructions"
            )
        if any(groups_of(warp).complete < groups_of(warp).committed for warp in members):
            problems.append(f"warps {first}..{first + 3} exit with wgmma groups that nobody waited for")
    return problems
