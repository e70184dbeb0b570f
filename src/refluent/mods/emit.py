"""A traced graph as device code: walked while a kernel is traced, each torch operation by what a table says of it.

Nothing here imports the CuTe DSL. `device` below is the module that computes (gpu/device/arithmetic.py): its values are
float32, int32, int64 or bool. Floating point nodes are float32 (float64 ones too), those of 16 bits rounded after each
operation. Whole numbers are exact: positions are int64 to torch, and an int64 node whose range fits is an int32 here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from refluent.mods.graph import constant, dependencies, dtype_of, output_of, read, simplify
from refluent.mods.mod import Mod, Read
from refluent.mods.program import is_clean, is_zero, with_output
from refluent.mods.ranges import fits, ranges_of

# aten operation -> (what its operands are converted to, function of `device`). "result": the result's type; "joint":
# what torch compares them in; "float", "bool": that.
TABLE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("detach", "alias", "clone", "positive", "lift_fresh"), ("result", "same")),
    **{name: ("result", name) for name in "add sub rsub mul neg square relu addcmul lerp".split()},
    **{name: ("result", name) for name in "minimum maximum clamp sign floor ceil trunc".split()},
    **{name: ("result", name) for name in "floor_divide remainder".split()},
    "abs": ("result", "absolute"),
    "pow": ("result", "power"),
    "round": ("result", "nearest"),
    "sgn": ("result", "sign"),
    "clamp_min": ("result", "maximum"),
    "clamp_max": ("result", "minimum"),
    "_to_copy": ("result", "same"),
    "where": ("result", "where"),
    "masked_fill": ("result", "masked_fill"),
    "threshold_backward": ("result", "threshold_backward"),
    **dict.fromkeys(("bitwise_and", "__and__"), ("result", "bitwise_and")),
    **dict.fromkeys(("bitwise_or", "__or__"), ("result", "bitwise_or")),
    **dict.fromkeys(("bitwise_xor", "__xor__"), ("result", "bitwise_xor")),
    "bitwise_not": ("result", "bitwise_not"),
    **dict.fromkeys(("__lshift__", "bitwise_left_shift"), ("result", "shift_left")),
    **dict.fromkeys(("__rshift__", "bitwise_right_shift"), ("result", "shift_right")),
    **{name: ("joint", name) for name in "eq ne lt le gt ge".split()},
    "logical_and": ("bool", "bitwise_and"),
    "logical_or": ("bool", "bitwise_or"),
    "logical_xor": ("bool", "bitwise_xor"),
    "logical_not": ("bool", "bitwise_not"),
    "isnan": ("float", "isnan"),
    "isinf": ("float", "isinf"),
    **{name: ("float", name) for name in "div reciprocal sqrt rsqrt exp exp2 log log2 log10".split()},
    **{name: ("float", name) for name in "tanh sigmoid silu softplus".split()},
    **{f"{name}_backward": ("float", f"{name}_backward") for name in "tanh sigmoid silu softplus".split()},
}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
DTYPES = (*_FLOATS, *_INTEGERS, torch.bool)
"""Of captured tensors and of nodes."""

VARYING = frozenset({"score", "g", "i"})  # what differs between the scores of one thread, which has one key

Value = Any  # of the device module
Place = tuple[tuple[int, Value], ...]
"""Coordinates by dimension, those that a thread's scores share first: their part of the address is computed once."""


def operation(node: fx.Node) -> str:
    """The name of an aten operation, without its overload."""
    name: str = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
    return name


@lru_cache(maxsize=1024)
def refusal(mod: Mod) -> str | None:
    """Why a mod cannot be emitted, in words; None if it can."""
    for captured in mod.captured:
        if captured.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"{mod.label} reads {captured.name} of type {captured.dtype}; its kernels read {names}"
    nodes = [n for graph in _graphs(mod) for n in graph.nodes if n.op == "call_function"]
    lacking = {name for n in nodes if n.target not in (read, constant) and (name := _unknown(n))}
    if lacking:
        known = ", ".join(sorted(name for name in TABLE if name.strip("_") == name and "backward" not in name))
        return f"its kernels cannot compute {', '.join(sorted(lacking))} of {mod.label}; what they can is {known}"
    for node in nodes:
        if dtype_of(node) not in DTYPES:
            return f"{mod.label} computes a number of type {dtype_of(node)}, which its kernels cannot"
    return None


