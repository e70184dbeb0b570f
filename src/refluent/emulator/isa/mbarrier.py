"""mbarrier in every form. Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".

A phase is complete when no arrivals are pending and the transaction count is zero. Handlers of asynchronous copies
and commits call complete_tx() and arrive().
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator.isa import CONTINUE, YIELD, AsyncOp, Handler, Modifiers, Outcome, blocked, handles
from refluent.emulator.ptx import Addr, Imm, Instruction, Kernel, Operand, Reg, Sink
from refluent.emulator.report import place
from refluent.emulator.state import CTA_RANK_SHIFT, LANES, SHARED_START, SHARED_WINDOW

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

MAX_COUNT = (1 << 20) - 1  # of arrivals, and of transaction bytes
_SPACES = ("shared", "shared::cta", "shared::cluster")
_SEEN = 6  # arriving instructions that a report names


class MBarrier:
    """An mbarrier object. `phase` counts completed phases; `tx` are bytes still to come (negative: came early)."""

    def __init__(self, machine: Machine, cta: CTA, offset: int, count: int, warp: MachineWarp) -> None:
        self.machine, self.cta, self.offset = machine, cta, offset
        self.count = self.pending = count
        self.tx = 0
        self.phase = 0
        self.waiters: list[MachineWarp] = []
        self.init_instr = warp.instr
        self.seen: dict[int, int] = {}  # instructions that arrived, or whose operations did: phase of the last time
        self.sync: Any = machine.check.mbarrier(cta, offset, warp)

    @property
    def name(self) -> str:
        return f"mbarrier 0x{self.offset:x} of {self.cta.name}"

    @property
    def token(self) -> int:
        """The opaque state that arrive returns."""
        return (self.phase << 40 | self.count << 20 | max(self.pending, 0)) & 0xFFFFFFFFFFFFFFFF

    def arrive(self, warp: MachineWarp, instr: int, count: int, tx: int = 0) -> None:
        """`tx` bytes are expected, then `count` arrivals happen."""
        self.seen[instr] = self.phase
        if tx:
            self.expect(warp, instr, tx)
        if count > self.pending:
            self._complain(warp, instr, f"{count} arrivals, but the phase expects only {self.pending} more")
        self.pending -= count
        self.settle()

    def expect(self, warp: MachineWarp, instr: int, nbytes: int) -> None:
        self.seen[instr] = self.phase
        self.tx += nbytes
        if abs(self.tx) > MAX_COUNT:
            self._complain(warp, instr, f"its transaction count, {self.tx}, is out of range (2^20 - 1)")

    def complete(self, warp: MachineWarp, instr: int, nbytes: int) -> None:
        self.expect(warp, instr, -nbytes)
        self.settle()

    def settle(self) -> None:
        """Complete the phase if it is."""
        if self.pending <= 0 and self.tx == 0:
            self.machine.check.flip(self.sync)
            self.phase += 1
            self.pending = self.count
            self.machine.wake(self)

    def _complain(self, warp: MachineWarp, instr: int, text: str) -> None:
        self.machine.finding("mbarrier", f"{self.name}, phase {self.phase}: {text}", self.cta, warp, instr)

    def explain(self) -> str:
        """For a deadlock report."""
        kernel = self.cta.launch.kernel
        missing = f"{self.pending} of {self.count} arrivals"
        if self.tx:
            missing += (
                f" and {self.tx} bytes" if self.tx > 0 else f" (and {-self.tx} bytes more came than were expected)"
            )
        text = f"{self.name}, phase {self.phase} (initialised at {place(kernel, self.init_instr)}): missing {missing}"
        seen = sorted(self.seen.items(), key=lambda item: -item[1])[:_SEEN]
        if not seen:
            return text + "; nothing has ever arrived"
        parts = [f"{place(kernel, instr)} (last in phase {phase})" for instr, phase in seen]
        return text + "; arrived so far: " + "; ".join(parts)

    def at_exit(self) -> str | None:
        """What is wrong with leaving the barrier like this."""
        if self.tx:
            return f"{self.name}, phase {self.phase}: {self.tx} transaction bytes are outstanding at exit"
        if self.pending != self.count:
            return f"{self.name}, phase {self.phase}: {self.pending} of {self.count} arrivals are missing at exit"
        return None


def split(machine: Machine, warp: MachineWarp, address: int, nbytes: int = 8) -> tuple[CTA, int]:
    """CTA and window offset of a shared (::cta, ::cluster) or generic address. Raises the fault of a bad one."""
    if address >> 32 not in (0, SHARED_WINDOW >> 32):
        raise machine.fault(warp, f"0x{address:x} is not an address of shared memory")
    address &= 0xFFFFFFFF
    rank, offset = address >> CTA_RANK_SHIFT, address & ((1 << CTA_RANK_SHIFT) - 1)
    cluster = warp.cta.cluster
    if rank >= len(cluster.ctas):
        raise machine.fault(warp, f"0x{address:x} names the CTA of rank {rank}; the cluster has {len(cluster.ctas)}")
    cta = cluster.ctas[rank]
    if offset < SHARED_START or offset + nbytes > cta.shared_end:
        raise machine.fault(
            warp, f"shared memory 0x{offset:x} lies outside the CTA's [0x{SHARED_START:x}, 0x{cta.shared_end:x})"
        )
    if cta.finished:
        machine.finding("exited", f"reaches into the shared memory of {cta.name}, which has exited", warp.cta, warp)
    return cta, offset


def find(machine: Machine, warp: MachineWarp, address: int) -> MBarrier:
    """The mbarrier at an address; its initialisation must be ordered before this use."""
    cta, offset = split(machine, warp, address)
    if offset & 7:
        raise machine.fault(warp, f"an mbarrier at 0x{offset:x} is not aligned to 8 bytes")
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise machine.fault(warp, f"there is no (initialised) mbarrier at 0x{offset:x} of {cta.name}")
    check = machine.check
    if check.enabled and warp.clocks is not None and not check.sees_init(barrier.sync, warp.clocks):
        kernel = cta.launch.kernel
        machine.finding(
            "mbarrier",
            f"{barrier.name} is used, not ordered after its initialisation at {place(kernel, barrier.init_instr)}",
            warp.cta,
            warp,
        )
    return barrier


def completion(machine: Machine, warp: MachineWarp, address: int) -> MBarrier:
    """The mbarrier on which an asynchronous operation issued now will complete."""
    barrier = find(machine, warp, address)
    check = machine.check
    if check.enabled and not check.sees_init(barrier.sync, warp.clocks, asynchronous=True):
        machine.finding(
            "proxy",
            f"{barrier.name} is used by an asynchronous operation without a fence.mbarrier_init or fence.proxy.async "
            f"after its initialisation at {place(barrier.cta.launch.kernel, barrier.init_instr)}",
            warp.cta,
            warp,
        )
    return barrier


def _target(machine: Machine, cta: CTA, offset: int, op: AsyncOp) -> MBarrier | None:
    barrier = cta.mbarriers.get(offset)
    if cta.finished or barrier is None:
        gone = "whose CTA has exited" if cta.finished else "where there is none (any more)"
        text = f"{op.describe()} completes on an mbarrier at 0x{offset:x} of {cta.name}, {gone}"
        machine.finding("mbarrier", text, op.cta, op.warp, op.instr)
        return None
    return barrier


def complete_tx(machine: Machine, cta: CTA, offset: int, nbytes: int, op: AsyncOp) -> None:
    """An asynchronous operation has brought bytes."""
    barrier = _target(machine, cta, offset, op)
    if barrier is not None:
        machine.check.complete(barrier.sync, op)
        barrier.complete(op.warp, op.instr, nbytes)


def arrive(machine: Machine, cta: CTA, offset: int, count: int, op: AsyncOp) -> None:
    """An asynchronous operation arrives (tcgen05.commit, cp.async.mbarrier.arrive)."""
    barrier = _target(machine, cta, offset, op)
    if barrier is not None:
        machine.check.complete(barrier.sync, op)
        barrier.arrive(op.warp, op.instr, count)


def active(mask: int) -> list[int]:
    """The lanes of a mask."""
    return [lane for lane in range(LANES) if mask >> lane & 1]


def _lane_values(warp: MachineWarp, operand: Operand | None, default: int) -> list[int]:
    if operand is None:
        return [default] * LANES
    if isinstance(operand, Imm):
        return [operand.value] * LANES
    assert isinstance(operand, Reg)
    values: list[int] = warp.view(operand).tolist()
    return values


@handles("mbarrier.init")
def _prepare_init(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    mods.choose(_SPACES, "generic")
    mods.choose(("b64",))
    mods.done()
    address, count = instr.operands
    assert isinstance(address, Addr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        counts = _lane_values(warp, count, 1)
        addresses = warp.locate(address).tolist()
        for lane in active(mask):
            owner, offset = split(machine, warp, addresses[lane])
            if owner is not cta:
                raise machine.fault(warp, f"mbarrier.init in the shared memory of another CTA ({owner.name})")
            if offset & 7 or not 1 <= counts[lane] <= MAX_COUNT:
                raise machine.fault(warp, f"mbarrier.init at 0x{offset:x} with count {counts[lane]}")
            old = cta.mbarriers.get(offset)
            if old is not None and old.waiters:
                machine.finding("mbarrier", f"{old.name} is initialised again while warps wait on it", cta, warp)
            cta.mbarriers[offset] = MBarrier(machine, cta, offset, counts[lane], warp)
            machine.check.mark_mbarrier(warp, cta, offset, True)
        return CONTINUE

    return handler


@handles("mbarrier.inval")
def _prepare_inval(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    mods.choose(_SPACES, "generic")
    mods.choose(("b64",))
    mods.done()
    address = instr.operands[0]
    assert isinstance(address, Addr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        addresses = warp.locate(address).tolist()
        for lane in active(mask):
            barrier = find(machine, warp, addresses[lane])
            if barrier.waiters:
                machine.finding("mbarrier", f"{barrier.name} is invalidated while warps wait on it", cta, warp)
            del barrier.cta.mbarriers[barrier.offset]
            machine.check.mark_mbarrier(warp, barrier.cta, barrier.offset, False)
        return CONTINUE

    return handler


@handles("mbarrier.arrive", "mbarrier.arrive_drop")
def _prepare_arrive(instr: Instruction, kernel: Kernel) -> Handler:
    drop = instr.modifiers[0] == "arrive_drop"
    mods = Modifiers(instr, kernel, skip=1)
    expect = mods.flag("expect_tx")
    no_complete = mods.flag("noComplete")
    relaxed = mods.choose(("release", "relaxed"), "release") == "relaxed"
    mods.choose(("cta", "cluster"), "cta")
    mods.choose(_SPACES, "generic")
    mods.choose(("b64",))
    mods.done()
    operands = list(instr.operands)
    state = operands.pop(0) if isinstance(operands[0], (Reg, Sink)) else None
    address = operands[0]
    assert isinstance(address, Addr)
    extra = operands[1] if len(operands) > 1 else None
    if expect and extra is None:
        raise mods.refuse("needs the number of bytes")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        addresses = warp.locate(address).tolist()
        extras = _lane_values(warp, extra, 1)
        tokens = np.zeros(LANES, np.uint64)
        known: dict[int, MBarrier] = {}
        for lane in active(mask):
            barrier = known.get(addresses[lane])
            if barrier is None:
                barrier = known[addresses[lane]] = find(machine, warp, addresses[lane])
                if not relaxed:
                    machine.check.arrive(barrier.sync, warp)
            tokens[lane] = barrier.token
            if drop:
                barrier.count -= 1 if expect else extras[lane]
            if no_complete and barrier.pending <= extras[lane]:
                machine.finding("mbarrier", f"{barrier.name}: arrive.noComplete completes the phase", cta, warp)
            if expect:
                barrier.arrive(warp, warp.instr, 1, extras[lane])
            else:
                barrier.arrive(warp, warp.instr, extras[lane])
        if isinstance(state, Reg):
            warp.set(state, tokens, mask)
        return CONTINUE

    return handler


@handles("mbarrier.expect_tx", "mbarrier.complete_tx")
def _prepare_tx(instr: Instruction, kernel: Kernel) -> Handler:
    sign = 1 if instr.modifiers[0] == "expect_tx" else -1
    mods = Modifiers(instr, kernel, skip=1)
    mods.choose(("relaxed",), "relaxed")
    mods.choose(("cta", "cluster"), "cta")
    mods.choose(_SPACES, "generic")
    mods.choose(("b64",))
    mods.done()
    address, nbytes = instr.operands
    assert isinstance(address, Addr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        addresses = warp.locate(address).tolist()
        counts = _lane_values(warp, nbytes, 0)
        for lane in active(mask):
            barrier = find(machine, warp, addresses[lane])
            barrier.expect(warp, warp.instr, sign * counts[lane])
            barrier.settle()
        return CONTINUE

    return handler


@handles("mbarrier.pending_count")
def _prepare_pending_count(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    mods.choose(("b64",))
    mods.done()
    target, state = instr.operands
    assert isinstance(target, Reg)
    assert isinstance(state, (Reg, Imm))

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        warp.set(target, (warp.get(state, np.uint64) & np.uint64(MAX_COUNT)).astype(np.uint32), mask)
        return CONTINUE

    return handler


@handles("mbarrier.test_wait", "mbarrier.try_wait")
def _prepare_wait(instr: Instruction, kernel: Kernel) -> Handler:
    sleeps = instr.modifiers[0] == "try_wait"
    mods = Modifiers(instr, kernel, skip=1)
    parity = mods.flag("parity")
    relaxed = mods.choose(("acquire", "relaxed"), "acquire") == "relaxed"
    mods.choose(("cta", "cluster"), "cta")
    mods.choose(_SPACES[:2], "generic")
    mods.choose(("b64",))
    mods.done()
    target, address, state = instr.operands[:3]
    assert isinstance(target, Reg)
    assert isinstance(address, Addr)
    if len(instr.operands) > (4 if sleeps else 3):
        raise mods.refuse(f"{len(instr.operands)} operands")

    def complete(barrier: MBarrier, value: int) -> bool:
        return (barrier.phase & 1) != (value & 1) if parity else barrier.phase & 0xFFFFFF != value >> 40

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        addresses = warp.locate(address).tolist()
        values = _lane_values(warp, state, 0)
        passed = 0
        missing: MBarrier | None = None
        done: dict[tuple[int, int], MBarrier] = {}
        for lane in active(mask):
            key = (addresses[lane], values[lane])
            barrier = done.get(key) or find(machine, warp, addresses[lane])
            if complete(barrier, values[lane]):
                done[key] = barrier
                passed |= 1 << lane
            else:
                missing = barrier
                if sleeps:
                    break
        if missing is None or not sleeps:
            if not relaxed:
                for barrier in done.values():
                    machine.check.wait(barrier.sync, warp)
            warp.set_predicate(target, passed, mask)
            return CONTINUE if missing is None else YIELD

        def give_up() -> Outcome:
            warp.set_predicate(target, 0, mask)
            return YIELD

        tried = (warp.instr, missing, missing.phase)
        if warp.polled != tried and machine.schedule.gives_up():
            warp.polled = tried
            warp.set_predicate(target, 0, mask)
            return CONTINUE
        return blocked(missing, missing.explain, None, give_up)

    return handler
