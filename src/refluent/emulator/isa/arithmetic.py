"""The arithmetic of atomics and reductions, on arrays of raw bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from refluent.emulator.isa import Modifiers

_BYTES = {"b128": 16, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4}
_BYTES |= {"bf16x2": 4, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b8": 1, "u8": 1, "s8": 1}
_NUMPY = {"u": "u", "s": "i", "b": "u", "f": "f"}
_STEPS = ("inc", "dec")
_BITS = ("and", "or", "xor", "exch", "cas")

Combine = Callable[..., np.ndarray]


def type_bytes(kind: str) -> int:
    """Size of a type."""
    return _BYTES[kind]


def element_bytes(kind: str, mods: Modifiers) -> int:
    """Size of an instruction's type, which is refused if there is none such."""
    if kind not in _BYTES:
        raise mods.refuse(f"type .{kind or '(none)'}")
    return _BYTES[kind]


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, as raw bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def flush(values: np.ndarray) -> np.ndarray:
    """Subnormal numbers to zeros of their sign."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def combine(op: str, kind: str, mods: Modifiers, flushing: bool = False) -> Combine:
    """combine_named for an instruction, which is refused where the combination does not exist."""
    try:
        return combine_named(op, kind, flushing)
    except ValueError as error:
        raise mods.refuse(str(error)) from None


def combine_named(op: str, kind: str, flushing: bool = False) -> Combine:
    """new = f(old, value[, other]) on raw bits of type `kind`. `flushing`: f32 additions flush subnormal numbers."""
    if op in _BITS:
        if kind[0] == "f" or (kind[0] != "b" and op == "xor"):
            raise ValueError(f".{op} of .{kind}")
        return _bitwise(op)
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        if op not in ("add", "min", "max"):
            raise ValueError(f".{op} of .{kind}")
        return _halves(op, kind)
    if kind[0] == "b" or (kind[0] == "f" and op not in ("add", "min", "max")) or (op in _STEPS and kind != "u32"):
        raise ValueError(f".{op} of .{kind}")
    if (op, kind) == ("add", "s64"):
        raise ValueError(".add of .s64")
    dtype = np.dtype(f"{_NUMPY[kind[0]]}{_BYTES[kind]}")
    function = _NUMERIC[op]

    def apply(old: np.ndarray, value: np.ndarray) -> np.ndarray:
        a, b = old.view(dtype), value.view(dtype)
        with np.errstate(all="ignore"):
            if flushing and kind == "f32":
                return flush(function(flush(a), flush(b))).astype(dtype).view(old.dtype)
            return function(a, b).astype(dtype).view(old.dtype)

    return apply


def _bitwise(op: str) -> Combine:
    def compare(old: np.ndarray, value: np.ndarray, other: np.ndarray) -> np.ndarray:
        equal = (old == value).all(axis=0) if len(old) > 1 else old == value
        return np.where(equal, other, old)

    functions: dict[str, Combine] = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, value: value,
        "cas": compare,
    }
    return functions[op]


def _halves(op: str, kind: str) -> Combine:
    function = _NUMERIC[op]
    brain = kind.startswith("bf16")

    def apply(old: np.ndarray, value: np.ndarray) -> np.ndarray:
        a, b = np.ascontiguousarray(old).view(np.uint16), np.ascontiguousarray(value).view(np.uint16)
        with np.errstate(all="ignore"):
            if brain:
                bits = f32_to_bf16(function(bf16_to_f32(a), bf16_to_f32(b)))
            else:
                bits = function(a.view(np.float16), b.view(np.float16)).view(np.uint16)
        return np.ascontiguousarray(bits).view(old.dtype)

    return apply


def _increment(old: np.ndarray, bound: np.ndarray) -> np.ndarray:
    return np.where(old >= bound, np.uint32(0), old + np.uint32(1))


def _decrement(old: np.ndarray, bound: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > bound), bound, old - np.uint32(1))


_NUMERIC: dict[str, Combine] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "inc": _increment,
    "dec": _decrement,
}