def _unknown(node: fx.Node) -> str | None:
    """The name of an operation that is not in the table."""
    name = operation(node)
    if name == "round" and len(node.args) + len(node.kwargs) > 1:
        return "round to decimals"
    if name == "pow" and not dtype_of(node).is_floating_point:
        exponent = node.args[1]
        return None if isinstance(exponent, int) and 0 <= exponent <= 8 else "pow of whole numbers beyond 8"
    return None if name in TABLE else name


def _graphs(mod: Mod) -> Iterable[fx.Graph]:
    yield simplify(mod.graphs[torch.float32], keep_detach=False)
    if mod.kind == "score":
        yield mod.grad_graphs[torch.float32]


@lru_cache(maxsize=1024)
def adds_once(mod: Mod, captured: int) -> bool:
    """Whether no two scores add to one element of a captured tensor's gradient: it is read once, at every position."""
    _, per_read = output_of(mod.grad_graphs[torch.float32])
    places = [r.index for item, r in zip(per_read, mod.reads, strict=True) if item and r.captured == captured]
    return len(places) < 2 and all({"b", "h", "i", "j"} <= set(index) for index in places)


@dataclass(frozen=True)
class Position:
    """Where a score stands: device values of int32."""

    b: Value
    h: Value
    i: Value
    j: Value


