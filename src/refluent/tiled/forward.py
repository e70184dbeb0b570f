"""The forward over tiles: online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018)
with the tiling of FlashAttention (Dao et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from refluent.problem import Inputs, Problem
from refluent.tiled.dropout import keep_mask
from refluent.tiled.operands import Exponential, minus_inf_to_zero, pack_keys, pack_rows
from refluent.tiled.products import Products, product_dtype
from refluent.tiled.scores import Scorer, Workspace
from refluent.tiled.visible import BlockMap, Keep, Tile, Visibility
from refluent.tiled.walk import Chunk, TileSize, covers_everything


@dataclass(frozen=True)
class Outputs:
    """o like q with v's head dimension; lse and max_score (b, h, sq) or (h, tq)."""

    o: Tensor
    lse: Tensor
    max_score: Tensor | None

    @staticmethod
    def empty(problem: Problem, q: Tensor) -> Outputs:
        """What rows outside every sequence hold: o = 0, lse = max_score = -inf. Where there are none o stays unset."""
        o_shape = (*q.shape[:-1], problem.head_dim_v)
        o = q.new_empty(o_shape) if covers_everything(problem) else q.new_zeros(o_shape)
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        lse = q.new_full(shape, -math.inf, dtype=problem.accum_dtype)
        return Outputs(o, lse, torch.full_like(lse, -math.inf) if problem.options.return_max_score else None)


def forward_chunks(
    problem: Problem, inputs: Inputs, chunks: Iterable[Chunk], tile: TileSize, blocks: BlockMap | None, out: Outputs
) -> None:
    """Fill ``out`` for the rows and heads of some chunks."""
    workspace = Workspace(problem.device)
    for chunk in chunks:
        _Forward(problem, inputs, chunk, tile, blocks, workspace, out).run()


class _Forward:
    """One chunk's forward."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        chunk: Chunk,
        tile: TileSize,
        blocks: BlockMap | None,
        workspace: Workspace,
        out: Outputs,
    ) -> None:
        self.problem, self.inputs, self.chunk, self.tile, self.out = problem, inputs, chunk, tile, out
        self.accum = problem.accum_dtype
        self.product = product_dtype(problem)
        self.exp = Exponential.of_choice(problem)
        self.products = Products(problem, workspace)
        self.workspace = workspace
        self.visibility = Visibility(problem, inputs, chunk, tile, blocks)
        self.scorer = Scorer(problem, inputs, chunk, self.visibility)
        len_k = chunk.segment.len_k
        self.k = pack_keys(chunk.key_side(inputs.k, 0, len_k), chunk, self.accum)  # (units, sk, d)
        self.v = pack_keys(chunk.key_side(inputs.v, 0, len_k), chunk, self.product)  # (units, sk, dv)

    def run(self) -> None:
        for i0 in range(0, self.chunk.segment.len_q, self.tile.m):
            i1 = min(i0 + self.tile.m, self.chunk.segment.len_q)
            if not self._rows(i0, i1, self.exp):
                self._rows(i0, i1, Exponential(binary=False))

    def _rows(self, i0: int, i1: int, exp: Exponential) -> bool:
        """Rows [i0, i1) against every key they may see; False, with nothing stored, where ``exp`` does not reach."""
        q = pack_rows(self.chunk.query_side(self.inputs.q, i0, i1), self.chunk, self.accum)
        q.mul_(self.problem.scale)
        acc = q.new_zeros(*q.shape[:-1], self.problem.head_dim_v)
        row_max = q.new_full((*q.shape[:-1], 1), -math.inf)
        row_sum = torch.zeros_like(row_max)
        for tile in self.visibility.tiles(i0, i1):
            s = self._scores(q, tile)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            minus_max = exp.minus(minus_inf_to_zero(new_max))
            if not exp.reaches(minus_max):
                return False
            p = exp.of(s, minus_max, out=self._buffer("p", s.shape, self.accum))
            rescale = exp.rescale(row_max, minus_max)
            row_sum.mul_(rescale).add_(p.sum(-1, keepdim=True))
            row_max = new_max
            if self.inputs.philox is not None:
                self._drop(p, tile, self.inputs.philox)
            self._accumulate(acc.mul_(rescale), p, tile)
        self._store(i0, i1, acc, row_max, row_sum, exp)
        return True

    def _scores(self, q: Tensor, tile: Tile) -> Tensor:
        """Scores of a tile (units, group * tm, tn) after softcap and score_mod, -inf where masked."""
        raw = self.products.fresh("s", q, self.k[:, tile.j0 : tile.j1].transpose(1, 2))
        s = self.scorer.apply(raw, tile)
        if tile.keep is not None:
            # raw is no longer needed: its memory takes the masked scores, those of score_mod may be the user's.
            tile.keep.scores(self.scorer.by_head(s), out=self.scorer.by_head(raw))
            return raw
        return s

    def _drop(self, p: Tensor, tile: Tile, philox: Tensor) -> None:
        """Zero the dropped weights; the kept ones' factor 1 / (1 - p) is applied to the sum."""
        stream = self.visibility.batch_head(self.problem.heads_q)
        kept = keep_mask(philox, self.problem.options.dropout_p, stream, tile.i0, tile.i1, tile.j0, tile.j1)
        Keep(kept, self.accum).zero_(self.scorer.by_head(p))

    def _accumulate(self, acc: Tensor, p: Tensor, tile: Tile) -> None:
        if self.product != self.accum:
            p = self._buffer("p", p.shape, self.product).copy_(p)
        self.products.add(acc, p, self.v[:, tile.j0 : tile.j1])

    def _store(self, i0: int, i1: int, acc: Tensor, row_max: Tensor, row_sum: Tensor, exp: Exponential) -> None:
        chunk, out = self.chunk, self.out
        top = minus_inf_to_zero(row_max)
        lse = row_sum.log()
        residual = exp.residual(top, exp.minus(top))
        if residual is not None:
            lse.sub_(residual)
        lse.add_(top)
        total = row_sum
        if self.inputs.sink is not None:
            sink = chunk.head_side(self.inputs.sink).to(self.accum)[:, None, None]
            by_head = self.scorer.by_head
            share = sink - by_head(top)
            if residual is not None:
                share.add_(by_head(residual))
            total = row_sum + share.exp_().view_as(row_sum)
            lse = torch.logaddexp(by_head(lse), sink).view_as(row_sum)
        factor = 1.0 / (1.0 - self.problem.options.dropout_p) if self.inputs.philox is not None else 1.0
        acc.mul_(factor / total.masked_fill(total == 0, 1.0))
        chunk.query_side(out.o, i0, i1).copy_(self.scorer.by_head(acc))
        chunk.row_side(out.lse, i0, i1).copy_(self.scorer.by_head(lse).squeeze(-1))
        if out.max_score is not None:
            chunk.row_side(out.max_score, i0, i1).copy_(self.scorer.by_head(row_max).squeeze(-1))

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.workspace.get(name, shape, dtype)
