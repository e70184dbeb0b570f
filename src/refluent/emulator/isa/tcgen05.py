"""tcgen05: tensor memory, the matrix unit of sm_100a and their ordering.

Source: PTX ISA, "tcgen05.alloc", ".ld", ".st", ".cp", ".mma", ".commit", ".wait", "tcgen05 memory consistency model".
mma and cp of a CTA (or a pair) go through one queue in order; commit follows everything queued before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator.isa import (
    CONTINUE,
    AsyncOp,
    Handler,
    Modifiers,
    Outcome,
    blocked,
    handles,
    tmem,
)
from refluent.emulator.isa.mbarrier import arrive
from refluent.emulator.isa.mma_tcgen05 import InstructionDescriptor, Mma
from refluent.emulator.isa.operand import DescriptorError, MatrixDescriptor, chunk_addresses
from refluent.emulator.isa.registers import (
    converged,
    first_use,
    flag,
    lane_value,
    lanes_of,
    read_rows,
    vector,
    write_rows,
)
from refluent.emulator.memory import MemoryFault, shared_offset, shared_rank
from refluent.emulator.ptx import Addr, Imm, Instruction, Kernel, Reg, Vec

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

_GROUPS = ["cta_group::1", "cta_group::2"]
QUEUE = "tcgen05"


@dataclass(eq=False)
class TensorMemory:
    """Allocation state of one CTA's tensor memory: first column -> (columns, instruction that allocated)."""

    allocated: dict[int, tuple[int, Instruction]] = field(default_factory=dict)
    relinquished: bool = False
    waiters: list[MachineWarp] = field(default_factory=list)

    def place(self, columns: int) -> int | None:
        """First free run of `columns`, at a multiple of its size, or None."""
        for start in range(0, tmem.COLUMNS, columns):
            if all(start + columns <= a or a + n <= start for a, (n, _) in self.allocated.items()):
                return start
        return None

    def covers(self, first: int, columns: int) -> bool:
        """Whether every column of [first, first + columns) is allocated."""
        need = set(range(first, first + columns))
        for start, (count, _) in self.allocated.items():
            need -= set(range(start, start + count))
        return not need


def tensor_memory(cta: CTA) -> TensorMemory:
    """The CTA's allocation state, made on first use."""
    if cta.tmem_state is None:
        cta.tmem_state = TensorMemory()
    return cta.tmem_state


@handles("tcgen05.alloc")
def prepare_alloc(instr: Instruction, kernel: Kernel) -> Handler:
    """tcgen05.alloc.cta_group.sync.aligned{.shared::cta}.b32 [dst], nCols"""
    modifiers = _sync_modifiers(instr, kernel)
    modifiers.choose(["shared::cta", "shared"], "shared::cta")
    modifiers.choose(["b32"])
    modifiers.done()
    destination, count = instr.operands
    if not isinstance(destination, Addr) or not isinstance(count, Reg | Imm):
        raise modifiers.refuse("[dst], nCols expected")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        columns, state = warp.scalar(count, mask), tensor_memory(cta)
        if columns not in (32, 64, 128, 256, 512):
            raise MemoryFault(f"{instr.name} of {columns} columns; 32, 64, 128, 256 and 512 exist")
        if state.relinquished:
            machine.finding("tensor memory", "tcgen05.alloc after relinquish_alloc_permit", cta, warp, instr.index)
        start = state.place(columns)
        if start is None:
            return blocked(state, f"tcgen05.alloc of {columns} columns: tensor memory is full")
        state.allocated[start] = (columns, instr)
        offset = shared_offset(int(warp.locate(destination)[0]))
        if machine.check.enabled:
            machine.check.warp_access(warp, cta, np.array([offset]), 4, write=True, lanes=np.array([0]))
            machine.check.tmem_allocated(cta, start, columns)
        cta.shared.view(np.uint32)[offset >> 2] = start
        return CONTINUE

    return handler