class Emission:
    """A graph to be emitted, once for the values that a thread's scores share and once for each score.

    `device`: the module that computes. Outputs are read with :meth:`value`, from what :meth:`column` returned.
    """

    def __init__(self, graph: fx.Graph, device: Any) -> None:
        self.device = device
        self.depends = dependencies(graph)
        self.ranges = ranges_of(graph)
        nodes = [n for n in graph.nodes if n.op == "call_function" and n.target is not constant]
        self._shared = [n for n in nodes if not self.depends[n] & VARYING]
        self._varying = [n for n in nodes if self.depends[n] & VARYING]
        self._inputs = {n.name: n for n in graph.nodes if n.op == "placeholder"}

    def shared(self, at: Position, captured: Sequence[Value]) -> dict[fx.Node, Value]:
        """What depends on the batch, the head and the key alone."""
        values = self._bound({}, {"b": at.b, "h": at.h, "j": at.j})
        values |= {n: captured[int(name[1:])] for name, n in self._inputs.items() if name[0] == "c"}
        for node in self._shared:
            values[node] = self._compute(node, values)
        return values

    def column(
        self, shared: Mapping[fx.Node, Value], i: Value, score: Value | None = None, g: Value | None = None
    ) -> dict[fx.Node, Value]:
        """Everything, for one query."""
        values = self._bound(dict(shared), {"i": i, "score": score, "g": g})
        for node in self._varying:
            values[node] = self._compute(node, values)
        return values

    def _bound(self, values: dict[fx.Node, Value], inputs: dict[str, Value]) -> dict[fx.Node, Value]:
        return values | {self._inputs[name]: value for name, value in inputs.items() if name in self._inputs}

    def kind(self, node: fx.Node) -> str:
        """How a node's value is held: "f32", "i32", "i64" or "bool"."""
        dtype = dtype_of(node)
        if dtype.is_floating_point:
            return "f32"
        if dtype == torch.bool:
            return "bool"
        return "i32" if fits(self.ranges[node], torch.int32) else "i64"

    def value(self, values: Mapping[fx.Node, Value], arg: Any, kind: str) -> Value:
        """A node's or a python number's value as `kind`."""
        if isinstance(arg, fx.Node) and arg.target is constant:
            arg = arg.args[0]
        return self.device.cast(values[arg] if isinstance(arg, fx.Node) else arg, kind)

    def place(self, values: Mapping[fx.Node, Value], index: Sequence[Any], shape: Sequence[Value]) -> Place:
        """Where `captured[index]` is: counted from the end if negative, moved inside if it lies outside."""
        shared: list[tuple[int, Value]] = []
        own: list[tuple[int, Value]] = []
        for dim, (arg, size) in enumerate(zip(index, shape)):
            low, high = self.ranges[arg] if isinstance(arg, fx.Node) else (arg, arg)
            at = self.value(values, arg, "i32" if fits((low, high), torch.int32) else "i64")
            varies = isinstance(arg, fx.Node) and bool(self.depends[arg] & VARYING)
            (own if varies else shared).append((dim, self.device.clamped(at, size, low < 0, high >= 0)))
        return (*shared, *own)

    def _compute(self, node: fx.Node, values: Mapping[fx.Node, Value]) -> Value:
        dtype = dtype_of(node)
        if node.target is read:
            source = values[node.args[0]]  # type: ignore[index]
            at = self.place(values, node.args[2:], source.tensor.shape)
            return self.device.cast(source.load(at), self.kind(node))
        name = operation(node)
        rule, function = TABLE[name]
        keywords = dict(node.kwargs)
        if name == "_to_copy":
            keywords, made = {}, self.value(values, node.args[0], self._cast_kind(node))
        else:
            if name == "div" and keywords.pop("rounding_mode", None) is not None:
                rule, function = "result", f"{node.kwargs['rounding_mode']}_divide"
            args = self._arguments(node, values, rule)
            if function in ("floor_divide", "remainder") and self._counts(node):
                function = f"unsigned_{function}"
            if function == "div":
                keywords["exact"] = not self.depends[node] & {"score", "g"}
            made = getattr(self.device, function)(*args, **keywords)
        if rule not in ("joint", "bool") and dtype != torch.bool:
            made = self.device.rounded(made, str(dtype).removeprefix("torch."))
        return self.device.cast(made, self.kind(node))

    def _counts(self, node: fx.Node) -> bool:
        """Whether the result and the operands are whole and none is below 0."""
        if dtype_of(node).is_floating_point:
            return False
        lowest: list[Any] = [self.ranges[a][0] if isinstance(a, fx.Node) else a for a in node.args[:2]]
        return min(lowest) >= 0

    def _cast_kind(self, node: fx.Node) -> str:
        """Of a conversion: to whole numbers by way of int64 where int32 would not hold them."""
        kind = self.kind(node)
        source = node.args[0]
        wide = isinstance(source, fx.Node) and kind == "i32" and self.kind(source) in ("i64", "f32")
        return "i64" if wide else kind

    def _arguments(self, node: fx.Node, values: Mapping[fx.Node, Value], rule: str) -> list[Value]:
        kind = {"float": "f32", "bool": "bool"}.get(rule) or self._common_kind(node, rule)
        conditions = {"where": (0,), "masked_fill": (1,)}.get(operation(node), ())
        return [
            None if arg is None else self.value(values, arg, "bool" if number in conditions else kind)
            for number, arg in enumerate(node.args)
        ]

    def _common_kind(self, node: fx.Node, rule: str) -> str:
        """The kind in which an operation's operands meet, wide enough for all of them and for the result."""
        conditions = {"where": 1}.get(operation(node), 0)
        operands = [a for a in node.args[conditions:] if isinstance(a, fx.Node | int | float)]
        if operation(node) == "masked_fill":
            del operands[1]
        dtype = dtype_of(node) if rule == "result" else _joint_type(operands)
        if dtype.is_floating_point:
            return "f32"
        if dtype == torch.bool:
            return "bool"
        spans = [self.ranges[a] if isinstance(a, fx.Node) else (int(a), int(a)) for a in operands]
        if rule == "result":
            spans.append(self.ranges[node])
        return "i32" if all(fits(span, torch.int32) for span in spans) else "i64"


def _joint_type(operands: Sequence[Any]) -> torch.dtype:
    """What torch converts 0-d tensors and python numbers to before it compares them."""
    stand_ins = [torch.empty((), dtype=dtype_of(a), device="meta") if isinstance(a, fx.Node) else a for a in operands]
    return torch.result_type(*stand_ins)


