"""From raw products to scores and back: softcap and score_mod on one tile, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refluent.problem import Inputs, Problem
from refluent.tiled.visible import Tile, Visibility
from refluent.tiled.walk import Chunk


class Workspace:
    """Buffers that live as long as a call and are handed out again for every tile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with undefined contents; valid until the same name is asked for again."""
        size = 1
        for extent in shape:
            size *= extent
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=dtype, device=self._device)
            self._flat[name, dtype] = flat
        return flat[:size].view(shape)


@dataclass(frozen=True)
class Scorer:
    """Applies softcap and score_mod to the scores of a chunk's tiles.

    Scores are (units, group * tm, tn) for the matrix products and, the same memory, (b, h, tm, tn) for mods.
    """

    problem: Problem
    inputs: Inputs
    chunk: Chunk
    visibility: Visibility

    def by_head(self, x: Tensor) -> Tensor:
        """(units, group * tm, n) -> (b, h, tm, n), the same memory."""
        return x.view(self.chunk.num_b, self.chunk.num_h, -1, x.shape[-1])

    def apply(self, s: Tensor, tile: Tile) -> Tensor:
        """Scores after softcap (written over ``s``) and score_mod (in memory of its own), not yet masked."""
        softcap = self.problem.options.softcap
        if softcap:
            s.mul_(1.0 / softcap).tanh_().mul_(softcap)
        mod = self.problem.options.score_mod
        if mod is None:
            return s
        at = self.visibility.positions(tile.i0, tile.i1, tile.j0, tile.j1)
        s4 = self.by_head(s)
        modified = mod.evaluate(
            s4,
            at.b,
            at.h,
            at.i,
            at.j,
            self.inputs.score_captured,
            origin=at.origin,
            clamp=self.visibility.clamp,
        )
        return modified.expand_as(s4).reshape(s.shape)

    def backward(
        self, ds: Tensor, s: Tensor, tile: Tile, needs: Sequence[bool], out: Sequence[Tensor | None]
    ) -> Tensor:
        """Gradient of the raw products: ``ds`` (exactly 0 where masked) back through score_mod and softcap.

        s: as :meth:`apply` left it. Captured tensors' gradients are added to ``out``. The result may be ``ds``
        itself, changed in place.
        """
        mod = self.problem.options.score_mod
        if mod is not None:
            at = self.visibility.positions(tile.i0, tile.i1, tile.j0, tile.j1)
            ds4 = self.by_head(ds)
            back = mod.backward(
                self.by_head(s),
                at.b,
                at.h,
                at.i,
                at.j,
                self.inputs.score_captured,
                ds4,
                needs=needs,
                out=out,
                origin=at.origin,
                clamp=self.visibility.clamp,
            )
            ds = back.expand_as(ds4).reshape(ds.shape)
        softcap = self.problem.options.softcap
        if softcap:
            # d (c tanh(x / c)) / dx = 1 - (s / c)**2; s is free to be overwritten now.
            slope = s.mul_(1.0 / softcap).square_().neg_().add_(1.0)
            ds = torch.mul(ds, slope, out=slope)
        return ds