@handles("tcgen05.dealloc")
def prepare_dealloc(instr: Instruction, kernel: Kernel) -> Handler:
    """tcgen05.dealloc.cta_group.sync.aligned.b32 taddr, nCols"""
    modifiers = _sync_modifiers(instr, kernel)
    modifiers.choose(["b32"])
    modifiers.done()
    address, count = instr.operands
    if not isinstance(address, Reg | Imm) or not isinstance(count, Reg | Imm):
        raise modifiers.refuse("taddr, nCols expected")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        start, columns, state = warp.scalar(address, mask), warp.scalar(count, mask), tensor_memory(cta)
        known = state.allocated.get(start)
        if known is None or known[0] != columns:
            text = f"tcgen05.dealloc of {columns} columns at {start}, which no tcgen05.alloc returned"
            machine.finding("tensor memory", text, cta, warp, instr.index)
        else:
            if machine.check.enabled:
                machine.check.tmem_access(warp, cta, np.arange(tmem.LANES), start, columns, write=True)
            del state.allocated[start]
        machine.wake(state)
        return CONTINUE

    return handler


@handles("tcgen05.relinquish_alloc_permit")
def prepare_relinquish(instr: Instruction, kernel: Kernel) -> Handler:
    """tcgen05.relinquish_alloc_permit.cta_group.sync.aligned"""
    _sync_modifiers(instr, kernel).done()

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        tensor_memory(cta).relinquished = True
        return CONTINUE

    return handler


def _sync_modifiers(instr: Instruction, kernel: Kernel) -> Modifiers:
    modifiers = Modifiers(instr, kernel, skip=1)
    modifiers.choose(_GROUPS)
    modifiers.choose(["sync"])
    modifiers.choose(["aligned"])
    return modifiers


