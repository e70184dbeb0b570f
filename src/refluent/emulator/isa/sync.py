"""Fences and proxies, setmaxnreg, griddepcontrol, clusterlaunchcontrol, nanosleep.

Source: PTX ISA, "membar/fence", "setmaxnreg", "griddepcontrol", "clusterlaunchcontrol", "nanosleep".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator.check.order import scope_of
from refluent.emulator.isa import CONTINUE, YIELD, AsyncOp, Handler, Modifiers, Outcome, blocked, handles
from refluent.emulator.isa.barriers import check_convergent
from refluent.emulator.isa.mbarrier import complete_tx, completion, split
from refluent.emulator.ptx import Addr, Imm, Instruction, Kernel, Reg, Vec

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine

_SCOPES = ("cta", "cluster", "gpu", "sys")


def _nothing(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
    return CONTINUE


@handles("fence", "membar")
def _prepare_fence(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    if instr.opcode == "membar":
        if mods.flag("proxy"):
            return _prepare_proxy(instr, mods)
        mods.choose(("cta", "gl", "sys"))
        mods.done()
        return _thread_fence(scope_of(instr))
    if mods.flag("mbarrier_init"):
        mods.choose(("release",))
        mods.choose(("cluster",))
        mods.done()
        return _fence_init
    if mods.flag("proxy"):
        return _prepare_proxy(instr, mods)
    mods.choose(("acq_rel", "sc", "acquire", "release"), "acq_rel")
    mods.choose(("sync_restrict::shared::cta", "sync_restrict::shared::cluster"), "")
    mods.choose(_SCOPES)
    mods.done()
    return _thread_fence(scope_of(instr))


def _thread_fence(scope: int) -> Handler:
    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        machine.check.thread_fence(warp, scope)
        return CONTINUE

    return handler


def _fence_init(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
    machine.check.fence_init(warp)
    return CONTINUE


def _prepare_proxy(instr: Instruction, mods: Modifiers) -> Handler:
    if mods.flag("alias") or mods.take("tensormap") is not None:
        # A tensor map is read when its copy performs, so what the fence makes visible is visible anyway.
        for name in ("release", "acquire"):
            mods.flag(name)
        mods.choose(_SCOPES, "")
        mods.done()
        return _nothing
    if mods.take("async::generic") is not None:
        mods.choose(("acquire", "release"))
        mods.choose(("sync_restrict::shared::cluster", "sync_restrict::shared::cta"), "")
        mods.choose(_SCOPES, "")
        mods.done()
        return _proxy(True, False)
    mods.choose(("async",))
    space = mods.choose(("global", "shared", "shared::cta", "shared::cluster"), "all")
    mods.done()
    return _proxy(space != "global", space in ("global", "all"))


def _proxy(shared: bool, in_global: bool) -> Handler:
    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        machine.check.fence_proxy(warp, shared, in_global)
        return CONTINUE

    return handler


@handles("tensormap.cp_fenceproxy")
def _prepare_tensormap_copy(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    for names in (
        ("global",),
        ("shared::cta",),
        ("tensormap::generic",),
        ("release",),
        _SCOPES,
        ("sync",),
        ("aligned",),
    ):
        mods.choose(names)
    mods.done()
    target, source, size = instr.operands
    assert isinstance(target, Addr)
    assert isinstance(source, Addr)
    if not isinstance(size, Imm) or size.value != 128:
        raise mods.refuse("copies 128 bytes")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        lane = (mask & -mask).bit_length() - 1
        owner, offset = split(machine, warp, int(warp.locate(source)[lane]), 128)
        machine.memory.writable(int(warp.locate(target)[lane]), 128)[:] = owner.shared[offset : offset + 128]
        return CONTINUE

    return handler


@handles("setmaxnreg")
def _prepare_setmaxnreg(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    grows = mods.choose(("inc", "dec")) == "inc"
    for names in (("sync",), ("aligned",), ("u32",)):
        mods.choose(names)
    mods.done()
    operand = instr.operands[0]
    if not isinstance(operand, Imm) or not 24 <= operand.value <= 256 or operand.value % 8:
        raise mods.refuse("the register count must be a multiple of 8 from 24 to 256")
    count = operand.value

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        check_convergent(machine, cta, warp, mask)
        change = (count - warp.registers) * 32
        if grows and change > cta.pool:
            return blocked(cta.registers, lambda: f"{change} registers, of which the CTA's pool has {cta.pool}")
        if (change < 0) is grows and change:
            step = "fewer" if grows else "more"
            machine.finding("setmaxnreg", f"asks for {step} registers than the warp has ({warp.registers})", cta, warp)
        cta.pool -= change
        warp.registers = count
        warp.setmaxnreg.append(count)
        cta.launch.counts.setmaxnreg[warp.index] = count
        machine.wake(cta.registers)
        return CONTINUE

    return handler


@handles("griddepcontrol")
def _prepare_griddepcontrol(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    kind = mods.choose(("launch_dependents", "wait"))
    mods.done()

    def launch_dependents(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        if not cta.launch_dependents:
            cta.launch_dependents = True
            cta.launch.triggered += 1
        return CONTINUE

    def wait(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        before = cta.launch.after
        if before is not None and not before.completed:
            return blocked(before, lambda: f"the launch of {before.name} to be complete")
        machine.check.launch_edge(warp)
        return CONTINUE

    return launch_dependents if kind == "launch_dependents" else wait


@handles("nanosleep")
def _prepare_nanosleep(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    mods.choose(("u32",))
    mods.done()

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        return YIELD

    return handler


# The 16 bytes that try_cancel writes: x, y, z of the cancelled cluster's first CTA, then 1 if one was cancelled.


@handles("clusterlaunchcontrol.try_cancel")
def _prepare_try_cancel(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    mods.choose(("async",))
    mods.choose(("shared::cta",), "generic")
    mods.choose(("mbarrier::complete_tx::bytes",))
    everywhere = mods.flag("multicast::cluster::all")
    mods.choose(("b128",))
    mods.done()
    target, barrier_address = instr.operands
    assert isinstance(target, Addr)
    assert isinstance(barrier_address, Addr)

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        lane = (mask & -mask).bit_length() - 1
        _, offset = split(machine, warp, int(warp.locate(target)[lane]), 16)
        barrier = completion(machine, warp, int(warp.locate(barrier_address)[lane]))
        found = cta.launch.take_waiting()
        answer = np.array([*(found or (0, 0, 0)), int(found is not None)], np.uint32).view(np.uint8)
        ctas = cta.cluster.ctas if everywhere else [cta]

        def perform() -> None:
            for peer in ctas:
                channel = machine.check.channel_of(peer, barrier.offset)
                if machine.check.enabled:
                    machine.check.async_shared(op, peer, offset, 16, write=True, channel=channel)
                peer.shared[offset : offset + 16] = answer
                complete_tx(machine, peer, barrier.offset, 16, op)

        channel = machine.check.channel_of(barrier.cta, barrier.offset)
        op = AsyncOp(
            "try_cancel", cta, warp, warp.instr, perform, lambda: "clusterlaunchcontrol.try_cancel", channel=channel
        )
        machine.submit(op)
        return CONTINUE

    return handler


@handles("clusterlaunchcontrol.query_cancel")
def _prepare_query_cancel(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=1)
    kind = mods.choose(
        ("is_canceled", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z", "get_first_ctaid")
    )
    mods.choose(("pred",) if kind == "is_canceled" else ("b32", "v4"))
    mods.flag("b32")
    mods.choose(("b128",))
    mods.done()
    target, source = instr.operands
    assert isinstance(source, Reg)

    def words(warp: MachineWarp) -> list[np.ndarray]:
        low, high = warp.view(source)
        shift = np.uint64(32)
        return [(part >> by).astype(np.uint32) for part in (low, high) for by in (np.uint64(0), shift)]

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        values = words(warp)
        if kind == "is_canceled":
            assert isinstance(target, Reg)
            bits = np.flatnonzero(values[3])
            warp.set_predicate(target, sum(1 << int(lane) for lane in bits), mask)
        elif isinstance(target, Vec):
            for register, value in zip(target.items, values):
                if isinstance(register, Reg):
                    warp.set(register, value, mask)
        else:
            assert isinstance(target, Reg)
            warp.set(target, values["xyz".index(kind[-1])], mask)
        return CONTINUE

    return handler
