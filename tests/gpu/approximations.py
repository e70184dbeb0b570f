"""Functions that the hardware approximates: the chip's results beside the emulator's, and the manual's bounds.

Source of the bounds: PTX ISA, the tables of each instruction. `relative` and `absolute` errors, or units in the last
place; the emulator's own rounding of the exact value adds half a unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2, pi

import numpy as np

import chip
from ptx_lab import Case, Lab

COUNT = 4096


@dataclass(frozen=True)
class Bound:
    kind: str  # relative, absolute
    limit: float
    low: float
    high: float

    @property
    def text(self) -> str:
        return f"2^{log2(self.limit):.1f} {self.kind}"


F32 = {
    "ex2.approx.ftz.f32": Bound("relative", 2.0**-22, -100, 100),
    "lg2.approx.ftz.f32": Bound("absolute", 2.0**-22, 0.5, 2),
    "rcp.approx.ftz.f32": Bound("relative", 2.0**-23, 0.01, 100),
    "rsqrt.approx.ftz.f32": Bound("relative", 2.0**-22.4, 0.01, 100),
    "sqrt.approx.ftz.f32": Bound("relative", 2.0**-23, 0.01, 100),
    "sin.approx.ftz.f32": Bound("absolute", 2.0**-20.5, -pi, pi),
    "cos.approx.ftz.f32": Bound("absolute", 2.0**-20.5, -pi, pi),
    "tanh.approx.f32": Bound("relative", 2.0**-11, -4, 4),
    "div.approx.ftz.f32": Bound("relative", 2.0**-22, 0.01, 100),
    "div.full.ftz.f32": Bound("relative", 2.0**-22, 0.01, 100),
}
HALF = {
    "ex2.approx.f16": Bound("relative", 2.0**-9.9, -10, 10),
    "tanh.approx.f16": Bound("absolute", 2.0**-10.987, -4, 4),
}
BOUNDS = F32 | HALF
ROUNDING = {4: 2.0**-24, 2: 2.0**-11}  # relative, of the emulator's result


def inputs(name: str) -> list[np.ndarray]:
    bound, rng = BOUNDS[name], np.random.default_rng(5)
    dtype, word = (np.float32, np.uint32) if name in F32 else (np.float16, np.uint16)
    x = rng.uniform(bound.low, bound.high, (2, COUNT)).astype(dtype).view(word)
    return [x[0], x[1]] if name.startswith("div") else [x[0]]


def case(name: str) -> Case:
    values = inputs(name)
    text = f"{name} {{d}}, {{a}}" + (", {b}" if len(values) == 2 else "")
    return Case(text, (32 if name in F32 else 16,), tuple(values))


def on_chip(device: chip.Chip) -> dict[str, np.ndarray]:
    """The chip's bits by the instruction's text."""
    cases = [case(name) for name in BOUNDS]
    found = {}
    for one, result in zip(cases, device.run(cases)):
        assert result is not None, f"{one.text} was not assembled"
        found[one.text] = result[0]
    return found


def emulated() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Text, first operand and the emulator's bits."""
    for name in BOUNDS:
        lab, one = Lab(), case(name)
        here = lab.add(one.text, one.out, *one.inputs)
        lab.run()
        yield one.text, one.inputs[0], here.results[0]


def error(text: str, there: np.ndarray, here: np.ndarray, x: np.ndarray) -> tuple[float, Bound]:
    """The largest distance and what is allowed: the manual's bound and the rounding of the emulator's exact value."""
    bound = BOUNDS[text.split(" ")[0]]
    dtype = np.float32 if here.dtype.itemsize == 4 else np.float16
    got, wanted = (bits.view(dtype).astype(np.float64) for bits in (there, here))
    rounding = ROUNDING[here.dtype.itemsize]
    if bound.kind == "absolute":
        largest = float(np.abs(got - wanted).max())
        limit = bound.limit + rounding * float(np.abs(wanted).max())
    else:
        tiny = np.finfo(dtype).tiny
        size = np.maximum(np.abs(wanted), tiny)
        largest = float((np.abs(got - wanted) / size).max())
        limit = bound.limit + rounding
    return largest, Bound(bound.kind, limit, bound.low, bound.high)
