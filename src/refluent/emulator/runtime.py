"""The memory runtime that compiled kernels call: bounds, alignment, shadow, copy, for one warp instruction."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from refluent.emulator import state
from refluent.emulator.check import shadow
from refluent.emulator.check.shadow import ALL_BYTES, BYTES_SHIFT, KIND_SHIFT, LANE_SHIFT, WEAK, touch
from refluent.emulator.footprint import note
from refluent.emulator.native import load8, load16, load32, load64, store8, store16, store32, store64

MAX_CLUSTER = 8

# What WarpState.cta points to, one a warp.
CONTEXT = np.dtype(
    [
        ("shared", "<i8", (MAX_CLUSTER,)),  # window of each CTA of the cluster, 0 once it has left
        ("shadow", "<i8", (MAX_CLUSTER,)),  # its shadow
        ("who", "<i8", (shadow.WHO_WORDS,)),
        ("pointers", "<i8", (32,)),  # scratch: where each lane's access lies
        ("records", "<i8", (32,)),  # scratch: its shadow, 0 for none
        ("fresh", "<i8", (32,)),  # scratch: whether an uninitialised read there is a finding
        ("header", "<i8"),  # GlobalMemory.header
        ("shared_end", "<i8"),
        ("rank", "<i8"),
        ("ranks", "<i8"),
        ("checks", "<i8"),
        ("fault_address", "<i8"),
        ("fault_lane", "<i8"),
        ("fault_space", "<i8"),
        ("written_bytes", "<i8"),
        ("read_bytes", "<i8"),
    ]
)

MISALIGNED, OUT_GLOBAL, OUT_SHARED, OUT_LOCAL, OUT_PARAM, CTA_GONE, READ_ONLY, WINDOW = range(
    state.FAULT_MEMORY, state.FAULT_MEMORY + 8
)
FAULT_TEXT = {
    MISALIGNED: "misaligned access",
    OUT_GLOBAL: "access outside the global memory handed in",
    OUT_SHARED: "access outside the CTA's shared memory",
    OUT_LOCAL: "access outside local memory",
    OUT_PARAM: "access outside the kernel's parameters",
    CTA_GONE: "access to the shared memory of a CTA that has exited",
    READ_ONLY: "write to read-only memory",
    WINDOW: "the address names another CTA's shared memory (or none), but the instruction says .shared::cta",
}


def _at(field: str) -> int:
    assert CONTEXT.fields is not None
    return int(CONTEXT.fields[field][1])


_SHARED, _SHADOW, _WHO, _POINTERS, _RECORDS, _FRESH = map(
    _at, ("shared", "shadow", "who", "pointers", "records", "fresh")
)
_HEADER, _SHARED_END, _RANK, _RANKS, _CHECKS = map(_at, ("header", "shared_end", "rank", "ranks", "checks"))
_FAULT_ADDRESS, _FAULT_LANE, _FAULT_SPACE = map(_at, ("fault_address", "fault_lane", "fault_space"))
_CTA, _LOCAL, _PARAMS = map(state.offset_of, ("cta", "local", "params"))
_LOCAL_SIZE, _PARAM_SIZE, _CONVERGED = map(state.offset_of, ("local_size", "param_size", "convergent"))
_GENERIC, _GLOBAL, _SHARED_CTA, _SHARED_CLUSTER, _LOCAL_SPACE, _PARAM = range(6)
_RANK_SHIFT, _START = state.CTA_RANK_SHIFT, state.SHARED_START
_OFFSET_MASK = (1 << state.CTA_RANK_SHIFT) - 1
_LOW56 = (1 << 56) - 1


@njit(cache=True)
def _global(context: int, address: int, nbytes: int, store: int, lane: int) -> int:
    header = load64(context + _HEADER)
    table, count, index = load64(header), load64(header + 8), load64(header + 16)
    if index >= count or address < load64(table + 32 * index) or address + nbytes > load64(table + 32 * index + 8):
        low, high = 0, count
        while low < high:
            middle = (low + high) >> 1
            if load64(table + 32 * middle) <= address:
                low = middle + 1
            else:
                high = middle
        if low == 0 or address + nbytes > load64(table + 32 * low - 24):
            return OUT_GLOBAL
        index = low - 1
        store64(header + 16, index)
    row = table + 32 * index
    flags = load64(row + 24)
    if store != 0 and (flags & 2) != 0:
        return READ_ONLY
    footprint = load64(header + 24)
    if footprint != 0:
        note(footprint, index, address - load64(row), nbytes, store != 0)
    store64(context + _POINTERS + 8 * lane, address)
    shadows = load64(row + 16)
    store64(context + _RECORDS + 8 * lane, 0 if shadows == 0 else shadows + 64 * ((address - load64(row)) >> 1))
    store64(context + _FRESH + 8 * lane, flags & 1)
    return 0


@njit(cache=True)
def _shared(context: int, address: int, nbytes: int, own: bool, lane: int) -> int:
    rank, offset = address >> _RANK_SHIFT, address & _OFFSET_MASK
    if own and rank != load64(context + _RANK):
        return WINDOW
    if rank < 0 or rank >= load64(context + _RANKS):
        return OUT_SHARED
    if offset < _START or offset + nbytes > load64(context + _SHARED_END):
        return OUT_SHARED
    window = load64(context + _SHARED + 8 * rank)
    if window == 0:
        return CTA_GONE
    store64(context + _POINTERS + 8 * lane, window + offset)
    shadows = load64(context + _SHADOW + 8 * rank)
    store64(context + _RECORDS + 8 * lane, 0 if shadows == 0 else shadows + 64 * (offset >> 1))
    store64(context + _FRESH + 8 * lane, 1)
    return 0


@njit(cache=True)
def _locate(warp: int, context: int, address: int, nbytes: int, space: int, store: int, lane: int) -> int:
    """Fault code, or 0 with the lane's pointer, shadow record and freshness in the context's scratch."""
    if address & (nbytes - 1):
        return MISALIGNED
    if space == _GENERIC:
        window = address >> 56
        if window == 0:
            return _global(context, address, nbytes, store, lane)
        if window == 1:
            return _shared(context, address & _LOW56, nbytes, False, lane)
        if window != 2:
            return OUT_GLOBAL
        address &= _LOW56
        space = _LOCAL_SPACE
    if space == _GLOBAL:
        return _global(context, address, nbytes, store, lane)
    if space in (_SHARED_CTA, _SHARED_CLUSTER):
        return _shared(context, address, nbytes, space == _SHARED_CTA, lane)
    store64(context + _RECORDS + 8 * lane, 0)
    if space == _LOCAL_SPACE:
        size = load32(warp + _LOCAL_SIZE)
        if address < 0 or address + nbytes > size:
            return OUT_LOCAL
        store64(context + _POINTERS + 8 * lane, load64(warp + _LOCAL) + lane * size + address)
        return 0
    params = load64(warp + _PARAMS)
    if address < params or address + nbytes > params + load32(warp + _PARAM_SIZE):
        return OUT_PARAM
    if store != 0:
        return READ_ONLY
    store64(context + _POINTERS + 8 * lane, address)
    return 0


@njit(cache=True)
def _copy(data: int, pointer: int, element: int, count: int, store: int, lane: int) -> None:
    for i in range(count):
        register, memory = data + (32 * i + lane) * element, pointer + i * element
        source, target = (register, memory) if store != 0 else (memory, register)
        if element == 4:
            store32(target, load32(source))
        elif element == 8:
            store64(target, load64(source))
        elif element == 2:
            store16(target, load16(source))
        else:
            store8(target, load8(source))


@njit(cache=True)
def _same_data(data: int, element: int, count: int, lane: int, other: int) -> bool:
    for i in range(count):
        for b in range(element):
            if load8(data + (32 * i + lane) * element + b) != load8(data + (32 * i + other) * element + b):
                return False
    return True


@njit(cache=True)
def _agreeing_store(
    record: int, context: int, tick: int, instr: int, data: int, element: int, count: int, lane: int
) -> bool:
    """Whether another lane of this very store wrote the granule with the same values: harmless."""
    if load32(record) != load64(context + _WHO) or load32(record + 4) != tick:
        return False
    what = load32(record + 8)
    if (what & shadow.INSTR_MASK) != instr:
        return False
    other = (what >> LANE_SHIFT) & 63
    return (
        other < lane
        and load64(context + _POINTERS + 8 * other) == load64(context + _POINTERS + 8 * lane)
        and _same_data(data, element, count, lane, other)
    )


@njit(cache=True)
def _mark_rewrite(context: int, who: int, found: int, data: int, element: int, count: int, lane: int) -> None:
    """The lane's store has led to findings: races of writes in which memory holds these very values are named so."""
    pointer = load64(context + _POINTERS + 8 * lane)
    for i in range(count):
        for b in range(element):
            if load8(data + (32 * i + lane) * element + b) != load8(pointer + i * element + b):
                return
    findings = load64(who + 8 * shadow.FINDINGS)
    for i in range(found, load64(findings)):
        at = findings + 8 * (shadow.LIST_HEADER + shadow.FINDING_WORDS * i)
        if load64(at) == shadow.WRITE_WRITE:
            store64(at, shadow.REWRITE)


