"""Values that depend on a row and a column through their distance j - i alone.

In a box of Tm rows and Tn columns there are only Tm + Tn - 1 distances. So ``table[bucket(j - i), h]`` is computed
once per distance, (1, H, 1, Tm + Tn - 1), and spread over the tile in one pass; its gradient is summed along diagonals
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from refluent.mods.graph import aten, constant, inputs_of
from refluent.mods.reads import Tile


class Distances:
    """Which nodes of a graph are functions of the distance (and of b and h); none of no graph.

    ``roots``: node -> (factor, offset) where it is factor * (j - i) + offset in whole numbers. ``members``: the roots
    and everything that is computed from them, b, h and captured tensors alone.
    """

    def __init__(self, graph: fx.Graph | None, depends: dict[fx.Node, frozenset[str]]) -> None:
        self.roots: dict[fx.Node, tuple[int, int]] = {}
        self.members: set[fx.Node] = set()
        self._depends = depends
        forms: dict[fx.Node, tuple[int, int, int]] = {}
        for node in graph.nodes if graph is not None else ():
            form = _linear(node, forms)
            if form is not None:
                forms[node] = form
                if form[0] == -form[1] != 0:
                    self.roots[node] = (form[1], form[2])
                    self.members.add(node)
            elif node.op == "call_function" and self.indexes(inputs_of(node)):
                self.members.add(node)

    def indexes(self, inputs: Sequence[Any]) -> bool:
        """Whether a value of these inputs is a function of the distance, b and h."""
        nodes = [n for n in inputs if isinstance(n, fx.Node)]
        alone = all(n in self.members or self._depends[n] <= {"b", "h"} for n in nodes)
        return alone and any(n in self.members for n in nodes)


def _linear(node: fx.Node, forms: dict[fx.Node, tuple[int, int, int]]) -> tuple[int, int, int] | None:
    """(p, q, r) of a node that is p * i + q * j + r in whole numbers."""
    if node.op == "placeholder":
        return {"i": (1, 0, 0), "j": (0, 1, 0)}.get(node.name)
    if node.meta.get("dtype") != torch.int64 or node.kwargs:
        return None

    def form(arg: Any) -> tuple[int, int, int] | None:
        if isinstance(arg, fx.Node) and arg.target is constant:
            arg = arg.args[0]
        if isinstance(arg, int) and not isinstance(arg, bool):
            return (0, 0, arg)
        return forms.get(arg) if isinstance(arg, fx.Node) else None

    parts = [found for a in node.args if (found := form(a)) is not None]
    if len(parts) != len(node.args):
        return None
    if node.target is aten.neg.default:
        return (-parts[0][0], -parts[0][1], -parts[0][2])
    if len(parts) != 2:
        return None
    (p, q, r), (u, v, w) = parts
    if node.target is aten.add.Tensor:
        return (p + u, q + v, r + w)
    if node.target is aten.sub.Tensor:
        return (p - u, q - v, r - w)
    if node.target is aten.rsub.Scalar:
        return (u - p, v - q, w - r)
    if node.target is aten.mul.Tensor and u == v == 0:
        return (p * w, q * w, r * w)
    return None


def distances(tile: Tile, device: torch.device) -> Tensor:
    """The tile's distances j - i, ascending: (1, 1, 1, Tm + Tn - 1), int64."""
    if tile.origin is None:
        raise ValueError("distances need a tile with an origin")
    rows, columns = tile.sizes[2:]
    lowest = tile.origin[3] - tile.origin[2] - (rows - 1)
    return torch.arange(lowest, lowest + rows + columns - 1, device=device).view(1, 1, 1, -1)


def spread(x: Tensor, tile: Tile) -> Tensor:
    """By distance (1 or B, 1 or H, 1, Tm + Tn - 1) -> by row and column (.., .., Tm, Tn), a new tensor."""
    # Window w of length Tn starts at distance w - (Tm - 1), which is row Tm - 1 - w.
    # (flip would keep the order of the window's strides, which is not that of the scores.)
    rows, columns = tile.sizes[2:]
    return x.unfold(3, columns, 1).squeeze(2).index_select(2, torch.arange(rows - 1, -1, -1, device=x.device))


def spread_whole(x: Tensor, tile: Tile) -> Tensor:
    """Like spread, over every batch and head of the tile: for what is then overwritten by the result."""
    return spread(x.expand(*tile.sizes[:2], -1, -1), tile)


_AT_ONCE = 1 << 17
"""Elements that diagonals shears at once on the CPU: half a megabyte, which stays in the cache."""


def diagonals(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Sum over ``axes`` (0 and 1 may be among them) and along diagonals: (B, H, Tm, Tn) -> (.., .., 1, Tm + Tn - 1)."""
    if axes:
        x = x.sum(axes, keepdim=True)
    batch, heads, rows, columns = x.shape
    count = rows + columns - 1
    x = x.reshape(batch * heads, rows, columns)
    group = max(1, _AT_ONCE // (rows * count)) if x.device.type == "cpu" else batch * heads
    sums = x.new_empty(batch * heads, count)
    sheared = x.new_zeros(min(group, batch * heads), rows, count)
    # Row i moves by rows - 1 - i, so that one distance fills one column; what lies between stays zero.
    moved = sheared.as_strided((sheared.shape[0], rows, columns), (rows * count, count - 1, 1), rows - 1)
    for first in range(0, batch * heads, group):
        part = x[first : first + group]
        moved[: len(part)].copy_(part)
        torch.sum(sheared[: len(part)], 1, out=sums[first : first + group])
    return sums.view(batch, heads, 1, count)
