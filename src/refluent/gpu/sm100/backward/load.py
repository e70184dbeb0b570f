"""The load role, one warp: K and V once a tile, then Q, LSE, dO and dPsum of every step.

K's bytes count at the first Q's barrier and V's at the first dO's, so that the MMA warp waits once for both. K and V of
the next tile are loaded when the last step of this one has been released: that is when no product reads them any more.

In a cluster each CTA loads a share of the rows of Q and dO for all of them; LSE and dPsum, which are small, for itself
alone.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from refluent.gpu.device.copies import sequence_rows
from refluent.gpu.device.pipeline import expect, mask
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.context import Context


@cute.jit
def load(ctx: Context):
    step = cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = ctx.call.tile(index)
        if tile.steps > 0:
            step = load_tile(ctx, tile, step)
    if cutlass.const_expr(ctx.static.cluster > 1):
        drain(ctx, step)


@cute.jit
def drain(ctx: Context, step: cutlass.Int32):
    """Until the cluster has released the last steps: nobody arrives at this CTA's barriers any more, and it may leave.

    Nor does anybody write here: its own products have waited for all that was to come.
    """
    for ring in cutlass.const_expr((ctx.barriers.q, ctx.barriers.do)):
        for stage in cutlass.range_constexpr(ring.stages):
            ring.wait_empty(step + stage)


def boxes(atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor, share=0, shares: int = 1):
    """Stages in shared memory and boxes in global memory, one mode each; of several shares of a box, one."""
    return cpasync.tma_partition(
        atom, share, cute.make_layout(shares), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )


@cute.jit
def load_tile(ctx: Context, tile: Tile, step: cutlass.Int32):
    """All loads of one tile; returns the step count after it."""
    call, plan, src, shared, bars = ctx.call, ctx.plan, ctx.sources, ctx.shared, ctx.barriers
    m, n, d, dv = plan.tile_m, plan.tile_n, plan.head_dim, plan.head_dim_v
    s, dp = ctx.products.s[0].get_slice(0), ctx.products.dp[0].get_slice(0)
    q_rows = sequence_rows(src.q, call.queries, tile.batch, tile.head, tile.len_q)
    do_rows = sequence_rows(src.do, call.queries, tile.batch, tile.head, tile.len_q)
    k_rows = sequence_rows(src.k, call.keys, tile.batch, tile.kv_head, tile.len_k)
    v_rows = sequence_rows(src.v, call.keys, tile.batch, tile.kv_head, tile.len_k)
    share = (0, 1)
    if cutlass.const_expr(ctx.static.cluster > 1):
        share = (cute.arch.block_idx_in_cluster(), ctx.static.cluster)
    q_slots, q_boxes = boxes(src.q_atom, shared.q, s.partition_B(cute.local_tile(q_rows, (m, d), (None, 0))), *share)
    k_slots, k_boxes = boxes(src.k_atom, shared.k, s.partition_A(cute.local_tile(k_rows, (n, d), (tile.n_block, 0))))
    v_slots, v_boxes = boxes(src.v_atom, shared.v, dp.partition_A(cute.local_tile(v_rows, (n, dv), (tile.n_block, 0))))
    do_slots, do_boxes = boxes(
        src.do_atom, shared.do, dp.partition_B(cute.local_tile(do_rows, (m, dv), (None, 0))), *share
    )
    row0 = call.queries.block_offset(tile.batch, m) * m
    statistic = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=m * 32)
    lse = cute.local_tile(cute.domain_offset((row0,), src.lse_log2[tile.head, None]), (m,), (None,))
    dpsum = cute.local_tile(cute.domain_offset((row0,), src.dpsum[tile.head, None]), (m,), (None,))
    element, everybody = ctx.static.dtype.width // 8, mask(ctx.static.cluster)
    for place in cutlass.range(tile.m_begin, tile.m_end):
        m_block = call.query_block(tile, place)
        opening = place == tile.m_begin
        if opening and step > 0:
            bars.q.wait_empty(step + plan.stages_q - 1)  # the step before this tile: its dQ read K
        bars.q.wait_empty(step)
        q_full = bars.q.full_at(step)
        expect(q_full, m * d * element + (n * d * element if opening else 0))
        if opening:
            cute.copy(src.k_atom, k_boxes, k_slots[None, 0], tma_bar_ptr=q_full)
        q_slot, do_slot = q_slots[None, bars.q.stage(step)], do_slots[None, bars.do.stage(step)]
        cute.copy(src.q_atom, q_boxes[None, m_block], q_slot, tma_bar_ptr=q_full, mcast_mask=everybody)

        bars.lse.wait_empty(step)
        with cute.arch.elect_one():
            full = bars.lse.full_at(step)
            cute.arch.mbarrier_arrive_and_expect_tx(full, m * 4)
            cute.copy(statistic, lse[None, m_block], shared.lse[None, bars.lse.stage(step)], mbar_ptr=full)

        bars.do.wait_empty(step)
        do_full = bars.do.full_at(step)
        expect(do_full, m * dv * element + (n * dv * element if opening else 0))
        if opening:
            cute.copy(src.v_atom, v_boxes, v_slots[None, 0], tma_bar_ptr=do_full)
        cute.copy(src.do_atom, do_boxes[None, m_block], do_slot, tma_bar_ptr=do_full, mcast_mask=everybody)

        bars.dpsum.wait_empty(step)
        with cute.arch.elect_one():
            full = bars.dpsum.full_at(step)
            cute.arch.mbarrier_arrive_and_expect_tx(full, m * 4)
            cute.copy(statistic, dpsum[None, m_block], shared.dpsum[None, bars.dpsum.stage(step)], mbar_ptr=full)
        step += 1
    return step
