"""Instructions across the lanes of a warp: shfl, vote, match, redux, elect, activemask, bar.warp.sync."""

from __future__ import annotations

from refluent.emulator.codegen import control
from refluent.emulator.codegen.emitter import Emitter
from refluent.emulator.codegen.integer import binary, intrinsic, put
from refluent.emulator.codegen.moves import lane_constant
from refluent.emulator.codegen.registry import Mods, emits, operand_count
from refluent.emulator.ptx import Dual, Imm, Instruction, Operand, Sink
from refluent.emulator.state import FAULT_SYNC, offset_of

I32 = "<32 x i32>"
LANE = lane_constant(list(range(32)))
LANE_BIT = lane_constant([1 << i for i in range(32)])


def members(e: Emitter, ins: Instruction, operand: Operand) -> str:
    """Each lane's member mask. A lane outside its own mask, or a member that is not here, is a fault.

    Lanes that have left the kernel count as members that came.
    """
    named = e.bits(e.value(operand, 32))
    active = e.active()
    here = e.op(f"or i32 {active}, {e.load_field('exited')}")
    if isinstance(operand, Imm):
        missing = e.op(f"and i32 {operand.unsigned(32)}, {e.op(f'xor i32 {here}, -1')}")
        outside = e.op(f"and i32 {active}, {~operand.unsigned(32) & 0xFFFFFFFF}")
        bad = e.op(f"or i32 {missing}, {outside}")
        some = e.op(f"icmp ne i32 {active}, 0")
        control.fault_if(e, e.op(f"and i1 {e.op(f'icmp ne i32 {bad}, 0')}, {some}"), ins.index, FAULT_SYNC)
    else:
        absent = e.splat(e.op(f"xor i32 {here}, -1"), "i32")
        missing = e.op(f"icmp ne {I32} {binary(e, 'and', 32, named, absent)}, zeroinitializer")
        outside = e.op(f"icmp eq {I32} {binary(e, 'and', 32, named, LANE_BIT)}, zeroinitializer")
        either = e.op(f"bitcast <32 x i1> {e.op(f'or <32 x i1> {missing}, {outside}')} to i32")
        bad = e.op(f"and i32 {either}, {active}")
        control.fault_if(e, e.op(f"icmp ne i32 {bad}, 0"), ins.index, FAULT_SYNC)
    count(e, "convergent", active)
    return named


def count(e: Emitter, field: str, active: str) -> None:
    """Add one to a counter of the record when any lane executes."""
    one = e.op(f"zext i1 {e.op(f'icmp ne i32 {active}, 0')} to i32")
    e.store_field(field, e.op(f"add i32 {e.load_field(field)}, {one}"))


@emits("bar", types=("",), writes=0)
def bar_warp_sync(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 1)
    mods.take("warp")
    mods.take("sync")
    members(e, ins, ins.operands[0])
    count(e, "warp_barriers", e.active())


@emits("activemask", types=("b32",))
def activemask(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 1)
    mods.last()
    put(e, ins, e.splat(e.active(), "i32"), 32)


def two(e: Emitter, target: Operand) -> tuple[Operand, Operand]:
    return (target.first, target.second) if isinstance(target, Dual) else (target, Sink())


