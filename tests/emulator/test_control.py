"""Branches, divergence, loops, exits, events, budgets, counters; loads, stores and parameters; addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from ptx_lab import compiled, put, refusal, register, run_until_event
from refluent.emulator import state
from refluent.emulator.codegen.jit import CompiledKernel

FULL = 0xFFFFFFFF
LANE = np.arange(32, dtype=np.uint32)


def finish(body: str) -> tuple[CompiledKernel, state.Warp]:
    """Run a body whose %r0 is the lane, to its first event."""
    code = compiled(f"  mov.u32 %r0, %laneid;\n{body}\n  st.volatile.v4.b32 [%d1], {{%r1, %r2, %r3, %r4}};\n  ret;")
    (warp,), _ = code.prepare(1)
    assert run_until_event(code, warp) == state.EVENT, warp.fault
    return code, warp


def lanes_of(code: CompiledKernel, warp: state.Warp, name: str) -> np.ndarray:
    return warp.get(register(code, name))


def test_if_then_else_meets_again() -> None:
    code, warp = finish(
        """
  setp.lt.u32 %p1, %r0, 10;
  mov.u32 %r2, 5;
  @%p1 bra THEN;
  mul.lo.u32 %r1, %r0, 3;
  bra.uni JOIN;
THEN:
  add.u32 %r1, %r0, 100;
JOIN:
  activemask.b32 %r3;
  add.u32 %r2, %r2, %r1;"""
    )
    wanted = np.where(LANE < 10, LANE + 100, LANE * 3)
    np.testing.assert_array_equal(lanes_of(code, warp, "%r1"), wanted)
    np.testing.assert_array_equal(lanes_of(code, warp, "%r2"), wanted + 5)
    assert (lanes_of(code, warp, "%r3") == FULL).all()
    assert warp.mask == warp.event_mask == FULL
    assert warp.stack_depth == 0


def test_nested_divergence() -> None:
    """Four ways, each with its own mask; inner paths meet before outer ones."""
    code, warp = finish(
        """
  and.b32 %r10, %r0, 1;
  and.b32 %r11, %r0, 2;
  setp.eq.u32 %p1, %r10, 0;
  setp.eq.u32 %p2, %r11, 0;
  @%p1 bra EVEN;
  @%p2 bra ODD_LOW;
  mov.u32 %r1, 3;
  bra ODD_JOIN;
ODD_LOW:
  mov.u32 %r1, 1;
ODD_JOIN:
  activemask.b32 %r3;
  bra JOIN;
EVEN:
  @%p2 bra EVEN_LOW;
  mov.u32 %r1, 2;
  bra EVEN_JOIN;
EVEN_LOW:
  mov.u32 %r1, 0;
EVEN_JOIN:
  activemask.b32 %r3;
JOIN:
  activemask.b32 %r4;"""
    )
    np.testing.assert_array_equal(lanes_of(code, warp, "%r1"), LANE & 3)
    np.testing.assert_array_equal(lanes_of(code, warp, "%r3"), np.where(LANE & 1, 0xAAAAAAAA, 0x55555555))
    assert (lanes_of(code, warp, "%r4") == FULL).all()


def test_loop_with_a_trip_count_per_lane() -> None:
    """Lanes leave one after another; the stack stays shallow."""
    code, warp = finish(
        """
  mov.u32 %r1, 0;
  mov.u32 %r2, 0;
LOOP:
  add.u32 %r1, %r1, %r2;
  add.u32 %r2, %r2, 1;
  setp.le.u32 %p1, %r2, %r0;
  @%p1 bra LOOP;
  activemask.b32 %r3;"""
    )
    np.testing.assert_array_equal(lanes_of(code, warp, "%r1"), LANE * (LANE + 1) // 2)
    assert (lanes_of(code, warp, "%r3") == FULL).all()
    assert warp.record["stack"][:, 2].astype(bool).sum() <= 2


def test_break_and_continue() -> None:
    code, warp = finish(
        """
  mov.u32 %r1, 0;
  mov.u32 %r2, 0;
LOOP:
  add.u32 %r2, %r2, 1;
  setp.gt.u32 %p1, %r2, 40;
  @%p1 bra DONE;
  and.b32 %r5, %r2, 1;
  setp.eq.u32 %p2, %r5, 0;
  @%p2 bra LOOP;
  add.u32 %r1, %r1, %r2;
  setp.gt.u32 %p3, %r1, %r0;
  @!%p3 bra LOOP;
