"""What a CTA must not leave behind when its last warp leaves the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine


def check_exit(machine: Machine, cta: CTA, last: MachineWarp) -> None:
    """Findings about barriers, bulk copies, registers and tensor memory at the end of a CTA."""
    if not machine.check.enabled:
        return
    for mbarrier in cta.mbarriers.values():
        text = mbarrier.at_exit()
        if text is not None:
            machine.finding("exit", text, cta, last, mbarrier.init_instr)
    for named in cta.named.values():
        if named.arrived:
            machine.finding("exit", f"left un-arrived: {named.explain()}", cta, *named.arrived[0])
    for warp in cta.warps:
        _check_warp(machine, cta, warp)
    if cta.tmem_state is not None:
        for column, (columns, instr) in cta.tmem_state.allocated.items():
            text = f"{columns} columns of tensor memory at {column} are never freed"
            machine.finding("tensor memory", text, cta, last, instr.index)


def _check_warp(machine: Machine, cta: CTA, warp: MachineWarp) -> None:
    for lane, groups in warp.groups.get("bulk", {}).items():
        for op in groups.unread():
            machine.finding(
                "exit",
                f"lane {lane} leaves without waiting until {op.describe()} has read shared memory",
                cta,
                warp,
                op.instr,
            )
    peers = [w for w in cta.warps[4 * warp.warpgroup : 4 * warp.warpgroup + 4] if w.setmaxnreg != warp.setmaxnreg]
    if peers and warp.setmaxnreg and not warp.index % 4:
        asked = "; ".join(f"warp {w.index}: {w.setmaxnreg}" for w in (warp, *peers))
        machine.finding("setmaxnreg", f"the warps of warpgroup {warp.warpgroup} executed different ones: {asked}", cta)
