"""The reduce role, four warps: dQ of a step from tensor memory into its float32 accumulator in global memory.

A chunk of columns at a time, of all rows, goes through a staging buffer, laid out as it lies in global memory, and
leaves it by one bulk reduce-add.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import bulk_reduce_add, held
from refluent.gpu.device.pipeline import arrive
from refluent.gpu.device.semaphore import release_turn, wait_turn
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.chunks import load_chunk, stage_chunk
from refluent.gpu.sm100.backward.context import REDUCE_BARRIER, Context

THREADS = 128


@cute.jit
def reduce(ctx: Context):
    step, adds = cutlass.Int32(0), cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = ctx.call.tile(index)
        block0 = ctx.call.queries.block_offset(tile.batch, ctx.plan.tile_m)
        for place in cutlass.range(tile.m_begin, tile.m_end):
            m_block = ctx.call.query_block(tile, place)
            adds = reduce_step(ctx, tile, m_block, block0 + m_block, step, adds)
            step += 1
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def reduce_step(
    ctx: Context,
    tile: Tile,
    m_block: cutlass.Int32,
    block: cutlass.Int32,
    step: cutlass.Int32,
    adds: cutlass.Int32,
):
    """dQ of one step, added if it has a part in it; `block` is the query block's place in the workspace.

    adds: those before this one; returned with it.
    """
    plan, bars, dq = ctx.plan, ctx.barriers, ctx.plan.dq
    thread = cute.arch.thread_idx()[0]
    width, chunks = plan.reduce_columns, dq.columns // plan.reduce_columns
    share = sum(held(b.rows, width) for b in dq.blocks)  # a thread's registers of a chunk
    values = cute.make_rmem_tensor(cute.make_layout(share * chunks), cutlass.Float32)
    bars.dq.wait_full(step)
    for chunk in cutlass.range_constexpr(chunks):
        load_chunk(ctx.tmem, dq, chunk * width, width, thread, values.iterator + chunk * share)
    cute.arch.fence_view_async_tmem_load()
    arrive(bars.dq.empty_at(step))
    if cutlass.const_expr(ctx.static.cluster == 1):
        add_chunks(ctx, tile, m_block, block, values, step)
    else:
        if tile.adds(m_block):
            add_chunks(ctx, tile, m_block, block, values, adds)
            adds += 1
    return adds


@cute.jit
def add_chunks(
    ctx: Context,
    tile: Tile,
    m_block: cutlass.Int32,
    block: cutlass.Int32,
    values: cute.Tensor,
    adds: cutlass.Int32,
):
    """A query block's dQ from registers to the workspace, in its turn if the call is deterministic."""
    plan, dq, thread = ctx.plan, ctx.plan.dq, cute.arch.thread_idx()[0]
    width, chunks = plan.reduce_columns, dq.columns // plan.reduce_columns
    share = cute.size(values) // chunks
    if cutlass.const_expr(ctx.static.deterministic):
        if thread == 0:
            turn = ctx.targets.dq_turn[tile.head, None]
            wait_turn(turn.iterator + block, ctx.call.rank(tile, m_block))
    for chunk in cutlass.range_constexpr(chunks):
        if thread == 0:  # the reduce-add that read this buffer last has read it
            cute.arch.cp_async_bulk_wait_group(plan.stages_reduce - 1, read=True)
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=THREADS)
        use = adds * chunks + chunk
        buffer = ctx.shared.staging[None, use % plan.stages_reduce].iterator
        stage_chunk(buffer, dq, width, thread, values.iterator + chunk * share)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=THREADS)
        if thread == 0:
            target = ctx.targets.dq[tile.head, block, chunk, None, None, None]
            bulk_reduce_add(target.iterator, buffer, dq.rows * width * 4)
            cute.arch.cp_async_bulk_commit_group()
    if cutlass.const_expr(ctx.static.deterministic):
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0)
            turn = ctx.targets.dq_turn[tile.head, None]
            release_turn(turn.iterator + block)
