"""Graphs as Python functions over tiles: each expression in the smallest shape that holds it, few passes over scores.

A tile is (B, H, Tm, Tn). ``slope[h]`` stays (1, H, 1, 1) and ``j - i`` stays (1, 1, Tm, Tn) until they meet the scores.
Temporaries that nobody reads again are overwritten, and ``x + a * b`` is one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from refluent.mods.graph import (
    POSITIONS,
    aten,
    captured_number,
    constant,
    dependencies,
    dtype_of,
    output_of,
    read,
    simplify,
)

Program = Callable[..., Any]


@dataclass(frozen=True)
class Tile:
    """How a program's positions lie: ``origin`` (first b, h, i, j of a box) with its ``sizes``, or None; clamping."""

    origin: tuple[int, int, int, int] | None
    sizes: tuple[int, int, int, int]
    clamp: bool


@dataclass(frozen=True)
class Reader:
    """Runs one read, forward and backward.

    ``axes``: per dimension of the captured tensor the tile axis (0..3 for b, h, i, j) that indexes it, a fixed number
    as (number,), or None if some index is computed. ``reduced``: tile axes that the indices ignore.
    """

    captured: int
    dtype: torch.dtype
    axes: tuple[int | tuple[int], ...] | None
    reduced: tuple[int, ...]
    what: str

    def load(self, x: Tensor, index: tuple[Tensor | int, ...], tile: Tile) -> Tensor:
        """The values at ``index``, broadcastable to the tile, in the read's type."""
        box = self.box(x, tile)
        if box is not None:
            return box.to(self.dtype)
        if tile.clamp or x.device.type != "cpu":
            index = self.clamped(x, index)
        try:
            found = x[index] if index else x
        except IndexError as error:
            raise ValueError(f"{self.what}, of shape {tuple(x.shape)}, out of range: {error}") from None
        return (found if found.ndim == 4 else found.reshape(1, 1, 1, 1)).to(self.dtype)

    def check(self, x: Tensor, index: tuple[Tensor | int, ...]) -> None:
        for at, size in zip(index, x.shape):
            low, high = (int(e) for e in at.aminmax()) if isinstance(at, Tensor) else (at, at)
            if low < -size or high >= size:
                raise ValueError(f"{self.what}, of shape {tuple(x.shape)}, out of range: index {low} to {high}")

    def clamped(self, x: Tensor, index: tuple[Tensor | int, ...]) -> tuple[Tensor | int, ...]:
        if 0 in x.shape:
            raise ValueError(f"{self.what}, of shape {tuple(x.shape)}, which holds nothing")
        return tuple(
            at.clamp(-size, size - 1) if isinstance(at, Tensor) else min(max(at, -size), size - 1)
            for at, size in zip(index, x.shape)
        )

    def box(self, x: Tensor, tile: Tile) -> Tensor | None:
        """The slice of ``x`` that a box of positions reads, as a (b, h, i, j) view; None where it is no slice."""
        if self.axes is None or tile.origin is None:
            return None
        dim, order = 0, []
        for axis, size in zip(self.axes, x.shape):
            if isinstance(axis, tuple):
                if not -size <= axis[0] < size:
                    return None
                x = x.select(dim, axis[0])
                continue
            start, length = tile.origin[axis], tile.sizes[axis]
            if start < 0 or start + length > size:
                return None
            x = x.narrow(dim, start, length)
            order.append(axis)
            dim += 1
        x = x.permute(sorted(range(dim), key=order.__getitem__))
        for axis in range(4):
            if axis not in order:
                x = x.unsqueeze(axis)
        return x

    def add(self, out: Tensor, dr: Tensor, index: tuple[Tensor | int, ...], tile: Tile) -> None:
        """Add the gradient of the read's values, already over the whole tile or reduced, to ``out``."""
        axes = tuple(a for a in self.reduced if dr.shape[a] != 1)
        if axes:
            dr = dr.sum(axes, keepdim=True)
        box = self.box(out, tile)
        if box is not None:
            box.add_(dr)
            return
        if tile.clamp or out.device.type != "cpu":
            index = self.clamped(out, index)
        else:
            self.check(out, index)
        flat = torch.zeros((), dtype=torch.int64, device=out.device)
        for at, size, stride in zip(index, out.shape, out.stride()):
            if isinstance(at, Tensor):
                at = at.to(torch.int64)
                at = torch.where(at < 0, at + size, at)
            elif at < 0:
                at += size
            flat = flat + at * stride
        flat = flat.expand(dr.shape).reshape(-1)
        values = dr.reshape(-1).to(out.dtype)
        if out.device.type == "cpu":
            out.view(-1).index_add_(0, flat, values)
        else:  # sorted, so that the order of the sum is fixed
            out.view(-1).index_put_((flat,), values, accumulate=True)