DONE:
  activemask.b32 %r3;"""
    )

    def one(lane: int) -> int:
        total = count = 0
        while True:
            count += 1
            if count > 40:
                return total
            if count & 1:
                total += count
                if total > lane:
                    return total

    np.testing.assert_array_equal(lanes_of(code, warp, "%r1"), [one(i) for i in range(32)])
    assert (lanes_of(code, warp, "%r3") == FULL).all()


def test_some_lanes_exit_early() -> None:
    body = """
  mov.u32 %r0, %laneid;
  setp.lt.u32 %p1, %r0, 4;
  setp.lt.u32 %p2, %r0, 8;
  @%p2 bra SMALL;
  mov.u32 %r1, 7;
  bra JOIN;
SMALL:
  @%p1 ret;
  mov.u32 %r1, 9;
JOIN:
  st.volatile.b32 [%d1], %r1;
  ret;"""
    code = compiled(body)
    (warp,), _ = code.prepare(1)
    assert run_until_event(code, warp) == state.EVENT
    assert warp.event_mask == 0xFFFFFFF0
    assert warp.exited == 0xF
    np.testing.assert_array_equal(lanes_of(code, warp, "%r1")[4:], np.where(LANE < 8, 9, 7)[4:])
    assert run_until_event(code, warp) == state.EXIT
    assert warp.exited == FULL


def test_early_returns_do_not_split_what_follows() -> None:
    """Inside a branch some lanes return through the common exit; the rest meet again before it."""
    body = """
  mov.u32 %r0, %laneid;
  setp.lt.u32 %p1, %r0, 8;
  setp.lt.u32 %p2, %r0, 3;
  @!%p1 bra AFTER;
  @%p2 bra DONE;
  mov.u32 %r1, 5;
AFTER:
  bar.warp.sync -1;
  activemask.b32 %r2;
  st.volatile.v2.b32 [%d1], {%r1, %r2};
DONE:
  ret;"""
    code = compiled(body)
    (warp,), _ = code.prepare(1)
    assert run_until_event(code, warp) == state.EVENT
    assert warp.event_mask == 0xFFFFFFF8
    assert (lanes_of(code, warp, "%r2")[3:] == 0xFFFFFFF8).all()
    np.testing.assert_array_equal(lanes_of(code, warp, "%r1")[3:], np.where(LANE < 8, 5, 0)[3:])
    assert run_until_event(code, warp) == state.EXIT
    assert warp.exited == FULL


def test_branches_in_a_loop_that_ends_in_a_return_meet_again() -> None:
    """A loop whose only way out is the exit: what diverges inside it still has a point where it meets."""
    body = """
  mov.u32 %r0, %laneid;
  mov.u32 %r3, 0;
LOOP:
  setp.eq.u32 %p1, %r0, 0;
  @!%p1 bra MEET;
  add.u32 %r1, %r1, 7;
MEET:
  activemask.b32 %r2;
  bar.warp.sync -1;
  st.volatile.v2.b32 [%d1], {%r1, %r2};
  add.u32 %r3, %r3, 1;
  setp.ge.u32 %p2, %r3, 3;
  @%p2 bra DONE;
  bra LOOP;
DONE:
  ret;"""
    code = compiled(body)
    (warp,), _ = code.prepare(1)
    for turn in range(1, 4):
        assert run_until_event(code, warp) == state.EVENT
        assert (lanes_of(code, warp, "%r2") == FULL).all()
        np.testing.assert_array_equal(lanes_of(code, warp, "%r1"), np.where(LANE == 0, 7 * turn, 0))
    assert run_until_event(code, warp) == state.EXIT


def test_guarded_events() -> None:
    """An event whose guard holds nowhere is passed; elsewhere its mask is the guard's."""
    body = """
  mov.u32 %r0, %laneid;
  setp.gt.u32 %p1, %r0, 99;
  setp.lt.u32 %p2, %r0, 3;
  @%p1 nanosleep.u32 1;
  @%p2 nanosleep.u32 2;
  @!%p2 nanosleep.u32 3;
  ret;"""
    code = compiled(body)
    (warp,), counters = code.prepare(1)
    seen = []
    while run_until_event(code, warp) == state.EVENT:
        seen.append((code.kernel.instructions[warp.instr].operands[0].value, warp.event_mask))
    assert seen == [(2, 7), (3, 0xFFFFFFF8)]
    assert warp.event == state.EXIT
    assert code.executed(counters).tolist() == [1] * len(code.kernel.instructions)


