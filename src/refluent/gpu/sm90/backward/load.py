"""The load role, one warp: K and V once a tile, Q with LSE and dO with dPsum for every step.

The first Q and dO of a tile are loaded before its K and V, whose buffers the last tile keeps for longer.
A tile that no query visits has no loads, but takes its turn at the buffers: zeros leave through them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from refluent.gpu.device.copies import sequence_rows
from refluent.gpu.device.pipeline import arrive, expect
from refluent.gpu.device.work import Tile
from refluent.gpu.sm90.backward.context import Context


@cute.jit
def load(ctx: Context):
    step, tiles = cutlass.Int32(0), cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = ctx.call.tile(index)
        if tile.exists:
            if tile.steps > 0:
                step = load_tile(ctx, tile, step, tiles)
            else:
                for ring in cutlass.const_expr((ctx.barriers.k, ctx.barriers.v)):
                    ring.wait_empty(tiles)
                    arrive(ring.full_at(tiles))
            tiles += 1


def boxes(atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor):
    """Stages in shared memory and boxes in global memory, one mode each."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


@cute.jit
def load_tile(ctx: Context, tile: Tile, step: cutlass.Int32, tiles: cutlass.Int32):
    """All loads of one tile; returns the step count after it."""
    call, plan, src, shared, bars = ctx.call, ctx.plan, ctx.sources, ctx.shared, ctx.barriers
    m, n, d, dv = plan.tile_m, plan.tile_n, plan.head_dim, plan.head_dim_v
    q_rows = sequence_rows(src.q, call.queries, tile.batch, tile.head, tile.len_q)
    do_rows = sequence_rows(src.do, call.queries, tile.batch, tile.head, tile.len_q)
    k_rows = sequence_rows(src.k, call.keys, tile.batch, tile.kv_head, tile.len_k)
    v_rows = sequence_rows(src.v, call.keys, tile.batch, tile.kv_head, tile.len_k)
    q_slots, q_boxes = boxes(src.q_atom, shared.q, cute.local_tile(q_rows, (m, d), (None, 0)))
    k_slots, k_boxes = boxes(src.k_atom, shared.k, cute.local_tile(k_rows, (n, d), (None, 0)))
    v_slots, v_boxes = boxes(src.v_atom, shared.v, cute.local_tile(v_rows, (n, dv), (None, 0)))
    do_slots, do_boxes = boxes(src.do_atom, shared.do, cute.local_tile(do_rows, (m, dv), (None, 0)))
    row0 = call.queries.block_offset(tile.batch, m) * m
    statistic = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=m * 32)
    lse = cute.local_tile(cute.domain_offset((row0,), src.lse_log2[tile.head, None]), (m,), (None,))
    dpsum = cute.local_tile(cute.domain_offset((row0,), src.dpsum[tile.head, None]), (m,), (None,))
    element = ctx.static.dtype.width // 8
    for m_block in cutlass.range(tile.m_begin, tile.m_end):
        opening = m_block == tile.m_begin

        bars.q.wait_empty(step)
        full, stage = bars.q.full_at(step), bars.q.stage(step)
        expect(full, m * d * element + m * 4)
        cute.copy(src.q_atom, q_boxes[None, m_block], q_slots[None, stage], tma_bar_ptr=full)
        with cute.arch.elect_one():
            cute.copy(statistic, lse[None, m_block], shared.lse[None, stage], mbar_ptr=full)
        if opening:
            bars.k.wait_empty(tiles)
            expect(bars.k.full_at(tiles), n * d * element)
            cute.copy(src.k_atom, k_boxes[None, tile.n_block], k_slots[None, 0], tma_bar_ptr=bars.k.full_at(tiles))

        bars.do.wait_empty(step)
        full, stage = bars.do.full_at(step), bars.do.stage(step)
        expect(full, m * dv * element + m * 4)
        cute.copy(src.do_atom, do_boxes[None, m_block], do_slots[None, stage], tma_bar_ptr=full)
        with cute.arch.elect_one():
            cute.copy(statistic, dpsum[None, m_block], shared.dpsum[None, stage], mbar_ptr=full)
        if opening:
            bars.v.wait_empty(tiles)
            expect(bars.v.full_at(tiles), n * dv * element)
            cute.copy(src.v_atom, v_boxes[None, tile.n_block], v_slots[None, 0], tma_bar_ptr=bars.v.full_at(tiles))
        step += 1
    return step
