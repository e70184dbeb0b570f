"""The backward over tiles: FlashAttention's (Dao, "FlashAttention-2", 2023, algorithm 2), rows outside, keys inside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from refluent.problem import Gradients, Inputs, Needs, Problem
from refluent.tiled.dropout import keep_mask
from refluent.tiled.operands import Exponential, largest, minus_inf_to_zero, pack_keys, pack_rows
from refluent.tiled.products import Products, product_dtype
from refluent.tiled.scores import Scorer, Workspace
from refluent.tiled.visible import BlockMap, Keep, Tile, Visibility
from refluent.tiled.walk import Chunk, TileSize, covers_everything


@dataclass(frozen=True)
class Upstream:
    """What the forward made and what came back: o, do like q with v's head dimension; lse, dlse (b, h, sq), (h, tq)."""

    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None


def empty_gradients(problem: Problem, inputs: Inputs, needs: Needs) -> Gradients:
    """Where a gradient is needed: zeros, or memory that chunks fill; dsink and dcaptured in the accumulate type."""
    make = torch.empty if covers_everything(problem) else torch.zeros
    mod = problem.options.score_mod
    dcaptured: tuple[Tensor | None, ...] = ()
    if mod is not None:
        dcaptured = mod.grad_buffers(inputs.score_captured, needs.dcaptured, problem.accum_dtype)
    dsink = None
    if needs.dsink and inputs.sink is not None:
        dsink = torch.zeros_like(inputs.sink, dtype=problem.accum_dtype)
    return Gradients(
        make(inputs.q.shape, dtype=problem.dtype, device=problem.device) if needs.dq else None,
        make(inputs.k.shape, dtype=problem.dtype, device=problem.device) if needs.dk else None,
        make(inputs.v.shape, dtype=problem.dtype, device=problem.device) if needs.dv else None,
        dsink,
        dcaptured,
    )


def finish(inputs: Inputs, out: Gradients) -> Gradients:
    """dsink and dcaptured in their tensors' own types."""
    return replace(
        out,
        dsink=None if out.dsink is None or inputs.sink is None else out.dsink.to(inputs.sink.dtype),
        dcaptured=tuple(
            None if grad is None else grad.to(captured.dtype)
            for grad, captured in zip(out.dcaptured, inputs.score_captured)
        ),
    )


def private(out: Gradients) -> Gradients:
    """The same dq, dk, dv, which chunks fill in different places, and zeros for what they all add to."""
    return replace(
        out,
        dsink=None if out.dsink is None else torch.zeros_like(out.dsink),
        dcaptured=tuple(None if grad is None else torch.zeros_like(grad) for grad in out.dcaptured),
    )


def add(out: Gradients, part: Gradients) -> None:
    """Add what :func:`private` made apart."""
    for total, share in zip((out.dsink, *out.dcaptured), (part.dsink, *part.dcaptured)):
        if total is not None and share is not None:
            total.add_(share)


def backward_chunks(
    problem: Problem,
    inputs: Inputs,
    chunks: Iterable[Chunk],
    tile: TileSize,
    blocks: BlockMap | None,
    upstream: Upstream,
    needs: Needs,
    out: Gradients,
) -> None:
    """Fill ``out`` for some chunks; dsink and dcaptured are added to."""
    workspace = Workspace(problem.device)
    for chunk in chunks:
        _Backward(problem, inputs, chunk, tile, blocks, workspace, upstream, needs, out).run()


_SURE = 2.0**20
"""Magnitude of lse up to which scores come out again as the forward had them, but for a small part of 1."""


@dataclass(frozen=True)
class _Rows:
    """What a tile of rows brings along; r = group * tm rows per unit."""

    q: Tensor  # (units, r, d), times scale
    q_columns: Tensor  # (units, d, r) in the product type; times scale unless that type rounds
    do: Tensor  # (units, r, dv), divided by 1 - dropout_p
    do_columns: Tensor  # (units, dv, r) in the product type; divided likewise unless that type rounds
    minus_lse: Tensor  # (units, r, 1), as Exponential takes it; -inf where the row is empty, so that p = 0
    delta: Tensor  # (units, r, 1)
    exp: Exponential
    sure: bool  # that exp(s - lse) is at most 1 but for rounding, as it is in exact numbers
    dq: Tensor  # (units, r, d), accumulator