@njit(cache=True)
def touch_lanes(
    warp: int, instr: int, mask: int, addresses: int, data: int, element: int, count: int, store: int, kind: int
) -> None:
    """Enter an access into the shadow; locate_lanes has filled the context's scratch. `data` may be 0."""
    context = load64(warp + _CTA)
    who = context + _WHO
    tick = load64(who + 8 * shadow.TICK) + load32(warp + _CONVERGED)
    nbytes = element * count
    for lane in range(32):
        if (mask >> lane) & 1 == 0:
            continue
        record = load64(context + _RECORDS + 8 * lane)
        if record == 0:
            continue
        address = load64(addresses + 8 * lane)
        fresh = load64(context + _FRESH + 8 * lane) != 0
        what = instr | (lane << LANE_SHIFT) | (kind << KIND_SHIFT)
        if store != 0 and data != 0 and _agreeing_store(record, context, tick, instr, data, element, count, lane):
            continue
        touched = ALL_BYTES if nbytes > 1 else 1 << (address & 1)
        found = load64(load64(who + 8 * shadow.FINDINGS))
        for granule in range((nbytes + 1) >> 1):
            touch(
                record + 64 * granule,
                who,
                tick,
                what | (touched << BYTES_SHIFT),
                store != 0,
                fresh,
                shadow.BEFORE,
                address + 2 * granule,
                0,
            )
        if store != 0 and data != 0 and found != load64(load64(who + 8 * shadow.FINDINGS)):
            _mark_rewrite(context, who, found, data, element, count, lane)


