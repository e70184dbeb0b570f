"""The compute role, two warpgroups: P from S, dS from dP; then dV and dK of the tile.

Tensor memory holds S^T and dP^T: a thread has one key (its lane) and half of the queries (columns, by warpgroup); of 64
keys two threads share one and have a quarter each.
Everything a score function does happens in `weights`, and what its gradient does in `grad_scores`; score_mod and
mask_mod come from mods.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import held, held_column, held_row, load_columns, store_columns
from refluent.gpu.device.numerics import LOG2E, exp2, fma2, mul2, opaque, sub2
from refluent.gpu.device.philox import kept_queries
from refluent.gpu.device.pipeline import arrive
from refluent.gpu.device.scores import capped, kept_part
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.context import COMPUTE_WARP, Context
from refluent.gpu.sm100.backward.epilogue import store_grads
from refluent.gpu.sm100.backward.mods import Columns, add_totals, modified, scatter, sloped
from refluent.gpu.sm100.backward.storage import DS, P

COLUMNS = 32  # of tensor memory that one load brings


@dataclass(frozen=True)
class Share:
    """What a thread has of a tile's scores: `columns` queries from `first`, of one key, `row`.

    Its warpgroup has `half` queries from `group_first`; `thread` counts in the warpgroup.
    """

    group: cutlass.Int32
    thread: cutlass.Int32
    row: cutlass.Int32
    group_first: cutlass.Int32
    first: cutlass.Int32
    half: cutlass.Constexpr
    columns: cutlass.Constexpr

    @staticmethod
    def make(plan) -> Share:
        index = cute.arch.thread_idx()[0] - 32 * COMPUTE_WARP
        group = cute.arch.make_warp_uniform(index // 128)
        thread = opaque(index) % 128
        half = plan.tile_m // 2
        group_first = group * half
        first = group_first + held_column(plan.s.rows, half, thread)
        return Share(group, thread, held_row(plan.s.rows, thread), group_first, first, half, held(plan.s.rows, half))

    @property
    def part(self) -> int:
        """Queries that are stored at once."""
        return min(COLUMNS, self.columns)

    def of_statistic(self, ring: cute.Tensor, stage) -> cute.Tensor:
        """The thread's queries of a (tile_m, stages) buffer."""
        return cute.local_tile(ring[None, stage], (self.columns,), (self.first // self.columns,))


@dataclass(frozen=True)
class Seen:
    """Which of a thread's queries see its key, columns low to high, and whose scores dropout keeps, a bit each."""

    low: cutlass.Int32
    high: cutlass.Int32
    kept: cutlass.Uint64

    @cute.jit
    def by(self, c: cutlass.Constexpr):
        return c >= self.low and c <= self.high


@cute.jit
def compute(ctx: Context):
    share = Share.make(ctx.plan)
    count = len(ctx.static.score_mod.totals) if ctx.static.score_mod is not None else 0
    totals = cute.make_rmem_tensor(cute.make_layout(max(count, 1)), cutlass.Float32)
    step, tiles = cutlass.Int32(0), cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = ctx.call.tile(index)
        totals.fill(0.0)
        for place in cutlass.range(tile.m_begin, tile.m_end):
            m_block = ctx.call.query_block(tile, place)
            compute_step(ctx, tile, m_block, share, step, totals)
            step += 1
        # Both once more: through the steps they would be held in registers.
        tile = ctx.call.tile(opaque(index))
        share = Share.make(ctx.plan)
        if cutlass.const_expr(count > 0):
            if tile.steps > 0:
                add_totals(ctx, tile, share.first, tile.n_block * ctx.plan.tile_n + share.row, totals)
        if tile.steps > 0:
            ctx.barriers.dkv.wait_full(tiles)
        if tile.exists:
            store_grads(ctx, tile, share.group, share.thread)
        if tile.steps > 0:
            arrive(ctx.barriers.dkv.empty_at(tiles))
            tiles += 1


@cute.jit
def compute_step(
    ctx: Context, tile: Tile, m_block: cutlass.Int32, share: Share, step: cutlass.Int32, totals: cute.Tensor
):
    """P and dS of a thread's share of a block of queries."""
    plan, bars, dtype = ctx.plan, ctx.barriers, ctx.static.dtype
    p = cute.make_rmem_tensor(cute.make_layout(share.columns), cutlass.Float32)
    packed = cute.make_rmem_tensor(cute.make_layout(share.columns), dtype)
    query, key = m_block * plan.tile_m + share.first, tile.n_block * plan.tile_n + share.row
    columns = Columns(ctx, tile, query, key)
    columns.start_forward()
    scores = p
    if cutlass.const_expr(ctx.static.keeps_score):
        scores = cute.make_rmem_tensor(cute.make_layout(share.columns), cutlass.Float32)

    seen = see(ctx, tile, m_block * plan.tile_m, share)
    bars.lse.wait_full(step)
    bars.s.wait_full(step)
    for c in cutlass.range_constexpr(0, share.half, COLUMNS):
        load_columns(
            ctx.tmem, plan.s.column + share.group_first + c, COLUMNS, share.thread, p.iterator + c, plan.s.rows
        )
    cute.arch.fence_view_async_tmem_load()
    lse = share.of_statistic(ctx.shared.lse, bars.lse.stage(step))
    if cutlass.const_expr(not ctx.static.shaped):
        hide(ctx, tile, m_block * plan.tile_m, share, seen, p)
    for c in cutlass.range_constexpr(0, share.columns, share.part):  # part by part: fewer registers hold P
        weights(ctx, seen, columns, p, scores, packed, lse, c, share.part)
        if cutlass.const_expr(plan.transposed_kv):
            store_shared(ctx.shared.ds[None, None, None, P], packed, share, c)
        else:
            store_tensor(ctx.tmem, plan.s.column, packed, share, c)
    arrive(bars.lse.empty_at(step))
    if cutlass.const_expr(plan.transposed_kv):
        cute.arch.fence_view_async_shared()
    else:
        cute.arch.fence_view_async_tmem_store()
    arrive(bars.s.empty_at(step))

    bars.dpsum.wait_full(step)
    bars.dp.wait_full(step)
    dpsum = share.of_statistic(ctx.shared.dpsum, bars.dpsum.stage(step))
    if cutlass.const_expr(ctx.static.mod_gradient):
        columns.start_backward()
    kept = opaque(seen.kept)  # else its bits would be taken apart once and stay so, a register each
    for c in cutlass.range_constexpr(0, share.half, COLUMNS):
        dp = cute.make_rmem_tensor(cute.make_layout(held(plan.dp.rows, COLUMNS)), cutlass.Float32)
        load_columns(ctx.tmem, plan.dp.column + share.group_first + c, COLUMNS, share.thread, dp.iterator, plan.dp.rows)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(ctx.static.mod_gradient):
            grad_mod(ctx, columns, p, scores, dp, dpsum, packed, kept, totals, c)
        else:
            grad_scores(ctx, p, dp, dpsum, packed, kept, c)
        if cutlass.const_expr(not plan.transposed_kv):
            store_tensor(ctx.tmem, plan.dp.column, packed, share, c)
        store_shared(ctx.shared.ds[None, None, None, DS], packed, share, c)
    arrive(bars.dpsum.empty_at(step))
    if cutlass.const_expr(not plan.transposed_kv):
        cute.arch.fence_view_async_tmem_store()
    cute.arch.fence_view_async_shared()
    arrive(bars.ds.full_at(step))


@cute.jit
def see(ctx: Context, tile: Tile, first_query: cutlass.Int32, share: Share) -> Seen:
    """What a thread's key is seen by; worked out while the scores are on their way and registers are free."""
    call, columns = ctx.call, share.columns
    key, query = tile.n_block * ctx.plan.tile_n + share.row, first_query + share.first
    kept = cutlass.Uint64(0)
    if cutlass.const_expr(ctx.static.dropout):
        stream = tile.batch * call.heads + tile.head
        kept = kept_queries(ctx.scores.philox, ctx.scores.keep_from, stream, query, key, columns)
    low, high = call.window.columns(key, query, tile.len_q, tile.len_k)
    return Seen(low, high, kept)


@cute.jit
def hide(ctx: Context, tile: Tile, first_query: cutlass.Int32, share: Share, seen: Seen, p: cute.Tensor):
    """Raw scores of queries that do not see the key get what has no weight."""
    plan, first_key = ctx.plan, tile.n_block * ctx.plan.tile_n
    group_query = first_query + share.group_first
    if not ctx.call.window.whole(first_key, group_query, plan.tile_n, share.half, tile.len_q, tile.len_k):
        for c in cutlass.range_constexpr(share.columns):
            p[c] = p[c] if seen.by(c) else cutlass.Float32(ctx.static.hidden)


@cute.jit
def weights(
    ctx: Context,
    seen: Seen,
    columns: Columns,
    p: cute.Tensor,
    scores: cute.Tensor,
    packed: cute.Tensor,
    lse: cute.Tensor,
    first: cutlass.Constexpr,
    count: cutlass.Constexpr,
):
    """`count` raw scores in p become weights, and `packed` gets what dV multiplies: the kept weights in 16 bits.

    With a score function that is not linear, p leaves multiplied by its derivative: that is all dS still needs, unless
    captured tensors get gradients: then `scores` keeps what score_mod was given.
    """
    static = ctx.static
    for c in cutlass.range_constexpr(first, first + count, 2):
        score, slope = (p[c], p[c + 1]), None
        factor, hidden = ctx.scores.factor, cutlass.Float32(static.hidden)
        if cutlass.const_expr(static.score_mod is not None):
            score, slope = modified(columns, scores, score, c)
            factor = cutlass.Float32(LOG2E)
        elif cutlass.const_expr(static.softcap):
            score, slope = capped(ctx.scores, ctx.call.scale, score)
            factor = ctx.scores.softcap * LOG2E
        if cutlass.const_expr(static.shaped):
            hidden = -cutlass.Float32.inf
            score = tuple(x if seen.by(c + e) else hidden for e, x in enumerate(score))
        if cutlass.const_expr(static.mask_mod is not None):
            score = tuple(x if columns.visible(c + e) else hidden for e, x in enumerate(score))
        score = fma2(score, (factor, factor), (-lse[c], -lse[c + 1]))
        weight = exp2(score[0]), exp2(score[1])
        store_pair(packed, c, kept_part(ctx.scores, ctx.static.dropout, weight, seen.kept, c))
        p[c], p[c + 1] = weight if cutlass.const_expr(slope is None) else sloped(columns, weight, slope)


@cute.jit
def grad_mod(
    ctx: Context,
    columns: Columns,
    p: cute.Tensor,
    scores: cute.Tensor,
    dp: cute.Tensor,
    dpsum: cute.Tensor,
    packed: cute.Tensor,
    kept: cutlass.Uint64,
    totals: cute.Tensor,
    first: cutlass.Constexpr,
):
    """grad_scores by way of score_mod's gradient, and that of the captured tensors."""
    parts = []
    for c in cutlass.range_constexpr(0, cute.size(dp), 2):
        x = first + c
        arrived = kept_part(ctx.scores, ctx.static.dropout, (dp[c], dp[c + 1]), kept, x)
        g = mul2((p[x], p[x + 1]), sub2(arrived, (dpsum[x], dpsum[x + 1])))
        pair = [columns.grad(x + e, g[e], scores[x + e]) for e in range(2)]
        store_pair(packed, x, (pair[0][0], pair[1][0]))
        parts += [pair[0][1], pair[1][1]]
    scatter(columns, totals, first, parts)


@cute.jit
def store_pair(packed: cute.Tensor, c: cutlass.Constexpr, pair):
    """Two neighbours of `packed`, in its type."""
    both = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
    both[0], both[1] = pair
    cute.make_tensor(packed.iterator + c, cute.make_layout(2)).store(both.load().to(packed.element_type))


@cute.jit
def grad_scores(
    ctx: Context,
    p: cute.Tensor,
    dp: cute.Tensor,
    dpsum: cute.Tensor,
    packed: cute.Tensor,
    kept: cutlass.Uint64,
    first: cutlass.Constexpr,
):
    """dS = P (dP - dPsum) of the columns from `first`, in 16 bits; dropped scores have dP = 0."""
    for c in cutlass.range_constexpr(0, cute.size(dp), 2):
        x = first + c
        arrived = kept_part(ctx.scores, ctx.static.dropout, (dp[c], dp[c + 1]), kept, x)
        shifted = sub2(arrived, (dpsum[x], dpsum[x + 1]))
        ds = mul2((p[x], p[x + 1]), shifted)
        if cutlass.const_expr(ctx.static.score_mod is not None and not ctx.static.score_mod.clean):
            ds = tuple(y if s != 0.0 else cutlass.Float32(0.0) for y, s in zip(ds, shifted))
        store_pair(packed, x, ds)


@cute.jit
def store_tensor(
    tmem: cute.Pointer, column: cutlass.Constexpr, packed: cute.Tensor, share: Share, first: cutlass.Constexpr
):
    """A part of P or dS, two queries a column, over what the thread itself has read of S or dP: an A operand in tensor
    memory, each warpgroup's queries from the first of its own columns on."""
    words = cute.recast_tensor(packed, cutlass.Float32)
    start = column + share.group_first + first // 2
    store_columns(tmem, start, share.part // 2, share.thread, words.iterator + first // 2)


@cute.jit
def store_shared(scores: cute.Tensor, packed: cute.Tensor, share: Share, first: cutlass.Constexpr):
    """A part of P or dS into shared memory, where they lie with the queries of a key contiguous, as dQ's product reads
    dS."""
    shape = ((scores.shape[0][0], scores.shape[1]), (scores.shape[0][1], scores.shape[2]))
    stride = ((scores.stride[0][0], scores.stride[1]), (scores.stride[0][1], scores.stride[2]))
    plain = cute.make_tensor(scores.iterator, cute.make_layout(shape, stride=stride))  # (tile_m, tile_n)
    column = cute.local_tile(plain[None, share.row], (8,), (None,))
    source = cute.local_tile(packed, (8,), (None,))
    for c in cutlass.range_constexpr(first // 8, (first + share.part) // 8):
        cute.autovec_copy(source[None, c], column[None, share.first // 8 + c])
