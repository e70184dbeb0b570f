"""cvt among integers, f16, bf16, tf32, f32 and f64, and packing to f16x2 and bf16x2."""

from __future__ import annotations

from refluent.emulator.codegen import rounding
from refluent.emulator.codegen.emitter import FLOAT_TYPE, Emitter, Val, vec
from refluent.emulator.codegen.floating import flush, saturate
from refluent.emulator.codegen.half import flush_half, from_f32, from_f64, relu, to_f32
from refluent.emulator.codegen.integer import binary, cut, extend
from refluent.emulator.codegen.registry import INTEGER, Mods, emits, operand_count
from refluent.emulator.codegen.rounding import F64, MODES, math, narrow
from refluent.emulator.ptx import Imm, Instruction, Operand, Reg

INTEGERS = tuple(k for k in INTEGER if k[0] != "b")
FLOATS = ("f16", "bf16", "f32", "f64")
TO_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
FINITE = {"f16": 0x7BFF, "bf16": 0x7F7F}


def read(e: Emitter, operand: Operand, kind: str) -> Val:
    """The source: a wider register's low bits are taken."""
    bits = int(kind.lstrip("abcdefstu"))
    if isinstance(operand, Imm):
        return e.float_value(operand, bits) if kind in FLOATS else e.constant(operand.value, bits)
    if not isinstance(operand, Reg):
        raise e.refuse(f"operand {operand}")
    val = e.read(operand)
    if val.bits == bits:
        return val
    if val.bits < bits or kind in FLOATS:
        raise e.refuse(f"{operand.bits}-bit register {operand.name} for .{kind}")
    return e.from_bits(cut(e, e.bits(val), val.bits, bits), bits)


def deliver(e: Emitter, target: Operand, val: Val, signed: bool) -> None:
    """A result narrower than its register is extended."""
    if isinstance(target, Reg) and target.storage > val.bits:
        val = e.from_bits(extend(e, e.bits(val), val.bits, target.storage, signed), target.storage)
    e.write(target, val)


@emits("cvt", types=(*INTEGERS, *FLOATS))
def cvt(e: Emitter, ins: Instruction, mods: Mods) -> None:
    if mods.flag("pack"):
        _pack_integers(e, ins, mods)
        return
    source = mods.last()
    target = mods.last()
    if target in ("f16x2", "bf16x2"):
        _pack(e, ins, mods, source, target)
        return
    if target not in (*INTEGERS, *FLOATS, "tf32"):
        from refluent.emulator.codegen import small

        small.from_wide(e, ins, mods, source, target)
        return
    operand_count(e, ins, 2)
    val = read(e, ins.operands[1], source)
    if target == "tf32":
        result = _tf32(e, mods, source, val)
    elif source in INTEGERS and target in INTEGERS:
        result = _integers(e, mods, source, target, val)
    elif source in INTEGERS:
        result = _to_float(e, mods, source, target, val)
    elif target in INTEGERS:
        result = _to_integer(e, mods, source, target, val)
    else:
        result = _floats(e, mods, source, target, val)
    deliver(e, ins.operands[0], result, target[0] == "s")


def _integers(e: Emitter, mods: Mods, source: str, target: str, val: Val) -> Val:
    sat = mods.flag("sat")
    a, b = int(source[1:]), int(target[1:])
    name = e.bits(val)
    if sat:
        name = _clamp(e, name, source, target)
    if a < b:
        name = extend(e, name, a, b, source[0] == "s")
    elif a > b:
        name = cut(e, name, a, b)
    return e.from_bits(name, b)


def _clamp(e: Emitter, name: str, source: str, target: str) -> str:
    """Limit to the target's range, in the source's width."""
    a, b = int(source[1:]), int(target[1:])
    signed = source[0] == "s"
    least = -(1 << (b - 1)) if target[0] == "s" else 0
    most = (1 << (b - 1)) - 1 if target[0] == "s" else (1 << b) - 1
    low, high = (-(1 << (a - 1)), (1 << (a - 1)) - 1) if signed else (0, (1 << a) - 1)
    prefix = "s" if signed else "u"
    for op, bound, needed in (("max", least, least > low), ("min", most, most < high)):
        if needed:
            full, kind = f"llvm.{prefix}{op}.v32i{a}", vec(f"i{a}")
            e.library.declare(full, f"declare {kind} @{full}({kind}, {kind})")
            name = e.op(f"call {kind} @{full}({kind} {name}, {kind} splat (i{a} {bound}))")
    return name