def test_events_write_registers_and_read_them() -> None:
    """What a handler writes through the warp is what native code reads next, divergent lanes included."""
    body = """
  mov.u32 %r0, %laneid;
  setp.lt.u32 %p1, %r0, 5;
  mov.u32 %r1, 1;
  @%p1 bra LOW;
  ld.acquire.gpu.global.b32 %r1, [%d2+8];
LOW:
  add.u32 %r2, %r1, 1;
  st.volatile.b32 [%d1], %r2;
  ret;"""
    code = compiled(body)
    (warp,), _ = code.prepare(1)
    put(warp, register(code, "%d2"), np.arange(32, dtype=np.uint64) * 16)
    assert run_until_event(code, warp) == state.EVENT
    ins = code.kernel.instructions[warp.instr]
    assert warp.event_mask == 0xFFFFFFE0
    np.testing.assert_array_equal(warp.locate(ins.operands[1]), np.arange(32) * 16 + 8)
    warp.set(ins.operands[0], np.arange(32, dtype=np.uint32) + 50, warp.event_mask)
    assert run_until_event(code, warp) == state.EVENT
    np.testing.assert_array_equal(lanes_of(code, warp, "%r2"), np.where(LANE < 5, 2, LANE + 51))


def test_budget_stops_a_loop_and_lets_it_go_on() -> None:
    code = compiled("L:\n  add.u32 %r1, %r1, 1;\n  setp.ne.u32 %p1, %r1, 100;\n  @%p1 bra L;\n  ret;")
    (warp,), counters = code.prepare(1)
    stops = 0
    warp.budget = 9
    while (why := code.run(warp.address)) == state.BUDGET:
        stops += 1
        warp.budget = 9
    assert why == state.EXIT
    assert stops == 11
    assert code.executed(counters).tolist() == [100, 100, 100, 1]


def test_indexed_branches() -> None:
    table = """
  mov.u32 %r0, %laneid;
  and.b32 %r5, %r0, 3;
TS: .branchtargets A, B, C, B;
  brx.idx %r5, TS;
A:
  mov.u32 %r1, 10;
  bra JOIN;
B:
  mov.u32 %r1, 20;
  bra JOIN;
C:
  mov.u32 %r1, 30;
JOIN:
  activemask.b32 %r2;"""
    code, warp = finish(table)
    np.testing.assert_array_equal(lanes_of(code, warp, "%r1"), np.array([10, 20, 30, 20])[LANE & 3])
    assert (lanes_of(code, warp, "%r2") == FULL).all()
    code = compiled("  mov.u32 %r5, 7;\nTS: .branchtargets A;\n  brx.idx %r5, TS;\nA:\n  ret;")
    (warp,), _ = code.prepare(1)
    assert run_until_event(code, warp) == state.FAULT
    assert warp.fault == state.FAULT_BRANCH


def test_trap_is_a_fault() -> None:
    code = compiled("  mov.u32 %r0, %laneid;\n  setp.eq.u32 %p1, %r0, 31;\n  @%p1 trap;\n  ret;")
    (warp,), _ = code.prepare(1)
    assert run_until_event(code, warp) == state.FAULT
    assert (warp.fault, warp.instr) == (state.FAULT_TRAP, 2)