def reader_of(node: fx.Node, depends: dict[fx.Node, frozenset[str]], names: Sequence[str], label: str) -> Reader:
    """The reader of a read node; ``names`` of the captured tensors and ``label`` of the function serve messages."""
    number = captured_number(node)
    axes = _axes(node.args[2:])
    reduced = tuple(a for a, name in enumerate(POSITIONS) if name not in depends[node])
    return Reader(number, dtype_of(node), axes, reduced, f"{label} reads {names[number]}")


def _axes(index: Sequence[Any]) -> tuple[int | tuple[int], ...] | None:
    """Tile axes and fixed numbers that index a captured tensor; None where an index is computed or comes twice."""
    axes: list[int | tuple[int]] = []
    for item in index:
        if isinstance(item, int):
            axes.append((item,))
        elif item.name in POSITIONS and POSITIONS.index(item.name) not in axes:
            axes.append(POSITIONS.index(item.name))
        else:
            return None
    return tuple(axes)


class _Writer:
    """Writes a graph as the source of one Python function."""

    def __init__(self, graph: fx.Graph, names: Sequence[str], label: str) -> None:
        self.depends = dependencies(graph)
        self.captured_names = names
        self.label = label
        self.space: dict[str, Any] = {"torch": torch, "contract": contract}
        self.lines: list[str] = []
        self.names: dict[fx.Node, str] = {n: n.name for n in graph.nodes if n.op == "placeholder"}
        self.left: dict[fx.Node, int] = {}  # uses of a value that are still to come
        self.owned: set[fx.Node] = set()  # temporaries, which may be overwritten
        self.fused = _products_to_fuse(graph, self.depends)
        for node in graph.nodes:
            for used in node.all_input_nodes:
                self.left[used] = self.left.get(used, 0) + _count(node, used)

    def write(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_function" or node.target is constant or node in self.fused:
                continue
            if node.target is read:
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

    def text(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return _literal(arg.args[0]) if arg.target is constant else self.names[arg]
        if isinstance(arg, list | tuple):
            return "[" + ", ".join(self.text(a) for a in arg) + "]"
        return _literal(arg)

    def tensor(self, arg: Any) -> str:
        """Like text, but a constant is a tensor: where a python number would give the result another type."""
        if isinstance(arg, fx.Node) and arg.target is constant:
            return f"torch.full((1, 1, 1, 1), {_literal(arg.args[0])}, dtype={arg.args[1]}, device=b.device)"
        return self.text(arg)

    def cast(self, arg: Any, dtype: torch.dtype) -> str:
        text = self.text(arg)
        return text if dtype_of(arg) == dtype else f"{text}.to({dtype})"

    def read(self, node: fx.Node) -> None:
        reader = reader_of(node, self.depends, self.captured_names, self.label)
        index = "".join(f"{self.text(a)}, " for a in node.args[2:])
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
            if self.reusable(args[1], node):
                args.reverse()
        name, call = f"v{len(self.names)}", _callable(target)
        packet = getattr(aten, target._schema.name.partition("::")[2] + "_", None)  # type: ignore[union-attr]
        in_place = getattr(packet, target._overloadname, None)  # type: ignore[union-attr]
        if in_place is not None and self.reusable(args[0], node):
            call, name = in_place, self.names[args[0]]  # type: ignore[index]
        text = self.text if _takes_numbers(node) else self.tensor
        arguments = [text(a) for a in args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
        self.lines.append(f"{name} = {self.bind(call, 'op')}({', '.join(arguments)})")
        self.names[node] = name
        self.owned.add(node)
        self.release(node, name)

    def multiply_add(self, node: fx.Node, product: fx.Node) -> None:
        other = node.args[1] if node.args[0] is product else node.args[0]
        first, second = (self.cast(a, dtype_of(node)) for a in product.args)
        if self.reusable(other, node):
            name = self.names[other]  # type: ignore[index]
            self.lines.append(f"{name}.addcmul_({first}, {second})")
        else:
            name = f"v{len(self.names)}"
            self.lines.append(f"{name} = torch.addcmul({self.text(other)}, {first}, {second})")
        self.names[node] = name
        self.owned.add(node)
        self.release(product, name)
        self.release(node, name)

    def reusable(self, arg: Any, node: fx.Node) -> bool:
        """Whether ``node`` may overwrite its argument: a temporary of the same shape and type that dies here."""
        if not isinstance(arg, fx.Node) or arg not in self.owned or self.left[arg] != 1 or not self.depends[node]:
            return False
        return self.extent(arg) == self.extent(node) and dtype_of(arg) == dtype_of(node)

    def extent(self, node: fx.Node) -> frozenset[str]:
        """The tile axes that a value spans, as position names."""
        return frozenset(POSITIONS) if self.depends[node] & {"score", "g"} else self.depends[node]

    def release(self, node: fx.Node, keep: str) -> None:
        """Forget temporaries that ``node`` was the last to use, except the one that became its result."""
        dead = []
        for used in node.all_input_nodes:
            self.left[used] -= _count(node, used)
            if self.left[used] == 0 and used.op == "call_function" and self.names.get(used, keep) != keep:
                dead.append(self.names[used])
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


def compile_forward(graph: fx.Graph, names: Sequence[str], label: str) -> Program:
    """``program(score, b, h, i, j, captured, tile)`` gives the result, broadcastable to the tile."""
    graph = simplify(graph, keep_detach=False)
    writer = _Writer(graph, names, label)
    writer.write(graph)
    writer.lines.append(f"return {writer.tensor(output_of(graph))}")
    return writer.build("score, b, h, i, j, captured, tile")


def compile_backward(
    graph: fx.Graph, forward: Sequence[Reader], names: Sequence[str], label: str, needs: Sequence[bool]
) -> Program:
    """``program(score, b, h, i, j, captured, g, out, tile)`` gives dscore and adds to ``out``.

    ``graph``: as :func:`refluent.mods.grad.derive` makes it; ``forward``: its reads' readers; ``needs``: which captured
    tensors get a gradient.
    """
    dscore, per_read = output_of(graph)
    kept = tuple(
        item if needs and needs[reader.captured] and item is not None and not _is_zero(item[0]) else None
        for item, reader in zip(per_read, forward)
    )
    graph = _with_output(graph, (dscore, kept))
    dscore, per_read = output_of(graph)
    writer = _Writer(graph, names, label)
    last = [(item, reader) for item, reader in zip(per_read, forward) if item is not None]
    contracted = {item[0]: c for item, reader in last if (c := _contraction(item[0], reader, writer.depends))}
    writer.fused |= set(contracted)  # never written out: contract() takes the two factors
    writer.write(graph)
    outputs = [dscore] + [item[0] for item, _ in last]
    if any(isinstance(n, fx.Node) and not is_clean(n) for n in outputs):
        writer.lines.append("nothing = g == 0")
    for item, reader in last:
        text = _reduced(writer, item[0], reader, contracted.get(item[0]))
        index = "".join(f"{writer.text(a)}, " for a in item[1:])
        bound = writer.bind(reader, "read")
        writer.lines.append(f"{bound}.add(out[{reader.captured}], {text}, ({index}), tile)")
    if dscore is None or _is_zero(dscore):
        writer.lines.append("return torch.zeros_like(g)")
    else:
        writer.lines.append(f"return {_zeroed(writer, dscore)}")
    return writer.build("score, b, h, i, j, captured, g, out, tile")


def _with_output(graph: fx.Graph, output: Any) -> fx.Graph:
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


def _reduced(writer: _Writer, dr: fx.Node, reader: Reader, contraction: tuple[fx.Node, fx.Node] | None) -> str:
    if contraction is None:
        return f"({_zeroed(writer, dr)}).expand(g.shape)"
    scores, weights = contraction
    return f"contract({writer.text(scores)}, {writer.text(weights)})"


def _is_zero(node: object) -> bool:
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
    if _is_zero(node):
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


def contract(x: Tensor, y: Tensor) -> Tensor:
    """``(x * y).sum((2, 3), keepdim=True)`` in one pass over x (B, H, Tm, Tn); y broadcasts to (1, 1, Tm, Tn)."""
    batch, heads, rows, columns = x.shape
    weights = y.to(x.dtype).expand(1, 1, rows, columns).reshape(-1)
    return torch.mv(x.reshape(batch * heads, rows * columns), weights).view(batch, heads, 1, 1)
