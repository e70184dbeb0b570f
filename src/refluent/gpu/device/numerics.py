"""Arithmetic that the kernels choose on purpose: packed pairs on Blackwell, hardware approximations."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute

LOG2E = math.log2(math.e)


def fma2(a, b, c):
    """a * b + c of two float32 pairs, one instruction."""
    return cute.arch.fma_packed_f32x2(a, b, c)


def mul2(a, b):
    return cute.arch.mul_packed_f32x2(a, b)


def sub2(a, b):
    return cute.arch.sub_packed_f32x2(a, b)


def pack(pair, dtype):
    """Two float32 numbers as 16-bit ones in a word, the first in the low half.

    Written out, for a conversion that the compiler knows it takes apart where the halves are read again, and keeps each
    in a register of its own.
    """
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[cutlass.Uint32],
        read_only_args=[pair[1], pair[0]],
    )


def exp2(x):
    """ex2.approx.ftz: 2 ulp, exact 0 for -inf."""
    return cute.arch.exp2(x)


@cute.jit
def tanh(x: cutlass.Float32) -> cutlass.Float32:
    """tanh from one exponential and one reciprocal, to about 1e-6 absolute: tanh.approx is good to 5e-4 only."""
    e = cute.arch.exp2(cutlass.min(x, cutlass.Float32(15.0)) * 2.885390081777927)  # exp(2 x)
    return 1.0 - 2.0 * cute.arch.rcp_approx(e + 1.0)


@cute.jit
def opaque(value):
    """The integer, which the compiler takes for a new one: what is made of it is worked out here, not kept from
    before."""
    kind = type(value)
    return cute.arch.inline_ptx(f"mov.b{kind.width} {{$w0}}, {{$r0}};", write_only_types=[kind], read_only_args=[value])


@cute.jit
def log2_factor(scale: cutlass.Float32) -> cutlass.Float32:
    """What makes a raw score the exponent of 2, log2(e) scale; never 0, for 0 times infinity is NaN: dq and dk are
    multiplied by the true scale."""
    factor = scale * LOG2E
    if scale == 0.0:
        factor = cutlass.Float32(1e-30)
    return factor


def hidden_score(negative_scale: bool) -> float:
    """The raw score that has no weight."""
    return math.inf if negative_scale else -math.inf
