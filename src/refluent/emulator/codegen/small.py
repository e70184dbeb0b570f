"""Formats of 8 bits and less: e4m3, e5m2, e2m3, e3m2, e2m1 and ue8m0, in packed conversions.

A finite magnitude is encoded as ((e - emin) << M) + m, where e is its exponent, at least emin, and m its M-bit
mantissa with the leading one, rounded at that exponent: subnormals and carries come out right by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from refluent.emulator.codegen import rounding
from refluent.emulator.codegen.emitter import Emitter, Val
from refluent.emulator.codegen.half import from_f32, relu, to_f32
from refluent.emulator.codegen.integer import binary, cut, extend, intrinsic
from refluent.emulator.codegen.registry import Mods, emits, operand_count
from refluent.emulator.codegen.rounding import math
from refluent.emulator.ptx import Instruction, Operand, Reg

I32 = "<32 x i32>"


@dataclass(frozen=True)
class Format:
    """A sign, `exponent` bits and `mantissa` bits; `largest` is the code of the largest finite magnitude."""

    exponent: int
    mantissa: int
    largest: int
    nan: int | None  # None: no NaN, conversions give the largest
    infinity: int | None = None

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def least_exponent(self) -> int:
        return 2 - (1 << (self.exponent - 1))


FORMATS = {
    "e4m3x2": Format(4, 3, 0x7E, 0x7F),
    "e5m2x2": Format(5, 2, 0x7B, 0x7F, 0x7C),
    "e2m3x2": Format(2, 3, 0x1F, None),
    "e3m2x2": Format(3, 2, 0x1F, None),
    "e2m1x2": Format(2, 1, 0x7, None),
}


def encode(e: Emitter, val: Val, form: Format, with_relu: bool) -> str:
    """f32 -> code in an i32, to nearest even, overflow to the largest finite (.satfinite)."""
    bits = e.bits(val)
    size = binary(e, "and", 32, bits, "splat (i32 2147483647)")
    exponent = binary(e, "sub", 32, binary(e, "lshr", 32, size, "splat (i32 23)"), "splat (i32 127)")
    exponent = intrinsic(e, "smax", 32, exponent, f"splat (i32 {form.least_exponent})")
    # Scaling by a power of two is exact here: 2 ** (mantissa - exponent) as a float's exponent field.
    scale_exponent = binary(e, "sub", 32, f"splat (i32 {form.mantissa + 127})", exponent)
    usable = intrinsic(e, "smax", 32, scale_exponent, "splat (i32 1)")
    scale = rounding.as_float(e, binary(e, "shl", 32, usable, "splat (i32 23)"), 32)
    magnitude = rounding.as_float(e, size, 32)
    scaled = math(e, "roundeven", "float", e.op(f"fmul <32 x float> {magnitude}, {scale}"))
    full = "llvm.fptoui.sat.v32i32.v32f32"
    e.library.declare(full, f"declare {I32} @{full}(<32 x float>)")
    mantissa = e.op(f"call {I32} @{full}(<32 x float> {scaled})")
    rebased = binary(e, "sub", 32, exponent, f"splat (i32 {form.least_exponent})")
    code = binary(e, "add", 32, binary(e, "shl", 32, rebased, f"splat (i32 {form.mantissa})"), mantissa)
    code = intrinsic(e, "umin", 32, code, f"splat (i32 {form.largest})")
    huge = e.op(f"icmp uge {I32} {size}, splat (i32 {(128 + 126) << 23})")
    code = e.select(huge, f"splat (i32 {form.largest})", code, "i32")
    minus = e.op(f"icmp slt {I32} {bits}, zeroinitializer")
    if with_relu:
        code = e.select(minus, "zeroinitializer", code, "i32")
    else:
        signed = binary(e, "or", 32, code, f"splat (i32 {1 << (form.bits - 1)})")
        code = e.select(minus, signed, code, "i32")
    nan = e.op(f"icmp ugt {I32} {size}, splat (i32 2139095040)")
    return e.select(nan, f"splat (i32 {form.largest if form.nan is None else form.nan})", code, "i32")


def decode(e: Emitter, code: str, form: Format) -> Val:
    """Code in an i32 -> f32, exactly."""
    field = binary(e, "and", 32, code, f"splat (i32 {(1 << (form.bits - 1)) - 1})")
    exponent = binary(e, "lshr", 32, field, f"splat (i32 {form.mantissa})")
    mantissa = binary(e, "and", 32, field, f"splat (i32 {(1 << form.mantissa) - 1})")
    subnormal = e.op(f"icmp eq {I32} {exponent}, zeroinitializer")
    lead = binary(e, "or", 32, mantissa, f"splat (i32 {1 << form.mantissa})")
    whole = e.select(subnormal, mantissa, lead, "i32")
    up = intrinsic(e, "umax", 32, exponent, "splat (i32 1)")
    biased = binary(e, "add", 32, up, f"splat (i32 {form.least_exponent - 1 - form.mantissa + 127})")
    scale = rounding.as_float(e, binary(e, "shl", 32, biased, "splat (i32 23)"), 32)
    value = e.op(f"fmul <32 x float> {e.op(f'uitofp {I32} {whole} to <32 x float>')}, {scale}")
    bits = rounding.raw(e, value, 32)
    if form.infinity is not None:
        infinite = e.op(f"icmp eq {I32} {field}, splat (i32 {form.infinity})")
        bits = e.select(infinite, "splat (i32 2139095040)", bits, "i32")
        nan = e.op(f"icmp ugt {I32} {field}, splat (i32 {form.infinity})")
    elif form.nan is not None:
        nan = e.op(f"icmp eq {I32} {field}, splat (i32 {form.nan})")
    else:
        nan = "zeroinitializer"
    high = binary(e, "and", 32, code, f"splat (i32 {1 << (form.bits - 1)})")
    sign = binary(e, "shl", 32, high, f"splat (i32 {32 - form.bits})")
    bits = e.select(nan, "splat (i32 2147483647)", binary(e, "or", 32, bits, sign), "i32")
    return e.from_bits(bits, 32)


def pair_width(form: Format) -> int:
    """How far apart the two codes of a pair lie: 4 bits for e2m1, else 8."""
    return 4 if form.bits == 4 else 8


def from_wide(e: Emitter, ins: Instruction, mods: Mods, source: str, target: str) -> None:
    """cvt.<pair>.f32 d, a, b: a is the upper one."""
    if target == "ue8m0x2":
        _to_scale(e, ins, mods, [e.float_value(o, 32) for o in reversed(ins.operands[1:])], source)
        return
    if target not in FORMATS or source != "f32":
        raise e.refuse(f"type .{target}")
    operand_count(e, ins, 3)
    values = [e.float_value(o, 32) for o in reversed(ins.operands[1:])]
    _finish_pair(e, ins, mods, values, FORMATS[target])


@emits("cvt", types=("f16x2", "bf16x2"))
def from_halves(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """cvt.<pair>.f16x2 d, a."""
    source, target = mods.last(), mods.last()
    operand_count(e, ins, 2)
    values = [to_f32(e, half, source[:-2]) for half in e.halves(e.value(ins.operands[1], 32))]
    if target == "ue8m0x2":
        _to_scale(e, ins, mods, values, source)
        return
    if target not in FORMATS:
        raise e.refuse(f"type .{target}")
    _finish_pair(e, ins, mods, values, FORMATS[target])


def _finish_pair(e: Emitter, ins: Instruction, mods: Mods, values: list[Val], form: Format) -> None:
    mods.take("rn")
    mods.take("satfinite")
    with_relu = mods.flag("relu")
    low, high = (encode(e, v, form, with_relu) for v in values)
    _deliver(e, ins.operands[0], low, high, pair_width(form))


def _deliver(e: Emitter, target: Operand, low: str, high: str, apart: int) -> None:
    both = binary(e, "or", 32, low, binary(e, "shl", 32, high, f"splat (i32 {apart})"))
    wanted = 8 if apart == 4 else 16
    if not isinstance(target, Reg) or target.bits != wanted:
        raise e.refuse(f"destination {target}")
    e.write(target, e.from_bits(cut(e, both, 32, 16), 16))


@emits("cvt", types=(*FORMATS,))
def to_halves(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """cvt.f16x2.<pair> d, a."""
    source, target = mods.last(), mods.last()
    operand_count(e, ins, 2)
    mods.take("rn")
    with_relu = mods.flag("relu")
    if target != "f16x2":
        raise e.refuse(f"type .{target}")
    form = FORMATS[source]
    operand = ins.operands[1]
    if not isinstance(operand, Reg) or operand.bits != (8 if form.bits == 4 else 16):
        raise e.refuse(f"operand {operand}")
    both = extend(e, e.bits(e.read(operand)), 16, 32, False)
    codes = [both, binary(e, "lshr", 32, both, f"splat (i32 {pair_width(form)})")]
    halves = [from_f32(e, decode(e, code, form), "f16") for code in codes]
    if with_relu:
        halves = [relu(e, half, "f16") for half in halves]
    e.write(ins.operands[0], e.from_halves(halves[0], halves[1]))


def _to_scale(e: Emitter, ins: Instruction, mods: Mods, values: list[Val], source: str) -> None:
    """ue8m0: the exponent alone, rounded to zero or up; negative numbers and NaN give NaN (0xff)."""
    if source not in ("f32", "bf16x2"):
        raise e.refuse(f"type .{source}")
    operand_count(e, ins, 3 if source == "f32" else 2)
    mode, finite = mods.take("rz", "rp"), mods.flag("satfinite")
    codes = []
    for val in values:
        bits = e.bits(val)
        size = binary(e, "and", 32, bits, "splat (i32 2147483647)")
        code = binary(e, "lshr", 32, size, "splat (i32 23)")
        if mode == "rp":
            code = binary(e, "lshr", 32, binary(e, "add", 32, size, "splat (i32 8388607)"), "splat (i32 23)")
        code = intrinsic(e, "umin", 32, code, f"splat (i32 {254 if finite else 255})")
        nan = e.op(f"icmp ugt {I32} {size}, splat (i32 2139095040)")
        codes.append(e.select(nan, "splat (i32 255)", code, "i32"))
    _deliver(e, ins.operands[0], codes[0], codes[1], 8)


@emits("cvt", types=("ue8m0x2",))
def from_scale(e: Emitter, ins: Instruction, mods: Mods) -> None:
    """cvt.rn.bf16x2.ue8m0x2: powers of two, 2^-127 is subnormal."""
    operand_count(e, ins, 2)
    mods.last()
    mods.take("bf16x2")
    mods.take("rn")
    both = e.bits(e.value(ins.operands[1], 16))
    parts = []
    for shift in (0, 8):
        code = binary(e, "and", 16, binary(e, "lshr", 16, both, f"splat (i16 {shift})"), "splat (i16 255)")
        number = binary(e, "shl", 16, code, "splat (i16 7)")
        zero = e.op(f"icmp eq <32 x i16> {code}, zeroinitializer")
        number = e.select(zero, "splat (i16 64)", number, "i16")
        nan = e.op(f"icmp eq <32 x i16> {code}, splat (i16 255)")
        parts.append(e.from_bits(e.select(nan, "splat (i16 32767)", number, "i16"), 16))
    e.write(ins.operands[0], e.from_halves(parts[0], parts[1]))
