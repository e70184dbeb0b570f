"""f16, bf16 and their packed pairs: add, sub, mul, fma, min, max, neg, abs, comparisons; mixed with f32.

Sums and products are formed in f32, which holds enough bits that rounding twice is rounding once; fma goes through
doubles rounded to odd.
"""

from __future__ import annotations

from refluent.emulator.codegen import rounding
from refluent.emulator.codegen.emitter import Emitter, Val
from refluent.emulator.codegen.floating import COMPARE, arithmetic, extreme, flush, magnitude, saturate
from refluent.emulator.codegen.logic import combine
from refluent.emulator.codegen.registry import Mods, emits, operand_count
from refluent.emulator.codegen.rounding import MODES, narrow, widen
from refluent.emulator.ptx import Dual, Instruction, Operand

SCALARS = ("f16", "bf16")
PAIRS = ("f16x2", "bf16x2")
ONE = {"f16": 0x3C00, "bf16": 0x3F80}


def to_f32(e: Emitter, val: Val, kind: str) -> Val:
    """Exactly, as f32."""
    if kind == "bf16":
        wide = e.op(f"zext <32 x i16> {e.bits(val)} to <32 x i32>")
        return e.from_bits(e.op(f"shl <32 x i32> {wide}, splat (i32 16)"), 32)
    return e.from_float(e.op(f"fpext <32 x half> {e.fp(val)} to <32 x float>"), 32)


def from_f32(e: Emitter, val: Val, kind: str, mode: str = "rn") -> Val:
    """Round f32 to f16 or bf16. A NaN becomes the canonical one."""
    if kind == "f16":
        return e.from_float(narrow(e, e.fp(val), mode, 32, 16), 16)
    bits = val.int_ if val.int_ is not None else rounding.raw(e, e.fp(val), 32)
    i = "<32 x i32>"
    if mode == "rn":
        low = e.op(f"and {i} {e.op(f'lshr {i} {bits}, splat (i32 16)')}, splat (i32 1)")
        grown = e.op(f"add {i} {e.op(f'add {i} {bits}, splat (i32 32767)')}, {low}")
    elif mode == "rz":
        grown = bits
    else:
        test = "slt" if mode == "rm" else "sge"
        side = e.op(f"icmp {test} {i} {bits}, zeroinitializer")
        grown = e.select(side, e.op(f"add {i} {bits}, splat (i32 65535)"), bits, "i32")
    nan = e.op(f"fcmp uno <32 x float> {e.fp(val)}, zeroinitializer")
    high = e.op(f"lshr {i} {grown}, splat (i32 16)")
    chosen = e.select(nan, "splat (i32 32767)", high, "i32")
    return e.from_bits(e.op(f"trunc {i} {chosen} to <32 x i16>"), 16)


def from_f64(e: Emitter, odd: str, kind: str, mode: str = "rn") -> Val:
    """Round a double (rounded to odd, or exact) to f16 or bf16."""
    return from_f32(e, e.from_float(narrow(e, odd, "odd"), 32), kind, mode)


def flush_half(e: Emitter, val: Val) -> Val:
    """Subnormal f16 -> zero of its sign."""
    bits = e.bits(val)
    exponent = e.op(f"and <32 x i16> {bits}, splat (i16 31744)")
    tiny = e.op(f"icmp eq <32 x i16> {exponent}, zeroinitializer")
    sign = e.op(f"and <32 x i16> {bits}, splat (i16 -32768)")
    return e.from_bits(e.select(tiny, sign, bits, "i16"), 16)


def compute(e: Emitter, op: str, kind: str, args: list[Val], ftz: bool = False, sat: bool = False) -> Val:
    """add, sub, mul, fma of f16 or bf16 values, rounded to nearest."""
    if ftz:
        args = [flush_half(e, a) for a in args]
    wide = [to_f32(e, a, kind) for a in args]
    if op == "fma":
        a, b, c = (widen(e, e.fp(w)) for w in wide)
        result = from_f64(e, rounding.fma_odd(e, a, b, c, "rn"), kind)
    else:
        result = from_f32(e, arithmetic(e, op, "rn", wide), kind)
    if sat:
        result = from_f32(e, saturate(e, to_f32(e, result, kind)), kind)
    return flush_half(e, result) if ftz else result


