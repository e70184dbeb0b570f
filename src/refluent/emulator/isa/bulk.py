"""Asynchronous copies that need no tensor map: cp.async.bulk, cp.reduce.async.bulk, st.async, red.async.

Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator.isa import CONTINUE, AsyncOp, Handler, Modifiers, Outcome, handles
from refluent.emulator.isa.arithmetic import Combine, combine, combine_named, element_bytes, type_bytes
from refluent.emulator.isa.atomics import read_data, registers
from refluent.emulator.isa.groups import bulk_groups, wait_bulk
from refluent.emulator.isa.mbarrier import MBarrier, active, complete_tx, completion, split
from refluent.emulator.ptx import Addr, Imm, Instruction, Kernel, Operand, Reg
from refluent.emulator.state import LANES

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def integers(warp: MachineWarp, operand: Operand) -> list[int]:
    """A lane's value each, of a register or immediate."""
    if isinstance(operand, Imm):
        return [operand.value] * LANES
    assert isinstance(operand, Reg)
    values: list[int] = warp.view(operand).tolist()
    return values


# cp.async.bulk and cp.reduce.async.bulk


def add_to_group(warp: MachineWarp, op: AsyncOp) -> None:
    """An operation that completes by bulk group belongs to the group that its lane commits next."""
    lane = (warp.event_mask & -warp.event_mask).bit_length() - 1
    bulk_groups(warp, lane).open.append(op)


def reduce_elements(target: np.ndarray, values: np.ndarray, operation: str, element: str) -> np.ndarray:
    """What a reduction leaves in global memory: raw bits of `element` type, any shape."""
    function = _element_reduction(operation, element)
    old = np.ascontiguousarray(target)
    return function(old, np.ascontiguousarray(values)).reshape(target.shape)


@lru_cache(maxsize=64)
def _element_reduction(operation: str, element: str) -> Combine:
    kind = "f32" if element in ("f32.ftz", "tf32") else element
    if operation in ("and", "or", "xor"):
        kind = f"b{8 * type_bytes(kind)}"
    return combine_named(operation, kind, flushing=True)


class BulkForm:
    """The modifiers that bulk copies and reductions share: where from, where to, how they complete."""

    def __init__(self, instr: Instruction, kernel: Kernel, mods: Modifiers) -> None:
        self.target = mods.choose(("shared::cluster", "global", "shared::cta"))
        source_names = ("global", "shared::cta") if self.target != "global" else ("shared::cta",)
        self.source = mods.choose(source_names)
        self.by_barrier = mods.choose(("mbarrier::complete_tx::bytes", "bulk_group")).startswith("mbarrier")
        self.multicast = mods.flag("multicast::cluster")
        hint = mods.flag("L2::cache_hint")
        self.byte_mask = mods.flag("cp_mask")
        if self.by_barrier == (self.target == "global"):
            raise mods.refuse("copies to global memory complete by bulk_group, others by mbarrier")
        operands = list(instr.operands)
        self.to, self.origin, self.size = operands[:3]
        rest = operands[3:]
        self.barrier = rest.pop(0) if self.by_barrier else None
        self.ctas = rest.pop(0) if self.multicast else None
        if hint:
            rest.pop(0)
        self.bytes = rest.pop(0) if self.byte_mask else None
        if rest:
            raise mods.refuse("has more operands than expected")


