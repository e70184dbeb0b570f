"""Instructions across lanes: shuffles in every mode, votes, reductions, matches, elections; faults of absent lanes."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest

import ieee
from ieee import F32
from ptx_lab import Lab, compiled, put, register, run_until_event
from refluent.emulator import state

FULL = 0xFFFFFFFF
RNG = np.random.default_rng(0)


def word(count: int = 32) -> np.ndarray:
    return RNG.integers(0, 1 << 32, count, np.uint32)


def spread(mask: int) -> np.ndarray:
    return np.full(32, mask, np.uint32)


def shuffled(mode: str, value: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """PTX ISA, shfl.sync: the manual's pseudo-code."""
    out, flags = np.zeros(32, np.uint32), np.zeros(32, bool)
    for lane in range(32):
        by, clamp, segment = int(b[lane]) & 31, int(c[lane]) & 31, int(c[lane]) >> 8 & 31
        last = lane & segment | clamp & ~segment & 31
        first = lane & segment
        match mode:
            case "up":
                j = lane - by
                ok = j >= last
            case "down":
                j = lane + by
                ok = j <= last
            case "bfly":
                j = lane ^ by
                ok = j <= last
            case _:
                j = first | by & ~segment & 31
                ok = j <= last
        out[lane], flags[lane] = value[j if ok else lane], ok
    return out, flags


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode: str) -> None:
    lab, todo = Lab(), []
    for by in (0, 1, 2, 5, 16, 31, 33):
        for clamp in (0, 31, 0x1C03, 0x181F, 0x1000, 0x1018, 0x0F0F):
            value = word()
            text = f"shfl.sync.{mode}.b32 {{d}}|{{e}}, {{a}}, {by}, {clamp}, -1"
            wanted = shuffled(mode, value, spread(by), spread(clamp))
            todo.append((lab.add(text, (32, 1), value), wanted))
            text = f"shfl.sync.{mode}.b32 {{d}}|{{e}}, {{a}}, {{b}}, {{c}}, {{g}}"
            b, c = word() & np.uint32(31), spread(clamp)
            wanted = shuffled(mode, value, b, c)
            todo.append((lab.add(text, (32, 1), value, b, c, spread(FULL)), wanted))
    lab.run()
    for case, (values, flags) in todo:
        np.testing.assert_array_equal(case.results[0], values, err_msg=case.text)
        np.testing.assert_array_equal(case.results[1], flags, err_msg=case.text)


def groups(mask: int, members: np.ndarray) -> list[list[int]]:
    """For each lane the active lanes of its own member mask."""
    return [[j for j in range(32) if mask >> j & 1 and int(m) >> j & 1] for m in members]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("mask", [FULL, 0x0FF0F00F])
def test_vote_and_redux(mask: int, halves: bool) -> None:
    members = np.array([0xFFFF if i < 16 else 0xFFFF0000 for i in range(32)], np.uint32) if halves else spread(FULL)
    on = state.lanes(mask)
    lab, todo = Lab(), []
    for density in (0.0, 0.5, 1.0):
        p = RNG.random(32) < density
        yes = [[p[j] for j in group] for group in groups(mask, members)]
        for test, f in (("all", all), ("any", any), ("uni", lambda g: all(g) or not any(g))):
            todo.append((lab.add(f"vote.sync.{test}.pred {{d}}, {{a}}, {{b}}", 1, p, members), [f(g) for g in yes]))
        ballots = [sum(1 << j for j in group if p[j]) for group in groups(mask, members)]
        todo.append((lab.add("vote.sync.ballot.b32 {d}, {a}, {b}", 32, p, members), ballots))
    value = word()
    sets = [[int(value[j]) for j in group] for group in groups(mask, members)]
    signed = [[v - (1 << 32) if v >> 31 else v for v in group] for group in sets]
    for op, f in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        todo.append(
            (
                lab.add(f"redux.sync.{op}.b32 {{d}}, {{a}}, {{b}}", 32, value, members),
                [functools.reduce(f, g) for g in sets],
            )
        )
    for kind, source in (("u32", sets), ("s32", signed)):
        for op, f in (("add", sum), ("min", min), ("max", max)):
            wanted = [f(g) & FULL for g in source]
            todo.append((lab.add(f"redux.sync.{op}.{kind} {{d}}, {{a}}, {{b}}", 32, value, members), wanted))
    lab.run(mask)
    for case, wanted in todo:
        got = case.results[0]
        np.testing.assert_array_equal(got[on], np.array(wanted, got.dtype)[on], err_msg=case.text)


def test_redux_of_floats() -> None:
    lab, todo = Lab(), []
    for seed in range(4):
        a = ieee.samples(F32, np.random.default_rng(seed), 32)
        numbers = [int(v) for v in a if not F32.is_nan(int(v))]

        def order(v: int) -> int:
            return -(v & 0x7FFFFFFF) - 1 if v >> 31 else v

        for op, f in (("min", min), ("max", max)):
            todo.append((lab.add(f"redux.sync.{op}.f32 {{d}}, {{a}}, -1", 32, a), f(numbers, key=order)))
            nan = F32.canonical_nan if len(numbers) < 32 else f(numbers, key=order)
            todo.append((lab.add(f"redux.sync.{op}.NaN.f32 {{d}}, {{a}}, -1", 32, a), nan))
            sizes = [v & 0x7FFFFFFF for v in numbers]
            todo.append((lab.add(f"redux.sync.{op}.abs.f32 {{d}}, {{a}}, -1", 32, a), f(sizes)))
    lab.run()
    for case, wanted in todo:
        assert (case.results[0] == wanted).all(), f"{case.text}: {case.results[0][0]:#x}, not {wanted:#x}"


