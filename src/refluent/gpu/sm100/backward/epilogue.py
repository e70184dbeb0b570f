"""dV and dK of a tile out of tensor memory: to 16-bit gradients, or added to the group's float32 accumulators."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import bulk_reduce_add, load_columns
from refluent.gpu.device.semaphore import release_turn, wait_turn
from refluent.gpu.device.work import Tile
from refluent.gpu.plans.sm100 import GROUP_STAGING_BYTES, LANES, Accumulator
from refluent.gpu.sm100.backward.chunks import load_chunk, stage_chunk
from refluent.gpu.sm100.backward.context import COMPUTE_BARRIER, GROUP_BARRIER, Context

COLUMNS = 16  # a thread moves at a time
GROUP_THREADS = 128


@cute.jit
def store_grads(ctx: Context, tile: Tile, group: cutlass.Int32, thread: cutlass.Int32):
    """Both gradients of the tile; warpgroup `group` has half of the columns of each accumulator."""
    plan, targets = ctx.plan, ctx.targets
    if cutlass.const_expr(ctx.call.group == 1):
        store = store_turned if plan.transposed_kv else store_rows
        store(ctx, tile, group, thread, targets.dv, plan.dv, cutlass.Float32(1.0))
        store(ctx, tile, group, thread, targets.dk, plan.dk, ctx.call.scale)
    else:
        if tile.seen:
            add_rows(ctx, tile, group, thread)


@cute.jit
def store_rows(
    ctx: Context,
    tile: Tile,
    group: cutlass.Int32,
    row: cutlass.Int32,
    target: cute.Tensor,
    acc: cutlass.Constexpr[Accumulator],
    factor: cutlass.Float32,
):
    """A thread's key row, scaled, in 16 bits; zeros where no query visits the tile. Padding is never written."""
    key = tile.n_block * ctx.plan.tile_n + row
    line = key_rows(ctx, tile, target)[key, None]
    out = cute.make_tensor(line.iterator.align(16), cute.make_layout((8, acc.columns // 8)))
    values = cute.make_rmem_tensor(cute.make_layout(COLUMNS), cutlass.Float32)
    packed = cute.make_rmem_tensor(cute.make_layout((8, COLUMNS // 8)), ctx.static.dtype)
    half = acc.columns // 2
    for c in cutlass.range_constexpr(0, half, COLUMNS):
        values.fill(0.0)
        if tile.seen:
            load_columns(ctx.tmem, acc.column + group * half + c, COLUMNS, row, values.iterator)
            cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(COLUMNS):
            packed[j] = (values[j] * factor).to(ctx.static.dtype)
        if key < tile.len_k:
            for j in cutlass.range_constexpr(COLUMNS // 8):
                place = (group * half + c) // 8 + j
                if place * 8 < line.shape[0]:
                    cute.autovec_copy(packed[None, j], out[None, place])


@cute.jit
def store_turned(
    ctx: Context,
    tile: Tile,
    group: cutlass.Int32,
    thread: cutlass.Int32,
    target: cute.Tensor,
    acc: cutlass.Constexpr[Accumulator],
    factor: cutlass.Float32,
):
    """The same where keys are columns: a thread has one element of every key's row, a warp 64 bytes side by side."""
    rows = key_rows(ctx, tile, target)
    values = cute.make_rmem_tensor(cute.make_layout(COLUMNS), cutlass.Float32)
    half = acc.columns // 2
    for part in cutlass.range(acc.rows * half // (LANES * COLUMNS)):  # of all blocks, which lie side by side
        block, column = part // (half // COLUMNS), group * half + part % (half // COLUMNS) * COLUMNS
        values.fill(0.0)
        if tile.seen:
            load_columns(ctx.tmem, acc.column + block * acc.columns + column, COLUMNS, thread, values.iterator)
            cute.arch.fence_view_async_tmem_load()
        key, place = tile.n_block * ctx.plan.tile_n + column, block * LANES + thread
        for j in cutlass.range_constexpr(COLUMNS):
            if key + j < tile.len_k and place < rows.shape[1]:
                rows[key + j, place] = (values[j] * factor).to(ctx.static.dtype)


@cute.jit
def key_rows(ctx: Context, tile: Tile, target: cute.Tensor):
    """(keys, d): the rows of the tile's sequence and head."""
    side = ctx.call.keys
    if cutlass.const_expr(side.cu_seqlens is not None):
        return cute.domain_offset((side.start(tile.batch), 0), target[None, tile.head, None])
    return target[tile.batch, None, tile.head, None]


@cute.jit
def add_rows(ctx: Context, tile: Tile, group: cutlass.Int32, thread: cutlass.Int32):
    """Grouped heads: bulk reduce-adds into the key head's accumulators, through the buffers of dS (and P)."""
    plan, targets = ctx.plan, ctx.targets
    block = ctx.call.keys.block_offset(tile.batch, plan.tile_n) + tile.n_block
    if cutlass.const_expr(ctx.static.deterministic):
        if thread == 0:
            turn = targets.dkv_turn[tile.kv_head, None]
            wait_turn(turn.iterator + 2 * block + group, tile.head % ctx.call.group)
    staged = cute.recast_ptr(ctx.shared.ds.iterator, dtype=cutlass.Float32)
    buffer = staged + group * (GROUP_STAGING_BYTES // 4)
    add_columns(ctx, group, thread, buffer, targets.dv_accum[tile.kv_head, block, None, None, None, None], plan.dv)
    add_columns(ctx, group, thread, buffer, targets.dk_accum[tile.kv_head, block, None, None, None, None], plan.dk)
    if thread == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    # Both warpgroups' buffers have been read: the next tile's scores may go over them.
    cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=2 * GROUP_THREADS)
    if cutlass.const_expr(ctx.static.deterministic):
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0)
            turn = targets.dkv_turn[tile.kv_head, None]
            release_turn(turn.iterator + 2 * block + group)


@cute.jit
def add_columns(
    ctx: Context,
    group: cutlass.Int32,
    thread: cutlass.Int32,
    buffer: cute.Pointer,
    target: cute.Tensor,
    acc: cutlass.Constexpr[Accumulator],
):
    """The warpgroup's half of the columns of one accumulator to its workspace (chunks, width / 4, rows, 4)."""
    half, width = acc.columns // 2, ctx.plan.group_columns
    values = cute.make_rmem_tensor(cute.make_layout(acc.rows * width // GROUP_THREADS), cutlass.Float32)
    for c in cutlass.range_constexpr(0, half, width):
        load_chunk(ctx.tmem, acc, group * half + c, width, thread, values.iterator)
        cute.arch.fence_view_async_tmem_load()
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP_THREADS)
        stage_chunk(buffer, acc, width, thread, values.iterator)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP_THREADS)
        if thread == 0:
            chunk = target[(group * half + c) // width, None, None, None]
            bulk_reduce_add(chunk.iterator, buffer, acc.rows * width * 4)
            cute.arch.cp_async_bulk_commit_group()
