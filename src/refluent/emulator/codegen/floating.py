"""f32, f32x2 and f64 arithmetic: add, sub, mul, fma, min, max, neg, abs, comparisons, testp, copysign."""

from __future__ import annotations

from refluent.emulator.codegen import rounding
from refluent.emulator.codegen.emitter import FLOAT_TYPE, Emitter, Val, vec
from refluent.emulator.codegen.logic import INTEGERS, finish_set, finish_setp
from refluent.emulator.codegen.registry import Mods, emits, operand_count
from refluent.emulator.codegen.rounding import MODES, math, narrow, widen
from refluent.emulator.ptx import Instruction

COMPARE = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "num": "ord", "nan": "uno"}
COMPARE |= {"equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge"}


def flush(e: Emitter, val: Val) -> Val:
    """Subnormal f32 -> zero of its sign."""
    bits = val.int_ if val.int_ is not None else rounding.raw(e, e.fp(val), 32)
    exponent = e.op(f"and <32 x i32> {bits}, splat (i32 2139095040)")
    tiny = e.op(f"icmp eq <32 x i32> {exponent}, zeroinitializer")
    sign = e.op(f"and <32 x i32> {bits}, splat (i32 -2147483648)")
    flushed = e.select(tiny, sign, bits, "i32")
    if val.int_ is not None:
        return e.from_bits(flushed, 32)
    return e.from_float(rounding.as_float(e, flushed, 32), 32)


def saturate(e: Emitter, val: Val) -> Val:
    """Clamp to [0, 1]; NaN becomes +0."""
    v = vec(FLOAT_TYPE[val.bits])
    x = e.fp(val)
    positive = e.op(f"fcmp ogt {v} {x}, zeroinitializer")
    floor = e.select(positive, x, "zeroinitializer", FLOAT_TYPE[val.bits])
    below = e.op(f"fcmp olt {v} {floor}, splat ({FLOAT_TYPE[val.bits]} 1.0)")
    one = f"splat ({FLOAT_TYPE[val.bits]} 1.0)"
    return e.from_float(e.select(below, floor, one, FLOAT_TYPE[val.bits]), val.bits)


def operands(e: Emitter, ins: Instruction, bits: int, ftz: bool = False) -> list[Val]:
    values = [e.float_value(o, bits) for o in ins.operands[1:]]
    return [flush(e, v) for v in values] if ftz else values


def arithmetic(e: Emitter, op: str, mode: str, args: list[Val]) -> Val:
    """add, sub, mul or fma of f32 or f64 values, correctly rounded in any mode."""
    bits = args[0].bits
    kind = FLOAT_TYPE[bits]
    names = [e.fp(a) for a in args]
    if mode == "rn":
        if op == "fma":
            return e.from_float(math(e, "fma", kind, *names), bits)
        return e.from_float(e.op(f"f{op} {vec(kind)} {names[0]}, {names[1]}"), bits)
    if bits == 64:
        return e.from_float(rounding.hardware(e, op if op == "fma" else f"f{op}", mode, *names), bits)
    if op == "sub":
        names[1] = e.op(f"fneg <32 x float> {names[1]}")
    if op in ("add", "sub"):
        return e.from_float(_directed_add(e, mode, names[0], names[1]), 32)
    wide = [widen(e, n) for n in names]
    if op == "mul":
        exact = e.op(f"fmul <32 x double> {wide[0]}, {wide[1]}")
    else:
        exact = rounding.fma_odd(e, wide[0], wide[1], wide[2], mode)
    return e.from_float(narrow(e, exact, mode), 32)


