"""Functions the hardware approximates (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div) and their IEEE forms.

The default is the exact function, computed in double to well below half a unit of f32 and rounded once. With
Options(approx="perturbed") each approximate result then moves by a pseudo-random amount within the error the PTX
manual allows, drawn from the operand's bits and the warp's `seed`: the same input gives the same output.
"""

from __future__ import annotations

import math as m
from collections.abc import Callable

from refluent.emulator.codegen import rounding
from refluent.emulator.codegen.emitter import Emitter, Val
from refluent.emulator.codegen.floating import flush, operands, saturate
from refluent.emulator.codegen.half import base_kind, flush_half, from_f32, join, split, to_f32
from refluent.emulator.codegen.registry import Mods, emits, operand_count
from refluent.emulator.codegen.rounding import F32, F64, MODES, divide_odd, math, narrow, sqrt_odd, widen
from refluent.emulator.ptx import Instruction

INFINITY = "0x7FF0000000000000"


def number(value: float) -> str:
    """A splatted double constant."""
    return f"splat (double 0x{m_bits(value):016X})"


def m_bits(value: float) -> int:
    import struct

    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def function(e: Emitter, name: str, body: Callable[[Emitter, str], str]) -> str:
    """Define @name (<32 x float>) -> <32 x float> once."""
    if name not in e.library.text:
        inner = Emitter(e.kernel, e.layout, e.library, e.options)
        inner.ins = e.ins
        result = body(inner, "%x")
        text = "\n".join(inner.lines)
        e.library.add(name, f"define internal {F32} @{name}({F32} %x) noinline #0 {{\n{text}\n  ret {F32} {result}\n}}")
    return name