class BulkMove:
    """One lane's bulk copy or reduction."""

    def __init__(
        self, machine: Machine, warp: MachineWarp, form: BulkForm, lane: int, reduction: Combine | None
    ) -> None:
        self.machine, self.warp, self.form, self.reduction = machine, warp, form, reduction
        self.nbytes = integers(warp, form.size)[lane]
        self.item = 1
        self.source = self._place(form.source, form.origin, lane)
        self.target = self._place(form.target, form.to, lane)
        if self.nbytes % 16 or self.nbytes <= 0 or self.source[1] % 16 or self.target[1] % 16:
            raise machine.fault(
                warp,
                f"bulk copy of {self.nbytes} bytes from 0x{self.source[1]:x} to 0x{self.target[1]:x}: size and both "
                "addresses must be multiples of 16",
            )
        self.targets: list[CTA] = []
        self.barrier: MBarrier | None = None
        if form.by_barrier:
            assert isinstance(form.barrier, Addr)
            self.barrier = completion(machine, warp, int(warp.locate(form.barrier)[lane]))
            assert self.target[0] is not None
            self.targets = [self.target[0]]
            if form.ctas is not None:
                ranks = integers(warp, form.ctas)[lane]
                self.targets = [cta for cta in warp.cta.cluster.ctas if ranks >> cta.rank & 1]
            elif self.barrier.cta is not self.target[0]:
                raise machine.fault(warp, f"completes on {self.barrier.name}, but writes {self.target[0].name}")
        self.byte_mask = integers(warp, form.bytes)[lane] if form.bytes is not None else 0xFFFF
        self.data = np.empty(0, np.uint8)
        self.op: AsyncOp

    def _place(self, space: str, operand: Operand, lane: int) -> tuple[CTA | None, int]:
        assert isinstance(operand, Addr)
        address = int(self.warp.locate(operand)[lane])
        if space == "global":
            self.machine.memory.find(address, max(self.nbytes, 1))
            return None, address
        return split(self.machine, self.warp, address, self.nbytes)

    def submit(self, kind: str) -> AsyncOp:
        machine, warp = self.machine, self.warp
        stored = self.form.target == "global"
        channel = None
        if self.barrier is not None:
            channel = machine.check.channel_of(self.barrier.cta, self.barrier.offset)
        self.op = AsyncOp(
            kind,
            warp.cta,
            warp,
            warp.instr,
            self.perform,
            self.describe,
            read=self.read if stored else None,
            nbytes=self.nbytes,
            row="bulk",
            channel=channel,
            source_channel=machine.check.channel(warp, "bulk source") if stored else None,
        )
        return machine.submit(self.op)

    def describe(self) -> str:
        target = "global memory" if self.form.target == "global" else "shared memory"
        return f"bulk copy of {self.warp.name}, {self.nbytes} bytes to {target} 0x{self.target[1]:x}"

    def read(self) -> None:
        cta, start = self.source
        if cta is not None:
            if self.machine.check.enabled:
                self.machine.check.async_shared(self.op, cta, start, self.nbytes, write=False)
            self.data = cta.shared[start : start + self.nbytes].copy()
        else:
            if self.machine.check.enabled:
                self.machine.check.async_global(self.op, start, self.nbytes, write=False)
            self.data = self.machine.memory.view(start, self.nbytes)

    def perform(self) -> None:
        if self.op.read is None:
            self.read()
        if self.barrier is None:
            view = self.machine.memory.writable(self.target[1], self.nbytes)
            self._check(None, None)
            self._store(view)
            return
        for cta in self.targets:
            channel = self.machine.check.channel_of(cta, self.barrier.offset)
            self._check(cta, channel)
            self._store(cta.shared[self.target[1] : self.target[1] + self.nbytes])
            complete_tx(self.machine, cta, self.barrier.offset, self.nbytes, self.op)

    def _check(self, cta: CTA | None, channel: Any) -> None:
        check, atomic = self.machine.check, self.reduction is not None
        if not check.enabled:
            return
        for write in (False, True) if atomic else (True,):
            if cta is None:
                check.async_global(self.op, self.target[1], self.nbytes, write=write, atomic=atomic)
            else:
                check.async_shared(
                    self.op, cta, self.target[1], self.nbytes, write=write, atomic=atomic, channel=channel
                )

    def _store(self, view: np.ndarray) -> None:
        if self.reduction is not None:
            dtype = _UNSIGNED[self.item]
            typed = view.view(dtype)
            typed[:] = self.reduction(typed, np.ascontiguousarray(self.data).view(dtype))
        elif self.byte_mask == 0xFFFF:
            view[:] = self.data
        else:
            chosen = np.array([self.byte_mask >> i & 1 for i in range(16)], bool)
            np.copyto(view.reshape(-1, 16), self.data.reshape(-1, 16), where=chosen)


@handles("cp.async.bulk")
def _prepare_bulk(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=2)
    form = BulkForm(instr, kernel, mods)
    mods.done()
    return _bulk_handler("bulk load" if form.by_barrier else "bulk store", form, None, 1)


@handles("cp.reduce.async.bulk")
def _prepare_bulk_reduction(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=3)
    form = BulkForm(instr, kernel, mods)
    op = mods.choose(("add", "min", "max", "inc", "dec", "and", "or", "xor"))
    mods.flag("noftz")
    kind = mods.left.pop() if mods.left else ""
    mods.done()
    item = element_bytes(kind, mods)
    return _bulk_handler("bulk reduce", form, combine(op, kind, mods, flushing=form.target == "global"), item)


