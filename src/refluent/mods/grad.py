"""The derived gradient: torch's own autograd, run once over the traced graph and recorded as a graph again.

Every read is an input of its own, so the function of one score is pointwise in (score, r_0, r_1, ...) and its
vector-Jacobian product is too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from refluent.mods.graph import constant, dtype_of, read, replay, simplify
from refluent.mods.trace import Recorder, RecordOperations, Refusal, Trace, outside_transforms


def derive(graph: fx.Graph, name: str) -> fx.Graph:
    """The gradient of a score graph: placeholders of ``graph`` and g, output (dscore, (read_0, read_1, ...)).

    read_k belongs to the k-th read in order: (dr_k, *its indices), or None where the result does not depend on it or
    where it is no floating point number. Raises ValueError where an operation has no derivative.
    """
    try:
        with outside_transforms():
            return simplify(_derive(graph), keep_detach=False)
    except _NoDerivative as error:
        raise ValueError(f"score_mod {name!r} cannot be differentiated: {error}") from error.__cause__


class _NoDerivative(Exception):
    """Why, and near which of the user's lines."""


def _derive(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    dtype = next(dtype_of(n) for n in graph.nodes if n.name == "score")
    recorder = Recorder(Trace(made), {}, dtype, widen=False)
    copies: dict[fx.Node, fx.Node] = {}
    env: dict[fx.Node, Any] = {}
    variables: list[Tensor | None] = []
    indices: list[tuple[fx.Node | int, ...]] = []
    line = ""
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = made.node_copy(node)
            # A captured tensor itself has no value here; its reads do.
            env[node] = node if node.name.startswith("c") else recorder.track(copies[node], dtype_of(node))
            if node.name == "score":
                variables.append(env[node].requires_grad_())
    g = recorder.track(made.placeholder("g"), dtype)

    def run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal line
        line = node.meta.get("line", line)
        if node.target is constant:
            return torch.tensor(args[0], dtype=args[1])
        if node.target is not read:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        index = tuple(recorder.nodes[id(a)] if isinstance(a, Tensor) else a for a in args[2:])
        indices.append(index)
        value = recorder.track(recorder.emit(read, (copies[args[0]], args[1], *index), {}, args[1]), args[1])
        variables.append(value.requires_grad_() if args[1].is_floating_point else None)
        return value

    try:
        with torch.enable_grad(), RecordOperations(recorder):
            grads = _gradients(replay(graph, env, run), variables, g)
            outputs = [None if grad is None else recorder.node_of(grad) for grad in grads]
    except (Refusal, RuntimeError, NotImplementedError) as error:
        raise _NoDerivative(f"{error} (near {line})" if line else str(error)) from error
    made.output((outputs[0], tuple(None if dr is None else (dr, *index) for dr, index in zip(outputs[1:], indices))))
    return made


def _gradients(result: Tensor, variables: list[Tensor | None], g: Tensor) -> list[Tensor | None]:
    wanted = [v for v in variables if v is not None]
    found: Iterator[Tensor | None]
    if result.requires_grad:
        found = iter(torch.autograd.grad(result, wanted, g, allow_unused=True))
    else:
        found = iter((None,) * len(wanted))
    return [None if v is None else next(found) for v in variables]