@njit(cache=True)
def locate_lanes(warp: int, mask: int, addresses: int, nbytes: int, space: int, store: int) -> int:
    """Fault code of a warp's access, or 0 with every lane located in the context's scratch."""
    context = load64(warp + _CTA)
    for lane in range(32):
        if (mask >> lane) & 1:
            address = load64(addresses + 8 * lane)
            code = _locate(warp, context, address, nbytes, space, store, lane)
            if code != 0:
                store64(context + _FAULT_ADDRESS, address)
                store64(context + _FAULT_LANE, lane)
                store64(context + _FAULT_SPACE, space)
                return code
    return 0


@njit(cache=True)
def _access(
    warp: int, instr: int, mask: int, addresses: int, data: int, element: int, count: int, space: int, store: int
) -> int:
    code = locate_lanes(warp, mask, addresses, element * count, space, store)
    if code != 0:
        return code
    context = load64(warp + _CTA)
    if load64(context + _CHECKS) != 0:
        touch_lanes(warp, instr, mask, addresses, data, element, count, store, WEAK)
    for lane in range(32):
        if (mask >> lane) & 1:
            _copy(data, load64(context + _POINTERS + 8 * lane), element, count, store, lane)
    return 0


@cfunc("int32(int64, int32, int32, int64, int64, int32, int32, int32, int32)", cache=True)
def mem_access(
    warp: int, instr: int, mask: int, addresses: int, data: int, element: int, count: int, space: int, store: int
) -> Any:
    """Load or store `count` elements of `element` bytes a lane; 0 or a fault code. No lane is touched on a fault."""
    return _access(warp, instr, mask & 0xFFFFFFFF, addresses, data, element, count, space, store)


MEM_ACCESS: int = mem_access.address


@njit(cache=True)
def copy_lanes(warp: int, mask: int, data: int, element: int, count: int, store: int) -> None:
    """Copy between memory that locate_lanes has found and `data`, (count, 32) elements."""
    context = load64(warp + _CTA)
    for lane in range(32):
        if (mask >> lane) & 1:
            _copy(data, load64(context + _POINTERS + 8 * lane), element, count, store, lane)


_SPACE_NAMES = ("generic", "global", "shared", "shared::cluster", "local", "param")


def fault_text(warp: Any) -> str:
    """What a warp's fault is, with the address for one of memory."""
    code = warp.fault
    if code not in FAULT_TEXT:
        return state.FAULT_TEXT.get(code, f"fault {code}")
    context = warp.context[0]
    address, lane = int(context["fault_address"]), int(context["fault_lane"])
    text = f"{FAULT_TEXT[code]}: lane {lane}, {_SPACE_NAMES[int(context['fault_space'])]} address 0x{address:x}"
    if code == OUT_GLOBAL:
        text += f", which {warp.cta.machine.memory.nearest(address)}"
    if code == OUT_SHARED:
        text += f"; the CTA has [0x{state.SHARED_START:x}, 0x{warp.cta.shared_end:x})"
    return text