@emits("cvt", types=("b32",))
def _pack_integers(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """cvt.pack.sat: clamp a and b; a above b, above them what was in c (moved up) when there is a c."""
    mods.maybe("pack")
    third = mods.flag("b32")
    if mods.last() != "s32":
        raise e.refuse("a source other than .s32")
    target = mods.take(*(("u2", "s2", "u4", "s4", "u8", "s8") if third else ("u16", "s16")))
    mods.take("sat")
    operand_count(e, ins, 4 if third else 3)
    bits = int(target[1:])
    keep = f"splat (i32 {(1 << bits) - 1})"
    a, b = (binary(e, "and", 32, _clamp(e, e.bits(e.value(o, 32)), "s32", target), keep) for o in ins.operands[1:3])
    result = binary(e, "or", 32, binary(e, "shl", 32, a, f"splat (i32 {bits})"), b)
    if third:
        up = binary(e, "shl", 32, e.bits(e.value(ins.operands[3], 32)), f"splat (i32 {2 * bits})")
        result = binary(e, "or", 32, up, result)
    e.write(ins.operands[0], e.from_bits(result, 32))


def _odd_double(e: Emitter, name: str, kind: str) -> str:
    """An integer as a double: exact up to 32 bits, rounded to odd at 64."""
    bits, op = int(kind[1:]), "sitofp" if kind[0] == "s" else "uitofp"
    if bits < 64:
        return e.op(f"{op} {vec(f'i{bits}')} {name} to {F64}")
    shift = "ashr" if kind[0] == "s" else "lshr"
    high = e.op(f"{op} <32 x i64> {binary(e, shift, 64, name, 'splat (i64 32)')} to {F64}")
    high = e.op(f"fmul {F64} {high}, splat (double 4294967296.0)")
    low = e.op(f"uitofp <32 x i64> {binary(e, 'and', 64, name, 'splat (i64 4294967295)')} to {F64}")
    return rounding.add_odd(e, high, low, "rn")


def _to_float(e: Emitter, mods: Mods, source: str, target: str, val: Val) -> Val:
    mode, sat = mods.take(*MODES, default="rn"), mods.flag("sat")
    name, bits = e.bits(val), int(source[1:])
    op = "sitofp" if source[0] == "s" else "uitofp"
    if target in ("f32", "f64") and (mode == "rn" or (target == "f64" and bits < 64)):
        kind = FLOAT_TYPE[int(target[1:])]
        result = e.from_float(e.op(f"{op} {vec(f'i{bits}')} {name} to {vec(kind)}"), int(target[1:]))
    elif target == "f64":
        shift = "ashr" if source[0] == "s" else "lshr"
        high = e.op(f"{op} <32 x i64> {binary(e, shift, 64, name, 'splat (i64 32)')} to {F64}")
        high = e.op(f"fmul {F64} {high}, splat (double 4294967296.0)")
        low = e.op(f"uitofp <32 x i64> {binary(e, 'and', 64, name, 'splat (i64 4294967295)')} to {F64}")
        result = e.from_float(rounding.hardware(e, "fadd", mode, high, low), 64)
    else:
        odd = _odd_double(e, name, source)
        result = e.from_float(narrow(e, odd, mode), 32) if target == "f32" else from_f64(e, odd, target, mode)
    return _saturated(e, result, target) if sat else result


def _saturated(e: Emitter, val: Val, kind: str) -> Val:
    if kind in ("f16", "bf16"):
        return from_f32(e, saturate(e, to_f32(e, val, kind)), kind)
    return saturate(e, val)


def _wide(e: Emitter, val: Val, source: str) -> Val:
    return to_f32(e, val, source) if source in ("f16", "bf16") else val


def _to_integer(e: Emitter, mods: Mods, source: str, target: str, val: Val) -> Val:
    """Out of range clamps. NaN is 0, or for 64-bit results and from f64 the top bit alone."""
    test = mods.take(*TO_INTEGRAL)
    if mods.flag("ftz"):
        if source != "f32":
            raise e.refuse("modifier .ftz")
        val = flush(e, val)
    mods.flag("sat")
    wide = _wide(e, val, source)
    kind = FLOAT_TYPE[wide.bits]
    rounded = math(e, TO_INTEGRAL[test], kind, e.fp(wide))
    bits = int(target[1:])
    op = "fptosi" if target[0] == "s" else "fptoui"
    full = f"llvm.{op}.sat.v32i{bits}.v32f{wide.bits}"
    e.library.declare(full, f"declare {vec(f'i{bits}')} @{full}({vec(kind)})")
    result = e.op(f"call {vec(f'i{bits}')} @{full}({vec(kind)} {rounded})")
    if source == "f64" or bits == 64:
        nan = e.op(f"fcmp uno {vec(kind)} {rounded}, zeroinitializer")
        result = e.select(nan, f"splat (i{bits} {1 << (bits - 1)})", result, f"i{bits}")
    return e.from_bits(result, bits)


def _floats(e: Emitter, mods: Mods, source: str, target: str, val: Val) -> Val:
    integral = mods.maybe(*TO_INTEGRAL)
    mode = mods.maybe(*MODES)
    ftz, sat = mods.flag("ftz"), mods.flag("sat")
    with_relu, finite = mods.flag("relu"), mods.flag("satfinite")
    if ftz and "f32" not in (source, target):
        raise e.refuse("modifier .ftz")
    if (with_relu or finite) and target not in FINITE:
        raise e.refuse("modifier .relu or .satfinite")
    if mode and source == target:
        raise e.refuse(f"modifier .{mode}")
    if ftz and source == "f32":
        val = flush(e, val)
    if integral:
        if source != target:
            raise e.refuse(f"modifier .{integral}")
        result = _integral(e, integral, source, val)
    elif source == target:
        result = val
    else:
        result = resize(e, val, source, target, mode or "rn")
    if finite:
        result = clamp_finite(e, result, target)
    if with_relu:
        result = relu(e, result, target)
    if sat:
        result = _saturated(e, result, target)
    return flush(e, result) if ftz and target == "f32" else result


def _integral(e: Emitter, test: str, kind: str, val: Val) -> Val:
    wide = _wide(e, val, kind)
    name = FLOAT_TYPE[wide.bits]
    rounded = e.from_float(math(e, TO_INTEGRAL[test], name, e.fp(wide)), wide.bits)
    return from_f32(e, rounded, kind) if kind in ("f16", "bf16") else rounded


def resize(e: Emitter, val: Val, source: str, target: str, mode: str) -> Val:
    """Between two floating-point formats."""
    if source == "f64":
        if target == "f32":
            # A NaN keeps the upper bits of its payload.
            return e.from_bits(rounding.raw(e, narrow(e, e.fp(val), mode), 32), 32)
        return from_f64(e, e.fp(val), target, mode)
    wide = _wide(e, val, source)
    if target == "f64":
        return e.from_float(rounding.widen(e, e.fp(wide)), 64)
    return wide if target == "f32" else from_f32(e, wide, target, mode)


def clamp_finite(e: Emitter, val: Val, kind: str) -> Val:
    """Infinity becomes the largest number; NaN stays."""
    bits = e.bits(val)
    size = e.op(f"and <32 x i16> {bits}, splat (i16 32767)")
    infinite = e.op(f"icmp eq <32 x i16> {size}, splat (i16 {FINITE[kind] + 1})")
    sign = e.op(f"and <32 x i16> {bits}, splat (i16 -32768)")
    largest = e.op(f"or <32 x i16> {sign}, splat (i16 {FINITE[kind]})")
    return e.from_bits(e.select(infinite, largest, bits, "i16"), 16)


def _tf32(e: Emitter, mods: Mods, source: str, val: Val) -> Val:
    """Keep 10 bits of mantissa: .rna rounds ties away from zero, and only cuts a NaN (as an H200 does)."""
    if source != "f32":
        raise e.refuse(f"type .{source}")
    mode, finite, with_relu = mods.take("rna", "rn", "rz"), mods.flag("satfinite"), mods.flag("relu")
    bits = e.bits(val)
    i = "<32 x i32>"
    if mode == "rna":
        grown = e.op(f"add {i} {bits}, splat (i32 4096)")
    elif mode == "rn":
        low = binary(e, "and", 32, binary(e, "lshr", 32, bits, "splat (i32 13)"), "splat (i32 1)")
        grown = binary(e, "add", 32, binary(e, "add", 32, bits, "splat (i32 4095)"), low)
    else:
        grown = bits
    result = binary(e, "and", 32, grown, "splat (i32 -8192)")
    size = binary(e, "and", 32, result, "splat (i32 2147483647)")
    if finite:
        infinite = e.op(f"icmp eq {i} {size}, splat (i32 2139095040)")
        sign = binary(e, "and", 32, result, "splat (i32 -2147483648)")
        result = e.select(infinite, binary(e, "or", 32, sign, "splat (i32 2139086848)"), result, "i32")
    if with_relu:
        minus = e.op(f"icmp slt {i} {result}, zeroinitializer")
        result = e.select(minus, "zeroinitializer", result, "i32")
    nan = e.op(f"fcmp uno <32 x float> {e.fp(val)}, zeroinitializer")
    other = "splat (i32 2147475456)" if mode != "rna" else binary(e, "and", 32, bits, "splat (i32 -8192)")
    return e.from_bits(e.select(nan, other, result, "i32"), 32)


def _pack(e: Emitter, ins: Instruction, mods: Mods, source: str, target: str) -> None:
    """cvt.f16x2.f32 d, a, b: a goes to the upper half."""
    if source != "f32":
        raise e.refuse(f"type .{source}")
    operand_count(e, ins, 3)
    mode, finite, with_relu = mods.take("rn", "rz"), mods.flag("satfinite"), mods.flag("relu")
    kind = target[:-2]
    parts = []
    for operand in reversed(ins.operands[1:]):
        half = from_f32(e, e.float_value(operand, 32), kind, mode)
        if finite:
            half = clamp_finite(e, half, kind)
        parts.append(relu(e, half, kind) if with_relu else half)
    e.write(ins.operands[0], e.from_halves(parts[0], parts[1]))


__all__ = ["clamp_finite", "cvt", "deliver", "flush_half", "read", "resize"]