@pytest.mark.parametrize("seed", range(12))
def test_random_control_flow(seed: int) -> None:
    """Random forward branches and bounded loops: every lane ends with what it would compute alone."""
    rng = np.random.default_rng(seed)
    blocks = 12
    steps = rng.integers(1, 1000, blocks)
    bits = rng.integers(0, 7, blocks)
    targets = [int(rng.integers(0, blocks + 1)) for _ in range(blocks)]
    lines = ["  mov.u32 %r1, %laneid;", "  mov.u32 %r2, 0;"]
    for i in range(blocks):
        lines += [f"B{i}:", f"  mad.lo.u32 %r1, %r1, 5, {steps[i]};", "  add.u32 %r2, %r2, 1;"]
        lines += [f"  shr.u32 %r5, %r1, {bits[i]};", "  and.b32 %r5, %r5, 1;", "  setp.eq.u32 %p1, %r5, 1;"]
        lines += ["  setp.lt.u32 %p2, %r2, 60;", "  and.pred %p1, %p1, %p2;", f"  @%p1 bra B{targets[i]};"]
    lines += [f"B{blocks}:", "  activemask.b32 %r3;"]
    code, warp = finish("\n".join(lines))

    def alone(lane: int) -> tuple[int, int]:
        value, count, block = lane, 0, 0
        while block < blocks:
            value = (value * 5 + int(steps[block])) & FULL
            count += 1
            block = targets[block] if value >> int(bits[block]) & 1 and count < 60 else block + 1
        return value, count

    wanted = [alone(i) for i in range(32)]
    np.testing.assert_array_equal(lanes_of(code, warp, "%r1"), [v for v, _ in wanted])
    np.testing.assert_array_equal(lanes_of(code, warp, "%r2"), [c for _, c in wanted])
    assert (lanes_of(code, warp, "%r3") == FULL).all()
    assert warp.stack_depth == 0


# memory, parameters, addresses

MemAccess = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    *(ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64),
    *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
)


class Memory:
    """A memory runtime over one array, which keeps what it was asked."""

    def __init__(self, size: int = 4096) -> None:
        self.data = np.zeros(size, np.uint8)
        self.calls: list[tuple[int, ...]] = []
        self.callback = MemAccess(self.access)
        self.table = np.array([ctypes.cast(self.callback, ctypes.c_void_p).value] + [0] * 7, np.uint64)

    def access(
        self, _: int, instr: int, mask: int, at: int, data: int, size: int, count: int, space: int, store: int
    ) -> int:
        self.calls.append((instr, mask & FULL, size, count, space, store))
        addresses = (ctypes.c_uint64 * 32).from_address(at)
        for lane in range(32):
            if mask >> lane & 1:
                for i in range(count):
                    start = addresses[lane] + i * size
                    if start + size > len(self.data):
                        return 77
                    here = (ctypes.c_uint8 * size).from_address(data + (i * 32 + lane) * size)
                    if store:
                        self.data[start : start + size] = list(here)
                    else:
                        here[:] = self.data[start : start + size].tolist()
        return 0


def run_with_memory(body: str, fill: Callable[[Memory], None]) -> tuple[CompiledKernel, state.Warp, Memory]:
    code = compiled(f"  mov.u32 %r0, %laneid;\n{body}\n  st.volatile.b32 [%d300], %r300;\n  ret;")
    (warp,), _ = code.prepare(1)
    memory = Memory()
    fill(memory)
    warp.record["runtime"] = memory.table.ctypes.data
    run_until_event(code, warp)
    return code, warp, memory


@pytest.mark.parametrize(
    ("kind", "store", "reg", "count"),
    [
        ("b32", "b32", "r", 1),
        ("b64", "b64", "d", 1),
        ("b16", "b16", "h", 1),
        ("u8", "u8", "h", 1),
        ("b128", "b128", "q", 1),
    ]
    + [
        ("v2.b32", "v2.b32", "r", 2),
        ("v4.b32", "v4.b32", "r", 4),
        ("v2.b64", "v2.b64", "d", 2),
        ("v8.b32", "v8.b32", "r", 8),
    ]
    + [
        ("v4.b64", "v4.b64", "d", 4),
        ("v4.u8", "v4.u8", "h", 4),
        ("v2.f32", "v2.f32", "r", 2),
        ("v4.b16", "v4.b16", "h", 4),
    ],
)
def test_copies_of_every_width(kind: str, store: str, reg: str, count: int) -> None:
    """ld then st: the lower 2048 bytes arrive in the upper ones, under a guard only in its lanes."""
    bits = int(kind.split(".")[-1][1:])
    size = bits // 8 * count
    names = ", ".join(f"%{reg}{10 + i}" for i in range(count))
    names = "{" + names + "}" if count > 1 else names
    body = f"""
  mul.wide.u32 %d1, %r0, {size};
  setp.lt.u32 %p1, %r0, 20;
  @%p1 ld.global.{kind} {names}, [%d1];
  @%p1 st.global.{store} [%d1+2048], {names};"""
    rng = np.random.default_rng(3)

    def fill(memory: Memory) -> None:
        memory.data[:2048] = rng.integers(0, 256, 2048)

    _, warp, memory = run_with_memory(body, fill)
    assert warp.event == state.EVENT
    np.testing.assert_array_equal(memory.data[2048 : 2048 + 20 * size], memory.data[: 20 * size])
    assert not memory.data[2048 + 20 * size :].any()
    assert [call[1] for call in memory.calls] == [0xFFFFF] * 2