def _directed_add(e: Emitter, mode: str, x: str, y: str) -> str:
    """x + y in f32 alone: round to nearest, then step by the sign of the exact error."""
    v = "<32 x float>"
    total = e.op(f"fadd {v} {x}, {y}")
    error = rounding.sum_error(e, x, y, total, "float")
    # Beyond the largest number the error is not a number: there it points back to finite.
    size = math(e, "fabs", "float", total)
    infinite = e.op(f"fcmp oeq {v} {size}, splat (float 0x7FF0000000000000)")
    for part in (x, y):
        finite = e.op(f"fcmp one {v} {math(e, 'fabs', 'float', part)}, splat (float 0x7FF0000000000000)")
        infinite = e.op(f"and <32 x i1> {infinite}, {finite}")
    minus = rounding.negative(e, total, 32)
    back = e.op(f"fneg {v} {total}")
    error = e.select(infinite, back, error, "float")
    low, high = (e.op(f"fcmp {test} {v} {error}, zeroinitializer") for test in ("olt", "ogt"))
    if mode == "rm":
        where, away = low, minus
    elif mode == "rp":
        where, away = high, e.op(f"xor <32 x i1> {minus}, splat (i1 true)")
    else:
        where, away = e.op(f"select <32 x i1> {minus}, <32 x i1> {high}, <32 x i1> {low}"), "zeroinitializer"
    result = rounding.step(e, total, 32, away, where)
    return rounding.signed_zero(e, result, x, y, 32) if mode == "rm" else result


def flush_result(e: Emitter, op: str, args: list[Val], result: Val) -> Val:
    """Flush what was subnormal before rounding: also what rounds up to the smallest normal number."""
    if op in ("mul", "fma"):
        wide = [widen(e, e.fp(a)) for a in args]
        if op == "mul":
            exact = e.op(f"fmul <32 x double> {wide[0]}, {wide[1]}")
        else:
            exact = rounding.fma_odd(e, wide[0], wide[1], wide[2], "rn")
        size = math(e, "fabs", "double", exact)
        tiny = e.op(f"fcmp olt <32 x double> {size}, splat (double 0x3810000000000000)")
        zero = e.op(f"and <32 x i32> {rounding.raw(e, e.fp(result), 32)}, splat (i32 -2147483648)")
        return e.from_float(e.select(tiny, rounding.as_float(e, zero, 32), e.fp(result), "float"), 32)
    return flush(e, result)


