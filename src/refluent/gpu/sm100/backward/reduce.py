"""The reduce role, four warps: dQ of a step from tensor memory into its float32 accumulator in global memory.

Each thread has one row. REDUCE_COLUMNS columns at a time go through a staging buffer, laid out as they lie in the
accumulator, and leave it by one bulk reduce-add.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import bulk_reduce_add, load_columns
from refluent.gpu.device.pipeline import arrive
from refluent.gpu.device.semaphore import release_turn, wait_turn
from refluent.gpu.device.work import Tile
from refluent.gpu.plans.sm100 import REDUCE_COLUMNS
from refluent.gpu.sm100.backward.context import REDUCE_BARRIER, Context

THREADS = 128
VECTOR = 4  # float32 values that one store moves


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
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def reduce_step(ctx: Context, tile: Tile, m_block: cutlass.Int32, block: cutlass.Int32, step: cutlass.Int32):
    """dQ of one step; `block` is the query block's place in the workspace."""
    plan, bars = ctx.plan, ctx.barriers
    thread = cute.arch.thread_idx()[0]
    values = cute.make_rmem_tensor(cute.make_layout(plan.head_dim), cutlass.Float32)
    bars.dq.wait_full(step)
    for column in cutlass.range_constexpr(0, plan.head_dim, REDUCE_COLUMNS):
        load_columns(ctx.tmem, plan.tmem_dp + column, REDUCE_COLUMNS, thread, values.iterator + column)
    cute.arch.fence_view_async_tmem_load()
    arrive(bars.dq.empty_at(step))
    if cutlass.const_expr(ctx.static.deterministic):
        if thread == 0:
            turn = ctx.targets.dq_turn[tile.head, None]
            wait_turn(turn.iterator + block, ctx.call.rank(tile, m_block))
    for column in cutlass.range_constexpr(0, plan.head_dim, REDUCE_COLUMNS):
        chunk = column // REDUCE_COLUMNS
        if thread == 0:  # the reduce-add that read this buffer last has read it
            cute.arch.cp_async_bulk_wait_group(plan.stages_reduce - 1, read=True)
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=THREADS)
        use = step * (plan.head_dim // REDUCE_COLUMNS) + chunk
        buffer = ctx.shared.staging[None, use % plan.stages_reduce]
        stage_row(buffer, values, column, thread, plan.tile_m)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=THREADS)
        if thread == 0:
            target = ctx.targets.dq[tile.head, block, chunk, None, None, None]
            bulk_reduce_add(target.iterator, buffer.iterator, plan.tile_m * REDUCE_COLUMNS * 4)
            cute.arch.cp_async_bulk_commit_group()
    if cutlass.const_expr(ctx.static.deterministic):
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0)
            turn = ctx.targets.dq_turn[tile.head, None]
            release_turn(turn.iterator + block)


@cute.jit
def stage_row(
    buffer: cute.Tensor,
    values: cute.Tensor,
    column: cutlass.Constexpr,
    row: cutlass.Int32,
    rows: cutlass.Constexpr,
    columns: cutlass.Constexpr = REDUCE_COLUMNS,
):
    """One row's columns into a buffer ordered (columns / 4, rows, 4): neighbouring threads write side by side."""
    target = cute.make_tensor(
        buffer.iterator + row * VECTOR, cute.make_layout((VECTOR, columns // VECTOR), stride=(1, rows * VECTOR))
    )
    source = cute.make_tensor(values.iterator + column, cute.make_layout((VECTOR, columns // VECTOR)))
    for j in cutlass.range_constexpr(columns // VECTOR):
        target[None, j].store(source[None, j].load())