@emits("elect", types=("",))
def elect(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """The lowest member leads."""
    operand_count(e, ins, 2)
    mods.take("sync")
    named = members(e, ins, ins.operands[1])
    present = binary(e, "and", 32, named, e.splat(e.active(), "i32"))
    leader = intrinsic(e, "cttz", 32, present, extra="i1 false")
    number, flag = two(e, ins.operands[0])
    e.write(flag, e.from_lanes(e.op(f"icmp eq {I32} {leader}, {LANE}")))
    e.write(number, e.from_bits(leader, 32))


@emits("vote", types=("pred", "b32"))
def vote(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind = mods.last()
    mods.take("sync")
    test = mods.take("ballot") if kind == "b32" else mods.take("all", "any", "uni")
    said = e.mask(e.predicate(ins.operands[1]))
    named = members(e, ins, ins.operands[2])
    active = e.active()
    yes = binary(e, "and", 32, named, e.splat(e.op(f"and i32 {said}, {active}"), "i32"))
    if test == "ballot":
        put(e, ins, yes, 32)
        return
    present = binary(e, "and", 32, named, e.splat(active, "i32"))
    every = e.op(f"icmp eq {I32} {yes}, {present}")
    none = e.op(f"icmp eq {I32} {yes}, zeroinitializer")
    if test == "all":
        result = every
    elif test == "any":
        result = e.op(f"xor <32 x i1> {none}, splat (i1 true)")
    else:
        result = e.op(f"or <32 x i1> {every}, {none}")
    e.write(ins.operands[0], e.from_lanes(result))


# shuffles


@emits("shfl", types=("b32",))
def shfl(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 5)
    mods.last()
    mods.take("sync")
    mode = mods.take("up", "down", "bfly", "idx")
    target, flag = two(e, ins.operands[0])
    value = e.bits(e.value(ins.operands[1], 32))
    by, clamp = ins.operands[2], ins.operands[3]
    named = ins.operands[4]
    if isinstance(by, Imm) and isinstance(clamp, Imm):
        members(e, ins, named)
        sources = [_source_lane(mode, lane, by.unsigned(32), clamp.unsigned(32)) for lane in range(32)]
        picks = lane_constant([j for j, _ in sources])
        moved = e.op(f"shufflevector {I32} {value}, {I32} poison, {I32} {picks}")
        inside = "<" + ", ".join(f"i1 {'true' if ok else 'false'}" for _, ok in sources) + ">"
    else:
        by_bits, clamp_bits = (e.bits(e.value(o, 32)) for o in (by, clamp))
        members(e, ins, named)
        lane, inside = _source_lanes(e, mode, by_bits, clamp_bits)
        moved = gather(e, value, lane)
    e.write(target, e.from_bits(moved, 32))
    e.write(flag, e.from_lanes(inside))


def _source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Lane to read and whether it is in range (PTX ISA, shfl.sync)."""
    by, clamp, segment = b & 31, c & 31, c >> 8 & 31
    last = lane & segment | clamp & ~segment
    match mode:
        case "up":
            j = lane - by
            inside = j >= last
        case "down":
            j = lane + by
            inside = j <= last
        case "bfly":
            j = lane ^ by
            inside = j <= last
        case _:
            j = lane & segment | by & ~segment
            inside = j <= last
    return (j if inside else lane), inside


def _source_lanes(e: Emitter, mode: str, b: str, c: str) -> tuple[str, str]:
    """The same for lanes that each say how far."""
    five = "splat (i32 31)"
    by, clamp = binary(e, "and", 32, b, five), binary(e, "and", 32, c, five)
    segment = binary(e, "and", 32, binary(e, "lshr", 32, c, "splat (i32 8)"), five)
    rest = binary(e, "xor", 32, segment, "splat (i32 -1)")
    first = binary(e, "and", 32, LANE, segment)
    last = binary(e, "or", 32, first, binary(e, "and", 32, clamp, rest))
    if mode == "idx":
        j = binary(e, "or", 32, first, binary(e, "and", 32, by, rest))
    else:
        j = binary(e, {"up": "sub", "down": "add", "bfly": "xor"}[mode], 32, LANE, by)
    inside = e.op(f"icmp {'sge' if mode == 'up' else 'sle'} {I32} {j}, {last}")
    return e.select(inside, j, LANE, "i32"), inside


def gather(e: Emitter, value: str, lane: str) -> str:
    """value[lane] in each lane, through the record's scratch."""
    scratch = e.op(f"getelementptr i8, ptr %s, i64 {offset_of('data')}")
    e.line(f"store {I32} {value}, ptr {scratch}, align 64")
    name = "llvm.masked.gather.v32i32.v32p0"
    e.library.declare(name, f"declare {I32} @{name}(<32 x ptr>, i32, <32 x i1>, {I32})")
    safe = binary(e, "and", 32, lane, "splat (i32 31)")
    at = e.op(f"getelementptr i32, ptr {scratch}, {I32} {safe}")
    return e.op(f"call {I32} @{name}(<32 x ptr> {at}, i32 4, <32 x i1> splat (i1 true), {I32} zeroinitializer)")


# reductions and matches: loops over the lanes, in functions of their own

_REDUX = """define internal <32 x i32> @redux_{name}(<32 x i32> %value, <32 x i32> %members, i32 %active) noinline #0 {{
entry:
  br label %loop
loop:
  %j = phi i32 [ 0, %entry ], [ %next, %loop ]
  %acc = phi <32 x i32> [ splat (i32 {identity}), %entry ], [ %new, %loop ]
  %bit = shl i32 1, %j
  %on = and i32 %bit, %active
  %one = extractelement <32 x i32> %value, i32 %j
  %v0 = insertelement <32 x i32> poison, i32 %one, i64 0
  %v = shufflevector <32 x i32> %v0, <32 x i32> poison, <32 x i32> zeroinitializer
  %b0 = insertelement <32 x i32> poison, i32 %on, i64 0
  %b = shufflevector <32 x i32> %b0, <32 x i32> poison, <32 x i32> zeroinitializer
  %m = and <32 x i32> %b, %members
  %in = icmp ne <32 x i32> %m, zeroinitializer
{step}
  %new = select <32 x i1> %in, <32 x i32> %made, <32 x i32> %acc
  %next = add i32 %j, 1
  %more = icmp ne i32 %next, 32
  br i1 %more, label %loop, label %done
done:
  ret <32 x i32> %new
}}"""
_INTEGER_STEP = {"add": "add", "and": "and", "or": "or", "xor": "xor"}
_IDENTITY = {"add": 0, "or": 0, "xor": 0, "and": -1, "umin": -1, "umax": 0, "smin": 0x7FFFFFFF, "smax": -0x80000000}


@emits("redux", types=("u32", "s32", "b32", "f32"))
def redux(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind = mods.last()
    mods.take("sync")
    choices = {"b32": ("and", "or", "xor"), "f32": ("min", "max")}.get(kind, ("add", "min", "max"))
    op = mods.take(*choices)
    value = e.bits(e.value(ins.operands[1], 32))
    if kind == "f32":
        absolute, nan = mods.flag("abs"), mods.flag("NaN")
        if absolute:
            value = binary(e, "and", 32, value, "splat (i32 2147483647)")
        name, step, identity = _float_step(e, op, nan)
    else:
        name = f"{kind[0]}{op}" if op in ("min", "max") else op
        step, identity = _step(e, name), _IDENTITY[name]
    named = members(e, ins, ins.operands[2])
    if isinstance(ins.operands[2], Imm) and kind != "f32":
        put(e, ins, e.splat(_reduce(e, name, value, named, identity), "i32"), 32)
        return
    e.library.add(f"redux_{name}", _REDUX.format(name=name, step=step, identity=identity))
    result = e.op(f"call {I32} @redux_{name}({I32} {value}, {I32} {named}, i32 {e.active()})")
    put(e, ins, result, 32)


def _reduce(e: Emitter, name: str, value: str, named: str, identity: int) -> str:
    """One group for the whole warp: a tree of shuffles."""
    present = e.op(f"bitcast i32 {e.active()} to <32 x i1>")
    in_group = e.op(f"icmp ne {I32} {binary(e, 'and', 32, named, LANE_BIT)}, zeroinitializer")
    lanes = e.op(f"and <32 x i1> {present}, {in_group}")
    kept = e.select(lanes, value, f"splat (i32 {identity})", "i32")
    full = f"llvm.vector.reduce.{name}.v32i32"
    e.library.declare(full, f"declare i32 @{full}({I32})")
    return e.op(f"call i32 @{full}({I32} {kept})")


def _step(e: Emitter, name: str) -> str:
    if name in _INTEGER_STEP:
        return f"  %made = {_INTEGER_STEP[name]} {I32} %acc, %v"
    full = f"llvm.{name}.v32i32"
    e.library.declare(full, f"declare {I32} @{full}({I32}, {I32})")
    return f"  %made = call {I32} @{full}({I32} %acc, {I32} %v)"


def _float_step(e: Emitter, op: str, nan: bool) -> tuple[str, str, int]:
    """NaN is the neutral element of minNum; with .NaN an infinity is."""
    intrinsic_name = f"{op}imum" if nan else f"{op}imumnum"
    full = f"llvm.{intrinsic_name}.v32f32"
    f32 = "<32 x float>"
    e.library.declare(full, f"declare {f32} @{full}({f32}, {f32})")
    step = (
        f"  %fa = bitcast {I32} %acc to {f32}\n  %fv = bitcast {I32} %v to {f32}\n"
        f"  %fm = call {f32} @{full}({f32} %fa, {f32} %fv)\n  %raw = bitcast {f32} %fm to {I32}\n"
        f"  %bad = fcmp uno {f32} %fm, zeroinitializer\n"
        f"  %made = select <32 x i1> %bad, {I32} splat (i32 2147483647), {I32} %raw"
    )
    infinity = 0x7F800000 if op == "min" else 0xFF800000
    return f"{intrinsic_name}_f32", step, infinity if nan else 0x7FFFFFFF


@emits("match", types=("b32", "b64"))
def match(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Members with the same value; .all gives every member when all agree, else none."""
    operand_count(e, ins, 3)
    bits = int(mods.last()[1:])
    test = mods.take("any", "all")
    mods.take("sync")
    value = e.bits(e.value(ins.operands[1], bits))
    e.library.add(f"match{bits}", _match_text(bits))
    named = members(e, ins, ins.operands[2])
    active = e.active()
    same = e.op(f"call {I32} @match{bits}(<32 x i{bits}> {value}, {I32} {named}, i32 {active})")
    if test == "any":
        put(e, ins, same, 32)
        return
    target, flag = two(e, ins.operands[0])
    present = binary(e, "and", 32, named, e.splat(active, "i32"))
    every = e.op(f"icmp eq {I32} {same}, {present}")
    e.write(target, e.from_bits(e.select(every, named, "zeroinitializer", "i32"), 32))
    e.write(flag, e.from_lanes(every))


def _match_text(bits: int) -> str:
    value = f"<32 x i{bits}>"
    return f"""define internal {I32} @match{bits}({value} %value, {I32} %members, i32 %active) noinline #0 {{
entry:
  br label %loop
loop:
  %j = phi i32 [ 0, %entry ], [ %next, %loop ]
  %acc = phi {I32} [ zeroinitializer, %entry ], [ %new, %loop ]
  %one = extractelement {value} %value, i32 %j
  %v0 = insertelement {value} poison, i{bits} %one, i64 0
  %v = shufflevector {value} %v0, {value} poison, {I32} zeroinitializer
  %bit = shl i32 1, %j
  %on = and i32 %bit, %active
  %b0 = insertelement {I32} poison, i32 %on, i64 0
  %b = shufflevector {I32} %b0, {I32} poison, {I32} zeroinitializer
  %in = and {I32} %b, %members
  %eq = icmp eq {value} %value, %v
  %add = select <32 x i1> %eq, {I32} %in, {I32} zeroinitializer
  %new = or {I32} %acc, %add
  %next = add i32 %j, 1
  %more = icmp ne i32 %next, 32
  br i1 %more, label %loop, label %done
done:
  ret {I32} %new
}}"""
