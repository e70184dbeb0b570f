"""Integer arithmetic: add, sub, mul, mad (with carry), div, rem, min, max, abs, neg, sad, dot products."""

from __future__ import annotations

from refluent.emulator.codegen.emitter import Emitter, Val, vec
from refluent.emulator.codegen.registry import Mods, emits, operand_count
from refluent.emulator.ptx import Instruction, Reg

WORDS = ("u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64")
PACKED = ("u16x2", "s16x2")


def width(kind: str) -> int:
    return int(kind[1:])


def extend(e: Emitter, value: str, bits: int, to: int, signed: bool) -> str:
    return e.op(f"{'sext' if signed else 'zext'} {vec(f'i{bits}')} {value} to {vec(f'i{to}')}")


def cut(e: Emitter, value: str, bits: int, to: int) -> str:
    return e.op(f"trunc {vec(f'i{bits}')} {value} to {vec(f'i{to}')}")


def binary(e: Emitter, op: str, bits: int, a: str, b: str) -> str:
    return e.op(f"{op} {vec(f'i{bits}')} {a}, {b}")


def intrinsic(e: Emitter, name: str, bits: int, *args: str, extra: str = "") -> str:
    """A call of llvm.<name>.v32i<bits>."""
    kind = vec(f"i{bits}")
    tail = f", {extra}" if extra else ""
    types = ", ".join([kind] * len(args)) + (f", {extra.split()[0]}" if extra else "")
    full = f"llvm.{name}.v32i{bits}"
    e.library.declare(full, f"declare {kind} @{full}({types})")
    return e.op(f"call {kind} @{full}({', '.join(f'{kind} {a}' for a in args)}{tail})")


def sources(e: Emitter, ins: Instruction, bits: int, count: int = 0) -> list[str]:
    """Bits of the operands after the first."""
    return [e.bits(e.value(o, bits)) for o in ins.operands[1 : 1 + count if count else None]]


def put(e: Emitter, ins: Instruction, name: str, bits: int) -> None:
    e.write(ins.operands[0], e.from_bits(name, bits))


def carry_register(e: Emitter) -> Reg:
    return e.kernel.registers["%cc"]


