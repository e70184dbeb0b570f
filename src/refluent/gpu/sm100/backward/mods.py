"""score_mod and mask_mod at a thread's scores, which have one key and one query each, and what they read gets back.

A gradient goes to its captured tensor by as few additions as its index allows: what depends on neither query nor key,
or on the key alone, is summed over the tile in registers; what depends on the query alone, over the keys of a warp;
the rest is added score by score.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute

from refluent.gpu.device import arithmetic
from refluent.gpu.device.arithmetic import Source
from refluent.gpu.device.exact import add_exact
from refluent.gpu.device.numerics import mul2, tanh
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.context import Context
from refluent.mods.emit import Place, Position, Scatter

ZERO = cutlass.Float32(0.0)


class Columns:
    """The mods of one thread's scores: queries from `query`, all of one key. Device code is made by its methods."""

    def __init__(self, ctx: Context, tile: Tile, query: cutlass.Int32, key: cutlass.Int32) -> None:
        self.ctx, self.query = ctx, query
        self.at = Position(tile.batch, tile.head, query, key)
        self.score, self.mask = ctx.static.score_mod, ctx.static.mask_mod

    def sources(self) -> list[Source]:
        return [Source(t, d) for t, d in zip(self.ctx.scores.captured, self.score.dtypes, strict=True)]

    def start_forward(self) -> None:
        """What depends on no query."""
        if self.score is not None:
            self.forward = self.score.forward.shared(self.at, self.sources())
            if self.score.folded:
                self.start_backward()
        if self.mask is not None:
            captured = [Source(t, d) for t, d in zip(self.ctx.scores.mask_captured, self.mask.dtypes, strict=True)]
            self.allowed = self.mask.emission.shared(self.at, captured)

    def start_backward(self) -> None:
        self.backward = self.score.backward.shared(self.at, self.sources())

    def modified(self, c: int, raw: Any) -> tuple[Any, Any, Any]:
        """Score c after softcap and score_mod, the score that score_mod saw, and by what dS is multiplied (or None)."""
        score, cap = self._capped(raw)
        i = self.query + c
        emission = self.score.forward
        made = emission.value(emission.column(self.forward, i, score), self.score.result, "f32")
        if not self.score.folded:
            return made, score, None
        slope = self._dscore(self.score.backward.column(self.backward, i, score, cutlass.Float32(1.0)))
        return made, score, slope if cap is None else slope * cap

    def _capped(self, raw: Any) -> tuple[Any, Any]:
        """A score after scale and softcap, and the derivative of the cap (None: there is none)."""
        call, static = self.ctx.call, self.ctx.static
        if not static.softcap:
            return raw * call.scale, None
        cap = self.ctx.scores.softcap
        t = tanh(raw * (call.scale / cap))
        return cap * t, 1.0 - t * t

    def _dscore(self, values: Any) -> Any:
        dscore = self.score.dscore
        return ZERO if dscore is None else self.score.backward.value(values, dscore, "f32")

    def visible(self, c: int) -> Any:
        """What mask_mod says of score c."""
        return self.mask.allowed(self.allowed, self.query + c)

    def grad(self, c: int, g: Any, score: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        """dS of score c for g = dS after score_mod, and for each gradient of a read (its value, all nodes' values)."""
        emission = self.score.backward
        values = emission.column(self.backward, self.query + c, score, g)
        nothing = g == 0.0
        ds = self._dscore(values)
        if not self.score.clean:
            ds = arithmetic.select(nothing, ZERO, ds)
        if self.ctx.static.softcap:
            t = score / self.ctx.scores.softcap
            ds = ds * (1.0 - t * t)
        parts = []
        for scatter in self.score.scatters:
            part = emission.value(values, scatter.value, "f32")
            parts.append((part if scatter.clean else arithmetic.select(nothing, ZERO, part), values))
        return ds, parts

    def place(self, scatter: Scatter, i: Any) -> Place:
        """Where the gradient of a read goes whose index depends on the query i at most."""
        emission, target = scatter.place, self.ctx.scores.sums[scatter.captured]
        shared = emission.shared(replace(self.at, i=i), self.sources())
        return emission.place(emission.column(shared, i), scatter.at, target.shape)

    def add(self, scatter: Scatter, place: Place, value: Any) -> None:
        add_to(arithmetic.element(self.ctx.scores.sums[scatter.captured], place), value)


def modified(columns: Columns, scores: cute.Tensor, raw: Any, c: int) -> tuple[Any, Any]:
    """A pair of scores after score_mod, from c on, and by what their dS are multiplied, or None."""
    made, slopes = [], []
    for e, x in enumerate(raw):
        value, score, slope = columns.modified(c + e, x)
        made.append(value)
        slopes.append(slope)
        if columns.score.keeps_score:
            scores[c + e] = score
    return tuple(made), None if slopes[0] is None else tuple(slopes)


def sloped(columns: Columns, weight: Any, slope: Any) -> Any:
    """Weights times derivatives: 0 wherever the weight is, though the derivative may be inf or NaN there."""
    product = mul2(weight, slope)
    if columns.score is None or columns.score.clean:
        return product
    return tuple(arithmetic.select(w != 0.0, x, ZERO) for w, x in zip(weight, product, strict=True))


@cute.jit
def add_to(target: cute.Pointer, value: cutlass.Float32):
    """Add to one element of a captured tensor's gradient; nothing where the value is 0."""
    if cutlass.const_expr(target.dtype is cutlass.Int64):
        add_exact(target, value)
    else:  # not behind a branch: the address would be worked out anew behind each
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};",
            read_only_args=[target.toint(), value],
            predicate=value != 0.0,
        )


def scatter(columns: Columns, totals: cute.Tensor, first: int, parts: list[list[tuple[Any, Any]]]) -> None:
    """Gradients of reads, parts[c] of score first + c, to where they go."""
    score = columns.score
    number = 0
    for k, kind in enumerate(score.scatters):
        values = [part[k][0] for part in parts]
        if "i" not in kind.along:
            total = values[0]
            for value in values[1:]:
                total = total + value
            totals[number] = totals[number] + total
            number += 1
        elif "j" not in kind.along:
            lane = cute.arch.lane_idx() % len(values)
            total = sum_over_keys(values, lane)
            columns.add(kind, columns.place(kind, columns.query + first + lane), total)
        else:
            target = columns.ctx.scores.sums[kind.captured]
            for part in parts:
                value, known = part[k]
                columns.add(kind, score.backward.place(known, kind.index, target.shape), value)


def sum_over_keys(values: list[Any], lane: Any) -> Any:
    """values[lane] summed over as many lanes as there are values: each has one key, and the same queries."""
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & half) != 0
        kept = [arithmetic.select(upper, values[c + half], values[c]) for c in range(half)]
        given = [arithmetic.select(upper, values[c], values[c + half]) for c in range(half)]
        values = [x + cute.arch.shuffle_sync_bfly(y, half) for x, y in zip(kept, given, strict=True)]
    return values[0]


@cute.jit
def add_totals(ctx: Context, tile: Tile, query: cutlass.Int32, key: cutlass.Int32, totals: cute.Tensor):
    """What was summed over a tile: of one key by each thread, of no key by each warp."""
    columns = Columns(ctx, tile, query, key)
    for number, kind in cutlass.const_expr(tuple(enumerate(ctx.static.score_mod.totals))):
        total = totals[number]
        if cutlass.const_expr("j" not in kind.along):
            total = cute.arch.warp_reduction_sum(total)
            total = total if cute.arch.lane_idx() == 0 else cutlass.Float32(0.0)
        columns.add(kind, columns.place(kind, query), total)
