"""What the checks find: races, missing fences, uninitialised reads, by shadow memory and happens-before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator import runtime, state
from refluent.emulator.check import shadow
from refluent.emulator.check.clocks import Channel, Clock
from refluent.emulator.check.explain import KINDS, ON_DEMAND, explain
from refluent.emulator.check.order import CONVERGED, GRANULE_LANES, Order, SyncClocks
from refluent.emulator.memory import RECORD, TMEM_COLUMNS, Block, MemoryFault

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.isa import AsyncOp
    from refluent.emulator.machine import Machine

_SPACE_SHARED, _SPACE_GLOBAL, _SPACE_TENSOR = state.SHARED, state.GLOBAL, 9


class NoChecker:
    """Stands in when checks are off: every method does nothing."""

    enabled = False

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Checker(Order):
    """Order, and the accesses of operations: async_access, tmem_access; wait_op when a warp has waited for one."""

    enabled = True

    def __init__(self, machine: Machine, checks: str | Iterable[str], strict: bool = False) -> None:
        super().__init__()
        self.machine = machine
        self.strict = strict  # the letter of the manual, where compiled code is known to rely on more
        chosen = {checks} if isinstance(checks, str) else set(checks)
        if "all" in chosen:
            chosen = chosen - {"all"} | (set(KINDS) - set(ON_DEMAND))
        if unknown := chosen - set(KINDS):
            raise ValueError(f"checks: {', '.join(sorted(unknown))} not among {', '.join(KINDS)}, all, none")
        self.chosen = chosen
        self.copies_are_generic = "cp.async" in chosen
        self.drained = 0
        self.who = np.zeros(shadow.WHO_WORDS, np.int64)  # of the operation being performed
        self.who_address: int = self.who.ctypes.data

    def describe_address(self, address: int) -> str:
        try:
            block = self.machine.memory.find(address)
        except MemoryFault:
            return ""
        return f" (byte {address - block.base} of {block.name})" if block.name else ""

    # Operations

    def channel(self, warp: MachineWarp, name: str) -> Channel:
        """The warp's own channel for one kind of operation."""
        channels: dict[str, Channel] = warp.groups.setdefault("channels", {})
        if name not in channels:
            channels[name] = Channel(warp.cta.cluster.clocks, f"{name} of {warp.name}", own=True)
        return channels[name]

    def async_issue(self, op: AsyncOp, warp: MachineWarp) -> None:
        """What the issuer knows, the operation knows. machine.submit calls this too."""
        if op.stamp is not None:
            return
        op.stamp = self.released(warp).copy()
        if op.channel is None:
            op.channel = self.channel(warp, op.kind)
        if op.channel.own:
            op.channel.tick += 1
        op.tick = op.channel.tick
        if op.source_channel is not None:
            op.source_channel.tick += 1
            op.source_tick = op.source_channel.tick

    def begins(self, op: AsyncOp) -> None:
        """The machine calls this before each stage: accesses are the operation's from now on."""
        for earlier in op.after:
            self._follow(op.stamp, earlier)
        if not op.channel.own:
            op.tick = op.channel.tick

    def _follow(self, clock: Clock, op: AsyncOp) -> None:
        """A clock learns that an operation is done."""
        clock.join(op.stamp)
        slot = op.channel.slot
        if clock.rows[0, slot] < op.tick:
            clock.rows[0, slot] = op.tick
        self._follow_source(clock, op)

    def _follow_source(self, clock: Clock, op: AsyncOp) -> None:
        channel = op.source_channel
        if channel is not None and clock.rows[0, channel.slot] < op.source_tick:
            clock.rows[0, channel.slot] = op.source_tick

    def wait_op(self, warp: MachineWarp, op: AsyncOp) -> None:
        """The warp has waited for an operation to be done."""
        self._follow(warp.clocks, op)
        self.learned(warp)

    def wait_source(self, warp: MachineWarp, op: AsyncOp) -> None:
        """The warp has waited until an operation had read its source."""
        self._follow_source(warp.clocks, op)

    def wait_channel(self, warp: MachineWarp, name: str, tick: int | None = None) -> None:
        """The warp has waited for what it issued on a channel of its own (up to a tick)."""
        channel = self.channel(warp, name)
        tick = channel.tick if tick is None else tick
        rows = warp.clocks.rows
        if rows[0, channel.slot] < tick:
            rows[0, channel.slot] = tick

    def complete(self, sync: SyncClocks, op: AsyncOp) -> None:
        """An operation arrives at, or brings bytes to, an mbarrier."""
        sync.pending.join(op.stamp)
        if op.channel.own and sync.pending.rows[0, op.channel.slot] < op.tick:
            sync.pending.rows[0, op.channel.slot] = op.tick

    # Accesses of operations

    def async_shared(
        self,
        op: AsyncOp,
        cta: CTA,
        starts: np.ndarray | int,
        nbytes: int,
        *,
        write: bool,
        atomic: bool = False,
        generic: bool = False,
        channel: Channel | None = None,
    ) -> None:
        """An operation accesses `nbytes` of a CTA's shared memory at every start (window offsets).

        `atomic`: a reduction. `generic`: not through the async proxy. `channel`: where this access completes, if not
        on op.channel (multicast).
        """
        self._become(op, write, channel)
        self._shared(cta, starts, nbytes, _what(op, atomic, generic), write)

    def async_global(
        self,
        op: AsyncOp,
        starts: np.ndarray | int,
        nbytes: int,
        *,
        write: bool,
        atomic: bool = False,
        generic: bool = False,
        channel: Channel | None = None,
    ) -> None:
        """An operation accesses `nbytes` of global memory at every start (addresses)."""
        addresses = np.atleast_1d(np.asarray(starts, np.int64))
        if not len(addresses):
            return
        self._become(op, write, channel)
        what = _what(op, atomic, generic)
        block = self.machine.memory.find(int(addresses.min()), 1)
        if int(addresses.max()) + nbytes <= block.end:
            self._block_access(block, addresses, nbytes, what, write)
            return
        for address in addresses:
            block = self.machine.memory.find(int(address), nbytes)
            self._block_access(block, np.array([address]), nbytes, what, write)

    def async_tmem(self, op: AsyncOp, cta: CTA, lanes: np.ndarray, column: int, columns: int, *, write: bool) -> None:
        """An operation accesses columns of tensor memory in some lanes."""
        self._become(op, write, None)
        self._tmem(cta, lanes, column, columns, _what(op, False, False), write)

    def _become(self, op: AsyncOp, write: bool, channel: Channel | None) -> None:
        if channel is not None:
            actor, tick = channel.actor, channel.tick
        elif not write and op.source_channel is not None:
            actor, tick = op.source_channel.actor, op.source_tick
        else:
            actor, tick = op.channel.actor, op.tick
        self.identify(self.who, op.stamp, actor, tick)

    def _shared(self, cta: CTA, starts: np.ndarray | int, nbytes: int, what: int, write: bool) -> None:
        shadow.touch_spans(
            cta.clocks.shadow.ctypes.data,
            0,
            np.atleast_1d(np.asarray(starts, np.int64)).ravel(),
            nbytes,
            self.who_address,
            what,
            write,
            True,
            shadow.FENCED_SHARED,
            _SPACE_SHARED | cta.rank << 8,
        )

    def _block_access(self, block: Block, addresses: np.ndarray, nbytes: int, what: int, write: bool) -> None:
        if block.shadow is None:
            return
        shadow.touch_spans(
            block.shadow.ctypes.data,
            block.base,
            addresses,
            nbytes,
            self.who_address,
            what,
            write,
            block.fresh,
            shadow.FENCED_GLOBAL,
            _SPACE_GLOBAL,
        )

    def _tmem(self, cta: CTA, lanes: np.ndarray, column: int, columns: int, what: int, write: bool) -> None:
        rows = np.unique(np.asarray(lanes, np.int64) // GRANULE_LANES)
        cells = (rows[:, None] * TMEM_COLUMNS + np.arange(column, column + columns)).ravel()
        space = _SPACE_TENSOR | cta.rank << 8
        shadow.touch_cells(cta.clocks.tmem.ctypes.data, cells, self.who_address, what, write, space)

    # Accesses of warps by handlers

    def lanes_access(
        self, warp: MachineWarp, mask: int, addresses: np.ndarray, nbytes: int, write: bool, kind: int
    ) -> None:
        """An access of each lane; runtime.locate_lanes has just located them."""
        runtime.touch_lanes(warp.address, warp.instr, mask, addresses.ctypes.data, 0, nbytes, 1, int(write), kind)

    def warp_access(
        self, warp: MachineWarp, cta: CTA, offsets: np.ndarray, nbytes: int, *, write: bool, lanes: np.ndarray
    ) -> None:
        """A warp accesses shared memory through the generic proxy: `nbytes` at every offset, by the lane beside it."""
        space = _SPACE_SHARED | cta.rank << 8
        tick = int(warp.who[shadow.TICK]) + int(warp.words[CONVERGED])
        starts, by = np.asarray(offsets, np.int64), np.asarray(lanes, np.int64)
        base, who = cta.clocks.shadow.ctypes.data, warp.who.ctypes.data
        shadow.touch_rows(base, starts, by, nbytes, who, tick, warp.instr, write, space)

    def tmem_access(
        self,
        warp: MachineWarp,
        cta: CTA,
        lanes: np.ndarray,
        column: int,
        columns: int,
        *,
        write: bool,
        used_at: int | None = None,
    ) -> None:
        """tcgen05.ld or st of a warp: asynchronous until tmem_wait. `used_at`: the instruction that first reads what
        was loaded; a warp that has come past it has its values, wait or no wait (unless `strict`)."""
        what = self._as_channel(warp, "tcgen05.st" if write else "tcgen05.ld")
        self._tmem(cta, lanes, column, columns, what, write)
        if used_at is not None and not self.strict:
            loads = warp.groups.setdefault("tmem loads", [])
            loads.append((warp.instr, used_at, self.channel(warp, "tcgen05.ld").tick))

    def released(self, warp: MachineWarp) -> Clock:
        if loads := warp.groups.get("tmem loads"):
            here = warp.instr
            for at, used_at, tick in loads:
                if used_at < here or here <= at:  # past the use; or back before the load, in a loop
                    self.wait_channel(warp, "tcgen05.ld", tick)
            warp.groups["tmem loads"] = [load for load in loads if load[0] < here <= load[1]]
        return super().released(warp)

    def tmem_wait(self, warp: MachineWarp, store: bool) -> None:
        """tcgen05.wait::st or ::ld."""
        self.wait_channel(warp, "tcgen05.st" if store else "tcgen05.ld")

    def tmem_allocated(self, cta: CTA, column: int, columns: int) -> None:
        """Columns were allocated: nothing has written them."""
        cta.clocks.tmem.reshape(-1, TMEM_COLUMNS, RECORD)[:, column : column + columns] = 0

    def wgmma_reads(self, warp: MachineWarp, cta: CTA, addresses: list[np.ndarray], nbytes: int) -> None:
        """A warp's share of a wgmma reads its operands through the async proxy; wgmma_commit gives it a group."""
        what = self._as_channel(warp, "wgmma", self.channel(warp, "wgmma").tick + 1)
        for part in addresses:
            self._shared(cta, part, nbytes, what, False)

    def wgmma_commit(self, warp: MachineWarp, group: int) -> None:
        self.channel(warp, "wgmma").tick = group

    def wgmma_wait(self, warp: MachineWarp, group: int) -> None:
        """Groups up to this number are complete."""
        self.wait_channel(warp, "wgmma", group)

    def _as_channel(self, warp: MachineWarp, name: str, tick: int | None = None) -> int:
        """Accesses are those of an operation that the warp issues now on a channel of its own."""
        channel = self.channel(warp, name)
        if tick is None:
            channel.tick += 1
            tick = channel.tick
        self.identify(self.who, self.released(warp), channel.actor, tick)
        return warp.instr | (tick & 31) << shadow.LANE_SHIFT | shadow.ASYNC << shadow.KIND_SHIFT

    # Findings

    def drain(self, cta: CTA) -> None:
        """Turn what native code has found since the last time into findings."""
        count = int(self.found[0])
        while self.drained < count:
            at = shadow.LIST_HEADER + shadow.FINDING_WORDS * self.drained
            self.drained += 1
            finding = explain(self, self.found[at : at + shadow.FINDING_WORDS].tolist(), cta)
            if finding.kind in self.chosen:
                self.machine.report.enter(finding)


def _what(op: AsyncOp, atomic: bool, generic: bool) -> int:
    kind = shadow.ASYNC_ATOMIC if atomic else shadow.ASYNC
    if generic:
        kind = shadow.STRONG
    return int(op.instr | (op.order & 31) << shadow.LANE_SHIFT | kind << shadow.KIND_SHIFT)