def polynomial(e: Emitter, x: str, coefficients: list[float]) -> str:
    """Horner's rule, lowest coefficient first."""
    total = number(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = math(e, "fma", "double", total, x, number(c))
    return total


# Coefficients of (2^r - 1) / r on [-1/2, 1/2]: ln2^(k+1) / (k+1)!, to 1e-17.
EXP2_TERMS = [m.log(2) ** (k + 1) / m.factorial(k + 1) for k in range(13)]


def exp2_minus_one(e: Emitter, x: str) -> tuple[str, str]:
    """For doubles |x| < 1000: (2^r - 1, 2^k) with x = k + r, |r| <= 1/2."""
    whole = math(e, "roundeven", "double", x)
    rest = e.op(f"fsub {F64} {x}, {whole}")
    grown = e.op(f"fmul {F64} {rest}, {polynomial(e, rest, EXP2_TERMS)}")
    k = e.op(f"fptosi {F64} {whole} to <32 x i64>")
    biased = e.op(f"add <32 x i64> {k}, splat (i64 1023)")
    scale = rounding.as_float(e, e.op(f"shl <32 x i64> {biased}, splat (i64 52)"), 64)
    return grown, scale


def bounded(e: Emitter, x: str, low: float, high: float) -> str:
    """Clamp doubles; NaN goes to the lower bound (the caller puts NaN back)."""
    above = e.op(f"fcmp ogt {F64} {x}, {number(low)}")
    raised = e.select(above, x, number(low), "double")
    below = e.op(f"fcmp olt {F64} {raised}, {number(high)}")
    return e.select(below, raised, number(high), "double")


def keep_nan(e: Emitter, x: str, result: str) -> str:
    nan = e.op(f"fcmp uno {F32} {x}, zeroinitializer")
    return e.select(nan, "splat (float 0x7FF8000000000000)", result, "float")


def exp2(e: Emitter, x: str) -> str:
    wide = bounded(e, widen(e, x), -300.0, 300.0)
    grown, scale = exp2_minus_one(e, wide)
    result = math(e, "fma", "double", grown, scale, scale)
    return keep_nan(e, x, narrow(e, result, "rn"))


def tanh(e: Emitter, x: str) -> str:
    """(e^2x - 1) / (e^2x + 1), with e^2x - 1 free of cancellation near zero."""
    wide = bounded(e, widen(e, x), -20.0, 20.0)
    grown, scale = exp2_minus_one(e, e.op(f"fmul {F64} {wide}, {number(2 / m.log(2))}"))
    less = e.op(f"fsub {F64} {scale}, {number(1.0)}")
    expm1 = math(e, "fma", "double", grown, scale, less)
    ratio = e.op(f"fdiv {F64} {expm1}, {e.op(f'fadd {F64} {expm1}, {number(2.0)}')}")
    signed = narrow(e, ratio, "rn")
    zero = e.op(f"fcmp oeq {F32} {x}, zeroinitializer")
    return keep_nan(e, x, e.select(zero, x, signed, "float"))


def log2(e: Emitter, x: str) -> str:
    """log2 of m in [sqrt 1/2, sqrt 2) by the series of atanh((m - 1) / (m + 1)), plus the exponent."""
    bits = rounding.raw(e, widen(e, x), 64)
    offset = m_bits(m.sqrt(0.5))
    moved = e.op(f"sub <32 x i64> {bits}, splat (i64 {offset})")
    k = e.op(f"ashr <32 x i64> {moved}, splat (i64 52)")
    down = e.op(f"shl <32 x i64> {k}, splat (i64 52)")
    part = rounding.as_float(e, e.op(f"sub <32 x i64> {bits}, {down}"), 64)
    above = e.op(f"fsub {F64} {part}, {number(1.0)}")
    s = e.op(f"fdiv {F64} {above}, {e.op(f'fadd {F64} {part}, {number(1.0)}')}")
    square = e.op(f"fmul {F64} {s}, {s}")
    series = polynomial(e, square, [2 / m.log(2) / (2 * i + 1) for i in range(12)])
    whole = e.op(f"sitofp <32 x i64> {k} to {F64}")
    result = narrow(e, math(e, "fma", "double", s, series, whole), "rn")
    infinite = e.op(f"fcmp oeq {F32} {x}, splat (float {INFINITY})")
    result = e.select(infinite, x, result, "float")
    zero = e.op(f"fcmp oeq {F32} {x}, zeroinitializer")
    result = e.select(zero, "splat (float 0xFFF0000000000000)", result, "float")
    negative = e.op(f"fcmp olt {F32} {x}, zeroinitializer")
    result = e.select(negative, "splat (float 0x7FF8000000000000)", result, "float")
    return keep_nan(e, x, result)


def reciprocal_root(e: Emitter, x: str) -> str:
    root = math(e, "sqrt", "double", widen(e, x))
    return narrow(e, e.op(f"fdiv {F64} {number(1.0)}, {root}"), "rn")


def library_call(name: str) -> Callable[[Emitter, str], str]:
    """sin and cos: the host's libm in double."""

    def body(e: Emitter, x: str) -> str:
        return narrow(e, math(e, name, "double", widen(e, x)), "rn")

    return body


def reciprocal(e: Emitter, x: str) -> str:
    return e.op(f"fdiv {F32} splat (float 1.0), {x}")


def square_root(e: Emitter, x: str) -> str:
    return math(e, "sqrt", "float", x)


BODIES: dict[str, Callable[[Emitter, str], str]] = {
    "ex2": exp2,
    "lg2": log2,
    "tanh": tanh,
    "rcp": reciprocal,
    "rsqrt": reciprocal_root,
    "sqrt": square_root,
    "sin": library_call("sin"),
    "cos": library_call("cos"),
}
# Error allowed by the manual: in units of the last place of f32, or absolute.
ULPS = {"ex2": 2, "rcp": 1, "rsqrt": 2, "sqrt": 1, "tanh": 4096, "div": 2}
ABSOLUTE = {"sin": 2.0**-20.5, "cos": 2.0**-20.5, "lg2": 2.0**-22.6}


def random_lanes(e: Emitter, bits: str) -> str:
    """32 pseudo-random bits a lane from an operand and the seed (a finaliser of MurmurHash3's kind)."""
    i = "<32 x i32>"
    x = e.op(f"xor {i} {bits}, {e.splat(e.load_field('seed'), 'i32')}")
    for shift, factor in ((16, -2048144789), (13, -1028477387)):
        x = e.op(f"xor {i} {x}, {e.op(f'lshr {i} {x}, splat (i32 {shift})')}")
        x = e.op(f"mul {i} {x}, splat (i32 {factor})")
    return e.op(f"xor {i} {x}, {e.op(f'lshr {i} {x}, splat (i32 16)')}")


def perturb(e: Emitter, name: str, source: str, result: str) -> str:
    """Move a finite, normal, non-zero f32 result within the allowed error."""
    i = "<32 x i32>"
    draw = random_lanes(e, source)
    size = math(e, "fabs", "float", result)
    normal = e.op(f"fcmp oge {F32} {size}, splat (float 0x3810000000000000)")
    finite = e.op(f"fcmp olt {F32} {size}, splat (float {INFINITY})")
    where = e.op(f"and <32 x i1> {normal}, {finite}")
    if name in ULPS:
        span = 2 * ULPS[name] + 1
        step = e.op(f"urem {i} {e.op(f'lshr {i} {draw}, splat (i32 8)')}, splat (i32 {span})")
        step = e.op(f"sub {i} {step}, splat (i32 {ULPS[name]})")
        moved = rounding.as_float(e, e.op(f"add {i} {rounding.raw(e, result, 32)}, {step}"), 32)
        # Never across the border of the finite, normal numbers, and not past 1 for tanh.
        grown = math(e, "fabs", "float", moved)
        inside = e.op(f"fcmp oge {F32} {grown}, splat (float 0x3810000000000000)")
        limit = "1.0" if name == "tanh" else INFINITY
        below = e.op(f"fcmp {'ole' if name == 'tanh' else 'olt'} {F32} {grown}, splat (float {limit})")
        where = e.op(f"and <32 x i1> {where}, {e.op(f'and <32 x i1> {inside}, {below}')}")
    else:
        fraction = e.op(f"sitofp {i} {draw} to {F32}")
        unit = e.op(f"fmul {F64} {widen(e, fraction)}, {number(ABSOLUTE[name] / 2**31 * 0.99)}")
        moved = e.op(f"fadd {F32} {result}, {narrow(e, unit, 'rn')}")
    return e.select(where, moved, result, "float")


def perturb_half(e: Emitter, source: str, val: Val, kind: str) -> Val:
    """Move a finite, normal 16-bit result by at most one unit; 1 and above stay (tanh ends there)."""
    i = "<32 x i16>"
    draw = random_lanes(e, source)
    step = e.op(f"sub <32 x i32> {e.op(f'urem <32 x i32> {draw}, splat (i32 3)')}, splat (i32 1)")
    bits = e.bits(val)
    size = e.op(f"and {i} {bits}, splat (i16 32767)")
    least, most = (0x0400, 0x3C00) if kind == "f16" else (0x0080, 0x3F80)
    from_least = e.op(f"sub {i} {size}, splat (i16 {least + 1})")
    inside = e.op(f"icmp ult {i} {from_least}, splat (i16 {most - least - 1})")
    moved = e.op(f"add {i} {bits}, {e.op(f'trunc <32 x i32> {step} to {i}')}")
    return e.from_bits(e.select(inside, moved, bits, "i16"), 16)


def exactly(e: Emitter, name: str, source: str) -> str:
    label = function(e, f"{name}_f32", BODIES[name])
    return e.op(f"call {F32} @{label}({F32} {source})")


def approximate(e: Emitter, name: str, val: Val) -> Val:
    """The f32 function, perturbed when asked for."""
    source = e.fp(val)
    result = exactly(e, name, source)
    if e.options.approx == "perturbed":
        result = perturb(e, name, rounding.raw(e, source, 32), result)
    return e.from_float(result, 32)


@emits("ex2", "lg2", "sin", "cos", "tanh", "rsqrt", types=("f32",))
def approximation(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    mods.last()
    mods.take("approx")
    ftz = mods.flag("ftz")
    if ftz and ins.opcode == "tanh":
        raise e.refuse("modifier .ftz")
    (a,) = operands(e, ins, 32, ftz)
    result = approximate(e, ins.opcode, a)
    e.write(ins.operands[0], flush(e, result) if ftz else result)


@emits("rcp", "sqrt", types=("f32",))
def rcp_sqrt(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    mods.last()
    mode, ftz = mods.take("approx", *MODES), mods.flag("ftz")
    (a,) = operands(e, ins, 32, ftz)
    if mode == "approx":
        result = approximate(e, ins.opcode, a)
    elif mode == "rn":
        result = e.from_float(BODIES[ins.opcode](e, e.fp(a)), 32)
    else:
        wide = widen(e, e.fp(a))
        odd = sqrt_odd(e, wide) if ins.opcode == "sqrt" else divide_odd(e, number(1.0), wide)
        result = e.from_float(narrow(e, odd, mode), 32)
    e.write(ins.operands[0], flush(e, result) if ftz else result)


@emits("rcp", "sqrt", "rsqrt", types=("f64",))
def f64_functions(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    mods.last()
    mode = mods.take("approx", *(MODES if ins.opcode != "rsqrt" else ()))
    (a,) = operands(e, ins, 64)
    x = e.fp(a)
    if mode == "approx":
        _gross(e, ins, mods, x)
        return
    if ins.opcode == "sqrt":
        result = math(e, "sqrt", "double", x) if mode == "rn" else rounding.hardware(e, "sqrt", mode, x)
    elif mode == "rn":
        result = e.op(f"fdiv {F64} {number(1.0)}, {x}")
    else:
        result = rounding.hardware(e, "fdiv", mode, number(1.0), x)
    e.write(ins.operands[0], e.from_float(result, 64))


def _gross(e: Emitter, ins: Instruction, mods: Mods, x: str) -> None:
    """rcp.approx.ftz.f64 and rsqrt.approx.f64: the upper 32 bits of the result, the lower ones zero for .ftz."""
    if ins.opcode == "sqrt":
        raise e.refuse("modifier .approx")
    ftz = mods.flag("ftz") if ins.opcode == "rsqrt" else bool(mods.take("ftz"))
    if ftz:
        x = _top_word(e, x, True)
    root = math(e, "sqrt", "double", x) if ins.opcode == "rsqrt" else x
    result = e.op(f"fdiv {F64} {number(1.0)}, {root}")
    e.write(ins.operands[0], e.from_float(_top_word(e, result, True) if ftz else result, 64))


def _top_word(e: Emitter, x: str, tiny: bool) -> str:
    """Clear the low word; subnormals go to zero."""
    bits = e.op(f"and <32 x i64> {rounding.raw(e, x, 64)}, splat (i64 -4294967296)")
    if tiny:
        exponent = e.op(f"and <32 x i64> {bits}, splat (i64 {0x7FF << 52})")
        small = e.op(f"icmp eq <32 x i64> {exponent}, zeroinitializer")
        sign = e.op(f"and <32 x i64> {bits}, splat (i64 {1 << 63})")
        bits = e.select(small, sign, bits, "i64")
    return rounding.as_float(e, bits, 64)


@emits("div", types=("f32", "f64"))
def divide(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 3)
    kind = mods.last()
    bits = int(kind[1:])
    mode = mods.take(*MODES, *(("approx", "full") if bits == 32 else ()))
    ftz = bits == 32 and mods.flag("ftz")
    a, b = (e.fp(v) for v in operands(e, ins, bits, ftz))
    if bits == 64:
        result = e.op(f"fdiv {F64} {a}, {b}") if mode == "rn" else rounding.hardware(e, "fdiv", mode, a, b)
        e.write(ins.operands[0], e.from_float(result, 64))
        return
    if mode in ("rz", "rm", "rp"):
        result = narrow(e, divide_odd(e, widen(e, a), widen(e, b)), mode)
    else:
        result = e.op(f"fdiv {F32} {a}, {b}")
    if mode == "approx":
        result = _huge_divisor(e, a, b, result)
    if mode in ("approx", "full") and e.options.approx == "perturbed":
        mixed = e.op(f"xor <32 x i32> {rounding.raw(e, a, 32)}, {rounding.raw(e, b, 32)}")
        result = perturb(e, "div", mixed, result)
    val = e.from_float(result, 32)
    e.write(ins.operands[0], flush(e, val) if ftz else val)


def _huge_divisor(e: Emitter, a: str, b: str, result: str) -> str:
    """div.approx for 2^126 < |b| < 2^128: the reciprocal is flushed, so a * 0."""
    size = math(e, "fabs", "float", b)
    over = e.op(f"fcmp ogt {F32} {size}, splat (float 0x47D0000000000000)")
    finite = e.op(f"fcmp olt {F32} {size}, splat (float {INFINITY})")
    huge = e.op(f"and <32 x i1> {over}, {finite}")
    sign = e.op(f"and <32 x i32> {rounding.raw(e, b, 32)}, splat (i32 -2147483648)")
    zero = e.op(f"fmul {F32} {a}, {rounding.as_float(e, sign, 32)}")
    return e.select(huge, zero, result, "float")


@emits("ex2", "tanh", types=("f16", "bf16", "f16x2", "bf16x2"))
def half_functions(e: Emitter, ins: Instruction, mods: Mods) -> None:
    operand_count(e, ins, 2)
    kind = mods.last()
    base = base_kind(kind)
    mods.take("approx")
    # ex2's bf16 form is only defined with .ftz.
    ftz = ins.opcode == "ex2" and (mods.flag("ftz") if base == "f16" else bool(mods.take("ftz")))
    results = []
    for part in split(e, ins.operands[1], kind):
        val = flush_half(e, part) if ftz and base == "f16" else part
        wide = to_f32(e, val, base)
        if ftz and base == "bf16":
            wide = flush(e, wide)
        source = e.fp(wide)
        result = from_f32(e, e.from_float(exactly(e, ins.opcode, source), 32), base)
        if e.options.approx == "perturbed":
            result = perturb_half(e, rounding.raw(e, source, 32), result, base)
        results.append(flush_half(e, result) if ftz and base == "f16" else result)
    join(e, ins.operands[0], results)


__all__ = ["approximate", "saturate"]