@emits("add", "sub", "mul", "fma", "mad", types=("f32", "f64"))
def scalar(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    op = "fma" if ins.opcode == "mad" else ins.opcode
    operand_count(e, ins, 4 if op == "fma" else 3)
    mode = mods.take(*MODES, default="rn" if op != "fma" else "")
    ftz, sat = (mods.flag("ftz"), mods.flag("sat")) if kind == "f32" else (False, False)
    args = operands(e, ins, int(kind[1:]), ftz)
    result = arithmetic(e, op, mode, args)
    if ftz:
        result = flush_result(e, op, args, result)
    e.write(ins.operands[0], saturate(e, result) if sat else result)


@emits("add", "sub", "mul", "fma", types=("f32x2",))
def packed(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 4 if ins.opcode == "fma" else 3)
    mods.last()
    mode, ftz = mods.take(*MODES, default="rn"), mods.flag("ftz")
    pairs = [e.halves(e.value(o, 64)) for o in ins.operands[1:]]
    results = []
    for args in zip(*pairs):
        inputs = [flush(e, a) for a in args] if ftz else list(args)
        result = arithmetic(e, ins.opcode, mode, inputs)
        results.append(flush_result(e, ins.opcode, inputs, result) if ftz else result)
    e.write(ins.operands[0], e.from_halves(results[0], results[1]))


def extreme(e: Emitter, op: str, nan: bool, args: list[Val]) -> Val:
    """min or max of two or three numbers: -0 < +0; a NaN is passed over, or with .NaN wins."""
    kind = FLOAT_TYPE[args[0].bits]
    name = {("min", False): "minimumnum", ("max", False): "maximumnum"}.get((op, nan)) or f"{op}imum"
    result = e.fp(args[0])
    for other in args[1:]:
        result = math(e, name, kind, result, e.fp(other))
    return e.from_float(result, args[0].bits)


def magnitude(e: Emitter, val: Val) -> Val:
    return e.from_float(math(e, "fabs", FLOAT_TYPE[val.bits], e.fp(val)), val.bits)


@emits("min", "max", types=("f32", "f64"))
def min_max(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    ftz = nan = xorsign = absolute = False
    if kind == "f32":
        ftz, nan = mods.flag("ftz"), mods.flag("NaN")
        xorsign, absolute = mods.flag("xorsign"), mods.flag("abs")
        if xorsign and not absolute:
            raise e.refuse("modifier .xorsign without .abs")
    operand_count(e, ins, *((3, 4) if kind == "f32" and not xorsign else (3,)))
    args = operands(e, ins, int(kind[1:]), ftz)
    result = extreme(e, ins.opcode, nan, [magnitude(e, a) for a in args] if absolute else args)
    if xorsign:
        sign = e.op(f"xor <32 x i32> {e.bits(args[0])}, {e.bits(args[1])}")
        sign = e.op(f"and <32 x i32> {sign}, splat (i32 -2147483648)")
        # NaN stays canonical.
        number = e.op(f"fcmp ord <32 x float> {e.fp(result)}, zeroinitializer")
        sign = e.select(number, sign, "zeroinitializer", "i32")
        result = e.from_bits(e.op(f"or <32 x i32> {e.bits(result)}, {sign}"), 32)
    e.write(ins.operands[0], result)


@emits("neg", "abs", types=("f32", "f64"))
def sign(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    kind = mods.last()
    bits = int(kind[1:])
    ftz = kind == "f32" and mods.flag("ftz")
    (a,) = operands(e, ins, bits, ftz)
    if ins.opcode == "neg":
        e.write(ins.operands[0], e.from_float(e.op(f"fneg {vec(FLOAT_TYPE[bits])} {e.fp(a)}"), bits))
    else:
        e.write(ins.operands[0], magnitude(e, a))


@emits("copysign", types=("f32", "f64"))
def copysign(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """The sign of a on the magnitude of b."""
    operand_count(e, ins, 3)
    bits = int(mods.last()[1:])
    a, b = (e.bits(v) for v in operands(e, ins, bits))
    i = vec(f"i{bits}")
    sign_bit = 1 << (bits - 1)
    high = e.op(f"and {i} {a}, splat (i{bits} {sign_bit})")
    low = e.op(f"and {i} {b}, splat (i{bits} {sign_bit - 1})")
    e.write(ins.operands[0], e.from_bits(e.op(f"or {i} {high}, {low}"), bits))


def compare_floats(e: Emitter, ins: Instruction, mods: Mods, bits: int, ftz: bool) -> Val:
    test = mods.take(*COMPARE)
    values = [e.float_value(o, bits) for o in ins.operands[1:3]]
    a, b = (e.fp(flush(e, v) if ftz else v) for v in values)
    return e.from_lanes(e.op(f"fcmp {COMPARE[test]} {vec(FLOAT_TYPE[bits])} {a}, {b}"))


@emits("setp", types=("f32", "f64"))
def setp(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    ftz = kind == "f32" and mods.flag("ftz")
    finish_setp(e, ins, mods, compare_floats(e, ins, mods, int(kind[1:]), ftz))


@emits("set", types=("f32", "f64"))
def set_(e: Emitter, ins: Instruction, mods: Mods) -> None:
    kind = mods.last()
    ftz = mods.flag("ftz")
    finish_set(e, ins, mods, lambda: compare_floats(e, ins, mods, int(kind[1:]), ftz))


@emits("testp", types=("f32", "f64"))
def testp(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    bits = int(mods.last()[1:])
    test = mods.take("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    i = vec(f"i{bits}")
    size = e.op(f"and {i} {e.bits(e.float_value(ins.operands[1], bits))}, splat (i{bits} {(1 << (bits - 1)) - 1})")
    infinity = {32: 0x7F800000, 64: 0x7FF0000000000000}[bits]
    smallest = {32: 0x00800000, 64: 0x0010000000000000}[bits]

    def compare(op: str, value: int) -> str:
        return e.op(f"icmp {op} {i} {size}, splat (i{bits} {value})")

    simple = {"finite": ("ult", infinity), "infinite": ("eq", infinity), "notanumber": ("ugt", infinity)}
    simple["number"] = ("ule", infinity)
    if test in simple:
        result = compare(*simple[test])
    elif test == "normal":
        # Zero counts as normal.
        result = e.op(f"and <32 x i1> {compare('uge', smallest)}, {compare('ult', infinity)}")
        result = e.op(f"or <32 x i1> {result}, {compare('eq', 0)}")
    else:
        result = e.op(f"and <32 x i1> {compare('ult', smallest)}, {compare('ne', 0)}")
    e.write(ins.operands[0], e.from_lanes(result))


__all__ = ["INTEGERS", "arithmetic", "extreme", "flush", "magnitude", "operands", "saturate"]
