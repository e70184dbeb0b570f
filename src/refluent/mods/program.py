"""Graphs as Python functions over tiles: each expression in the smallest shape that holds it, few passes over scores.

A tile is (B, H, Tm, Tn). ``slope[h]`` stays (1, H, 1, 1) and ``j - i`` stays (1, 1, Tm, Tn) until they meet the scores.
Temporaries that nobody reads again are overwritten, and ``x + a * b`` is one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from refluent.mods.distance import Distances, diagonals, distances, spread, spread_whole
from refluent.mods.graph import (
    POSITIONS,
    aten,
    constant,
    dependencies,
    dtype_of,
    output_of,
    read,
    simplify,
)
from refluent.mods.reads import Reader, contract, reader_of

Program = Callable[..., Any]


class _Writer:
    """Writes a graph as the source of one Python function."""

    def __init__(self, graph: fx.Graph, names: Sequence[str], label: str, box: bool) -> None:
        self.distances = Distances(graph if box else None, dependencies(graph))
        self.along = self.distances.members
        self.spreads: dict[fx.Node, str] = {}  # values along the distance, over the tile
        self.depends = dependencies(graph)
        self.captured_names = names
        self.label = label
        self.space: dict[str, Any] = {"torch": torch, "contract": contract, "spread": spread, "diagonals": diagonals}
        self.space |= {"distances": distances, "spread_whole": spread_whole}
        self.lines: list[str] = ["d = distances(tile, b.device)"] if self.along else []
        self.names: dict[fx.Node, str] = {n: n.name for n in graph.nodes if n.op == "placeholder"}
        self.left: dict[fx.Node, int] = {}  # uses of a value that are still to come
        self.owned: set[fx.Node] = set()  # temporaries, which may be overwritten
        self.fused = _products_to_fuse(graph, self.depends) - self.along
        for node in graph.nodes:
            for used in node.all_input_nodes:
                self.left[used] = self.left.get(used, 0) + _count(node, used)

    def write(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_function" or node.target is constant or node in self.fused:
                continue
            if node in self.distances.roots:
                self.root(node)
            elif node.target is read:
                self.read(node)
            else:
                self.operation(node)

    def build(self, arguments: str) -> Program:
        source = f"def program({arguments}):\n    " + "\n    ".join(self.lines) + "\n"
        exec(compile(source, f"<{self.label}>", "exec"), self.space)
        program: Program = self.space["program"]
        program.__doc__ = source
        return program

    def bind(self, value: object, hint: str) -> str:
        name = f"{hint}{len(self.space)}"
        self.space[name] = value
        return name

    def text(self, arg: Any, user: fx.Node | None = None) -> str:
        """An argument's text in the line of ``user`` (None: where it has to span the tile)."""
        if isinstance(arg, fx.Node):
            if arg.target is constant:
                return _literal(arg.args[0])
            return self.spread(arg) if arg in self.along and user not in self.along else self.names[arg]
        if isinstance(arg, list | tuple):
            return "[" + ", ".join(self.text(a, user) for a in arg) + "]"
        return _literal(arg)

    def tensor(self, arg: Any, user: fx.Node | None = None) -> str:
        """Like text, but a constant is a tensor: where a python number would give the result another type."""
        if isinstance(arg, fx.Node) and arg.target is constant:
            return f"torch.full((1, 1, 1, 1), {_literal(arg.args[0])}, dtype={arg.args[1]}, device=b.device)"
        return self.text(arg, user)

    def spread(self, node: fx.Node) -> str:
        if node not in self.spreads:
            self.spreads[node] = f"{self.names[node]}_{len(self.spreads)}"
            self.lines.append(f"{self.spreads[node]} = spread({self.names[node]}, tile)")
        return self.spreads[node]

    def cast(self, arg: Any, user: fx.Node) -> str:
        text = self.text(arg, user)
        return text if dtype_of(arg) == dtype_of(user) else f"{text}.to({dtype_of(user)})"

    def root(self, node: fx.Node) -> None:
        """A multiple of the distance j - i, plus a number."""
        factor, offset = self.distances.roots[node]
        self.names[node] = name = f"v{len(self.names)}"
        self.lines.append(f"{name} = d * {factor} + {offset}" if (factor, offset) != (1, 0) else f"{name} = d")
        self.release(node, name)

    def read(self, node: fx.Node) -> None:
        reader = reader_of(node, self.depends, self.captured_names, self.label)
        index = "".join(f"{self.text(a, node)}, " for a in node.args[2:])
        self.names[node] = name = f"v{len(self.names)}"
        self.lines.append(f"{name} = {self.bind(reader, 'read')}.load(captured[{reader.captured}], ({index}), tile)")
        self.release(node, name)

    def operation(self, node: fx.Node) -> None:
        product = next((p for p in self.fused if p in node.args), None)
        if product is not None and node.target is aten.add.Tensor:
            self.multiply_add(node, product)
            return
        args, target = list(node.args), node.target
        if target in (aten.add.Tensor, aten.mul.Tensor) and not node.kwargs and not self.reusable(args[0], node):
            if self.reusable(args[1], node) or (self.spreadable(args[1], node) and not self.spreadable(args[0], node)):
                args.reverse()
        name, call = f"v{len(self.names)}", _callable(target)
        packet = getattr(aten, target._schema.name.partition("::")[2] + "_", None)  # type: ignore[union-attr]
        in_place = getattr(packet, target._overloadname, None)  # type: ignore[union-attr]
        if in_place is not None and self.reusable(args[0], node):
            call, name = in_place, self.names[args[0]]  # type: ignore[index]
        elif in_place is not None and self.spreadable(args[0], node):
            call, self.spreads[args[0]] = in_place, name  # type: ignore[index]
            self.lines.append(f"{name} = spread_whole({self.names[args[0]]}, tile)")  # type: ignore[index]
        text = self.text if _takes_numbers(node) else self.tensor
        arguments = [text(a, node) for a in args] + [f"{k}={text(v, node)}" for k, v in node.kwargs.items()]
        self.lines.append(f"{name} = {self.bind(call, 'op')}({', '.join(arguments)})")
        self.names[node] = name
        self.owned.add(node)
        self.release(node, name)

    def multiply_add(self, node: fx.Node, product: fx.Node) -> None:
        other = node.args[1] if node.args[0] is product else node.args[0]
        first, second = (self.cast(a, node) for a in product.args)
        if self.reusable(other, node):
            name = self.names[other]  # type: ignore[index]
            self.lines.append(f"{name}.addcmul_({first}, {second})")
        else:
            name = f"v{len(self.names)}"
            self.lines.append(f"{name} = torch.addcmul({self.text(other, node)}, {first}, {second})")
        self.names[node] = name
        self.owned.add(node)
        self.release(product, name)
        self.release(node, name)

    def spreadable(self, arg: Any, node: fx.Node) -> bool:
        """Whether ``node`` may overwrite the spread copy of a value along the distance: its only one, over all axes."""
        if not isinstance(arg, fx.Node) or arg not in self.along or node in self.along or arg in self.spreads:
            return False
        whole = self.extent(node) == frozenset(POSITIONS)
        return whole and self.left[arg] == 1 and dtype_of(arg) == dtype_of(node)

    def reusable(self, arg: Any, node: fx.Node) -> bool:
        """Whether ``node`` may overwrite its argument: a temporary of the same shape and type that dies here."""
        if not isinstance(arg, fx.Node) or arg not in self.owned or self.left[arg] != 1 or not self.depends[node]:
            return False
        return self.extent(arg) == self.extent(node) and dtype_of(arg) == dtype_of(node)

    def extent(self, node: fx.Node) -> frozenset[str]:
        """The tile axes that a value spans, as position names; d stands for the distance."""
        if node in self.along:
            return self.depends[node] - {"i", "j"} | {"d"}
        return frozenset(POSITIONS) if self.depends[node] & {"score", "g"} else self.depends[node]

    def release(self, node: fx.Node, keep: str) -> None:
        """Forget temporaries that ``node`` was the last to use, except the one that became its result."""
        dead = []
        for used in node.all_input_nodes:
            self.left[used] -= _count(node, used)
            if self.left[used] == 0 and used.op == "call_function" and self.names.get(used, keep) != keep:
                dead.append(self.names[used])
                if self.spreads.get(used, keep) != keep:
                    dead.append(self.spreads[used])
        if dead:
            self.lines.append(f"del {', '.join(dead)}")


