"""What the operations of a traced score_mod or mask_mod are on the device: see mods/emit.py, which calls them by name.

Values are float32, int32, int64 or bool scalars, python numbers where they are known. Semantics are torch's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from refluent.gpu.device import numerics
from refluent.mods.emit import Place

KINDS = {"f32": Float32, "i32": Int32, "i64": Int64, "bool": Boolean}
UNSIGNED = {Int32: cutlass.Uint32, Int64: cutlass.Uint64}
LOG2E, LN2, LOG10_2 = math.log2(math.e), math.log(2.0), math.log10(2.0)


@dataclass(frozen=True)
class Source:
    """A captured tensor, as the host passes it: bool as bytes, unsigned numbers of 16 and 32 bits as signed ones."""

    tensor: cute.Tensor
    dtype: cutlass.Constexpr  # torch's name of its type

    def load(self, place: Place) -> Any:
        """The element at a place."""
        value = cute.make_tensor(element(self.tensor, place), cute.make_layout(1))[0]
        if self.dtype == "bool":
            return value != 0
        if self.dtype == "uint8":
            return Int32(value) & 0xFF
        if self.dtype == "uint16":
            return Int32(value) & 0xFFFF
        if self.dtype == "uint32":
            return Int64(value) & 0xFFFFFFFF
        return value


def element(tensor: cute.Tensor, place: Place) -> cute.Pointer:
    """The address of an element."""
    offset = Int64(0)
    for dim, at in place:
        offset = offset + Int64(at) * tensor.stride[dim]
    return tensor.iterator + offset


def known(x: Any) -> Any:
    """The python number that a value is; None if only the device knows it."""
    value = getattr(x, "value", x)
    return value if isinstance(value, bool | int | float) else None


def cast(x: Any, kind: str) -> Any:
    """A value of any type, or a python number, as one of the four kinds; bool: whether it is not 0."""
    target = KINDS[kind]
    if known(x) is not None:
        return target(known(x))
    if isinstance(x, Boolean):
        return x if target is Boolean else select(x, target(1), target(0))
    return target(x)


def select(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y, both of one kind."""
    if known(condition) is not None:
        return x if known(condition) else y
    return type(x)(cutlass.select_(condition, x.ir_value(), y.ir_value()))


def rounded(x: Any, dtype: str) -> Any:
    """x as a number of torch's type: rounded to 16 bits, wrapped."""
    if dtype == "float16":
        return Float32(cutlass.Float16(x))
    if dtype == "bfloat16":
        return Float32(cutlass.BFloat16(x))
    if dtype in ("int8", "int16"):
        bits = 32 - int(dtype[3:])
        return (Int32(x) << bits) >> bits
    if dtype in ("uint8", "uint16"):
        return Int32(x) & ((1 << int(dtype[4:])) - 1)
    if dtype == "uint32":
        return Int64(x) & 0xFFFFFFFF
    return Int32(x) if dtype == "int32" else x


def clamped(at: Any, size: Any, negative: bool, positive: bool) -> Any:
    """A coordinate within [0, size) for an index; `negative`, `positive`: whether it may be below 0, or not."""
    size = type(at)(size)
    zero, last = type(at)(0), size - 1
    ahead = select(at < last, at, last) if positive else at
    if not negative:
        return Int32(ahead)
    behind = at + size
    behind = select(behind > 0, behind, zero)
    return Int32(select(at < 0, behind, ahead) if positive else behind)


# --- arithmetic


def same(x: Any) -> Any:
    return x


def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    if isinstance(x, Boolean):
        return x | y
    return x + (y if alpha == 1 else y * type(y)(alpha))


def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - (y if alpha == 1 else y * type(y)(alpha))


def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return sub(y, x, alpha)


def mul(x: Any, y: Any) -> Any:
    return x & y if isinstance(x, Boolean) else x * y


def neg(x: Any) -> Any:
    return -x


def absolute(x: Any) -> Any:
    return cute.math.absf(x) if isinstance(x, Float32) else select(x < 0, -x, x)


def square(x: Any) -> Any:
    return x * x


