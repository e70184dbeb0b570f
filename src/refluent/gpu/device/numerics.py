"""Arithmetic that the kernels choose on purpose: packed pairs on Blackwell, hardware approximations."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


def fma2(a, b, c):
    """a * b + c of two float32 pairs, one instruction."""
    return cute.arch.fma_packed_f32x2(a, b, c)


def mul2(a, b):
    return cute.arch.mul_packed_f32x2(a, b)


def sub2(a, b):
    return cute.arch.sub_packed_f32x2(a, b)


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
