"""Sums of float32 numbers without rounding: the same bits in whatever order they are added, without anybody waiting.

A sum is LIMBS int64 numbers, the k-th in units of 2^(32 k - 149), and a float32 that collects what is not finite. A
number touches two neighbours: its low 32 bits and, signed, the rest. A limb takes 2^31 numbers before it overflows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.plans.sm100 import LIMBS

UNIT = -149  # binary exponent of the smallest float32
DIGIT = (1 << 32) - 1


@cute.jit
def add_exact(limbs: cute.Pointer, value: cutlass.Float32):
    """Add to the sum at `limbs`."""
    bits = value.bitcast(cutlass.Int32)
    exponent = (bits >> 23) & 255
    if exponent == 255:
        rest = cute.recast_ptr(limbs + LIMBS, dtype=cutlass.Float32)
        cute.arch.red(rest, value, op="add", dtype="f32", sem="relaxed", scope="gpu")
    elif value != 0.0:
        shift = cutlass.max(exponent, 1) - 1
        mantissa = bits & 0x7FFFFF
        mantissa = mantissa | 0x800000 if exponent > 0 else mantissa
        wide = cutlass.Int64(mantissa) << cutlass.Int64(shift & 31)
        wide = -wide if bits < 0 else wide
        place = limbs + (shift >> 5)
        cute.arch.red(place, wide & DIGIT, op="add", dtype="u64", sem="relaxed", scope="gpu")
        cute.arch.red(place + 1, wide >> 32, op="add", dtype="u64", sem="relaxed", scope="gpu")


@cute.jit
def read_exact(first: cute.Pointer):
    """The sum at `first` as a float64: carries are brought up first, so that only the last bit is rounded."""
    limbs = cute.make_tensor(first, cute.make_layout(LIMBS))
    carry, digits = cutlass.Int64(0), []
    for k in cutlass.range_constexpr(LIMBS):
        total = limbs[k] + carry
        digits.append(total & DIGIT)
        carry = total >> 32
    value = cutlass.Float64(carry) * cutlass.Float64(2.0 ** (32 * LIMBS + UNIT))
    for k in cutlass.range_constexpr(LIMBS - 1, -1, -1):
        value = value + cutlass.Float64(digits[k]) * cutlass.Float64(2.0 ** (32 * k + UNIT))
    rest = cute.make_tensor(cute.recast_ptr(first + LIMBS, dtype=cutlass.Float32), cute.make_layout(1))
    return value + cutlass.Float64(rest[0])
