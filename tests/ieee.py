"""Floating-point formats on exact numbers: the definitions that the emulator's arithmetic is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

NAN = "nan"
Number = Fraction | str  # a Fraction, "inf", "-inf", "nan"; zero carries its sign apart


@dataclass(frozen=True)
class Format:
    """A binary format with infinities and NaN. Values are (Number, sign of zero)."""

    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def canonical_nan(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def smallest_normal(self) -> int:
        return 1 << self.mantissa

    def split(self, bits: int) -> tuple[bool, int]:
        return bool(bits >> (self.bits - 1)), bits & ((1 << (self.bits - 1)) - 1)

    def is_nan(self, bits: int) -> bool:
        return self.split(bits)[1] > self.infinity

    def flush(self, bits: int) -> int:
        minus, size = self.split(bits)
        return bits if size >= self.smallest_normal else int(minus) << (self.bits - 1)

    def value(self, bits: int) -> Number:
        minus, size = self.split(bits)
        if size > self.infinity:
            return NAN
        if size == self.infinity:
            return "-inf" if minus else "inf"
        field, fraction = size >> self.mantissa, size & ((1 << self.mantissa) - 1)
        if field:
            fraction |= 1 << self.mantissa
        number = Fraction(fraction) * Fraction(2) ** (max(field, 1) - self.bias - self.mantissa)
        return -number if minus else number

    def round(self, number: Number, mode: str = "rn", minus_zero: bool = False) -> int:
        """Bits of the number rounded; `minus_zero` is the sign of an exact zero."""
        top = 1 << (self.bits - 1)
        if number == NAN:
            return self.canonical_nan
        if isinstance(number, str):
            return self.infinity | (top if number == "-inf" else 0)
        if number == 0:
            return top if minus_zero else 0
        minus = number < 0
        size = -number if minus else number
        exponent = max(floor_log2(size), 1 - self.bias)
        units = size / Fraction(2) ** (exponent - self.mantissa)
        whole, rest = units.numerator // units.denominator, units - units.numerator // units.denominator
        up = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1 == 1),
            "rna": rest >= Fraction(1, 2),
            "rz": False,
            "rm": minus and rest > 0,
            "rp": not minus and rest > 0,
        }[mode]
        code = ((exponent - 1 + self.bias) << self.mantissa) + whole + int(up)
        if code >= self.infinity:
            toward = mode == "rz" or (mode == "rm" and not minus) or (mode == "rp" and minus)
            code = self.infinity - 1 if toward else self.infinity
        return code | (top if minus else 0)


def floor_log2(x: Fraction) -> int:
    n = x.numerator.bit_length() - x.denominator.bit_length()
    return n if x >= Fraction(2) ** n else n - 1


F16, BF16, F32, F64 = Format(5, 10), Format(8, 7), Format(8, 23), Format(11, 52)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def add(form: Format, a: int, b: int, mode: str = "rn") -> int:
    x, y = form.value(a), form.value(b)
    return _add(form, x, y, form.split(a)[0], form.split(b)[0], mode)


def _add(form: Format, x: Number, y: Number, minus_x: bool, minus_y: bool, mode: str) -> int:
    if NAN in (x, y) or {x, y} == {"inf", "-inf"}:
        return form.canonical_nan
    for v in (x, y):
        if isinstance(v, str):
            return form.round(v)
    total = x + y  # type: ignore[operator]
    zero = minus_x and minus_y if mode != "rm" else minus_x or minus_y
    if total == 0 and (x != 0 or y != 0):
        zero = mode == "rm"
    return form.round(total, mode, zero)


def multiply(x: Number, y: Number, minus: bool) -> Number:
    if NAN in (x, y):
        return NAN
    if isinstance(x, str) or isinstance(y, str):
        return NAN if x == 0 or y == 0 else "-inf" if minus else "inf"
    return x * y


def mul(form: Format, a: int, b: int, mode: str = "rn") -> int:
    minus = form.split(a)[0] != form.split(b)[0]
    return form.round(multiply(form.value(a), form.value(b), minus), mode, minus)


def fma(form: Format, a: int, b: int, c: int, mode: str = "rn", narrow: Format | None = None) -> int:
    """a * b + c rounded once; a and b may be of a narrower format."""
    factor = narrow or form
    minus = factor.split(a)[0] != factor.split(b)[0]
    product = multiply(factor.value(a), factor.value(b), minus)
    return _add(form, product, form.value(c), minus, form.split(c)[0], mode)


def div(form: Format, a: int, b: int, mode: str = "rn") -> int:
    x, y = form.value(a), form.value(b)
    minus = form.split(a)[0] != form.split(b)[0]
    if NAN in (x, y) or (isinstance(x, str) and isinstance(y, str)) or (x == 0 and y == 0):
        return form.canonical_nan
    if isinstance(x, str) or y == 0:
        return form.round("-inf" if minus else "inf")
    return form.round(Fraction(0) if isinstance(y, str) else x / y, mode, minus)


def sqrt(form: Format, a: int, mode: str = "rn") -> int:
    x = form.value(a)
    if x == 0:
        return a
    if x == NAN or x == "-inf" or (isinstance(x, Fraction) and x < 0):
        return form.canonical_nan
    if x == "inf":
        return a
    # 80 bits of the root, and a sticky bit below: more than any rounding can need.
    shift = 2 * (90 + abs(floor_log2(x)))
    scaled = x * 4**shift
    root = math.isqrt(scaled.numerator // scaled.denominator)
    sticky = root * root != scaled
    return form.round(Fraction(2 * root + int(sticky), 2 ** (shift + 1)), mode)


def convert(source: Format, target: Format, a: int, mode: str = "rn") -> int:
    return target.round(source.value(a), mode, source.split(a)[0])


def specials(form: Format) -> list[int]:
    """Bits worth trying: zeros, subnormals, borders, NaN, numbers around one and around ties."""
    one = form.bias << form.mantissa
    quiet = form.infinity | 1 << (form.mantissa - 1)
    sizes = [0, 1, 2, form.smallest_normal - 1, form.smallest_normal, form.smallest_normal + 1, form.infinity - 1]
    sizes += [form.infinity, quiet, form.infinity + 1, one, one - 1, one + 1, one | 1 << (form.mantissa - 1)]
    sizes += [one + (3 << form.mantissa), one + (form.mantissa << form.mantissa) + 1]
    return sizes + [s | 1 << (form.bits - 1) for s in sizes]


def samples(form: Format, rng: np.random.Generator, count: int) -> np.ndarray:
    """(count,) raw bits: pairs of special numbers, random bits, and numbers of like size (so that sums cancel)."""
    word = {16: np.uint16, 32: np.uint32, 64: np.uint64}[form.bits]
    chosen = rng.choice(np.array(specials(form), np.uint64), count)
    anything = (
        rng.integers(0, 1 << form.bits, count, np.uint64, endpoint=False)
        if form.bits < 64
        else rng.integers(0, 2**64 - 1, count, np.uint64, endpoint=True)
    )
    near = (np.uint64(form.bias) << np.uint64(form.mantissa)) + rng.integers(
        0, 1 << (form.mantissa + 2), count, np.uint64
    )
    near |= rng.integers(0, 2, count, np.uint64) << np.uint64(form.bits - 1)
    pick = rng.integers(0, 3, count)
    return np.select([pick == 0, pick == 1], [chosen, anything], near).astype(word)