def _count(node: fx.Node, used: fx.Node) -> int:
    """How often ``used`` stands among a node's arguments."""
    found = 0

    def look(n: fx.Node) -> fx.Node:
        nonlocal found
        found += n is used
        return n

    fx.node.map_arg((node.args, node.kwargs), look)
    return found


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


def _callable(target: Any) -> Any:
    """What runs an aten operation; torch.where takes python numbers where aten's overload does not."""
    return torch.where if target is aten.where.self else target


def _takes_numbers(node: fx.Node) -> bool:
    """Whether ``node`` may get its constants as python numbers: they are taken and give a result of the same type."""

    def stand_in(n: fx.Node) -> Any:
        return n.args[0] if n.target is constant else torch.empty((1, 1, 1, 1), dtype=dtype_of(n), device="meta")

    if not any(n.target is constant for n in node.all_input_nodes):
        return True
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), stand_in)
    try:
        return bool(_callable(node.target)(*args, **kwargs).dtype == dtype_of(node))
    except (RuntimeError, TypeError):  # this overload takes tensors only
        return False


def _products_to_fuse(graph: fx.Graph, depends: dict[fx.Node, frozenset[str]]) -> set[fx.Node]:
    """Products that one addition over the scores uses alone: addcmul does both in one pass."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs or not depends[node] & {"score", "g"}:
            continue
        a, b = node.args
        for product, other in ((b, a), (a, b)):
            if all(isinstance(n, fx.Node) and n.target is not constant for n in (product, other)) and _is_product(
                product
            ):
                if (
                    len(product.users) == 1
                    and product is not other
                    and dtype_of(other) == dtype_of(product) == dtype_of(node)
                ):
                    found.add(product)
                    break
    return found


def _is_product(node: fx.Node) -> bool:
    return (
        node.target is aten.mul.Tensor
        and dtype_of(node).is_floating_point
        and all(isinstance(a, fx.Node) and a.target is not constant for a in node.args)
    )


def compile_forward(graph: fx.Graph, names: Sequence[str], label: str, *, box: bool) -> Program:
    """``program(score, b, h, i, j, captured, tile)`` gives the result, broadcastable to the tile.

    ``box``: the tile has an origin.
    """
    graph = simplify(graph, keep_detach=False)
    writer = _Writer(graph, names, label, box)
    writer.write(graph)
    writer.lines.append(f"return {writer.tensor(output_of(graph))}")
    return writer.build("score, b, h, i, j, captured, tile")


def compile_backward(
    graph: fx.Graph, forward: Sequence[Reader], names: Sequence[str], label: str, *, needs: Sequence[bool], box: bool
) -> Program:
    """``program(score, b, h, i, j, captured, g, out, tile)`` gives dscore and adds to ``out``.

    ``graph``: as :func:`refluent.mods.grad.derive` makes it; ``forward``: its reads' readers; ``needs``: which captured
    tensors get a gradient; ``box``: the tile has an origin.
    """
    dscore, per_read = output_of(graph)
    kept = tuple(
        item if needs and needs[reader.captured] and item is not None and not is_zero(item[0]) else None
        for item, reader in zip(per_read, forward)
    )
    graph = with_output(graph, (dscore, kept))
    dscore, per_read = output_of(graph)
    writer = _Writer(graph, names, label, box)
    last = [(item, reader) for item, reader in zip(per_read, forward) if item is not None]
    contracted = {item[0]: c for item, reader in last if (c := _contraction(item[0], reader, writer.depends))}
    writer.fused |= set(contracted)  # never written out: contract() takes the two factors
    writer.write(graph)
    outputs = [dscore] + [item[0] for item, _ in last]
    if any(isinstance(n, fx.Node) and not is_clean(n) for n in outputs):
        writer.lines.append("nothing = g == 0")
    for item, reader in last:
        along = writer.distances.indexes(item[1:])
        text = _reduced(writer, item[0], reader, contracted.get(item[0]), along)
        index = "".join(f"{writer.names[a] if along and a in writer.along else writer.text(a)}, " for a in item[1:])
        bound = writer.bind(reader, "read")
        writer.lines.append(f"{bound}.add(out[{reader.captured}], {text}, ({index}), tile)")
    if dscore is None or is_zero(dscore):
        writer.lines.append("return torch.zeros_like(g)")
    else:
        writer.lines.append(f"return {_zeroed(writer, dscore)}")
    return writer.build("score, b, h, i, j, captured, g, out, tile")


def with_output(graph: fx.Graph, output: Any) -> fx.Graph:
    """The part of a graph that other outputs need: nodes, python numbers and None in tuples."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            new[node] = copy.node_copy(node, lambda n: new[n])
    copy.output(fx.node.map_arg(output, lambda n: new[n]))
    return simplify(copy, keep_detach=False)


