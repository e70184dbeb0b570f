"""cp.async: copies of 4, 8 or 16 bytes a lane from global to shared memory, their groups, their arrivals at mbarriers.

Source: PTX ISA, "cp.async", "cp.async.commit_group", "cp.async.wait_group", "cp.async.mbarrier.arrive".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator.isa import CONTINUE, AsyncOp, Handler, Modifiers, Outcome, handles
from refluent.emulator.isa.bulk import integers
from refluent.emulator.isa.groups import copy_groups
from refluent.emulator.isa.mbarrier import MBarrier, active, arrive, find, split
from refluent.emulator.ptx import Addr, Imm, Instruction, Kernel, Pred, Reg
from refluent.emulator.state import CTA_RANK_SHIFT, LANES, SHARED_START, SHARED_WINDOW
from refluent.emulator.state import lanes as lanes_of

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

_PREFETCH = ("L2::64B", "L2::128B", "L2::256B")


@handles("cp.async")
def _prepare_copy(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    cache = mods.choose(("ca", "cg"))
    mods.choose(("shared", "shared::cta"))
    mods.choose(("global",))
    mods.flag("L2::cache_hint")
    mods.choose(_PREFETCH, "")
    mods.done()
    target, source, size, *rest = instr.operands
    assert isinstance(target, Addr)
    assert isinstance(source, Addr)
    if not isinstance(size, Imm) or size.value not in ((4, 8, 16) if cache == "ca" else (16,)):
        raise mods.refuse("the copy size must be 4, 8 or 16 bytes (.cg: 16)")
    nbytes = size.value
    # What follows is a source size, a predicate to ignore the source, or a cache policy (64 bits).
    extra = rest[0] if rest else None
    ignores = isinstance(extra, Pred) or (isinstance(extra, Reg) and extra.bits == 1)
    sized = not ignores and (isinstance(extra, Imm) or (isinstance(extra, Reg) and extra.bits == 32))

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        lanes = np.array(active(mask))
        targets, sources = (warp.locate(operand)[lanes].astype(np.int64) for operand in (target, source))
        counts = np.full(LANES, nbytes)
        if ignores:
            counts[lanes_of(warp.predicate(extra))] = 0  # type: ignore[arg-type]
        elif sized:
            counts[:] = integers(warp, extra)  # type: ignore[arg-type]
        counts = counts[lanes]
        offsets = targets & ((1 << CTA_RANK_SHIFT) - 1)
        good = ((targets & 0xFFFFFFFF) >> CTA_RANK_SHIFT == cta.rank) & ((offsets | sources) % nbytes == 0)
        good &= (offsets >= SHARED_START) & (offsets + nbytes <= cta.shared_end)
        good &= ((targets >> 32 == 0) | (targets >> 32 == SHARED_WINDOW >> 32)) & (counts >= 0) & (counts <= nbytes)
        if not good.all():
            bad = int(np.argmin(good))
            owner, offset = split(machine, warp, int(targets[bad]), nbytes)
            raise machine.fault(
                warp,
                f"lane {lanes[bad]}: copies {counts[bad]} of {nbytes} bytes from 0x{sources[bad]:x} to shared memory "
                f"0x{offset:x} of {owner.name}: both must be aligned to the size, and the target the CTA's own",
            )
        op = _submit_copy(machine, cta, warp, offsets, sources, counts, nbytes)
        copy_groups(warp).add(op, mask)
        return CONTINUE

    return handler


def _submit_copy(
    machine: Machine,
    cta: CTA,
    warp: MachineWarp,
    starts: np.ndarray,
    sources: np.ndarray,
    counts: np.ndarray,
    nbytes: int,
) -> AsyncOp:
    """One copy a lane: `counts` bytes from each source, zeros up to `nbytes` after them."""

    def perform() -> None:
        if machine.check.enabled:
            machine.check.async_global(op, sources[counts > 0], nbytes, write=False)
            machine.check.async_shared(op, cta, starts, nbytes, write=True, generic=machine.check.copies_are_generic)
        values = np.zeros((len(starts), nbytes), np.uint8)
        whole = counts == nbytes
        values[whole] = machine.memory.gather(sources[whole], nbytes)
        for lane in np.flatnonzero(~whole & (counts > 0)).tolist():
            values[lane, : counts[lane]] = machine.memory.view(int(sources[lane]), int(counts[lane]))
        cta.shared[starts[:, None] + np.arange(nbytes)] = values

    op = AsyncOp(
        "cp.async",
        cta,
        warp,
        warp.instr,
        perform,
        lambda: f"cp.async of {warp.name} to shared memory 0x{starts[0]:x}",
        nbytes=nbytes * len(starts),
        row="bulk",
    )
    return machine.submit(op)


@handles("cp.async.commit_group")
def _prepare_commit(instr: Instruction, kernel: Kernel) -> Handler:
    Modifiers(instr, kernel, skip=2).done()

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        copy_groups(warp).commit(mask)
        return CONTINUE

    return handler


@handles("cp.async.wait_group", "cp.async.wait_all")
def _prepare_wait(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=2)
    mods.done()
    keep: int | None = None
    if instr.modifiers[1] == "wait_group":
        count = instr.operands[0]
        if not isinstance(count, Imm):
            raise mods.refuse("needs an immediate")
        keep = count.value

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        groups = copy_groups(warp)
        ops = groups.outstanding(mask, keep)
        outcome = machine.wait_for(ops, "cp.async groups to be complete")
        if outcome is CONTINUE:
            for op in ops:
                machine.check.wait_op(warp, op)
            groups.forget(ops)
        return outcome

    return handler


@handles("cp.async.mbarrier.arrive")
def _prepare_copy_arrive(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=3)
    counted = mods.flag("noinc")
    mods.choose(("shared", "shared::cta"), "generic")
    mods.choose(("b64",))
    mods.done()
    address = instr.operands[0]
    assert isinstance(address, Addr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        addresses = warp.locate(address).tolist()
        arrivals: dict[int, int] = {}
        barriers: dict[int, MBarrier] = {}
        for lane in active(mask):
            barrier = barriers.get(addresses[lane]) or find(machine, warp, addresses[lane])
            barriers[addresses[lane]] = barrier
            arrivals[addresses[lane]] = arrivals.get(addresses[lane], 0) + 1
            if not counted:
                barrier.pending += 1
        earlier = copy_groups(warp).outstanding(mask, None)
        for key, count in arrivals.items():
            _submit_arrival(machine, cta, warp, barriers[key], count, earlier)
        return CONTINUE

    return handler


def _submit_arrival(
    machine: Machine, cta: CTA, warp: MachineWarp, barrier: MBarrier, count: int, earlier: list[AsyncOp]
) -> None:
    def perform() -> None:
        arrive(machine, barrier.cta, barrier.offset, count, op)

    text = f"cp.async.mbarrier.arrive of {warp.name} on {barrier.name}"
    op = AsyncOp("cp.async arrive", cta, warp, warp.instr, perform, lambda: text, after=tuple(earlier), row="bulk")
    machine.submit(op)
