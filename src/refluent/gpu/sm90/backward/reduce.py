"""The reduce role, one warp: dQ of a step from its staging buffer into its float32 accumulator in global memory.

The compute warpgroups stage dQ as it lies in global memory, each its own part, whole or in pieces, and each
piece leaves by one bulk reduce-add.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import bulk_reduce_add
from refluent.gpu.device.semaphore import release_turn, wait_turn
from refluent.gpu.device.work import Tile
from refluent.gpu.plans.sm90 import GROUPS, ROWS
from refluent.gpu.sm90.backward.context import Context


@cute.jit
def reduce(ctx: Context):
    step = cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = ctx.call.tile(index)
        block0 = ctx.call.queries.block_offset(tile.batch, ctx.plan.tile_m)
        for m_block in cutlass.range(tile.m_begin, tile.m_end):
            reduce_step(ctx, tile, m_block, block0 + m_block, step)
            step += 1
    if cute.arch.lane_idx() == 0:
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def reduce_step(ctx: Context, tile: Tile, m_block: cutlass.Int32, block: cutlass.Int32, step: cutlass.Int32):
    """dQ of one step; `block` is the query block's place in the workspace."""
    plan, bars, rounds = ctx.plan, ctx.barriers, ctx.plan.reduce_rounds
    lane = cute.arch.lane_idx()  # one thread does it all: bulk groups are a thread's own
    size = ROWS * plan.reduce_columns  # elements of a piece
    target = ctx.targets.dq[tile.head, block, None, None, None].iterator
    if cutlass.const_expr(ctx.static.deterministic):
        if lane == 0:
            turn = ctx.targets.dq_turn[tile.head, None]
            wait_turn(turn.iterator + block, ctx.call.rank(tile, m_block))
    for piece in cutlass.range_constexpr(rounds):
        use = (step * rounds + piece) * GROUPS
        for group in cutlass.range_constexpr(GROUPS):
            bars.dq.wait_full(use + group)
            if lane == 0:
                place = target + (group * rounds + piece) * size
                bulk_reduce_add(place, ctx.shared.staging[None, group].iterator, size * 4)
                cute.arch.cp_async_bulk_commit_group()
        for group in cutlass.range_constexpr(GROUPS):
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(GROUPS - 1 - group, read=True)
                cute.arch.mbarrier_arrive(bars.dq.empty_at(use + group))
    if cutlass.const_expr(ctx.static.deterministic):
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0)
            turn = ctx.targets.dq_turn[tile.head, None]
            release_turn(turn.iterator + block)