def test_narrow_loads_extend_and_addresses_wrap() -> None:
    body = """
  shl.b32 %r1, %r0, 1;
  ld.shared.s8 %r2, [%r1];
  ld.shared.u8 %r3, [%r1];
  ld.shared.s16 %d4, [%r1];
  sub.u32 %r1, %r1, 16;
  ld.shared::cta.u16 %r5, [%r1+16];
  setp.gt.u32 %p1, %r0, 99;
  @%p1 ld.local.b32 %r6, [%r1];"""

    def fill(memory: Memory) -> None:
        memory.data[:64] = np.arange(64) * 37

    code, warp, memory = run_with_memory(
        body + "\n  st.volatile.v4.b32 [%d9], {%r2, %r3, %r5, %r6};\n  st.volatile.b64 [%d9], %d4;", fill
    )
    low = memory.data[:64:2]
    np.testing.assert_array_equal(warp.get(register(code, "%r2"), np.int32), low.view(np.int8))
    np.testing.assert_array_equal(warp.get(register(code, "%r3")), low)
    np.testing.assert_array_equal(warp.get(register(code, "%d4"), np.int64), memory.data[:64].view(np.int16))
    np.testing.assert_array_equal(warp.get(register(code, "%r5")), memory.data[:64].view(np.uint16))
    assert [call[4] for call in memory.calls] == [state.SHARED] * 4


def test_a_failing_access_names_the_instruction() -> None:
    code, warp, _ = run_with_memory("  mov.u64 %d1, 9999;\n  ld.global.b32 %r1, [%d1];", lambda memory: None)
    assert warp.event == state.FAULT
    assert warp.fault == 77
    assert code.kernel.instructions[warp.instr].opcode == "ld"


def test_parameters() -> None:
    params = ".param .u32 n, .param .align 8 .b8 box[24], .param .u64 .ptr .global .align 16 p, .param .f32 x"
    body = """
  ld.param.u32 %r1, [n];
  ld.param.v2.b32 {%r2, %r3}, [box+8];
  ld.param.u64 %d4, [p];
  ld.param.b8 %h5, [box+1];
  ld.param.f32 %r6, [x];
  mov.b64 %d7, box;
  cvta.param.u64 %d8, %d7;
  mov.b64 %d9, box+8;
  st.volatile.v4.b32 [%d1], {%r1, %r2, %r3, %r6};
  st.volatile.v4.b64 [%d1], {%d4, %d7, %d8, %d9};
  st.volatile.b16 [%d1], %h5;
  ret;"""
    code = compiled(body, params)
    assert [(p.offset, p.size, p.align) for p in code.kernel.params] == [(0, 4, 4), (8, 24, 8), (32, 8, 8), (40, 4, 4)]
    assert code.kernel.param_size == 44
    block = np.arange(1, 45, dtype=np.uint8)
    (warp,), _ = code.prepare(1)
    warp.record["params"] = block.ctypes.data
    assert run_until_event(code, warp) == state.EVENT
    raw = block.tobytes()
    for name, start, size in (
        ("%r1", 0, 4),
        ("%r2", 16, 4),
        ("%r3", 20, 4),
        ("%d4", 32, 8),
        ("%h5", 9, 1),
        ("%r6", 40, 4),
    ):
        assert (warp.get(register(code, name)) == int.from_bytes(raw[start : start + size], "little")).all(), name
    for name, offset in (("%d7", 8), ("%d8", 8), ("%d9", 16)):
        assert (warp.get(register(code, name)) == block.ctypes.data + offset).all(), name
    assert "a read past parameter n" in _refused("  ld.param.u64 %d1, [n];\n  ret;", ".param .u32 n")


