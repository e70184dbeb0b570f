"""Reads of captured tensors while a program runs: loading them, and adding up their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from refluent.mods.graph import POSITIONS, captured_number, dtype_of


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


def contract(x: Tensor, y: Tensor) -> Tensor:
    """``(x * y).sum((2, 3), keepdim=True)`` in one pass over x (B, H, Tm, Tn); y broadcasts to (1, 1, Tm, Tn)."""
    batch, heads, rows, columns = x.shape
    weights = y.to(x.dtype).expand(1, 1, rows, columns).reshape(-1)
    return torch.mv(x.reshape(batch * heads, rows * columns), weights).view(batch, heads, 1, 1)
