"""Between which bounds the whole numbers of a graph lie: most are positions, which 32 bits hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from refluent.mods.graph import constant, dtype_of, read

Range = tuple[int, int]
"""Lowest and highest value."""

POSITION: Range = (0, (1 << 30) - 1)
"""Of b, h, i and j: what a launch takes."""


def fits(span: Range, dtype: torch.dtype) -> bool:
    """Whether a type holds every number of the range."""
    low, high = limits(dtype)
    return low <= span[0] and span[1] <= high


def limits(dtype: torch.dtype) -> Range:
    """All that an integer type, or bool, can be."""
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def ranges_of(graph: fx.Graph) -> dict[fx.Node, Range]:
    """The range of every node that is a whole number or bool. What may overflow has its type's, as it wraps."""
    found: dict[fx.Node, Range] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in ("b", "h", "i", "j"):
            found[node] = POSITION
        elif node.op == "call_function" and not dtype_of(node).is_floating_point:
            whole = limits(dtype_of(node))
            span = _range_of(node, found)
            found[node] = whole if span is None or not fits(span, dtype_of(node)) else span
    return found


def _range_of(node: fx.Node, known: Mapping[fx.Node, Range]) -> Range | None:
    """None where nothing better than the type's own limits is known."""
    if node.target is read or dtype_of(node) == torch.bool:
        return None
    if node.target is constant:
        return int(node.args[0]), int(node.args[0])  # type: ignore[arg-type]
    name = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
    args = node.args
    if name in ("where", "masked_fill"):
        args = args[1:] if name == "where" else (args[0], args[2])
    spans = [_span(a, known) for a in args]
    if name == "div" and node.kwargs.get("rounding_mode") == "floor":
        name = "floor_divide"
    rule = _RULES.get(name)
    if rule is None or any(s is None for s in spans) or "alpha" in node.kwargs:
        return None
    return rule(*spans)


def _span(arg: Any, known: Mapping[fx.Node, Range]) -> Any:
    """A range; None where it is unknown, () where the argument is absent."""
    if arg is None:
        return ()
    if isinstance(arg, fx.Node):
        return known.get(arg)
    return (int(arg), int(arg)) if isinstance(arg, int) else None


def _corners(operation: Callable[[int, int], int], x: Range, y: Range) -> Range:
    values = [operation(a, b) for a in x for b in y]
    return min(values), max(values)


def _floor_divide(x: Range, y: Range) -> Range | None:
    return None if y[0] <= 0 <= y[1] else _corners(lambda a, b: a // b, x, y)


def _remainder(x: Range, y: Range) -> Range | None:
    if y[0] > 0:
        return x if x[0] >= 0 and x[1] < y[0] else (0, y[1] - 1)
    return (y[0] + 1, 0) if y[1] < 0 else None


def _shift(operation: Callable[[int, int], int]) -> Callable[[Range, Range], Range | None]:
    def rule(x: Range, y: Range) -> Range | None:
        return _corners(operation, x, y) if y[0] >= 0 and y[1] < 64 else None

    return rule


def _bits(x: Range, y: Range) -> Range:
    """Of |, ^ (and & of negative numbers): as many bits as either has."""
    size = max(v.bit_length() for v in (*x, *y))
    return (0 if x[0] >= 0 and y[0] >= 0 else -(1 << size)), (1 << size) - 1


def _and(x: Range, y: Range) -> Range:
    upper = [span[1] for span in (x, y) if span[0] >= 0]
    return (0, min(upper)) if upper else _bits(x, y)


def _abs(x: Range) -> Range:
    return (0 if x[0] <= 0 <= x[1] else min(abs(x[0]), abs(x[1]))), max(abs(x[0]), abs(x[1]))


def _clamp(x: Range, low: Any = (), high: Any = ()) -> Range:
    if low:
        x = max(x[0], low[0]), max(x[1], low[1])
    if high:
        x = min(x[0], high[0]), min(x[1], high[1])
    return x


def _both(x: Range, y: Range) -> Range:
    return min(x[0], y[0]), max(x[1], y[1])


_RULES: dict[str, Callable[..., Range | None]] = {
    "_to_copy": lambda x: x,
    "detach": lambda x: x,
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "rsub": lambda x, y: (y[0] - x[1], y[1] - x[0]),
    "mul": lambda x, y: _corners(lambda a, b: a * b, x, y),
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _abs,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "__lshift__": _shift(lambda a, b: a << b),
    "bitwise_left_shift": _shift(lambda a, b: a << b),
    "__rshift__": _shift(lambda a, b: a >> b),
    "bitwise_right_shift": _shift(lambda a, b: a >> b),
    "__and__": _and,
    "bitwise_and": _and,
    "__or__": _bits,
    "bitwise_or": _bits,
    "__xor__": _bits,
    "bitwise_xor": _bits,
    "bitwise_not": lambda x: (~x[1], ~x[0]),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "clamp": _clamp,
    "clamp_min": lambda x, y: _clamp(x, y),
    "clamp_max": lambda x, y: _clamp(x, (), y),
    "where": _both,
    "masked_fill": _both,
}