def _refused(body: str, params: str) -> str:
    try:
        compiled(body, params)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_addresses_of_variables_and_windows() -> None:
    header = """.extern .shared .align 128 .b8 dyn[];
.shared .align 16 .b8 fixed[40];
.global .align 4 .b32 numbers[3] = {1, 2, 3};
.const .align 8 .b64 other = 7;"""
    body = """
  .local .align 16 .b8 stack[32];
  mov.b32 %r1, fixed;
  mov.b32 %r2, dyn;
  mov.b64 %d3, numbers;
  mov.b64 %d4, other;
  mov.b64 %d5, stack;
  cvta.shared.u64 %d6, %d10;
  cvta.to.shared.u64 %d7, %d6;
  cvta.local.u64 %d8, %d5;
  isspacep.shared %p1, %d6;
  isspacep.global %p2, %d3;
  isspacep.local %p3, %d8;
  isspacep.global %p4, %d6;
  mapa.shared::cluster.u32 %r5, %r1, 3;
  getctarank.shared::cluster.u32 %r6, %r5;
  st.volatile.v4.b32 [%d1], {%r1, %r2, %r5, %r6};
  st.volatile.v4.b64 [%d1], {%d3, %d4, %d5, %d6};
  st.volatile.v2.b64 [%d1], {%d7, %d8};
  @%p1 nanosleep.u32 1;
  @%p2 nanosleep.u32 1;
  @%p3 nanosleep.u32 1;
  @%p4 nanosleep.u32 1;
  ret;"""
    code = compiled(body, "", header)
    kernel = code.kernel
    assert kernel.static_shared == state.SHARED_START + 40
    assert [(s.name, s.data) for s in kernel.symbols] == [
        ("numbers", b"\1\0\0\0\2\0\0\0\3\0\0\0"),
        ("other", b"\7" + bytes(7)),
    ]
    (warp,), _ = code.prepare(1)
    table = np.array([0x1000, 0x2000], np.uint64)
    warp.record["symbols"] = table.ctypes.data
    warp.shared_base = 2 << 24
    put(warp, register(code, "%d10"), np.full(32, (2 << 24) + 0x500, np.uint64))
    assert run_until_event(code, warp) == state.EVENT
    base = (2 << 24) + state.SHARED_START
    wanted = {"%r1": base, "%r2": (2 << 24) + 0x480, "%d3": 0x1000, "%d4": 0x2000, "%d5": 0}
    wanted |= {"%d6": state.SHARED_WINDOW + (2 << 24) + 0x500, "%d7": (2 << 24) + 0x500, "%d8": state.LOCAL_WINDOW}
    wanted |= {"%r5": (3 << 24) + state.SHARED_START, "%r6": 3}
    for name, value in wanted.items():
        assert (warp.get(register(code, name)) == value).all(), name
    flags = [warp.predicate(register(code, f"%p{i}")) for i in (1, 2, 3, 4)]
    assert flags == [FULL, FULL, FULL, 0]
    assert (warp.locate(kernel_symbol("fixed")) == base).all()


def kernel_symbol(name: str):  # type: ignore[no-untyped-def]
    from refluent.emulator.ptx import Symbol

    return Symbol(name)


def test_calls_are_events_with_their_arguments_in_registers() -> None:
    header = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);"
    body = """
  mov.u32 %r0, %laneid;
  cvt.u64.u32 %d2, %r0;
  {
  .param .b64 a0;
  .param .b64 a1;
  .param .b32 back;
  st.param.b64 [a0], %d2;
  st.param.b64 [a1+0], 17;
  call.uni (back), vprintf, (a0, a1);
  ld.param.b32 %r5, [back];
  }
  st.volatile.b32 [%d1], %r5;
  ret;"""
    code = compiled(body, "", header)
    (warp,), _ = code.prepare(1)
    assert run_until_event(code, warp) == state.EVENT
    call = code.kernel.instructions[warp.instr]
    assert str(call) == "call.uni {back}, vprintf, {a0, a1};"
    first, second = call.operands[2].items
    np.testing.assert_array_equal(warp.get(first), np.arange(32))
    assert (warp.get(second) == 17).all()
    warp.set(call.operands[0].items[0], 3)
    assert run_until_event(code, warp) == state.EVENT
    assert (warp.get(register(code, "%r5")) == 3).all()


def test_calls_of_defined_functions_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="func with a body"):
        compiled("  ret;", "", ".func f(.param .b32 a)\n{\n  ret;\n}")
    assert "label NOWHERE is not defined" in refusal("  bra NOWHERE;\n  ret;")
