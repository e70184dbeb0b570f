"""Exact results rounded in any mode: sums and products as doubles rounded to odd, then rounded once more.

Rounding to odd (an inexact result takes whichever neighbour has an odd last bit) keeps what a second rounding to a
format at least two bits narrower has to know (Boldo, Melquiond: Emulation of FMA and correctly rounded sums).
"""

from __future__ import annotations

from refluent.emulator.codegen.emitter import FLOAT_TYPE, Emitter, vec

F32, F64 = vec("float"), vec("double")
MODES = ("rn", "rz", "rm", "rp")


def math(e: Emitter, name: str, kind: str, *args: str) -> str:
    """A call of the LLVM intrinsic `name` on 32 lanes of half, float or double."""
    full = f"llvm.{name}.v32{ {'half': 'f16', 'float': 'f32', 'double': 'f64'}[kind] }"
    v = vec(kind)
    e.library.declare(full, f"declare {v} @{full}({', '.join([v] * len(args))})")
    return e.op(f"call {v} @{full}({', '.join(f'{v} {a}' for a in args)})")


def widen(e: Emitter, name: str, kind: str = "float") -> str:
    return e.op(f"fpext {vec(kind)} {name} to {F64}")


def raw(e: Emitter, name: str, bits: int) -> str:
    return e.op(f"bitcast {vec(FLOAT_TYPE[bits])} {name} to {vec(f'i{bits}')}")


def as_float(e: Emitter, name: str, bits: int) -> str:
    return e.op(f"bitcast {vec(f'i{bits}')} {name} to {vec(FLOAT_TYPE[bits])}")


def step(e: Emitter, value: str, bits: int, away: str, where: str) -> str:
    """Move to the next number away from zero (where `away`) or towards it, in the lanes of `where`."""
    i = vec(f"i{bits}")
    pattern = raw(e, value, bits)
    by = e.select(away, f"splat (i{bits} 1)", f"splat (i{bits} -1)", f"i{bits}")
    moved = e.op(f"add {i} {pattern}, {by}")
    return as_float(e, e.select(where, moved, pattern, f"i{bits}"), bits)


def negative(e: Emitter, value: str, bits: int) -> str:
    return e.op(f"icmp slt {vec(f'i{bits}')} {raw(e, value, bits)}, zeroinitializer")


def to_odd(e: Emitter, value: str, error: str, bits: int = 64) -> str:
    """`value` = round-to-nearest(value + error); rounded to odd instead."""
    v, i = vec(FLOAT_TYPE[bits]), vec(f"i{bits}")
    inexact = e.op(f"fcmp one {v} {error}, zeroinitializer")
    low = e.op(f"and {i} {raw(e, value, bits)}, splat (i{bits} 1)")
    even = e.op(f"icmp eq {i} {low}, zeroinitializer")
    where = e.op(f"and <32 x i1> {inexact}, {even}")
    differ = e.op(f"xor <32 x i1> {negative(e, value, bits)}, {negative(e, error, bits)}")
    away = e.op(f"xor <32 x i1> {differ}, splat (i1 true)")
    return step(e, value, bits, away, where)


def sum_error(e: Emitter, x: str, y: str, total: str, kind: str = "double") -> str:
    """x + y - total, exactly (Knuth's TwoSum)."""
    v = vec(kind)
    part = e.op(f"fsub {v} {total}, {x}")
    back = e.op(f"fsub {v} {total}, {part}")
    left = e.op(f"fsub {v} {x}, {back}")
    right = e.op(f"fsub {v} {y}, {part}")
    return e.op(f"fadd {v} {left}, {right}")


def add_odd(e: Emitter, x: str, y: str, mode: str) -> str:
    """x + y of doubles, to odd; an exact zero has the sign that the mode wants."""
    total = e.op(f"fadd {F64} {x}, {y}")
    odd = to_odd(e, total, sum_error(e, x, y, total))
    return signed_zero(e, odd, x, y, 64) if mode == "rm" else odd


def signed_zero(e: Emitter, total: str, x: str, y: str, bits: int) -> str:
    """Rounding down, x + y = 0 is -0 unless both are +0."""
    v, i = vec(FLOAT_TYPE[bits]), vec(f"i{bits}")
    zero = e.op(f"fcmp oeq {v} {total}, zeroinitializer")
    either = e.op(f"or {i} {raw(e, x, bits)}, {raw(e, y, bits)}")
    sign = e.op(f"and {i} {either}, splat (i{bits} {1 << (bits - 1)})")
    return as_float(e, e.select(zero, sign, raw(e, total, bits), f"i{bits}"), bits)


