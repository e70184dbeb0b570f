"""From the numbers that native code leaves to a finding in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refluent.emulator import state
from refluent.emulator.check import shadow
from refluent.emulator.ptx import Kernel
from refluent.emulator.report import Finding, place

if TYPE_CHECKING:
    from refluent.emulator.check.order import Order
    from refluent.emulator.cta import CTA

# Kinds that `checks` may name. Not among "all": "order", for kernels that promise the same bits in every run, and
# "cp.async", which takes what cp.async writes for writes of the generic proxy: the manual leaves open whether they are.
KINDS = ("race", "rewrite", "lanes", "proxy", "uninitialised", "object", "order", "cp.async")
ON_DEMAND = ("order", "cp.async")
_KIND = {
    shadow.WRITE_WRITE: "race",
    shadow.READ_AFTER_WRITE: "race",
    shadow.WRITE_AFTER_READ: "race",
    shadow.LANES: "lanes",
    shadow.NO_FENCE: "proxy",
    shadow.UNINITIALISED: "uninitialised",
    shadow.DATA_IN_OBJECT: "object",
    shadow.REWRITE: "rewrite",
    shadow.UNORDERED: "order",
}
_TEXT = {
    shadow.WRITE_WRITE: "{me} writes {where}, not ordered after the write by {other}",
    shadow.REWRITE: "{me} writes to {where} the value that it holds, not ordered after the write by {other}",
    shadow.UNORDERED: "{me} adds to {where}, not ordered after the reduction by {other}: which of them comes first "
    "decides how the result is rounded",
    shadow.READ_AFTER_WRITE: "{me} reads {where}, not ordered after the write by {other}",
    shadow.WRITE_AFTER_READ: "{me} overwrites {where}, not ordered after the read by {other}",
    shadow.LANES: "{me} accesses {where}, as does lane {lane} of the same warp, without a convergent "
    "instruction between them: {other}",
    shadow.NO_FENCE: "{me} accesses {where} through the async proxy: the write by {other} happened before, but no "
    "fence.proxy.async orders it for that proxy",
    shadow.UNINITIALISED: "{me} reads {where}, which nothing has written",
    shadow.DATA_IN_OBJECT: "{me} accesses {where}, which is part of a live mbarrier",
}


def explain(order: Order, words: list[int], cta: CTA) -> Finding:
    """The finding of one record of the list."""
    kind, address, actor, what, _tick, other_actor, other_what, _other_tick, space = words
    instr, other_instr = what & shadow.INSTR_MASK, other_what & shadow.INSTR_MASK
    launch = order.launch_of(actor)
    me = f"{_who(order, actor, what)} at {place(launch.kernel, instr)}"
    other, places = "", [(launch.kernel, instr)]
    if other_actor:
        earlier = order.launch_of(other_actor)
        other = f"{_who(order, other_actor, other_what)} at {place(earlier.kernel, other_instr)}"
        if earlier is not launch:
            other += (
                f" in the {'earlier' if earlier.clocks.base < launch.clocks.base else 'later'} launch of {earlier.name}"
            )
        places.append((earlier.kernel, other_instr))
    where = _where(order, address, space)
    lane = (other_what >> shadow.LANE_SHIFT) & 63
    lane_text = "another" if lane == shadow.MANY_LANES else str(lane)
    text = _TEXT[kind].format(me=me, other=other, where=where, lane=lane_text)
    name = _KIND[kind]
    if kind == shadow.NO_FENCE and earlier_copies(places):
        name = "cp.async"
    return Finding.make(name, text, launch, cta, places, addresses=(address, address + 2))


def earlier_copies(places: list[tuple[Kernel, int]]) -> bool:
    """Whether the earlier of two accesses is a cp.async."""
    kernel, instr = places[-1]
    found = kernel.instructions[instr]
    return found.opcode == "cp" and found.modifiers[:1] == ("async",) and "bulk" not in found.modifiers


def _who(order: Order, actor: int, what: int) -> str:
    launch = order.launch_of(actor)
    known = launch.clocks
    index, slot = divmod(actor - known.base, known.capacity)
    owners = known.spaces[index].owners
    owner = owners[slot] if slot < len(owners) else f"actor {slot}"
    kind = (what >> shadow.KIND_SHIFT) & 7
    if " warp " not in owner or kind >= shadow.ASYNC or " of " in owner:
        return owner
    lane = (what >> shadow.LANE_SHIFT) & 63
    return owner if lane == shadow.MANY_LANES else f"{owner} lane {lane}"


def _where(order: Order, address: int, space: int) -> str:
    base, rank = space & 0xFF, space >> 8
    if base == state.SHARED:
        return f"shared memory 0x{address:x} of the CTA of rank {rank}"
    if base == 9:
        return f"tensor memory lanes {address // 512 * 16}-{address // 512 * 16 + 15}, column {address % 512}"
    if base == 0:
        window = address >> 56
        if window == 0 and address < 1 << 32:
            return f"shared memory 0x{address & 0xFFFFFF:x} of the CTA of rank {address >> 24}"
        if window == 1:
            return f"shared memory 0x{address & 0xFFFFFF:x} of the CTA of rank {(address & 0xFFFFFFFF) >> 24}"
    return f"global memory 0x{address:x}{order.describe_address(address)}"
