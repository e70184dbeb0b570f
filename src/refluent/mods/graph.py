"""The graph of a traced mod, and what is done to it before it is run: a few passes over torch.fx graphs.

A graph's placeholders are score, b, h, i, j (and c0, c1, ... for captured tensors, g in a gradient graph). Every other
node is a pointwise aten operation on scalars, a :func:`read`, or a :func:`constant`; ``node.meta["dtype"]`` is its
type and ``node.meta["line"]`` the user's line it came from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

POSITIONS = ("b", "h", "i", "j")

IDENTITIES = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten.lift_fresh.default,
        aten.positive.default,
    }
)
"""Operations that hand their argument on; detach also stops the gradient."""


def read(captured: torch.Tensor, dtype: torch.dtype, *index: torch.Tensor | int) -> torch.Tensor:
    """Graph node: ``captured[index]`` converted to ``dtype``. Run by the generated programs, never called itself."""
    raise RuntimeError("a read is only a mark in a graph")


def constant(value: float | int | bool, dtype: torch.dtype) -> torch.Tensor:
    """Graph node: a 0-d tensor that the function made out of python numbers. Never called itself."""
    raise RuntimeError("a constant is only a mark in a graph")


def dtype_of(node: fx.Node) -> torch.dtype:
    """The type of the scalar that a node computes."""
    dtype: torch.dtype = node.meta["dtype"]
    return dtype


def captured_number(node: fx.Node) -> int:
    """Which captured tensor a read node reads."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        raise TypeError(f"{node} is no read")
    return int(source.name[1:])


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node's value comes from; a read's captured tensor is not one."""
    return [n for n in node.all_input_nodes if not (node.target is read and n is node.args[0])]


def dependencies(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """For every node, which of score, b, h, i, j and g its value depends on."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = frozenset() if node.name.startswith("c") else frozenset({node.name})
        else:
            found[node] = frozenset().union(*(found[n] for n in inputs_of(node)))
    return found


def _is_one(arg: object) -> bool:
    if isinstance(arg, fx.Node):
        return arg.target is constant and bool(arg.args[0] == 1)
    return not isinstance(arg, bool) and arg == 1


def _same_as_argument(node: fx.Node) -> fx.Node | None:
    """The argument that ``node`` merely repeats, if it does."""
    if node.target in IDENTITIES:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    candidate: object = None
    if node.target is aten._to_copy.default:
        candidate = node.args[0]
    elif node.target is aten.mul.Tensor:
        if _is_one(node.args[1]):
            candidate = node.args[0]
        elif _is_one(node.args[0]):
            candidate = node.args[1]
    elif node.target is aten.div.Tensor and _is_one(node.args[1]):
        candidate = node.args[0]
    elif node.target is aten.neg.default:
        inner = node.args[0]
        if isinstance(inner, fx.Node) and inner.target is aten.neg.default:
            candidate = inner.args[0]
    elif node.target is aten.where.self and node.args[1] is node.args[2]:
        candidate = node.args[1]
    if isinstance(candidate, fx.Node) and dtype_of(candidate) == dtype_of(node):
        return candidate
    return None


def _exact(arg: object) -> object:
    """A python number by its type and bits, so that 1, 1.0 and True, or 0.0 and -0.0, stay apart."""
    if isinstance(arg, float):
        return (float, arg.hex() if math.isfinite(arg) else repr(arg))
    if isinstance(arg, bool | int):
        return (type(arg), arg)
    if isinstance(arg, list | tuple):
        return tuple(_exact(a) for a in arg)
    return arg


def simplify(graph: fx.Graph, *, keep_detach: bool) -> fx.Graph:
    """A copy without dead nodes, repeats of the same expression and operations that change nothing.

    ``keep_detach``: detach stays (it matters to whoever differentiates the graph).
    """
    done = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    known: dict[object, fx.Node] = {}
    for node in _live(graph):
        if node.op == "output":
            done.output(fx.node.map_arg(node.args[0], lambda n: new[n]))
            continue
        copied = done.node_copy(node, lambda n: new[n])
        same = None
        if node.op == "call_function":
            if not (keep_detach and node.target is aten.detach.default):
                same = _same_as_argument(copied)
            if same is None:
                key = (
                    node.target,
                    _exact(copied.args),
                    tuple(sorted((k, _exact(v)) for k, v in copied.kwargs.items())),
                )
                same = known.setdefault(key, copied)
        if same is not None and same is not copied:
            done.erase_node(copied)
            copied = same
        new[node] = copied
    if any(len(n.users) == 0 for n in done.nodes if n.op == "call_function"):
        return simplify(done, keep_detach=keep_detach)
    return done


def _live(graph: fx.Graph) -> list[fx.Node]:
    """Nodes in order that the output needs, and every placeholder."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op in ("output", "placeholder") or node in needed:
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [n for n in graph.nodes if n in needed]


def output_of(graph: fx.Graph) -> Any:
    """What the graph returns: a node, or a tuple of nodes and None."""
    return next(n for n in reversed(graph.nodes) if n.op == "output").args[0]


def reads_of(graph: fx.Graph) -> list[fx.Node]:
    """The graph's read nodes, in order."""
    return [n for n in graph.nodes if n.target is read]


def describe(graph: fx.Graph) -> str:
    """Text that is equal for two graphs exactly when they compute the same thing in the same order."""
    names: dict[fx.Node, str] = {}
    lines: list[str] = []

    def text(arg: object) -> str:
        if isinstance(arg, fx.Node):
            return names[arg]
        if isinstance(arg, list | tuple):
            return "(" + ", ".join(text(a) for a in arg) + ")"
        return arg.hex() if isinstance(arg, float) and math.isfinite(arg) else repr(arg)

    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
        elif node.op == "output":
            lines.append(f"return {text(node.args[0])}")
        else:
            names[node] = f"v{len(names)}"
            target = node.target if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
            arguments = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in sorted(node.kwargs.items())]
            lines.append(f"{names[node]} = {target}({', '.join(arguments)})")
    return "\n".join(lines)


def digest(parts: Iterable[str]) -> str:
    """Sixteen hexadecimal digits of the parts' hash."""
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:16]


def replay(
    graph: fx.Graph, env: dict[fx.Node, Any], call: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]
) -> Any:
    """Run ``graph`` node by node from ``env`` (placeholders' values); ``call`` runs one node."""
    for node in graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: env[n])
        if node.op == "call_function":
            args = fx.node.map_arg(node.args, lambda n: env[n])
            env[node] = call(node, args, fx.node.map_arg(node.kwargs, lambda n: env[n]))
    raise RuntimeError("the graph has no output")