def _bulk_handler(kind: str, form: BulkForm, reduction: Combine | None, item: int) -> Handler:
    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        for lane in active(mask):
            move = BulkMove(machine, warp, form, lane, reduction)
            move.item = item
            op = move.submit(kind)
            if not form.by_barrier:
                bulk_groups(warp, lane).open.append(op)
        return CONTINUE

    return handler


@handles("cp.async.bulk.commit_group")
def _prepare_bulk_commit(instr: Instruction, kernel: Kernel) -> Handler:
    Modifiers(instr, kernel, skip=3).done()

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        for lane in active(mask):
            bulk_groups(warp, lane).commit()
        return CONTINUE

    return handler


@handles("cp.async.bulk.wait_group")
def _prepare_bulk_wait(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=3)
    read = mods.flag("read")
    mods.done()
    count = instr.operands[0]
    if not isinstance(count, Imm):
        raise mods.refuse("needs an immediate")
    keep = count.value

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        for lane in active(mask):
            if lane in warp.groups.get("bulk", ()):
                outcome = wait_bulk(machine, warp, lane, keep, read)
                if outcome is not CONTINUE:
                    return outcome
        return CONTINUE

    return handler


# Asynchronous stores to the shared memory of the cluster


@handles("st.async", "red.async")
def _prepare_async_store(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    mods.choose(("weak", "relaxed"), "")
    mods.choose(("cluster",), "")
    mods.choose(("shared::cluster",), "generic")
    mods.choose(("mbarrier::complete_tx::bytes",))
    op_name = mods.choose(("add", "min", "max", "inc", "dec", "and", "or", "xor")) if instr.opcode == "red" else ""
    count = {"v2": 2, "v4": 4}.get(mods.choose(("v2", "v4"), ""), 1)
    kind = mods.left.pop() if mods.left else ""
    mods.done()
    item = element_bytes(kind, mods)
    reduction = combine(op_name, kind, mods) if op_name else None
    target, source, barrier_address = instr.operands
    assert isinstance(target, Addr)
    assert isinstance(barrier_address, Addr)
    nbytes = item * count

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        data = read_data(warp, registers(source), item)
        targets, barriers = warp.locate(target).tolist(), warp.locate(barrier_address).tolist()
        for lane in active(mask):
            owner, offset = split(machine, warp, targets[lane], nbytes)
            if offset % nbytes:
                raise machine.fault(warp, f"shared memory 0x{offset:x} is not aligned to {nbytes} bytes")
            barrier = completion(machine, warp, barriers[lane])
            if barrier.cta is not owner:
                raise machine.fault(warp, f"completes on {barrier.name}, but writes {owner.name}")
            _submit_async_store(machine, warp, barrier, offset, data[:, lane].copy(), reduction)
        return CONTINUE

    return handler


def _submit_async_store(
    machine: Machine, warp: MachineWarp, barrier: MBarrier, offset: int, values: np.ndarray, reduction: Combine | None
) -> None:
    owner, nbytes = barrier.cta, values.nbytes

    def perform() -> None:
        if machine.check.enabled:
            machine.check.async_shared(
                op, owner, offset, nbytes, write=True, atomic=reduction is not None, generic=True
            )
        view = owner.shared[offset : offset + nbytes].view(values.dtype)
        view[:] = values if reduction is None else reduction(view, values)
        complete_tx(machine, owner, barrier.offset, nbytes, op)

    channel = machine.check.channel_of(owner, barrier.offset)
    text = f"asynchronous store of {warp.name} to shared memory 0x{offset:x} of {owner.name}"
    op = AsyncOp(
        "st.async", warp.cta, warp, warp.instr, perform, lambda: text, nbytes=nbytes, row="bulk", channel=channel
    )
    machine.submit(op)


# Hints


@handles("prefetch", "prefetchu", "cp.async.bulk.prefetch", "discard", "applypriority")
def _prepare_hint(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    for names in (
        ("async",),
        ("bulk",),
        ("prefetch",),
        ("L2",),
        ("param", "const"),
        ("global", "local"),
        ("tensormap",),
    ):
        mods.choose(names, "")
    mods.choose(("L1", "L2", "L2::evict_last", "L2::evict_normal", "L2::cache_hint"), "")
    mods.done()

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        return CONTINUE

    return handler