@handles("tcgen05.ld", "tcgen05.st")
def prepare_transfer(instr: Instruction, kernel: Kernel) -> Handler:
    """tcgen05.{ld,st}.sync.aligned.shape.xN{.pack::16b,.unpack::16b}.b32"""
    modifiers = Modifiers(instr, kernel, skip=1)
    modifiers.choose(["sync"])
    modifiers.choose(["aligned"])
    shape = modifiers.choose(["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
    repeats = int((modifiers.take("x") or "x0")[1:])
    load = instr.modifiers[0] == "ld"
    packed = modifiers.flag("pack::16b" if load else "unpack::16b")
    modifiers.choose(["b32"])
    modifiers.done()
    operands = list(instr.operands)
    registers = operands.pop(0 if load else -1)
    address, *rest = operands
    split = rest[0].value if rest and isinstance(rest[0], Imm) else 0
    rows = vector(registers)
    lane, column = tmem.transfer_cells(shape, repeats * 2 if packed else repeats, split)
    if len(lane) != len(rows) * (2 if packed else 1) or not isinstance(address, Addr):
        raise modifiers.refuse(f"{len(rows)} registers do not fit {shape}.x{repeats}")
    whole = shape == "32x32b"
    width = int(column.max()) + 1
    used_at = first_use(kernel, instr, registers) if load else None

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        taddr = warp.locate(address)
        if not (taddr == taddr[0]).all():
            machine.finding("divergence", f"{instr.name}: lanes disagree on the address", cta, warp, instr.index)
        base = int(taddr[0])
        first_lane, first = base >> 16, base & 0xFFFF
        _check_transfer(machine, cta, warp, instr, first_lane, first, width, whole)
        if machine.check.enabled:
            used = np.unique(lane) + first_lane
            machine.check.tmem_access(warp, cta, used, first, width, write=not load, used_at=used_at)
        if load:
            values = _read_cells(cta, lane + first_lane, column + first, first_lane, first, width, whole)
            write_rows(warp, rows, values[0::2] & 0xFFFF | values[1::2] << 16 if packed else values)
        else:
            values = read_rows(warp, rows)
            if packed:
                values = np.stack([values & 0xFFFF, values >> 16], axis=1).reshape(-1, 32)
            cta.tmem[lane + first_lane, column + first] = values
        machine.count_bytes(warp, "tcgen05." + instr.modifiers[0], values.nbytes)
        return CONTINUE

    return handler


def _read_cells(
    cta: CTA, lane: np.ndarray, column: np.ndarray, first_lane: int, first: int, width: int, whole: bool
) -> np.ndarray:
    """Cells of each register and thread: (registers, 32) uint32."""
    if whole:
        return cta.tmem[first_lane : first_lane + 32, first : first + width].T
    return cta.tmem[lane, column]


def _check_transfer(
    machine: Machine,
    cta: CTA,
    warp: MachineWarp,
    instr: Instruction,
    first_lane: int,
    first: int,
    width: int,
    whole: bool,
) -> None:
    slab = 32 * (warp.index % 4)
    allowed = (slab,) if whole else (slab, slab + 16)
    if first_lane not in allowed:
        raise MemoryFault(
            f"{instr.name}: warp {warp.index} reaches lanes {slab}..{slab + 31}, address names {first_lane}"
        )
    _check_columns(machine, cta, warp, instr, first, width)


def _check_columns(machine: Machine, cta: CTA, warp: MachineWarp, instr: Instruction, first: int, count: int) -> None:
    if first + count > tmem.COLUMNS:
        raise MemoryFault(f"{instr.name}: columns {first}..{first + count - 1} leave tensor memory")
    if not tensor_memory(cta).covers(first, count):
        text = f"{instr.name} touches columns {first}..{first + count - 1}, not all allocated"
        machine.finding("tensor memory", text, cta, warp, instr.index)


@handles("tcgen05.wait::ld", "tcgen05.wait::st")
def prepare_wait_for(instr: Instruction, kernel: Kernel) -> Handler:
    """Loads and stores are carried out at issue; the wait is what lets the checker publish them."""
    modifiers = Modifiers(instr, kernel, skip=1)
    modifiers.choose(["sync"])
    modifiers.choose(["aligned"])
    modifiers.done()
    store = instr.modifiers[0] == "wait::st"

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        converged(machine, cta, warp, mask, instr)
        if machine.check.enabled:
            machine.check.tmem_wait(warp, store)
        return CONTINUE

    return handler


@handles("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def prepare_fence(instr: Instruction, kernel: Kernel) -> Handler:
    """Code motion fences: nothing moves here."""
    Modifiers(instr, kernel, skip=1).done()
    return lambda machine, cta, warp, mask: CONTINUE


@handles("tcgen05.mma")
def prepare_mma(instr: Instruction, kernel: Kernel) -> Handler:
    """tcgen05.mma.cta_group.kind [d], a-desc | [a], b-desc, idesc {, disable-output-lane}, enable-input-d"""
    modifiers = Modifiers(instr, kernel, skip=1)
    group = int(modifiers.choose(_GROUPS)[-1])
    kind = modifiers.choose(["kind::f16", "kind::tf32", "kind::f8f6f4"])
    for use in ("fill", "use", "lastuse", "discard"):
        modifiers.flag(f"collector::a::{use}")
    modifiers.done()
    d, a, b, idesc, *rest = instr.operands
    lanes_off = rest.pop(0) if rest and isinstance(rest[0], Vec) else None
    disabled = lanes_off.items if isinstance(lanes_off, Vec) else ()
    if len(disabled) not in (0, 4 * group) or len(rest) != 1 or not isinstance(d, Addr):
        raise modifiers.refuse("[d], a, b, idesc, enable-input-d expected (scale-input-d is not executed)")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        for lane in lanes_of(mask):
            try:
                shape = InstructionDescriptor.decode(lane_value(warp, idesc, lane) & 0xFFFFFFFF, kind)
                descriptor_a: MatrixDescriptor | int
                if isinstance(a, Addr):
                    descriptor_a = int(warp.locate(a)[lane])
                else:
                    descriptor_a = MatrixDescriptor.decode(lane_value(warp, a, lane), machine.arch_number)
                descriptor_b = MatrixDescriptor.decode(lane_value(warp, b, lane), machine.arch_number)
            except DescriptorError as error:
                raise MemoryFault(f"{instr.name}: {error}") from None
            target, enable = int(warp.locate(d)[lane]), flag(warp, rest[0], lane)
            off = tuple(lane_value(warp, word, lane) & 0xFFFFFFFF for word in disabled)
            mma = Mma(shape, group, target, descriptor_a, descriptor_b, enable, off if any(off) else ())
            _submit_mma(machine, cta, warp, instr, mma)
        return CONTINUE

    return handler


def _submit_mma(machine: Machine, cta: CTA, warp: MachineWarp, instr: Instruction, mma: Mma) -> None:
    problem = mma.shape.violation(mma.cta_group)
    if problem:
        raise MemoryFault(f"{instr.name}: {problem}")
    ctas = cta.pair if mma.cta_group == 2 else (cta,)
    lanes, column, columns = mma.d_cells()
    cells = mma.a_cells()
    for member in ctas:
        _check_columns(machine, member, warp, instr, column, columns)
        if cells is not None:
            _check_columns(machine, member, warp, instr, cells[1], cells[2])
        _check_operand(member, mma, instr)

    def perform() -> None:
        check = machine.check
        if check.enabled:
            for member in ctas:
                addresses = mma.a_addresses()
                if addresses is not None:
                    check.async_shared(op, member, addresses, 16, write=False)
                elif cells is not None:
                    check.async_tmem(op, member, cells[0], cells[1], cells[2], write=False)
                check.async_shared(op, member, mma.b_addresses(), 16, write=False)
                if mma.accumulate:
                    check.async_tmem(op, member, lanes, column, columns, write=False)
                check.async_tmem(op, member, lanes, column, columns, write=True)
        mma.execute(ctas, machine.accumulator)
        machine.count_bytes(warp, "mma operands in shared memory", mma.shared_bytes)

    op = AsyncOp(
        kind=f"mma {mma.shape.m}x{mma.shape.n}x{mma.k}",
        cta=cta,
        warp=warp,
        instr=instr.index,
        perform=perform,
        describe=lambda: f"tcgen05.mma {mma.shape.m}x{mma.shape.n} into columns {column}..{column + columns - 1}",
        flops=mma.flops,
        row="tensor",
    )
    enqueue(machine, cta, warp, op, mma.cta_group == 2)


def _check_operand(cta: CTA, mma: Mma, instr: Instruction) -> None:
    for addresses in (mma.a_addresses(), mma.b_addresses()):
        if addresses is not None and addresses.max() + 16 > cta.shared_end:
            raise MemoryFault(f"{instr.name}: an operand reaches {int(addresses.max()) + 16:#x}, past shared memory")


def enqueue(machine: Machine, cta: CTA, warp: MachineWarp, op: AsyncOp, paired: bool) -> None:
    """Put an operation behind everything that the CTA (its pair) has given to the tensor unit."""
    last = cta.groups.get(QUEUE)
    op.after = () if last is None else (last,)
    op.channel = machine.check.channel(warp, QUEUE)
    for member in cta.pair if paired else (cta,):
        member.groups[QUEUE] = op
    machine.submit(op)


@handles("tcgen05.commit")
def prepare_commit(instr: Instruction, kernel: Kernel) -> Handler:
    """tcgen05.commit.cta_group.mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64 [mbar] {, ctaMask}"""
    modifiers = Modifiers(instr, kernel, skip=1)
    paired = modifiers.choose(_GROUPS) == "cta_group::2"
    modifiers.choose(["mbarrier::arrive::one"])
    modifiers.choose(["shared::cluster"], "generic")
    multicast = modifiers.flag("multicast::cluster")
    modifiers.choose(["b64"])
    modifiers.done()
    barrier, *rest = instr.operands
    if not isinstance(barrier, Addr | Reg) or multicast != bool(rest):
        raise modifiers.refuse("[mbar], and ctaMask with .multicast::cluster, expected")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        for lane in lanes_of(mask):
            address = int(warp.locate(barrier)[lane])
            ranks = lane_value(warp, rest[0], lane) & 0xFFFF if multicast else 1 << shared_rank(address)
            _submit_commit(machine, cta, warp, instr, shared_offset(address), ranks, paired)
        return CONTINUE

    return handler


def _submit_commit(
    machine: Machine, cta: CTA, warp: MachineWarp, instr: Instruction, offset: int, ranks: int, paired: bool
) -> None:
    members = [member for member in cta.cluster.ctas if ranks >> member.rank & 1]

    def perform() -> None:
        for member in members:
            arrive(machine, member, offset, 1, op)

    op = AsyncOp(
        kind="commit",
        cta=cta,
        warp=warp,
        instr=instr.index,
        perform=perform,
        describe=lambda: f"tcgen05.commit to the mbarrier at {offset:#x} of CTA ranks {[m.rank for m in members]}",
        row="tensor",
    )
    enqueue(machine, cta, warp, op, paired)


@handles("tcgen05.cp")
def prepare_cp(instr: Instruction, kernel: Kernel) -> Handler:
    """tcgen05.cp.cta_group.{128x256b,128x128b,4x256b} [taddr], s-desc: shared memory -> tensor memory, same lanes."""
    modifiers = Modifiers(instr, kernel, skip=1)
    group = int(modifiers.choose(_GROUPS)[-1])
    shape = modifiers.choose(["128x256b", "128x128b", "4x256b", "64x128b", "32x128b"])
    copies = modifiers.choose(["warpx4", "warpx2::02_13", "warpx2::01_23"], "none")
    modifiers.done()
    rows, bits = (int(part) for part in shape[:-1].split("x"))
    address, descriptor = instr.operands
    lanes = _cp_lanes(rows, copies, modifiers)
    if not isinstance(address, Addr):
        raise modifiers.refuse("[taddr], s-desc expected")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        for lane in lanes_of(mask):
            taddr = int(warp.locate(address)[lane])
            try:
                source = MatrixDescriptor.decode(lane_value(warp, descriptor, lane), machine.arch_number)
            except DescriptorError as error:
                raise MemoryFault(f"{instr.name}: {error}") from None
            copy = _Copy(cta.pair if group == 2 else (cta,), source, rows, bits // 32, lanes, taddr)
            copy.submit(machine, cta, warp, instr)
        return CONTINUE

    return handler


def _cp_lanes(rows: int, copies: str, modifiers: Modifiers) -> list[np.ndarray]:
    """Destination lanes of the rows, one array a copy."""
    row = np.arange(rows)
    if copies == "none" and rows in (128, 4):
        return [row]
    if copies == "warpx4" and rows == 32:
        return [row + 32 * w for w in range(4)]
    if copies == "warpx2::02_13" and rows == 64:
        return [row, row + 64]
    if copies == "warpx2::01_23" and rows == 64:
        return [row % 32 + 64 * (row // 32), row % 32 + 64 * (row // 32) + 32]
    raise modifiers.refuse(f"{rows} rows with {copies}")


@dataclass(frozen=True, eq=False)
class _Copy:
    ctas: tuple[CTA, ...]
    source: MatrixDescriptor
    rows: int
    columns: int
    lanes: list[np.ndarray]
    taddr: int

    def submit(self, machine: Machine, cta: CTA, warp: MachineWarp, instr: Instruction) -> None:
        chunks = chunk_addresses(self.source, self.rows, self.columns * 4, 4, False)
        first_lane, first = self.taddr >> 16, self.taddr & 0xFFFF
        for member in self.ctas:
            _check_columns(machine, member, warp, instr, first, self.columns)

        def perform() -> None:
            for member in self.ctas:
                values = member.shared.view(np.complex128)[chunks >> 4].view(np.uint32)
                for lanes in self.lanes:
                    if machine.check.enabled:
                        machine.check.async_shared(op, member, chunks, 16, write=False)
                        machine.check.async_tmem(op, member, lanes + first_lane, first, self.columns, write=True)
                    member.tmem[lanes + first_lane, first : first + self.columns] = values

        op = AsyncOp(
            kind="tcgen05.cp",
            cta=cta,
            warp=warp,
            instr=instr.index,
            perform=perform,
            describe=lambda: f"tcgen05.cp of {self.rows} rows to column {first}",
            nbytes=self.rows * self.columns * 4,
            row="tensor",
        )
        enqueue(machine, cta, warp, op, len(self.ctas) == 2)
