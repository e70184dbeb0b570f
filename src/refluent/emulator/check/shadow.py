"""Shadow memory: who wrote and who read each granule last, and what that means for the next access.

A granule (2 bytes of global or shared memory, 16 lanes x 1 column of tensor memory) has a record of 64 bytes: the
last write (actor, tick, what), up to four reads likewise, and which of its bytes were ever written. An access that
conflicts with one in the record is a race unless the accessor's clock has seen that actor's tick. This is FastTrack
(Flanagan and Freund, PLDI 2009) with several read slots: a read that the new one has seen is replaced by it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from refluent.emulator.native import load32, load64, load_i32, store32, store64

# The accessor, an int64 record: fields by index.
ACTOR, TICK, CLOCKS, STRIDE, REMOTE, CLUSTER_BASE, FLOOR, LAUNCH_BASE, CAPACITY, CLUSTERS, FINDINGS = range(11)
# Of a warp only: its tick at the last convergence that Python saw, and how many native ones there had been by then.
LANE_BASE, LANE_SEEN = 11, 12
WHO_WORDS = 13

# Rows of a clock: what has happened before; which generic writes to shared, to global memory are also fenced for the
# async proxy; which mbarrier initialisations are visible to the async proxy and to the cluster.
BEFORE, FENCED_SHARED, FENCED_GLOBAL, INITIALISED = range(4)
ROWS = 4

# What an access was: bits of a record's third word.
INSTR_BITS, LANE_SHIFT, KIND_SHIFT, BYTES_SHIFT = 20, 20, 26, 29
INSTR_MASK = (1 << INSTR_BITS) - 1
WEAK, STRONG, ASYNC, ASYNC_ATOMIC = range(4)  # kinds: ordinary; atomic or with memory order; async proxy; async reduce
MANY_LANES = 32
ALL_BYTES = 3

# A record.
WRITE, READS, READ_SLOTS, SLOT, WRITTEN = 0, 12, 4, 12, 60
OBJECT = 4  # bit of WRITTEN: the granule is part of a live mbarrier

# Kinds of finding and their record in the list.
WRITE_WRITE, READ_AFTER_WRITE, WRITE_AFTER_READ, NO_FENCE, UNINITIALISED, LANES, DATA_IN_OBJECT = range(1, 8)
REWRITE = 8  # a race of writes in which both write the same value
UNORDERED = 9  # asynchronous reductions: no race, but their order decides how the sum is rounded
FINDING_WORDS = 9  # kind, address, actor, what, tick, other actor, other what, other tick, space
FINDING_CAPACITY = 2048
LIST_HEADER = 2  # words before the first finding: count, capacity


def finding_list() -> np.ndarray:
    """An empty list that native code appends to."""
    words = np.zeros(LIST_HEADER + FINDING_WORDS * FINDING_CAPACITY, np.int64)
    words[1] = FINDING_CAPACITY
    return words


@njit(cache=True, inline="always")
def _word(who: int, index: int) -> int:
    return load64(who + 8 * index)


@njit(cache=True)
def ordered(who: int, actor: int, tick: int, row: int) -> bool:
    """Whether the accessor's clock (this row of it) has seen the actor's tick."""
    if actor < _word(who, FLOOR):
        return True
    local = actor - _word(who, CLUSTER_BASE)
    if 0 <= local < _word(who, CAPACITY):
        return load_i32(_word(who, CLOCKS) + row * _word(who, STRIDE) + 4 * local) >= tick
    remote = _word(who, REMOTE)
    relative = actor - _word(who, LAUNCH_BASE)
    if remote == 0 or relative < 0:
        return False
    capacity = _word(who, CAPACITY)
    cluster = relative // capacity
    if cluster >= _word(who, CLUSTERS):
        return False
    clocks = load64(remote + 8 * cluster)
    if clocks == 0:
        return False
    return load_i32(clocks + row * _word(who, STRIDE) + 4 * (relative - cluster * capacity)) >= tick


@njit(cache=True)
def report(
    who: int, kind: int, address: int, what: int, tick: int, actor: int, other: int, other_tick: int, space: int
) -> None:
    """Append a finding unless this pair of instructions has one of its kind in this launch."""
    found, launch = _word(who, FINDINGS), _word(who, LAUNCH_BASE)
    count = load64(found)
    instr, other_instr = what & INSTR_MASK, other & INSTR_MASK
    for i in range(count):
        at = found + 8 * (LIST_HEADER + FINDING_WORDS * i)
        if (
            load64(at) == kind
            and load64(at + 16) >= launch
            and (load64(at + 24) & INSTR_MASK) == instr
            and (load64(at + 48) & INSTR_MASK) == other_instr
        ):
            return
    if count >= load64(found + 8):
        return
    at = found + 8 * (LIST_HEADER + FINDING_WORDS * count)
    store64(at, kind)
    store64(at + 8, address)
    store64(at + 16, _word(who, ACTOR))
    store64(at + 24, what)
    store64(at + 32, tick)
    store64(at + 40, actor)
    store64(at + 48, other)
    store64(at + 56, other_tick)
    store64(at + 64, space)
    store64(found, count + 1)


@njit(cache=True)
def _clash(who: int, tick: int, what: int, actor: int, other: int, other_tick: int) -> int:
    """0 when the access is ordered after the recorded one or both are atomic; 1 for a race; 2 for one between lanes."""
    kind, other_kind = (what >> KIND_SHIFT) & 7, (other >> KIND_SHIFT) & 7
    if (kind & 1) == 1 and (other_kind & 1) == 1:
        return 0
    if ((what >> BYTES_SHIFT) & (other >> BYTES_SHIFT) & ALL_BYTES) == 0:
        return 0
    if actor == _word(who, ACTOR):
        lane, other_lane = (what >> LANE_SHIFT) & 63, (other >> LANE_SHIFT) & 63
        if kind < ASYNC:
            converged = tick - _word(who, TICK)
            since = tick if converged > _word(who, LANE_SEEN) else _word(who, LANE_BASE) + converged
            return 2 if lane != other_lane and other_tick >= since else 0
        if other_tick == tick and lane == other_lane and (what & INSTR_MASK) == (other & INSTR_MASK):
            return 0  # one operation's own accesses
    return 0 if ordered(who, actor, other_tick, BEFORE) else 1


@njit(cache=True)
def touch(
    record: int, who: int, tick: int, what: int, write: bool, fresh: bool, row: int, address: int, space: int
) -> None:
    """One access to one granule: report what is wrong with it, then enter it into the record.

    `fresh`: reading bytes that nothing wrote is a finding. `row`: the clock row of fenced generic writes here.
    """
    written = load32(record + WRITTEN)
    if written & OBJECT:
        report(who, DATA_IN_OBJECT, address, what, tick, 0, 0, 0, space)
    actor = load32(record)
    if actor != 0:
        other, other_tick = load32(record + 8), load32(record + 4)
        clash = _clash(who, tick, what, actor, other, other_tick)
        if clash == 1:
            report(
                who, WRITE_WRITE if write else READ_AFTER_WRITE, address, what, tick, actor, other, other_tick, space
            )
        elif clash == 2:
            report(who, LANES, address, what, tick, actor, other, other_tick, space)
        elif ((what >> KIND_SHIFT) & 7) == ASYNC_ATOMIC and ((other >> KIND_SHIFT) & 7) == ASYNC_ATOMIC:
            if (actor != _word(who, ACTOR) or other_tick != tick) and not ordered(who, actor, other_tick, BEFORE):
                report(who, UNORDERED, address, what, tick, actor, other, other_tick, space)
        elif ((what >> KIND_SHIFT) & 7) >= ASYNC and ((other >> KIND_SHIFT) & 7) < ASYNC:
            if not ordered(who, actor, other_tick, row):
                report(who, NO_FENCE, address, what, tick, actor, other, other_tick, space)
    bytes_touched = (what >> BYTES_SHIFT) & ALL_BYTES
    if write:
        _check_reads(record, who, tick, what, address, space)
        store32(record, _word(who, ACTOR))
        store32(record + 4, tick)
        store32(record + 8, what)
        if written & bytes_touched != bytes_touched:
            store32(record + WRITTEN, written | bytes_touched)
    else:
        if fresh and (written & bytes_touched) != bytes_touched:
            report(who, UNINITIALISED, address, what, tick, 0, 0, 0, space)
        _enter_read(record, who, tick, what)


@njit(cache=True)
def _check_reads(record: int, who: int, tick: int, what: int, address: int, space: int) -> None:
    for i in range(READ_SLOTS):
        slot = record + READS + SLOT * i
        actor = load32(slot)
        if actor == 0:
            return
        other, other_tick = load32(slot + 8), load32(slot + 4)
        clash = _clash(who, tick, what, actor, other, other_tick)
        if clash == 1:
            report(who, WRITE_AFTER_READ, address, what, tick, actor, other, other_tick, space)
        elif clash == 2:
            report(who, LANES, address, what, tick, actor, other, other_tick, space)
        store32(slot, 0)


@njit(cache=True)
def _enter_read(record: int, who: int, tick: int, what: int) -> None:
    me = _word(who, ACTOR)
    target = -1
    for i in range(READ_SLOTS):
        slot = record + READS + SLOT * i
        actor = load32(slot)
        if actor == 0:
            if target < 0:
                target = i
            break
        if actor == me:
            target = i
            other = load32(slot + 8)
            what |= other & (ALL_BYTES << BYTES_SHIFT)
            if load32(slot + 4) == tick and ((what ^ other) >> LANE_SHIFT) & 63:
                what |= MANY_LANES << LANE_SHIFT
            break
        if target < 0 and ordered(who, actor, load32(slot + 4), BEFORE):
            target = i
    if target < 0:
        target = me & (READ_SLOTS - 1)  # all are concurrent: the oldest knowledge of one reader is given up
    slot = record + READS + SLOT * target
    store32(slot, me)
    store32(slot + 4, tick)
    store32(slot + 8, what)


@njit(cache=True)
def touch_spans(
    shadow: int,
    origin: int,
    starts: np.ndarray,
    nbytes: int,
    who: int,
    what: int,
    write: bool,
    fresh: bool,
    row: int,
    space: int,
) -> None:
    """Accesses to [start, start + nbytes) for every start: `shadow` holds the records from address `origin` on."""
    tick = _word(who, TICK)
    for i in range(len(starts)):
        first = starts[i] - origin
        last = first + nbytes
        granule = first >> 1
        while 2 * granule < last:
            touched = ALL_BYTES
            if 2 * granule < first:
                touched = 2
            if 2 * granule + 1 >= last:
                touched &= 1
            touch(
                shadow + 64 * granule,
                who,
                tick,
                what | (touched << BYTES_SHIFT),
                write,
                fresh,
                row,
                origin + 2 * granule,
                space,
            )
            granule += 1


@njit(cache=True)
def touch_rows(
    shadow: int,
    starts: np.ndarray,
    lanes: np.ndarray,
    nbytes: int,
    who: int,
    tick: int,
    instr: int,
    write: bool,
    space: int,
) -> None:
    """Generic accesses of a warp's lanes to shared memory: `nbytes` (even) at starts[i] by lanes[i]."""
    for i in range(len(starts)):
        what = instr | (lanes[i] << LANE_SHIFT) | (WEAK << KIND_SHIFT) | (ALL_BYTES << BYTES_SHIFT)
        for at in range(starts[i], starts[i] + nbytes, 2):
            touch(shadow + 32 * at, who, tick, what, write, True, BEFORE, at, space)