@emits("add", "sub", "addc", "subc", types=WORDS)
def add_sub(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind = mods.last()
    bits, sat, sets = width(kind), mods.flag("sat"), mods.flag("cc")
    a, b = sources(e, ins, bits)
    op = ins.opcode[:3]
    if sat:
        if kind != "s32" or sets or ins.opcode.endswith("c"):
            raise e.refuse("modifier .sat")
        put(e, ins, intrinsic(e, f"s{op}.sat", bits, a, b), bits)
        return
    result = binary(e, op, bits, a, b)
    kind_bits = vec(f"i{bits}")
    wraps = e.op(f"icmp ult {kind_bits} {result if op == 'add' else a}, {a if op == 'add' else b}") if sets else ""
    if ins.opcode.endswith("c"):
        carry = e.op(f"zext <32 x i1> {e.lanes(e.read(carry_register(e)))} to {kind_bits}")
        total = binary(e, op, bits, result, carry)
        if sets:
            again = e.op(f"icmp ult {kind_bits} {total if op == 'add' else result}, {carry}")
            wraps = e.op(f"or <32 x i1> {wraps}, {again}")
        result = total
    put(e, ins, result, bits)
    if sets:
        e.write(carry_register(e), e.from_lanes(wraps))


def high_product(e: Emitter, a: str, b: str, bits: int, signed: bool) -> str:
    if bits < 64:
        wide = [extend(e, x, bits, 2 * bits, signed) for x in (a, b)]
        product = binary(e, "mul", 2 * bits, *wide)
        return cut(e, binary(e, "lshr", 2 * bits, product, f"splat (i{2 * bits} {bits})"), 2 * bits, bits)
    low_mask, shift = "splat (i64 4294967295)", "splat (i64 32)"
    al, bl = (binary(e, "and", 64, x, low_mask) for x in (a, b))
    ah, bh = (binary(e, "lshr", 64, x, shift) for x in (a, b))
    low = binary(e, "lshr", 64, binary(e, "mul", 64, al, bl), shift)
    middle = binary(e, "add", 64, binary(e, "mul", 64, ah, bl), low)
    other = binary(e, "add", 64, binary(e, "mul", 64, al, bh), binary(e, "and", 64, middle, low_mask))
    high = binary(e, "add", 64, binary(e, "mul", 64, ah, bh), binary(e, "lshr", 64, middle, shift))
    high = binary(e, "add", 64, high, binary(e, "lshr", 64, other, shift))
    if signed:
        for x, y in ((a, b), (b, a)):
            sign = binary(e, "ashr", 64, x, "splat (i64 63)")
            high = binary(e, "sub", 64, high, binary(e, "and", 64, sign, y))
    return high


def product(e: Emitter, a: str, b: str, kind: str, part: str) -> tuple[str, int]:
    """Bits of a * b: the low or high half, or the whole, and its width."""
    bits, signed = width(kind), kind[0] == "s"
    if part == "wide":
        wide = [extend(e, x, bits, 2 * bits, signed) for x in (a, b)]
        return binary(e, "mul", 2 * bits, *wide), 2 * bits
    if part == "hi":
        return high_product(e, a, b, bits, signed), bits
    return binary(e, "mul", bits, a, b), bits


@emits("mul", types=WORDS)
def mul(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind, part = mods.last(), mods.take("lo", "hi", "wide")
    a, b = sources(e, ins, width(kind))
    put(e, ins, *product(e, a, b, kind, part))


@emits("mad", "madc", types=WORDS)
def mad(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 4)
    kind, part = mods.last(), mods.take("lo", "hi", "wide")
    sat, sets = mods.flag("sat"), mods.flag("cc")
    a, b = sources(e, ins, width(kind), 2)
    name, bits = product(e, a, b, kind, part)
    c = e.bits(e.value(ins.operands[3], bits))
    if sat:
        if (kind, part) != ("s32", "hi") or sets or ins.opcode == "madc":
            raise e.refuse("modifier .sat")
        put(e, ins, intrinsic(e, "sadd.sat", bits, name, c), bits)
        return
    if part == "wide" and (sets or ins.opcode == "madc"):
        raise e.refuse("modifier .wide")
    total = binary(e, "add", bits, name, c)
    wraps = e.op(f"icmp ult {vec(f'i{bits}')} {total}, {c}") if sets else ""
    if ins.opcode == "madc":
        carry = e.op(f"zext <32 x i1> {e.lanes(e.read(carry_register(e)))} to {vec(f'i{bits}')}")
        total = binary(e, "add", bits, total, carry)
        if sets:
            again = e.op(f"icmp ult {vec(f'i{bits}')} {total}, {carry}")
            wraps = e.op(f"or <32 x i1> {wraps}, {again}")
    put(e, ins, total, bits)
    if sets:
        e.write(carry_register(e), e.from_lanes(wraps))


@emits("mul24", "mad24", types=("u32", "s32"))
def mul24(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3 if ins.opcode == "mul24" else 4)
    kind, part = mods.last(), mods.take("lo", "hi")
    sat = mods.flag("sat")
    shift = "ashr" if kind == "s32" else "lshr"
    inputs = sources(e, ins, 32)
    narrow = [binary(e, shift, 32, binary(e, "shl", 32, x, "splat (i32 8)"), "splat (i32 8)") for x in inputs[:2]]
    wide = [extend(e, x, 32, 64, kind == "s32") for x in narrow]
    whole = binary(e, "mul", 64, *wide)
    if part == "hi":
        whole = binary(e, "lshr", 64, whole, "splat (i64 16)")
    result = cut(e, whole, 64, 32)
    if ins.opcode == "mad24":
        if sat and (kind, part) != ("s32", "hi"):
            raise e.refuse("modifier .sat")
        result = intrinsic(e, "sadd.sat", 32, result, inputs[2]) if sat else binary(e, "add", 32, result, inputs[2])
    elif sat:
        raise e.refuse("modifier .sat")
    put(e, ins, result, 32)


@emits("div", "rem", types=("u16", "s16", "u32", "s32", "u64", "s64"))
def div_rem(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Up to 32 bits through exact double division; by zero gives all ones, as an H200 does."""
    operand_count(e, ins, 3)
    kind = mods.last()
    bits, signed = width(kind), kind[0] == "s"
    a, b = sources(e, ins, bits)
    i = vec(f"i{bits}")
    zero = e.op(f"icmp eq {i} {b}, zeroinitializer")
    safe = e.select(zero, f"splat (i{bits} 1)", b, f"i{bits}")
    if bits == 64:
        quotient = e.op(f"call {i} @{_divide64(e, signed)}({i} {a}, {i} {safe})")
    else:
        convert = "sitofp" if signed else "uitofp"
        x, y = (e.op(f"{convert} {i} {v} to <32 x double>") for v in (a, safe))
        ratio = e.op(f"fdiv <32 x double> {x}, {y}")
        quotient = cut(e, e.op(f"fptosi <32 x double> {ratio} to <32 x i64>"), 64, bits)
    if ins.opcode == "rem":
        quotient = binary(e, "sub", bits, a, binary(e, "mul", bits, quotient, safe))
    put(e, ins, e.select(zero, f"splat (i{bits} -1)", quotient, f"i{bits}"), bits)


def _divide64(e: Emitter, signed: bool) -> str:
    """64-bit division, lane by lane. INT64_MIN / -1 wraps."""
    name, op = ("sdiv64", "sdiv") if signed else ("udiv64", "udiv")
    i = "<32 x i64>"
    body = [f"define internal {i} @{name}({i} %a, {i} %b) noinline {{"]
    if signed:
        body += [
            f"  %minus = icmp eq {i} %b, splat (i64 -1)",
            f"  %safe = select <32 x i1> %minus, {i} splat (i64 1), {i} %b",
            f"  %q = sdiv {i} %a, %safe",
            f"  %neg = sub {i} zeroinitializer, %a",
            f"  %r = select <32 x i1> %minus, {i} %neg, {i} %q",
        ]
    else:
        body += [f"  %r = {op} {i} %a, %b"]
    e.library.add(name, "\n".join([*body, f"  ret {i} %r", "}"]))
    return name


@emits("min", "max", types=tuple(k for k in WORDS if k[0] != "b"))
def min_max(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind, relu = mods.last(), mods.flag("relu")
    bits = width(kind)
    if relu and kind != "s32":
        raise e.refuse("modifier .relu")
    result = intrinsic(e, f"{kind[0]}{ins.opcode}", bits, *sources(e, ins, bits))
    if relu:
        result = intrinsic(e, "smax", bits, result, "zeroinitializer")
    put(e, ins, result, bits)


@emits("add", "sub", "min", "max", types=PACKED)
def packed(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind = mods.last()
    relu = ins.opcode in ("min", "max") and mods.flag("relu")
    if relu and kind != "s16x2":
        raise e.refuse("modifier .relu")
    a, b = (e.halves(e.value(o, 32)) for o in ins.operands[1:])
    halves: list[Val] = []
    for x, y in zip(a, b):
        xs, ys = e.bits(x), e.bits(y)
        if ins.opcode in ("add", "sub"):
            r = binary(e, ins.opcode, 16, xs, ys)
        else:
            r = intrinsic(e, f"{kind[0]}{ins.opcode}", 16, xs, ys)
        if relu:
            r = intrinsic(e, "smax", 16, r, "zeroinitializer")
        halves.append(e.from_bits(r, 16))
    e.write(ins.operands[0], e.from_halves(halves[0], halves[1]))


@emits("abs", "neg", types=("s16", "s32", "s64"))
def abs_neg(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    bits = width(mods.last())
    (a,) = sources(e, ins, bits)
    if ins.opcode == "abs":
        put(e, ins, intrinsic(e, "abs", bits, a, extra="i1 false"), bits)
    else:
        put(e, ins, binary(e, "sub", bits, "zeroinitializer", a), bits)


@emits("sad", types=("u16", "s16", "u32", "s32", "u64", "s64"))
def sad(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 4)
    kind = mods.last()
    bits, sign = width(kind), kind[0]
    a, b, c = sources(e, ins, bits)
    high, low = intrinsic(e, f"{sign}max", bits, a, b), intrinsic(e, f"{sign}min", bits, a, b)
    put(e, ins, binary(e, "add", bits, c, binary(e, "sub", bits, high, low)), bits)


def _field(e: Emitter, value: str, at: int, bits: int, signed: bool) -> str:
    """Bits [at, at + bits) of 32, extended."""
    up = binary(e, "shl", 32, value, f"splat (i32 {32 - bits - at})")
    return binary(e, "ashr" if signed else "lshr", 32, up, f"splat (i32 {32 - bits})")


@emits("dp4a", types=("u32", "s32"))
@emits("dp2a", types=("u32", "s32"))
def dot_product(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 4)
    b_kind, a_kind = mods.last(), mods.take("u32", "s32")
    four = ins.opcode == "dp4a"
    part = "lo" if four else mods.take("lo", "hi")
    a, b, total = sources(e, ins, 32)
    for i in range(4 if four else 2):
        x = _field(e, a, 8 * i if four else 16 * i, 8 if four else 16, a_kind[0] == "s")
        y = _field(e, b, 8 * i + (16 if part == "hi" else 0), 8, b_kind[0] == "s")
        total = binary(e, "add", 32, total, binary(e, "mul", 32, x, y))
    put(e, ins, total, 32)