def addcmul(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return x + (y * z if value == 1 else y * z * type(x)(value))


def lerp(x: Any, end: Any, weight: Any) -> Any:
    return x + weight * (end - x)


def div(x: Any, y: Any, exact: bool = True) -> Any:
    """x / y; where a last bit does not matter, a division by a known number is a product."""
    divisor = known(y)
    if divisor and math.isfinite(divisor) and (not exact or math.frexp(divisor)[0] in (0.5, -0.5)):
        return x * Float32(1.0 / divisor)
    return x / y


def reciprocal(x: Any) -> Any:
    return Float32(1.0) / x


def floor_divide(x: Any, y: Any) -> Any:
    if isinstance(x, Float32):
        return _floor_and_rest(x, y)[0]
    return x // y


def remainder(x: Any, y: Any) -> Any:
    """Python's: it has the divisor's sign."""
    if isinstance(x, Float32):
        return _floor_and_rest(x, y)[1]
    return x - (x // y) * y


def unsigned_floor_divide(x: Any, y: Any) -> Any:
    """Of numbers that are not negative: a shift, where the divisor is a power of two."""
    unsigned = UNSIGNED[type(x)]
    return type(x)(unsigned(x) // unsigned(y))


def unsigned_remainder(x: Any, y: Any) -> Any:
    unsigned = UNSIGNED[type(x)]
    return type(x)(unsigned(x) % unsigned(y))


def trunc_divide(x: Any, y: Any) -> Any:
    if isinstance(x, Float32):
        return trunc(x / y)
    quotient = absolute(x) // absolute(y)
    return select((x < 0) ^ (y < 0), -quotient, quotient)


def _floor_and_rest(x: Any, y: Any) -> tuple[Any, Any]:
    """floor(x / y) and the rest, for quotients below 2^24; the quotient is corrected where it was rounded up."""
    quotient = floor(x / y)
    rest = cute.math.fma(-quotient, y, x)
    over = select(y > 0, rest < 0, rest > 0)
    return select(over, quotient - 1.0, quotient), select(over, rest + y, rest)


def minimum(x: Any, y: Any) -> Any:
    return cute.arch.fmin(x, y, nan=True) if isinstance(x, Float32) else select(x < y, x, y)


def maximum(x: Any, y: Any) -> Any:
    return cute.arch.fmax(x, y, nan=True) if isinstance(x, Float32) else select(x > y, x, y)


def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


def relu(x: Any) -> Any:
    return maximum(x, type(x)(0))


def sign(x: Any) -> Any:
    kind = type(x)
    return select(x > 0, kind(1), select(x < 0, kind(-1), kind(0)))


def _of_floats(function: Any) -> Any:
    return lambda x: function(x) if isinstance(x, Float32) else x


floor, ceil = _of_floats(cute.math.floor), _of_floats(cute.math.ceil)
trunc, nearest = _of_floats(cute.math.trunc), _of_floats(cute.math.roundeven)


# --- choices and bits


def where(condition: Any, x: Any, y: Any) -> Any:
    return select(condition, x, y)


def masked_fill(x: Any, condition: Any, value: Any) -> Any:
    return select(condition, value, x)


def bitwise_and(x: Any, y: Any) -> Any:
    return x & y


def bitwise_or(x: Any, y: Any) -> Any:
    return x | y


def bitwise_xor(x: Any, y: Any) -> Any:
    return x ^ y


def bitwise_not(x: Any) -> Any:
    return x ^ Boolean(True) if isinstance(x, Boolean) else x ^ type(x)(-1)


def shift_left(x: Any, y: Any) -> Any:
    """Zero for shifts that are negative or as wide as the type."""
    if known(y) is not None:
        return x << y if 0 <= known(y) < type(x).width else type(x)(0)
    return select(_within(y, x), x << (y & (type(x).width - 1)), type(x)(0))


def shift_right(x: Any, y: Any) -> Any:
    """All sign bits for such shifts."""
    last = type(x).width - 1
    if known(y) is not None:
        return x >> (known(y) if 0 <= known(y) < last else last)
    return x >> select(_within(y, x), y, type(y)(last))


def _within(y: Any, x: Any) -> Any:
    return (y >= 0) & (y < type(x).width)


def eq(x: Any, y: Any) -> Any:
    return x == y


def ne(x: Any, y: Any) -> Any:
    return x != y


def lt(x: Any, y: Any) -> Any:
    return x < y


def le(x: Any, y: Any) -> Any:
    return x <= y


def gt(x: Any, y: Any) -> Any:
    return x > y


def ge(x: Any, y: Any) -> Any:
    return x >= y


def isnan(x: Any) -> Any:
    return x != x


def isinf(x: Any) -> Any:
    return absolute(x) == Float32(math.inf)


# --- functions


def exp2(x: Any) -> Any:
    return numerics.exp2(x)


def exp(x: Any) -> Any:
    return numerics.exp2(x * LOG2E)


def log(x: Any) -> Any:
    """To the last bit: buckets of distances are made of it."""
    return cute.math.log(x)


def log2(x: Any) -> Any:
    return cute.math.log2(x)


def log10(x: Any) -> Any:
    return cute.math.log2(x) * LOG10_2


def sqrt(x: Any) -> Any:
    return cute.math.sqrt(x)


def rsqrt(x: Any) -> Any:
    return cute.math.rsqrt(x)


def power(x: Any, y: Any) -> Any:
    """By products for small whole exponents, else by logarithm and exponential, with x's sign for odd ones."""
    n = known(y)
    if n is not None and n == int(n) and 0 <= n <= 8:
        made = type(x)(1)
        for _ in range(int(n)):
            made = x if known(made) is not None else made * x
        return made
    if not isinstance(x, Float32):
        raise ValueError(f"whole numbers are raised to powers from 0 to 8, got {y}")
    if n in (-1, 0.5):
        return reciprocal(x) if n == -1 else sqrt(x)
    made = numerics.exp2(y * log2(absolute(x)))
    whole = floor(y) == y
    odd = whole & (floor(y * 0.5) * 2.0 != y)
    made = select(x < 0, select(whole, select(odd, -made, made), Float32(math.nan)), made)
    return select(y == 0, Float32(1.0), made)


def tanh(x: Any) -> Any:
    return numerics.tanh(x)


def sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(1.0 + numerics.exp2(x * -LOG2E))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    scaled = x * beta
    return select(scaled > threshold, x, log2(1.0 + exp(scaled)) * LN2 / beta)


# --- derivatives that torch has a name for


def tanh_backward(g: Any, result: Any) -> Any:
    return g * (1.0 - result * result)


def sigmoid_backward(g: Any, result: Any) -> Any:
    return g * (1.0 - result) * result


def silu_backward(g: Any, x: Any) -> Any:
    s = sigmoid(x)
    return g * s * (1.0 + x * (1.0 - s))


def softplus_backward(g: Any, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    return select(x * beta > threshold, g, g * sigmoid(x * beta))


def threshold_backward(g: Any, x: Any, threshold: Any) -> Any:
    return select(x <= threshold, type(g)(0), g)
