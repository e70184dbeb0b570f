"""The compute role, two warpgroups: the products, P from S, dS from dP; then dV and dK of the tile.

    prologue  S(0)
    step i    dP(i) issued; P(i) from S(i)
              dV += P(i)^T dO(i) issued; dS(i) from dP(i)
              S(i+1) issued; dS(i) in 16 bits, into shared memory; both warpgroups meet
              dQ(i) = dS(i) K, dK += dS(i)^T Q(i) issued; dQ(i) is staged

so that some product is under way whenever a warpgroup computes. P and dS in 16 bits share registers: dS goes into them
when dV has read P. Where there are too few for S(i+1) by then, it is issued before the meeting. Where P goes through
shared memory, dV is issued after the meeting, before dQ.
Each warpgroup has 64 keys and all queries of a block, or half of the queries: a thread has two keys (rows of S^T) and
of every 8 queries two neighbours.
Everything a score function does happens in `weights`, and what its gradient does in `grad_scores`: score_mod and
mask_mod plug in there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp, warpgroup

from refluent.gpu.device.numerics import LOG2E, exp2, pack
from refluent.gpu.device.philox import kept_queries
from refluent.gpu.device.pipeline import arrive
from refluent.gpu.device.scores import capped, kept_part
from refluent.gpu.device.work import Tile
from refluent.gpu.plans.sm90 import GROUPS, ROWS
from refluent.gpu.sm90.backward.chunks import first_column, first_row, held, stage_chunk
from refluent.gpu.sm90.backward.context import COMPUTE_BARRIER, COMPUTE_WARP, Context
from refluent.gpu.sm90.backward.epilogue import store_grads
from refluent.gpu.sm90.backward.products import multiply

THREADS = 128 * GROUPS


@dataclass(frozen=True)
class Share:
    """A thread's place: `thread` of warpgroup `group`, which has 64 keys of the tile from `group_key` and `queries`
    queries from `group_query`; the thread has two keys, `key` and `key` + 8, and of every 8 queries two, from `query`.
    """

    group: cutlass.Int32
    thread: cutlass.Int32
    group_key: cutlass.Int32
    group_query: cutlass.Int32
    key: cutlass.Int32
    query: cutlass.Int32
    queries: cutlass.Constexpr

    @staticmethod
    def make(plan) -> Share:
        index = cute.arch.thread_idx()[0] - 32 * COMPUTE_WARP
        group = cute.arch.make_warp_uniform(index // 128)
        thread = index % 128
        key, query = (group * ROWS, 0) if plan.by_keys else (0, group * plan.queries)
        return Share(group, thread, key, query, key + first_row(thread), query + first_column(thread), plan.queries)

    def of_statistic(self, ring: cute.Tensor, stage) -> cute.Tensor:
        """(2, queries / 8): the thread's queries of a (tile_m, stages) buffer."""
        start = (ring[None, stage].iterator + self.query).align(8)
        return cute.make_tensor(start, cute.make_layout((2, self.queries // 8), stride=(1, 8)))


@dataclass(frozen=True)
class Fragments:
    """Operands of the products in shared memory, as descriptors; a last mode is the stage. ds_t: P too."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    q_t: cute.Tensor
    k_t: cute.Tensor
    do_t: cute.Tensor
    ds_t: cute.Tensor | None

    @staticmethod
    def make(ctx: Context, share: Share) -> Fragments:
        p, shared = ctx.products, ctx.shared

        def a(product, tensor):
            part = product.mma.get_slice(share.group * 128).partition_A(tensor)
            return product.mma.make_fragment_A(part)

        def b(product, tensor):
            part = product.mma.get_slice(share.group * 128).partition_B(tensor)
            return product.mma.make_fragment_B(part)

        return Fragments(
            q=b(p.s, shared.q),
            k=a(p.s, shared.k),
            v=a(p.dp, shared.v),
            do=b(p.dp, shared.do),
            ds=a(p.dq, shared.ds),
            q_t=b(p.dk, shared.q_t),
            k_t=b(p.dq, shared.k_t),
            do_t=b(p.dv, shared.do_t),
            ds_t=None if ctx.plan.by_keys else a(p.dk, shared.ds_t),
        )


@dataclass(frozen=True)
class Registers:
    """A thread's accumulators; `packed`: P, then dS, in 16 bits and the same order, which is that of an A operand."""

    s: cute.Tensor
    dp: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    packed: cute.Tensor

    @staticmethod
    def make(ctx: Context) -> Registers:
        plan, products = ctx.plan, ctx.products

        def accumulator(product, rows, columns):
            return product.mma.make_fragment_C(product.mma.partition_shape_C((rows, columns)))

        packed = cute.make_layout(plan.queries // 2)
        if plan.by_keys:
            packed = products.dv.mma.make_fragment_A(
                products.dv.mma.partition_shape_A((plan.tile_n, plan.tile_m))
            ).layout
        return Registers(
            s=accumulator(products.s, plan.tile_n, plan.tile_m),
            dp=accumulator(products.dp, plan.tile_n, plan.tile_m),
            dq=accumulator(products.dq, plan.tile_m, plan.head_dim),
            dk=accumulator(products.dk, plan.tile_n, plan.head_dim),
            dv=accumulator(products.dv, plan.tile_n, plan.head_dim_v),
            packed=cute.make_rmem_tensor(packed, ctx.static.dtype),
        )


def by_query(tensor: cute.Tensor) -> cute.Tensor:
    """A thread's scores as (neighbours, rows, eights)."""
    eights = cute.size(tensor) // 4
    return cute.make_tensor(tensor.iterator, cute.make_layout((2, 2, eights)))


def pairs(packed: cute.Tensor) -> cute.Tensor:
    """A thread's scores in 16 bits, two neighbours a word, as (rows, eights)."""
    words = cute.recast_tensor(packed, cutlass.Uint32)
    return cute.make_tensor(words.iterator, cute.make_layout((2, cute.size(words) // 2)))


@cute.jit
def compute(ctx: Context):
    share = Share.make(ctx.plan)
    frags = Fragments.make(ctx, share)
    step, tiles = cutlass.Int32(0), cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = uniform(ctx.call.tile(index))
        if tile.exists:
            compute_tile(ctx, frags, tile, share, step, tiles)
            step += tile.steps
            tiles += 1


def uniform(tile: Tile) -> Tile:
    """The same, known to the compiler to be so in all threads: then descriptors and counters need no registers."""
    numbers = {f.name: cute.arch.make_warp_uniform(cutlass.Int32(getattr(tile, f.name))) for f in fields(tile)}
    own = {"own_begin": numbers["m_begin"], "own_end": numbers["m_end"]}  # a CTA is its own cluster
    return Tile(**{**numbers, **own, "exists": numbers["exists"] != 0})


@cute.jit
def compute_tile(ctx: Context, frags: Fragments, tile: Tile, share: Share, step: cutlass.Int32, tiles: cutlass.Int32):
    """All steps of one tile, and its dV and dK; `step` is its first."""
    bars, regs = ctx.barriers, Registers.make(ctx)
    regs.dk.fill(0.0)
    regs.dv.fill(0.0)
    bars.k.wait_full(tiles)
    bars.v.wait_full(tiles)
    if tile.steps > 0:
        scores(ctx, frags, regs, step)
        warpgroup.wait_group(0)
        last = tile.steps - 1
        for i in cutlass.range(last):
            compute_step(ctx, frags, regs, tile, share, step + i, tile.m_begin + i, True)
        compute_step(ctx, frags, regs, tile, share, step + last, tile.m_end - 1, False)
    store_grads(ctx, tile, share.group, share.thread, regs.dk, regs.dv)
    if share.thread == 0:
        cute.arch.mbarrier_arrive(bars.k.empty_at(tiles))
        cute.arch.mbarrier_arrive(bars.v.empty_at(tiles))


@cute.jit
def scores(ctx: Context, frags: Fragments, regs: Registers, step: cutlass.Int32):
    """S^T = K Q^T, issued."""
    q = ctx.barriers.q
    q.wait_full(step)
    multiply(ctx.products.s, regs.s, frags.k[None, None, None, 0], frags.q[None, None, None, q.stage(step)], False)


@cute.jit
def compute_step(
    ctx: Context,
    frags: Fragments,
    regs: Registers,
    tile: Tile,
    share: Share,
    step: cutlass.Int32,
    m_block: cutlass.Int32,
    following: cutlass.Constexpr,
):
    """A block of queries, whose S is there; leaves with that of the next. Nothing is under way before or after.

    ptxas runs products one by one, each waited for, unless it can tell at every place which are under way.
    """
    bars, products, shared = ctx.barriers, ctx.products, ctx.shared
    step = cute.arch.make_warp_uniform(step)
    q_stage, do_stage, ds_stage = (
        cute.arch.make_warp_uniform(stage)
        for stage in (bars.q.stage(step), bars.do.stage(step), step % ctx.plan.stages_ds)
    )
    plan = ctx.plan
    do, do_t = frags.do[None, None, None, do_stage], frags.do_t[None, None, None, do_stage]
    bars.do.wait_full(step)
    multiply(products.dp, regs.dp, frags.v[None, None, None, 0], do, False)
    kept = weights(ctx, tile, m_block, share, regs, share.of_statistic(shared.lse, q_stage))
    if cutlass.const_expr(plan.by_keys):
        multiply(products.dv, regs.dv, regs.packed, do_t, True)
    else:
        store_scores(ctx, regs, share, plan.stages_ds + ds_stage)
    # With the epilogue of grouped heads ptxas runs out of registers, and would issue the products one by one.
    early = following and plan.early_scores and ctx.call.group == 1
    warpgroup.wait_group(1 if plan.by_keys and plan.narrow_weights else 0)  # dP is there
    grad_scores(ctx, regs, share.of_statistic(shared.dpsum, do_stage), kept)
    if cutlass.const_expr(early):
        scores(ctx, frags, regs, step + 1)
    if cutlass.const_expr(plan.by_keys):
        warpgroup.wait_group(int(early))  # dV is there
        arrive(bars.do.empty_at(step))
    narrow_scores(ctx, regs)
    store_scores(ctx, regs, share, ds_stage)
    if cutlass.const_expr(following and not early):
        scores(ctx, frags, regs, step + 1)
    cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)  # all of dS is there
    ds_t = regs.packed
    if cutlass.const_expr(not plan.by_keys):
        multiply(products.dv, regs.dv, frags.ds_t[None, None, None, plan.stages_ds + ds_stage], do_t, True)
        ds_t = frags.ds_t[None, None, None, ds_stage]
    ds, k_t = frags.ds[None, None, None, ds_stage], frags.k_t[None, None, None, 0]
    multiply(products.dq, regs.dq, ds, k_t, False)
    multiply(products.dk, regs.dk, ds_t, frags.q_t[None, None, None, q_stage], True)
    warpgroup.wait_group(1)  # dQ is there
    if cutlass.const_expr(not plan.by_keys):
        arrive(bars.do.empty_at(step))
    stage_queries(ctx, regs, share, step)
    warpgroup.wait_group(0)
    arrive(bars.q.empty_at(step))


@cute.jit
def stage_queries(ctx: Context, regs: Registers, share: Share, step: cutlass.Int32):
    """The warpgroup's part of dQ into its staging buffer."""
    columns, rounds, ring = ctx.plan.reduce_columns, ctx.plan.reduce_rounds, ctx.barriers.dq
    buffer = ctx.shared.staging[None, share.group].iterator
    for piece in cutlass.range_constexpr(rounds):
        use = (step * rounds + piece) * GROUPS + share.group
        ring.wait_empty(use)
        stage_chunk(buffer, regs.dq.iterator + piece * held(columns), columns, share.thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        arrive(ring.full_at(use))


@cute.jit
def weights(ctx: Context, tile: Tile, m_block: cutlass.Int32, share: Share, regs: Registers, lse: cute.Tensor):
    """Raw scores in S become weights, and P gets what dV multiplies: the kept weights in 16 bits.

    With a score function that is not linear, S leaves multiplied by its derivative: that is all dS still needs.
    Returns which of the scores dropout keeps, a bit each.
    """
    call, static, plan = ctx.call, ctx.static, ctx.plan
    first_key, first_query = tile.n_block * plan.tile_n, m_block * plan.tile_m
    keys, query = (first_key + share.key, first_key + share.key + 8), first_query + share.query
    s, packed = by_query(regs.s), pairs(regs.packed)
    kept = (cutlass.Uint64(0), cutlass.Uint64(0))
    if cutlass.const_expr(static.dropout):
        stream = tile.batch * call.heads + tile.head
        state, keep_from = ctx.scores.philox, ctx.scores.keep_from
        kept = tuple(kept_queries(state, keep_from, stream, query, key, share.queries // 4, 8) for key in keys)
    seen = tuple(call.window.columns(key, query, tile.len_q, tile.len_k) for key in keys)
    if cutlass.const_expr(not static.softcap):
        group_key, group_query = first_key + share.group_key, first_query + share.group_query
        if not call.window.whole(group_key, group_query, ROWS, share.queries, tile.len_q, tile.len_k):
            for eight, r, e in cutlass.const_expr(places(share.queries)):
                low, high = seen[r]
                column = eight * 8 + e
                visible = column >= low and column <= high
                s[e, r, eight] = s[e, r, eight] if visible else cutlass.Float32(static.hidden)
    minus_lse = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
    for eight in cutlass.range_constexpr(share.queries // 8):
        cute.autovec_copy(lse[None, eight], minus_lse)
        for r in cutlass.range_constexpr(2):
            score, slope = (s[0, r, eight], s[1, r, eight]), None
            factor = ctx.scores.factor
            if cutlass.const_expr(static.softcap):
                score, slope = capped(ctx.scores, ctx.call.scale, score)
                low, high = seen[r]
                score = tuple(
                    x if eight * 8 + e >= low and eight * 8 + e <= high else -cutlass.Float32.inf
                    for e, x in enumerate(score)
                )
                factor = ctx.scores.softcap * LOG2E
            weight = tuple(exp2(x * factor - minus_lse[e]) for e, x in enumerate(score))
            packed[r, eight] = pack(kept_part(ctx.scores, static.dropout, weight, kept[r], 2 * eight), static.dtype)
            if cutlass.const_expr(slope is not None):
                weight = weight[0] * slope[0], weight[1] * slope[1]
            if cutlass.const_expr(not plan.narrow_weights):
                s[0, r, eight], s[1, r, eight] = weight
    return kept


def places(queries: int) -> tuple[tuple[int, int, int], ...]:
    """(eight, row, neighbour) of a thread's scores."""
    return tuple((eight, r, e) for eight in range(queries // 8) for r in range(2) for e in range(2))


@cute.jit
def grad_scores(ctx: Context, regs: Registers, dpsum: cute.Tensor, kept):
    """dS = P (dP - dPsum) in place of dP; dropped scores have dP = 0."""
    p, dp = by_query(regs.packed if ctx.plan.narrow_weights else regs.s), by_query(regs.dp)
    sums = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
    for eight in cutlass.range_constexpr(ctx.plan.queries // 8):
        cute.autovec_copy(dpsum[None, eight], sums)
        for r in cutlass.range_constexpr(2):
            pair = dp[0, r, eight], dp[1, r, eight]
            arrived = kept_part(ctx.scores, ctx.static.dropout, pair, kept[r], 2 * eight)
            weight = p[None, r, eight].load().to(cutlass.Float32)
            for e in cutlass.range_constexpr(2):
                dp[e, r, eight] = weight[e] * (arrived[e] - sums[e])


@cute.jit
def narrow_scores(ctx: Context, regs: Registers):
    """dS in 16 bits, as dK's product takes it."""
    ds, packed = by_query(regs.dp), pairs(regs.packed)
    for eight in cutlass.range_constexpr(ctx.plan.queries // 8):
        for r in cutlass.range_constexpr(2):
            packed[r, eight] = pack((ds[0, r, eight], ds[1, r, eight]), ctx.static.dtype)


@cute.jit
def store_scores(ctx: Context, regs: Registers, share: Share, stage):
    """P or dS in 16 bits into shared memory, where the keys of a query are contiguous, as dQ's product reads dS."""
    source = cute.make_tensor(regs.packed.iterator, regs.dp.layout)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), ctx.static.dtype)
    copy = cute.make_tiled_copy_C(atom, ctx.products.s.mma).get_slice(share.group * 128 + share.thread)
    cute.copy(atom, copy.retile(source), copy.partition_D(ctx.shared.ds_t[None, None, stage]))
    cute.arch.fence_view_async_shared()