@dataclass(frozen=True)
class Scatter:
    """The gradient of one read: `value`, a node of the gradient graph, goes to captured[index].

    `clean`: it is 0 by itself wherever g is. `along`: which of i, j the place depends on; over the other ones it can
    be summed before it is added. `place`: the graph of the index alone, and `at` the index there.
    """

    captured: int
    value: fx.Node
    index: tuple[Any, ...]
    clean: bool
    along: frozenset[str]
    place: Emission
    at: tuple[Any, ...]


class MaskMod:
    """A mask_mod as a kernel needs it."""

    def __init__(self, mod: Mod, device: Any) -> None:
        graph = simplify(mod.graphs[torch.float32], keep_detach=False)
        self.emission = Emission(graph, device)
        self.result = output_of(graph)
        self.dtypes = dtype_names(mod)

    def allowed(self, shared: Mapping[fx.Node, Value], i: Value) -> Value:
        """Whether the query sees the thread's key."""
        return self.emission.value(self.emission.column(shared, i), self.result, "bool")


def dtype_names(mod: Mod) -> tuple[str, ...]:
    """Of the captured tensors."""
    return tuple(str(captured.dtype).removeprefix("torch.") for captured in mod.captured)


class ScoreMod:
    """A score_mod as a backward kernel needs it: its value, its derivative, and the gradients of what it reads.

    `needs`: which captured tensors get a gradient. `softcap`: whether a softcap comes before it.

    `identity`: the derivative is 1. `folded`: the weights are multiplied by the derivative as soon as both are there,
    and no score has to be kept. `keeps_score`: the gradient graph is run where ds is known, with the scores that it
    was kept for.
    """

    def __init__(self, mod: Mod, needs: Sequence[bool], softcap: bool, device: Any) -> None:
        forward = simplify(mod.graphs[torch.float32], keep_detach=False)
        self.forward = Emission(forward, device)
        self.result = output_of(forward)
        graph, kept = _pruned(mod, needs)
        self.backward = Emission(graph, device)
        self.dscore = output_of(graph)[0]
        self.clean = self.dscore is None or is_clean(self.dscore)
        self.scatters = tuple(_scatter(graph, item, reader, self.backward, device) for item, reader in kept)
        uses = any(n.name == "score" and n.users for n in graph.nodes)
        self.identity = isinstance(self.dscore, fx.Node) and self.dscore.name == "g"
        self.folded = not self.scatters and (uses or softcap)
        self.keeps_score = bool(self.scatters) and (uses or softcap)
        self.dtypes = dtype_names(mod)

    @property
    def totals(self) -> tuple[Scatter, ...]:
        """Those that are summed over a whole tile, in registers, before they are added."""
        return tuple(s for s in self.scatters if "i" not in s.along)


def _pruned(mod: Mod, needs: Sequence[bool]) -> tuple[fx.Graph, list[tuple[Any, Read]]]:
    """The gradient graph without what nobody needs, and its reads' outputs."""
    graph = mod.grad_graphs[torch.float32]
    dscore, per_read = output_of(graph)
    wanted = [
        (item, reader)
        for item, reader in zip(per_read, mod.reads, strict=True)
        if item is not None and needs and needs[reader.captured] and not is_zero(item[0])
    ]
    graph = with_output(graph, (dscore, tuple(item for item, _ in wanted)))
    items = output_of(graph)[1]
    return graph, [(item, reader) for item, (_, reader) in zip(items, wanted)]


def _scatter(graph: fx.Graph, item: Any, reader: Read, backward: Emission, device: Any) -> Scatter:
    value, *index = item
    depends = frozenset().union(*(backward.depends[a] for a in index if isinstance(a, fx.Node)))
    place = with_output(graph, tuple(index))
    return Scatter(
        reader.captured,
        value,
        tuple(index),
        is_clean(value),
        depends & {"i", "j"},
        Emission(place, device),
        tuple(output_of(place)),
    )


__all__ = ["DTYPES", "TABLE", "Emission", "Position", "Scatter", "ScoreMod", "operation", "refusal"]