def _zeroed(writer: _Writer, node: fx.Node) -> str:
    """The node's value with zeros wherever g is 0: 0 * inf and NaN must not come out of masked positions."""
    text = writer.tensor(node)
    return text if is_clean(node) else f"torch.where(nothing, 0.0, {text})"


def _reduced(
    writer: _Writer, dr: fx.Node, reader: Reader, contraction: tuple[fx.Node, fx.Node] | None, along: bool
) -> str:
    """The gradient of a read's values over the tile, summed where that is cheap; ``along``: per distance."""
    if contraction is not None:
        scores, weights = contraction
        return f"contract({writer.text(scores)}, {writer.text(weights)})"
    whole = f"({_zeroed(writer, dr)}).expand(g.shape)"
    return f"diagonals({whole}, {reader.reduced})" if along else whole


def is_zero(node: object) -> bool:
    """Whether a node is the constant 0."""
    return isinstance(node, fx.Node) and node.target is constant and bool(node.args[0] == 0)


def _is_finite(node: Any, powers: int = 2) -> bool:
    """Whether a factor cannot be inf or NaN: whole numbers, finite constants, sums and short products of them."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int | float) and math.isfinite(node)
    if node.target is constant:
        return math.isfinite(node.args[0])  # type: ignore[arg-type]
    if not dtype_of(node).is_floating_point:
        return True
    if node.target in (aten.neg.default, aten._to_copy.default):
        return _is_finite(node.args[0], powers)
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar):
        return all(_is_finite(a, powers) for a in node.args)
    if node.target is aten.mul.Tensor and powers > 1:
        return all(_is_finite(a, powers - 1) for a in node.args)
    return False


def is_clean(node: fx.Node) -> bool:
    """Whether a node of a gradient graph is surely 0 wherever g is 0, whatever the scores and captured values are."""
    if node.name == "g":
        return True
    if is_zero(node):
        return True
    args = node.args
    if node.target in (aten.neg.default, aten._to_copy.default):
        return is_clean(args[0])  # type: ignore[arg-type]
    if node.target is aten.where.self:
        return is_clean(args[1]) and is_clean(args[2])  # type: ignore[arg-type]
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        return all(isinstance(a, fx.Node) and is_clean(a) for a in args)
    if node.target is aten.mul.Tensor:
        return any(isinstance(x, fx.Node) and is_clean(x) and _is_finite(y) for x, y in (args, args[::-1]))
    if node.target is aten.div.Tensor and isinstance(args[0], fx.Node) and is_clean(args[0]):
        return isinstance(args[1], int | float) and math.isfinite(args[1]) and args[1] != 0
    return False


def _contraction(dr: fx.Node, reader: Reader, depends: dict[fx.Node, frozenset[str]]) -> tuple[fx.Node, fx.Node] | None:
    """(scores, weights) where ``dr`` is their product, only summed over i and j, and weights depends on no b or h."""
    if dr.target is not aten.mul.Tensor or len(dr.users) != 1 or not {2, 3} <= set(reader.reduced) or not is_clean(dr):
        return None
    for scores, weights in (dr.args, dr.args[::-1]):
        if isinstance(scores, fx.Node) and isinstance(weights, fx.Node) and weights.target is not constant:
            if "g" in depends[scores] and depends[weights] and depends[weights] <= {"i", "j"}:
                return scores, weights
    return None
