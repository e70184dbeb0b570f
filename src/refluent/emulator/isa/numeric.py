"""Formats of the matrix units: raw bits to float32, and one multiply-accumulate in the chosen accumulator model.

Products of two 16-bit, tf32 or fp8 values are exact in float32, so a float32 (BLAS) product models "exact products,
float32 accumulation". The truncating model follows the published probing of Hopper's and Blackwell's tensor cores
(arXiv 2511.10909 and 2512.07004): the products of one instruction (32 bytes of K) and the accumulator are aligned to
the largest exponent among them, cut to a fixed number of fraction bits, added as integers, and the sum is cut to the
accumulator's type (f16: rounded to nearest). A product's exponent is the sum of its factors' exponents, whether or
not its significand reaches 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def tf32_to_f32(bits: np.ndarray) -> np.ndarray:
    """tf32 keeps the upper 19 bits of a float32; the unit ignores the rest."""
    return (np.ascontiguousarray(bits) & np.uint32(0xFFFFE000)).view(np.float32)


def _fp8_table(exponent_bits: int, mantissa_bits: int, bias: int, finite: bool) -> np.ndarray:
    table = np.zeros(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        top = (1 << exponent_bits) - 1
        if finite and exponent == top and mantissa == (1 << mantissa_bits) - 1:
            value = np.nan
        elif not finite and exponent == top:
            value = np.inf if mantissa == 0 else np.nan
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        table[code] = sign * value
    return table


_E4M3 = _fp8_table(4, 3, 7, finite=True)
_E5M2 = _fp8_table(5, 2, 15, finite=False)


def e4m3_to_f32(bits: np.ndarray) -> np.ndarray:
    return _E4M3[bits]


def e5m2_to_f32(bits: np.ndarray) -> np.ndarray:
    return _E5M2[bits]


DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bf16": bf16_to_f32,
    "f16": f16_to_f32,
    "tf32": tf32_to_f32,
    "e4m3": e4m3_to_f32,
    "e5m2": e5m2_to_f32,
}
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
K_BYTES = 32  # of one matrix instruction, every type


ACCUMULATORS = ("fp32", "truncate")
_SMALLEST_EXPONENT = {"bf16": -126, "f16": -14, "tf32": -126, "e4m3": -6, "e5m2": -14}  # of normal numbers
_NOTHING = -300  # below every exponent of a sum that is not 0


@dataclass(frozen=True)
class Product:
    """What the rounding of a matrix product depends on: the operands' types, whether the accumulator is f16, and how
    many bits the sum keeps below its largest exponent (25; wgmma on fp8: 13, and as many in the result)."""

    a_type: str
    b_type: str
    half: bool = False
    fraction: int = 25

    @staticmethod
    def of_wgmma(a_type: str, b_type: str, half: bool) -> Product:
        return Product(a_type, b_type, half, 13 if ELEMENT_BYTES[a_type] == 1 else 25)


def multiply_accumulate(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, model: str, product: Product) -> np.ndarray:
    """a (m, k) @ b (n, k)^T + c (m, n), all float32, k of one instruction. model: one of ACCUMULATORS. An f16
    accumulator's result is float64, still to be rounded, in the truncating model."""
    if model == "fp32":
        plain = a @ b.T
        return plain if c is None else plain + c
    total = _truncated_sum(a, b, c, product)
    return total if product.half else _cut(total, min(product.fraction, 23))


def _exponents(values: np.ndarray, smallest: int) -> np.ndarray:
    """Exponents of the leading bit, those of zeros far below all others."""
    exponents = np.maximum(np.frexp(values)[1] - 1, smallest)
    return np.where(values == 0, -1000, exponents)


def _truncated_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, product: Product) -> np.ndarray:
    """The sum of every product and c, each cut to so many bits below the largest exponent; float64, exact."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    a_exponents = _exponents(a, _SMALLEST_EXPONENT[product.a_type])
    b_exponents = _exponents(b, _SMALLEST_EXPONENT[product.b_type])
    largest = np.full((len(a), len(b)), _NOTHING) if c is None else _exponents(c, -126)
    for k in range(a.shape[1]):
        np.maximum(largest, a_exponents[:, k, None] + b_exponents[None, :, k], out=largest)
    np.maximum(largest, _NOTHING, out=largest)
    scale = np.ldexp(1.0, product.fraction - largest)
    total = np.zeros(largest.shape) if c is None else np.trunc(c * scale)
    for k in range(a.shape[1]):
        total += np.trunc(a[:, k, None] * b[None, :, k] * scale)
    total /= scale
    special = ~np.isfinite(total) | ~(np.isfinite(a).all(1)[:, None] & np.isfinite(b).all(1)[None])
    if special.any():
        plain = a @ b.T if c is None else a @ b.T + c
        total[special] = plain[special]
    return total


def _cut(total: np.ndarray, fraction: int) -> np.ndarray:
    """To float32 with `fraction` bits, towards zero."""
    unit = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - fraction)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(np.isfinite(total), np.trunc(total / unit) * unit, total).astype(np.float32)