def fma_odd(e: Emitter, a: str, b: str, c: str, mode: str) -> str:
    """a * b + c, where a * b is exact in double."""
    return add_odd(e, e.op(f"fmul {F64} {a}, {b}"), c, mode)


def divide_odd(e: Emitter, a: str, b: str) -> str:
    """a / b of doubles that hold at most 24 significant bits each."""
    quotient = e.op(f"fdiv {F64} {a}, {b}")
    minus = e.op(f"fneg {F64} {quotient}")
    rest = math(e, "fma", "double", minus, b, a)
    # rest / b has the sign of the error of the quotient.
    sign = e.op(f"xor <32 x i64> {raw(e, rest, 64)}, {raw(e, b, 64)}")
    flag = e.op(f"and <32 x i64> {sign}, splat (i64 {1 << 63})")
    size = math(e, "fabs", "double", rest)
    error = as_float(e, e.op(f"or <32 x i64> {flag}, {raw(e, size, 64)}"), 64)
    return to_odd(e, quotient, error)


def sqrt_odd(e: Emitter, a: str) -> str:
    """The square root of a double that holds at most 24 significant bits."""
    root = math(e, "sqrt", "double", a)
    minus = e.op(f"fneg {F64} {root}")
    return to_odd(e, root, math(e, "fma", "double", minus, root, a))


def narrow(e: Emitter, value: str, mode: str, source: int = 64, target: int = 32) -> str:
    """Round to a narrower format: "rn", "rz", "rm", "rp", or "odd"."""
    wide, thin = vec(FLOAT_TYPE[source]), vec(FLOAT_TYPE[target])
    result = e.op(f"fptrunc {wide} {value} to {thin}")
    if mode == "rn":
        return result
    back = e.op(f"fpext {thin} {result} to {wide}")
    return adjust(e, result, back, value, mode, source, target)


def adjust(e: Emitter, result: str, back: str, value: str, mode: str, source: int, target: int) -> str:
    """Correct a round-to-nearest result to another mode; `back` is the result in the wider format."""
    wide, i = vec(FLOAT_TYPE[source]), vec(f"i{target}")
    minus = negative(e, result, target)
    if mode == "odd":
        low = e.op(f"and {i} {raw(e, result, target)}, splat (i{target} 1)")
        even = e.op(f"icmp eq {i} {low}, zeroinitializer")
        inexact = e.op(f"fcmp one {wide} {back}, {value}")
        where = e.op(f"and <32 x i1> {inexact}, {even}")
        over = e.op(f"fcmp ogt {wide} {back}, {value}")
        return step(e, result, target, e.op(f"xor <32 x i1> {over}, {_not(e, minus)}"), where)
    if mode == "rm":
        return step(e, result, target, minus, e.op(f"fcmp ogt {wide} {back}, {value}"))
    if mode == "rp":
        return step(e, result, target, _not(e, minus), e.op(f"fcmp olt {wide} {back}, {value}"))
    kind = FLOAT_TYPE[source]
    larger = e.op(f"fcmp ogt {wide} {math(e, 'fabs', kind, back)}, {math(e, 'fabs', kind, value)}")
    return step(e, result, target, "zeroinitializer", larger)


def _not(e: Emitter, lanes: str) -> str:
    return e.op(f"xor <32 x i1> {lanes}, splat (i1 true)")


def hardware(e: Emitter, op: str, mode: str, *args: str) -> str:
    """f64 arithmetic in a directed mode, by setting the host's rounding mode around one strict operation."""
    name = f"{op}_f64_{mode}"
    parameters = ", ".join(f"{F64} %a{i}" for i in range(len(args)))
    rounding = {"rz": 0, "rn": 1, "rp": 2, "rm": 3}[mode]
    strict = f"llvm.experimental.constrained.{op}.v32f64"
    types = ", ".join([F64] * len(args))
    e.library.declare("llvm.set.rounding", "declare void @llvm.set.rounding(i32)")
    e.library.declare(strict, f"declare {F64} @{strict}({types}, metadata, metadata)")
    values = ", ".join(f"{F64} %a{i}" for i in range(len(args)))
    e.library.add(
        name,
        f"define internal {F64} @{name}({parameters}) #1 {{\n"
        f"  call void @llvm.set.rounding(i32 {rounding}) #2\n"
        f'  %r = call {F64} @{strict}({values}, metadata !"round.dynamic", metadata !"fpexcept.strict") #2\n'
        f"  call void @llvm.set.rounding(i32 1) #2\n  ret {F64} %r\n}}",
    )
    return e.op(f"call {F64} @{name}({', '.join(f'{F64} {a}' for a in args)})")