@pytest.mark.parametrize("mask", [FULL, 0x7E])
def test_match(mask: int) -> None:
    on = state.lanes(mask)
    lab, todo = Lab(), []
    for bits, kind in ((32, np.uint32), (64, np.uint64)):
        value = RNG.integers(0, 3, 32).astype(kind) << kind(bits - 8)
        same = [sum(1 << j for j in range(32) if on[j] and value[j] == v) for v in value]
        members = spread(mask)
        todo.append((lab.add(f"match.any.sync.b{bits} {{d}}, {{a}}, {{b}}", 32, value, members), (same,)))
        for v in (value, np.full(32, 7, kind)):
            agree = len(set(v[on])) == 1
            wanted = ([mask if agree else 0] * 32, [agree] * 32)
            todo.append((lab.add(f"match.all.sync.b{bits} {{d}}|{{e}}, {{a}}, {{b}}", (32, 1), v, members), wanted))
    lab.run(mask)
    for case, wanted in todo:
        for got, want in zip(case.results, wanted):
            np.testing.assert_array_equal(got[on], np.array(want, got.dtype)[on], err_msg=case.text)


@pytest.mark.parametrize("mask", [FULL, 0xFFFF0000, 0x00000100])
def test_elect_and_activemask(mask: int) -> None:
    lab = Lab()
    leader = lab.add("elect.sync {d}|{e}, {a}", (32, 1), spread(mask))
    only = lab.add("elect.sync _|{d}, {a}", 1, spread(mask))
    active = lab.add("activemask.b32 {d}", 32)
    lab.run(mask)
    on, first = state.lanes(mask), (mask & -mask).bit_length() - 1
    assert (leader.results[0][on] == first).all()
    for flags in (leader.results[1], only.results[0]):
        assert [i for i in np.flatnonzero(on) if flags[i]] == [first]
    assert (active.results[0][on] == mask).all()


def test_special_registers() -> None:
    lab = Lab()
    names = ["laneid", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt"]
    cases = {name: lab.add(f"mov.u32 {{d}}, %{name}", 32) for name in names}
    clocks = [lab.add("mov.u64 {d}, %clock64", 64) for _ in range(3)]
    timer = [lab.add("mov.u64 {d}, %globaltimer", 64) for _ in range(2)]
    lab.run()
    lane = np.arange(32, dtype=np.uint64)
    bit = np.uint64(1) << lane
    wanted = {"laneid": lane, "lanemask_eq": bit, "lanemask_le": 2 * bit - 1, "lanemask_lt": bit - 1}
    wanted |= {"lanemask_ge": FULL & ~(bit - 1), "lanemask_gt": FULL & ~(2 * bit - 1)}
    for name, case in cases.items():
        np.testing.assert_array_equal(case.results[0], wanted[name].astype(np.uint32), err_msg=name)
    reads = [int(c.results[0][0]) for c in clocks]
    assert reads[0] < reads[1] < reads[2]
    assert timer[0].results[0][0] < timer[1].results[0][0]


@pytest.mark.parametrize(
    "line",
    [
        "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;",
        "shfl.sync.idx.b32 %r1, %r2, 0, 31, %r3;",
        "vote.sync.any.pred %p1, %p2, -1;",
        "bar.warp.sync -1;",
        "elect.sync _|%p1, -1;",
        "redux.sync.add.u32 %r1, %r2, 0x3;",
    ],
)
def test_absent_members_are_a_fault(line: str) -> None:
    """Half of the warp goes another way: a mask that names it is a fault, its own half is not."""
    body = f"""
  setp.lt.u32 %p9, %r9, 16;
  @!%p9 bra DONE;
  {line}
  st.volatile.b32 [%d1], %r1;
DONE:
  st.volatile.b32 [%d1], %r2;
  ret;"""
    code = compiled(body)
    (warp,), _ = code.prepare(1)
    put(warp, register(code, "%r9"), np.arange(32, dtype=np.uint32))
    put(warp, register(code, "%r3"), spread(FULL))
    assert run_until_event(code, warp) == state.FAULT
    assert warp.fault == state.FAULT_SYNC
    assert code.kernel.instructions[warp.instr].opcode == line.split(".")[0]


def test_lanes_that_have_left_are_not_missed() -> None:
    body = """
  setp.lt.u32 %p9, %r9, 16;
  @!%p9 exit;
  bar.warp.sync -1;
  vote.sync.ballot.b32 %r1, %p9, -1;
  st.volatile.b32 [%d1], %r1;
  ret;"""
    code = compiled(body)
    (warp,), _ = code.prepare(1)
    put(warp, register(code, "%r9"), np.arange(32, dtype=np.uint32))
    assert run_until_event(code, warp) == state.EVENT
    assert warp.event_mask == 0xFFFF
    assert (warp.get(register(code, "%r1"))[:16] == 0xFFFF).all()
    assert int(warp.record["warp_barriers"]) == 1
    assert run_until_event(code, warp) == state.EXIT
    assert warp.exited == FULL
