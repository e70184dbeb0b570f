"""The compute role, two warpgroups: P from S, dS from dP; then dV and dK of the tile.

Tensor memory holds S^T and dP^T: a thread has one key (its lane) and half of the queries (columns, by warpgroup).
Everything a score function does happens in `weights`, and what its gradient does in `grad_scores`: score_mod and
mask_mod plug in there.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import load_columns, store_columns
from refluent.gpu.device.numerics import exp2, fma2, mul2, sub2, tanh
from refluent.gpu.device.philox import kept_queries
from refluent.gpu.device.pipeline import arrive
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.context import COMPUTE_BARRIER, COMPUTE_WARP, Context
from refluent.gpu.sm100.backward.epilogue import store_grads

THREADS = 256
COLUMNS = 32  # of tensor memory that one load brings
LOG2E = math.log2(math.e)


@cute.jit
def compute(ctx: Context):
    thread = cute.arch.thread_idx()[0] - 32 * COMPUTE_WARP
    group = cute.arch.make_warp_uniform(thread // 128)
    row = thread % 128
    step, tiles = cutlass.Int32(0), cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = ctx.call.tile(index)
        for m_block in cutlass.range(tile.m_begin, tile.m_end):
            compute_step(ctx, tile, m_block, group, row, step)
            step += 1
        if tile.steps > 0:
            ctx.barriers.dkv.wait_full(tiles)
        if tile.exists:
            store_grads(ctx, tile, group, row)
        if tile.steps > 0:
            arrive(ctx.barriers.dkv.empty_at(tiles))
            tiles += 1


@cute.jit
def compute_step(
    ctx: Context, tile: Tile, m_block: cutlass.Int32, group: cutlass.Int32, row: cutlass.Int32, step: cutlass.Int32
):
    """P and dS of one key and half of the queries of a block."""
    plan, bars, dtype = ctx.plan, ctx.barriers, ctx.static.dtype
    half = plan.tile_m // 2
    first = group * half  # column of the tile
    p = cute.make_rmem_tensor(cute.make_layout(half), cutlass.Float32)
    packed = cute.make_rmem_tensor(cute.make_layout(half), dtype)
    words = cute.recast_tensor(packed, cutlass.Float32)

    bars.lse.wait_full(step)
    bars.s.wait_full(step)
    for c in cutlass.range_constexpr(0, half, COLUMNS):
        load_columns(ctx.tmem, plan.tmem_s + first + c, COLUMNS, row, p.iterator + c)
    cute.arch.fence_view_async_tmem_load()
    lse = cute.local_tile(ctx.shared.lse[None, bars.lse.stage(step)], (half,), (group,))
    kept = weights(ctx, tile, m_block * plan.tile_m + first, row, p, packed, lse)
    arrive(bars.lse.empty_at(step))
    cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)  # S has been read: P may go over it
    for c in cutlass.range_constexpr(0, half // 2, COLUMNS // 2):
        store_columns(ctx.tmem, plan.tmem_s + first // 2 + c, COLUMNS // 2, row, words.iterator + c)
    cute.arch.fence_view_async_tmem_store()
    arrive(bars.s.empty_at(step))

    bars.dpsum.wait_full(step)
    bars.dp.wait_full(step)
    dpsum = cute.local_tile(ctx.shared.dpsum[None, bars.dpsum.stage(step)], (half,), (group,))
    for c in cutlass.range_constexpr(0, half, COLUMNS):
        dp = cute.make_rmem_tensor(cute.make_layout(COLUMNS), cutlass.Float32)
        load_columns(ctx.tmem, plan.tmem_dp + first + c, COLUMNS, row, dp.iterator)
        cute.arch.fence_view_async_tmem_load()
        grad_scores(ctx, p, dp, dpsum, packed, kept, c)
    arrive(bars.dpsum.empty_at(step))
    cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)  # dP has been read: dS may go over it
    for c in cutlass.range_constexpr(0, half // 2, COLUMNS // 2):
        store_columns(ctx.tmem, plan.tmem_dp + first // 2 + c, COLUMNS // 2, row, words.iterator + c)
    store_ds(ctx.shared.ds, packed, first, row)
    cute.arch.fence_view_async_tmem_store()
    cute.arch.fence_view_async_shared()
    arrive(bars.ds.full_at(step))


@cute.jit
def weights(
    ctx: Context,
    tile: Tile,
    first_query: cutlass.Int32,
    row: cutlass.Int32,
    p: cute.Tensor,
    packed: cute.Tensor,
    lse: cute.Tensor,
):
    """Raw scores in p become weights, and `packed` gets what dV multiplies: the kept weights in 16 bits.

    With a score function that is not linear, p leaves multiplied by its derivative: that is all dS still needs.
    Returns which of the scores dropout keeps, a bit each.
    """
    call, static, plan = ctx.call, ctx.static, ctx.plan
    first_key, columns = tile.n_block * plan.tile_n, cute.size(p)
    kept = cutlass.Uint64(0)
    if cutlass.const_expr(static.dropout):
        stream = tile.batch * call.heads + tile.head
        kept = kept_queries(ctx.scores.philox, ctx.scores.keep_from, stream, first_query, first_key + row, columns)
    low, high = call.window.columns(first_key + row, first_query, tile.len_q, tile.len_k)
    if cutlass.const_expr(not static.softcap):
        if not call.window.whole(first_key, first_query, plan.tile_n, columns, tile.len_q, tile.len_k):
            for c in cutlass.range_constexpr(columns):
                p[c] = p[c] if c >= low and c <= high else -cutlass.Float32.inf
    for c in cutlass.range_constexpr(0, columns, 2):
        score, slope = (p[c], p[c + 1]), None
        factor = call.scale * LOG2E
        if cutlass.const_expr(static.softcap):
            score, slope = capped(ctx, score)
            score = tuple(x if c + e >= low and c + e <= high else -cutlass.Float32.inf for e, x in enumerate(score))
            factor = ctx.scores.softcap * LOG2E
        score = fma2(score, (factor, factor), (-lse[c], -lse[c + 1]))
        weight = exp2(score[0]), exp2(score[1])
        store_pair(packed, c, kept_part(ctx, weight, kept, c))
        p[c], p[c + 1] = weight if cutlass.const_expr(slope is None) else mul2(weight, slope)
    return kept


@cute.jit
def capped(ctx: Context, score):
    """tanh(scale s / softcap) of a pair of raw scores, and its derivative with respect to the scaled score."""
    inner = ctx.call.scale / ctx.scores.softcap
    t = tanh(score[0] * inner), tanh(score[1] * inner)
    return t, (1.0 - t[0] * t[0], 1.0 - t[1] * t[1])


@cute.jit
def kept_part(ctx: Context, pair, kept: cutlass.Uint64, c: cutlass.Constexpr):
    """A pair of values where dropout keeps their scores, scaled; zeros elsewhere."""
    if cutlass.const_expr(not ctx.static.dropout):
        return pair
    bits = cutlass.Uint32(kept >> cutlass.Uint64(c))
    factor = ctx.scores.keep_scale
    first = pair[0] * factor if bits & 1 != 0 else cutlass.Float32(0.0)
    second = pair[1] * factor if bits & 2 != 0 else cutlass.Float32(0.0)
    return first, second


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
        arrived = kept_part(ctx, (dp[c], dp[c + 1]), kept, x)
        shifted = sub2(arrived, (dpsum[x], dpsum[x + 1]))
        store_pair(packed, x, mul2((p[x], p[x + 1]), shifted))


@cute.jit
def store_ds(ds: cute.Tensor, packed: cute.Tensor, first: cutlass.Int32, row: cutlass.Int32):
    """dS of one key into shared memory, where it lies with the queries contiguous: the A operand of dQ."""
    staged = ds[None, None, None, 0]
    shape = ((staged.shape[0][0], staged.shape[1]), (staged.shape[0][1], staged.shape[2]))
    stride = ((staged.stride[0][0], staged.stride[1]), (staged.stride[0][1], staged.stride[2]))
    plain = cute.make_tensor(staged.iterator, cute.make_layout(shape, stride=stride))  # (tile_m, tile_n)
    column = cute.local_tile(plain[None, row], (8,), (None,))
    source = cute.local_tile(packed, (8,), (None,))
    for c in cutlass.range_constexpr(cute.size(packed) // 8):
        cute.autovec_copy(source[None, c], column[None, first // 8 + c])