class _Backward:
    """One chunk's backward."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        chunk: Chunk,
        tile: TileSize,
        blocks: BlockMap | None,
        workspace: Workspace,
        upstream: Upstream,
        needs: Needs,
        out: Gradients,
    ) -> None:
        self.problem, self.inputs, self.chunk, self.tile = problem, inputs, chunk, tile
        self.upstream, self.needs, self.out = upstream, needs, out
        self.accum = problem.accum_dtype
        self.product = product_dtype(problem)
        self.rounds = self.product != self.accum
        self.exp = Exponential.of_choice(problem)
        self.products = Products(problem, workspace)
        self.workspace = workspace
        self.visibility = Visibility(problem, inputs, chunk, tile, blocks)
        self.scorer = Scorer(problem, inputs, chunk, self.visibility)
        self.keep_factor = 1.0 / (1.0 - problem.options.dropout_p) if inputs.philox is not None else 1.0
        self.needs_scores_after = bool(problem.options.softcap) or (
            problem.options.score_mod is not None and problem.options.score_mod.uses_score_in_grad
        )
        len_k = chunk.segment.len_k
        keys = chunk.key_side(inputs.k, 0, len_k)
        self.k = pack_keys(keys, chunk, self.accum)  # (units, sk, d)
        self.k_product = pack_keys(keys, chunk, self.product) if self.rounds else self.k
        self.v = pack_keys(chunk.key_side(inputs.v, 0, len_k), chunk, self.accum)  # (units, sk, dv)
        self.dk = self._key_accumulators(problem.head_dim) if needs.dk else []
        self.dv = self._key_accumulators(problem.head_dim_v) if needs.dv else []

    def _key_accumulators(self, depth: int) -> list[Tensor]:
        """One contiguous (units, depth, tn) accumulator per step of keys."""
        len_k, step = self.chunk.segment.len_k, self.tile.n
        shapes = [(self.chunk.units, depth, min(step, len_k - j0)) for j0 in range(0, len_k, step)]
        return [torch.zeros(shape, dtype=self.accum, device=self.problem.device) for shape in shapes]

    def run(self) -> None:
        for i0 in range(0, self.chunk.segment.len_q, self.tile.m):
            self._run_rows(i0, min(i0 + self.tile.m, self.chunk.segment.len_q))
        # q carried the scale into dk, unless dk was made from q as it came.
        self._store_keys(self.out.dk, self.dk, self.problem.scale if self.rounds else 1.0)
        self._store_keys(self.out.dv, self.dv, self.keep_factor if self.rounds else 1.0)

    def _store_keys(self, target: Tensor | None, tiles: Sequence[Tensor], factor: float) -> None:
        if target is None:
            return
        for number, grad in enumerate(tiles):
            j0 = number * self.tile.n
            if factor != 1.0:
                grad.mul_(factor)
            by_head = grad.view(self.chunk.num_b, self.chunk.num_kv, *grad.shape[1:])
            self.chunk.key_side(target, j0, j0 + grad.shape[2]).copy_(by_head.transpose(2, 3))

    def _run_rows(self, i0: int, i1: int) -> None:
        rows = self._load_rows(i0, i1)
        for tile in self.visibility.tiles(i0, i1):
            self._tile(rows, tile)
        if self.out.dq is not None:
            dq = self.scorer.by_head(rows.dq.mul_(self.problem.scale))
            self.chunk.query_side(self.out.dq, i0, i1).copy_(dq)

    def _load_rows(self, i0: int, i1: int) -> _Rows:
        chunk, up = self.chunk, self.upstream
        q = pack_rows(chunk.query_side(self.inputs.q, i0, i1), chunk, self.accum)
        do = pack_rows(chunk.query_side(up.do, i0, i1), chunk, self.accum)
        o = pack_rows(chunk.query_side(up.o, i0, i1), chunk, self.accum)
        lse = pack_rows(chunk.row_side(up.lse, i0, i1).unsqueeze(-1), chunk, self.accum)
        alive = Keep(lse != -math.inf, self.accum)
        # Whatever do and dlse hold in an empty row, nothing of it may spread.
        Keep(self._seen(lse, o), self.accum).zero_(do)
        delta = (o * do).sum(-1, keepdim=True)
        if up.dlse is not None:
            dlse = pack_rows(chunk.row_side(up.dlse, i0, i1).unsqueeze(-1), chunk, self.accum)
            alive.zero_(dlse)
            delta.sub_(dlse)
        self._add_sink_gradient(lse, delta, alive)
        finite_lse = minus_inf_to_zero(lse)
        sure = self.problem.device.type != "cpu" or largest(finite_lse) < _SURE
        exp = self.exp if sure else Exponential(binary=False)
        minus_lse = exp.minus(finite_lse)
        do_as_given = do.to(self.product) if self.rounds else do
        # p times a number per row is do and delta times that number.
        do.mul_(self.keep_factor)
        residual = None if self.rounds else exp.residual(finite_lse, minus_lse)
        if residual is not None:
            correction = residual.neg_().exp_()
            do.mul_(correction)
            delta.mul_(correction)
        minus_lse.masked_fill_(lse == -math.inf, -math.inf)
        q_as_given = q.to(self.product) if self.rounds else q
        return _Rows(
            q=q.mul_(self.problem.scale),
            q_columns=q_as_given.transpose(1, 2).contiguous(),
            do=do,
            do_columns=do_as_given.transpose(1, 2).contiguous(),
            minus_lse=minus_lse,
            delta=delta,
            exp=exp,
            sure=sure,
            dq=torch.zeros_like(q),
        )

    def _seen(self, lse: Tensor, o: Tensor) -> Tensor:
        """Rows that see something, (units, r, 1) bool."""
        seen = lse != -math.inf
        if self.inputs.sink is not None:
            sink = self.chunk.head_side(self.inputs.sink).to(self.accum)[:, None, None]
            empty = self.scorer.by_head(lse) == sink
            seen &= ~(empty.view_as(lse) & (o == 0).all(-1, keepdim=True))
        return seen

    def _add_sink_gradient(self, lse: Tensor, delta: Tensor, alive: Keep) -> None:
        if self.out.dsink is None or self.inputs.sink is None:
            return
        sink = self.chunk.head_side(self.inputs.sink).to(self.accum)[:, None, None]
        weight = torch.sub(sink, self.scorer.by_head(lse)).exp_().mul_(self.scorer.by_head(delta))
        alive.zero_(weight.view_as(lse))
        self.chunk.head_side(self.out.dsink).sub_(weight.sum((0, 2, 3)))

    def _tile(self, rows: _Rows, tile: Tile) -> None:
        """Everything that one tile adds to dq, dk, dv and to captured tensors."""
        keys, number = slice(tile.j0, tile.j1), tile.j0 // self.tile.n
        inside = slice(tile.j0 - number * self.tile.n, tile.j1 - number * self.tile.n)
        raw = self.products.fresh("s", rows.q, self.k[:, keys].transpose(1, 2))
        s = self.scorer.apply(raw, tile)
        target = self._buffer("p", raw.shape, self.accum) if self.needs_scores_after else raw
        p = rows.exp.of(s, rows.minus_lse, out=target)
        if not rows.sure:
            p.clamp_(max=1.0)
        if tile.keep is not None:
            tile.keep.zero_(self.scorer.by_head(p))
        kept = self._kept(tile)
        if self.needs.dv:
            weights = p
            if kept is not None:
                weights = self._buffer("zp", p.shape, self.accum).copy_(p)
                kept.zero_(self.scorer.by_head(weights))
            self._add_rows(self.dv[number][:, :, inside], rows.do_columns, self._as_product(weights))
        if not (self.needs.dq or self.needs.dk or any(self.needs.dcaptured)):
            return
        ds = self._score_gradient(rows, p, tile, kept)
        ds = self.scorer.backward(ds, raw, tile, self.needs.dcaptured, self.out.dcaptured)
        if not (self.needs.dq or self.needs.dk):
            return
        ds = self._as_product(ds)
        if self.needs.dq:
            self.products.add(rows.dq, ds, self.k_product[:, keys])
        if self.needs.dk:
            self._add_rows(self.dk[number][:, :, inside], rows.q_columns, ds)

    def _add_rows(self, acc: Tensor, columns: Tensor, weights: Tensor) -> None:
        """acc += columns @ weights, summed over a group's stacked rows.

        Wide inputs get one product per query head and a sum over them: one running sum over all heads grows larger on
        its way and loses several times as much.
        """
        group = self.problem.group if self.problem.dtype.itemsize >= 4 else 1
        if group == 1:
            self.products.add(acc, columns, weights)
            return
        by_head = columns.unflatten(2, (group, -1)).transpose(1, 2).flatten(0, 1)  # (units * group, depth, tm)
        heads = self.products.fresh("heads", by_head, weights.unflatten(1, (group, -1)).flatten(0, 1))
        acc.add_(heads.unflatten(0, (-1, group)).sum(1))

    def _kept(self, tile: Tile) -> Keep | None:
        """The weights that dropout keeps."""
        if self.inputs.philox is None:
            return None
        stream = self.visibility.batch_head(self.problem.heads_q)
        probability = self.problem.options.dropout_p
        return Keep(keep_mask(self.inputs.philox, probability, stream, tile.i0, tile.i1, tile.j0, tile.j1), self.accum)

    def _score_gradient(self, rows: _Rows, p: Tensor, tile: Tile, kept: Keep | None) -> Tensor:
        """ds = p (dp - delta), exactly 0 where masked."""
        ds = self.products.fresh("ds", rows.do, self.v[:, tile.j0 : tile.j1].transpose(1, 2))
        if kept is not None:
            kept.zero_(self.scorer.by_head(ds))
        ds.sub_(rows.delta).mul_(p)
        if tile.keep is not None:
            tile.keep.zero_(self.scorer.by_head(ds))
        return ds

    def _as_product(self, x: Tensor) -> Tensor:
        return self._buffer("product", x.shape, self.product).copy_(x) if self.rounds else x

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.workspace.get(name, shape, dtype)