@njit(cache=True)
def touch_cells(shadow: int, cells: np.ndarray, who: int, what: int, write: bool, space: int) -> None:
    """Accesses to granules by index (tensor memory)."""
    tick = _word(who, TICK)
    for i in range(len(cells)):
        record = shadow + 64 * cells[i]
        touch(record, who, tick, what | (ALL_BYTES << BYTES_SHIFT), write, True, BEFORE, cells[i], space)


@njit(cache=True)
def join(target: int, source: int, width: int, stride: int, rows: int) -> None:
    """target := max(target, source), the first `rows` rows."""
    for row in range(rows):
        at, other = target + row * stride, source + row * stride
        for i in range(width):
            value = load_i32(other + 4 * i)
            if value > load_i32(at + 4 * i):
                store32(at + 4 * i, value)


@njit(cache=True)
def copy(target: int, source: int, width: int, stride: int) -> None:
    """target := source."""
    for row in range(ROWS):
        at, other = target + row * stride, source + row * stride
        for i in range(width):
            store32(at + 4 * i, load_i32(other + 4 * i))


@njit(cache=True)
def raise_row(target: int, row: int, width: int, stride: int) -> None:
    """A fence: this row := what has happened before."""
    for i in range(width):
        store32(target + row * stride + 4 * i, load_i32(target + 4 * i))


@njit(cache=True)
def mark(shadow: int, granule: int, count: int, on: bool) -> None:
    """Set or clear the mark of a live mbarrier."""
    for i in range(count):
        at = shadow + 64 * (granule + i) + WRITTEN
        written = load32(at)
        store32(at, written | OBJECT if on else written & ~OBJECT)
