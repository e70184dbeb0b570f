"""Formats of the matrix units: raw bits to float32, and one multiply-accumulate in the chosen accumulator model.

Products of two 16-bit, tf32 or fp8 values are exact in float32, so a float32 (BLAS) product models "exact products,
float32 accumulation". The truncating model follows the published probing of Hopper's and Blackwell's tensor cores
(arXiv 2511.10909 and 2512.07004): the addends of one hardware step are aligned to the largest exponent, cut to a
fixed number of fraction bits and added as integers.
"""

from __future__ import annotations

from collections.abc import Callable

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


def multiply_accumulate(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, model: str) -> np.ndarray:
    """a (m, k) @ b (n, k)^T + c (m, n), all float32. model: "fp32", or "truncate" (fixed-point alignment, cut)."""
    if model == "fp32":
        product = a @ b.T
        return product if c is None else product + c
    return _truncating(a, b, c)


_FRACTION_BITS = 25  # below the largest addend's leading bit, H100 and B200 (arXiv 2511.10909, table of widths)


def _truncating(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    products = a.astype(np.float64)[:, None, :] * b.astype(np.float64)[None, :, :]
    addends = products if c is None else np.concatenate([products, c.astype(np.float64)[:, :, None]], axis=2)
    largest = np.max(np.abs(addends), axis=2, initial=0.0)
    exponent = np.frexp(largest)[1]
    unit = np.ldexp(1.0, exponent - _FRACTION_BITS)
    cut = np.trunc(addends / unit[:, :, None]).sum(axis=2) * unit
    exact = cut.astype(np.float32)
    over = np.abs(exact.astype(np.float64)) > np.abs(cut)  # float32 result is cut too, never rounded up
    exact[over] = np.nextafter(exact[over], np.float32(0))
    special = ~np.isfinite(largest)
    if special.any():
        exact[special] = addends.sum(axis=2)[special].astype(np.float32)
    return exact