def relu(e: Emitter, val: Val, kind: str) -> Val:
    """Negative -> +0, NaN -> canonical NaN."""
    bits = e.bits(val)
    minus = e.op(f"icmp slt <32 x i16> {bits}, zeroinitializer")
    zeroed = e.select(minus, "zeroinitializer", bits, "i16")
    size = e.op(f"and <32 x i16> {bits}, splat (i16 32767)")
    nan = e.op(f"icmp ugt <32 x i16> {size}, splat (i16 {0x7C00 if kind == 'f16' else 0x7F80})")
    return e.from_bits(e.select(nan, "splat (i16 32767)", zeroed, "i16"), 16)


def base_kind(kind: str) -> str:
    return kind.removesuffix("x2")


def split(e: Emitter, operand: Operand, kind: str) -> list[Val]:
    if kind.endswith("x2"):
        return list(e.halves(e.value(operand, 32)))
    return [e.value(operand, 16)]


def join(e: Emitter, target: Operand, parts: list[Val]) -> None:
    e.write(target, parts[0] if len(parts) == 1 else e.from_halves(parts[0], parts[1]))


@emits("add", "sub", "mul", "fma", types=(*SCALARS, *PAIRS))
def arithmetic16(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    if "f32" in mods.left:
        _mixed(e, ins, mods, kind)
        return
    operand_count(e, ins, 4 if ins.opcode == "fma" else 3)
    mods.maybe("rn")
    base = base_kind(kind)
    half = base == "f16"
    ftz, sat = half and mods.flag("ftz"), half and mods.flag("sat")
    with_relu = ins.opcode == "fma" and mods.flag("relu")
    if ins.opcode == "fma" and mods.flag("oob"):
        raise e.refuse("modifier .oob")
    columns = [split(e, o, kind) for o in ins.operands[1:]]
    results = [compute(e, ins.opcode, base, list(args), ftz, sat) for args in zip(*columns)]
    join(e, ins.operands[0], [relu(e, r, base) for r in results] if with_relu else results)


def _mixed(e: Emitter, ins: Instruction, mods: Mods, kind: str) -> None:
    """f32 arithmetic whose inputs (add, sub: the first; fma: both factors) are f16 or bf16."""
    mods.take("f32")
    if kind not in SCALARS or ins.opcode == "mul":
        raise e.refuse(f"type .{kind}")
    operand_count(e, ins, 4 if ins.opcode == "fma" else 3)
    mode, sat = mods.take(*MODES, default="rn"), mods.flag("sat")
    narrow_count = 2 if ins.opcode == "fma" else 1
    sources = ins.operands[1:]
    args = [to_f32(e, e.value(o, 16), kind) for o in sources[:narrow_count]]
    args += [e.float_value(o, 32) for o in sources[narrow_count:]]
    result = arithmetic(e, ins.opcode, mode, args)
    e.write(ins.operands[0], saturate(e, result) if sat else result)


@emits("min", "max", types=(*SCALARS, *PAIRS))
def min_max16(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind = mods.last()
    base = base_kind(kind)
    ftz = base == "f16" and mods.flag("ftz")
    nan, xorsign = mods.flag("NaN"), mods.flag("xorsign")
    if xorsign:
        mods.take("abs")
    results = []
    for pair in zip(*(split(e, o, kind) for o in ins.operands[1:])):
        halves = [flush_half(e, v) for v in pair] if ftz else list(pair)
        wide = [to_f32(e, v, base) for v in halves]
        best = extreme(e, ins.opcode, nan, [magnitude(e, w) for w in wide] if xorsign else wide)
        result = from_f32(e, best, base)
        if xorsign:
            sign = e.op(f"xor <32 x i16> {e.bits(halves[0])}, {e.bits(halves[1])}")
            sign = e.op(f"and <32 x i16> {sign}, splat (i16 -32768)")
            # NaN stays canonical.
            number = e.op(f"fcmp ord <32 x float> {e.fp(best)}, zeroinitializer")
            sign = e.select(number, sign, "zeroinitializer", "i16")
            result = e.from_bits(e.op(f"or <32 x i16> {e.bits(result)}, {sign}"), 16)
        results.append(result)
    join(e, ins.operands[0], results)


@emits("neg", "abs", types=(*SCALARS, *PAIRS))
def sign16(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    kind = mods.last()
    ftz = base_kind(kind) == "f16" and mods.flag("ftz")
    results = []
    for part in split(e, ins.operands[1], kind):
        bits = e.bits(flush_half(e, part) if ftz else part)
        size = e.op(f"and <32 x i16> {bits}, splat (i16 32767)")
        made = size if ins.opcode == "abs" else e.op(f"xor <32 x i16> {bits}, splat (i16 -32768)")
        infinity = 0x7C00 if base_kind(kind) == "f16" else 0x7F80
        nan = e.op(f"icmp ugt <32 x i16> {size}, splat (i16 {infinity})")
        results.append(e.from_bits(e.select(nan, "splat (i16 32767)", made, "i16"), 16))
    join(e, ins.operands[0], results)


def compare16(e: Emitter, test: str, kind: str, a: Val, b: Val, ftz: bool) -> Val:
    if ftz:
        a, b = flush_half(e, a), flush_half(e, b)
    names = [e.fp(to_f32(e, v, kind)) for v in (a, b)]
    return e.from_lanes(e.op(f"fcmp {COMPARE[test]} <32 x float> {names[0]}, {names[1]}"))


@emits("setp", types=(*SCALARS, *PAIRS))
def setp16(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """Scalars as f32's setp; pairs write the comparison of the low and of the high halves to p|q."""
    kind = mods.last()
    base = base_kind(kind)
    test, combined = mods.take(*COMPARE), mods.maybe("and", "or", "xor")
    ftz = base == "f16" and mods.flag("ftz")
    operand_count(e, ins, 4 if combined else 3)
    columns = zip(*(split(e, o, kind) for o in ins.operands[1:3]))
    results = [compare16(e, test, base, a, b, ftz) for a, b in columns]
    target = ins.operands[0]
    if len(results) == 1 and isinstance(target, Dual):
        results.append(e.invert(results[0]))
    if combined:
        other = e.predicate(ins.operands[3])
        results = [combine(e, combined, r, other) for r in results]
    if isinstance(target, Dual):
        e.write(target.first, results[0])
        e.write(target.second, results[1])
    elif len(results) == 1:
        e.write(target, results[0])
    else:
        raise e.refuse("one destination for two comparisons")


@emits("set", types=(*SCALARS, *PAIRS))
def set16(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    base = base_kind(kind)
    test, combined = mods.take(*COMPARE), mods.maybe("and", "or", "xor")
    ftz = base == "f16" and mods.flag("ftz")
    operand_count(e, ins, 4 if combined else 3)
    columns = list(zip(*(split(e, o, kind) for o in ins.operands[1:3])))
    lanes = [compare16(e, test, base, a, b, ftz) for a, b in columns]
    if combined:
        other = e.predicate(ins.operands[3])
        lanes = [combine(e, combined, r, other) for r in lanes]
    if kind.endswith("x2"):
        mods.take(kind)
        one = f"splat (i16 {ONE[base]})"
        parts = [e.from_bits(e.select(e.lanes(p), one, "zeroinitializer", "i16"), 16) for p in lanes]
    else:
        wanted = mods.take(kind, "u16", "s16", "u32", "s32")
        bits = 16 if wanted == kind else int(wanted[1:])
        one = f"splat (i16 {ONE[base]})" if wanted == kind else f"splat (i{bits} -1)"
        parts = [e.from_bits(e.select(e.lanes(lanes[0]), one, "zeroinitializer", f"i{bits}"), bits)]
    join(e, ins.operands[0], parts)


__all__ = ["base_kind", "flush", "flush_half", "from_f32", "from_f64", "join", "relu", "split", "to_f32"]
