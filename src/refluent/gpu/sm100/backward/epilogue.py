"""dV and dK of a tile out of tensor memory: to 16-bit gradients, or added to the group's float32 accumulators."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.copies import bulk_reduce_add, load_columns
from refluent.gpu.device.semaphore import release_turn, wait_turn
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.context import GROUP_BARRIER, Context
from refluent.gpu.sm100.backward.reduce import stage_row

COLUMNS = 16  # a thread moves at a time
GROUP_THREADS = 128


@cute.jit
def store_grads(ctx: Context, tile: Tile, group: cutlass.Int32, row: cutlass.Int32):
    """Both gradients of the tile; warpgroup `group` has half of the columns of each."""
    plan, targets = ctx.plan, ctx.targets
    if cutlass.const_expr(ctx.call.group == 1):
        store_rows(ctx, tile, group, row, targets.dv, plan.tmem_dv, plan.head_dim_v, cutlass.Float32(1.0))
        store_rows(ctx, tile, group, row, targets.dk, plan.tmem_dk, plan.head_dim, ctx.call.scale)
    else:
        if tile.steps > 0:
            add_rows(ctx, tile, group, row)


@cute.jit
def store_rows(
    ctx: Context,
    tile: Tile,
    group: cutlass.Int32,
    row: cutlass.Int32,
    target: cute.Tensor,
    column: cutlass.Constexpr,
    width: cutlass.Constexpr,
    factor: cutlass.Float32,
):
    """A thread's key row, scaled, in 16 bits; zeros where no query visits the tile. Padding is never written."""
    side = ctx.call.keys
    key = tile.n_block * ctx.plan.tile_n + row
    if cutlass.const_expr(side.cu_seqlens is not None):
        line = target[side.start(tile.batch) + key, tile.head, None]
    else:
        line = target[tile.batch, key, tile.head, None]
    out = cute.make_tensor(line.iterator.align(16), cute.make_layout((8, width // 8)))
    values = cute.make_rmem_tensor(cute.make_layout(COLUMNS), cutlass.Float32)
    packed = cute.make_rmem_tensor(cute.make_layout((8, COLUMNS // 8)), ctx.static.dtype)
    half = width // 2
    for c in cutlass.range_constexpr(0, half, COLUMNS):
        values.fill(0.0)
        if tile.steps > 0:
            load_columns(ctx.tmem, column + group * half + c, COLUMNS, row, values.iterator)
            cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(COLUMNS):
            packed[j] = (values[j] * factor).to(ctx.static.dtype)
        if key < tile.len_k:
            for j in cutlass.range_constexpr(COLUMNS // 8):
                place = (group * half + c) // 8 + j
                if place * 8 < line.shape[0]:
                    cute.autovec_copy(packed[None, j], out[None, place])


@cute.jit
def add_rows(ctx: Context, tile: Tile, group: cutlass.Int32, row: cutlass.Int32):
    """Grouped heads: bulk reduce-adds into the key head's accumulators, through the buffer of dS."""
    plan, targets = ctx.plan, ctx.targets
    block = ctx.call.keys.block_offset(tile.batch, plan.tile_n) + tile.n_block
    if cutlass.const_expr(ctx.static.deterministic):
        if row == 0:
            turn = targets.dkv_turn[tile.kv_head, None]
            wait_turn(turn.iterator + 2 * block + group, tile.head % ctx.call.group)
    staged = cute.recast_ptr(ctx.shared.ds.iterator, dtype=cutlass.Float32)
    buffer = cute.make_tensor(staged + group * plan.tile_n * COLUMNS, cute.make_layout(plan.tile_n * COLUMNS))
    add_columns(ctx, tile, group, row, block, buffer, targets.dv_accum, plan.tmem_dv, plan.head_dim_v)
    add_columns(ctx, tile, group, row, block, buffer, targets.dk_accum, plan.tmem_dk, plan.head_dim)
    if row == 0:  # before the next tile's dS goes into the buffer, behind the compute barrier
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    if cutlass.const_expr(ctx.static.deterministic):
        if row == 0:
            cute.arch.cp_async_bulk_wait_group(0)
            turn = targets.dkv_turn[tile.kv_head, None]
            release_turn(turn.iterator + 2 * block + group)


@cute.jit
def add_columns(
    ctx: Context,
    tile: Tile,
    group: cutlass.Int32,
    row: cutlass.Int32,
    block: cutlass.Int32,
    buffer: cute.Tensor,
    target: cute.Tensor,
    column: cutlass.Constexpr,
    width: cutlass.Constexpr,
):
    half, rows = width // 2, ctx.plan.tile_n
    values = cute.make_rmem_tensor(cute.make_layout(COLUMNS), cutlass.Float32)
    for c in cutlass.range_constexpr(0, half, COLUMNS):
        load_columns(ctx.tmem, column + group * half + c, COLUMNS, row, values.iterator)
        cute.arch.fence_view_async_tmem_load()
        if row == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP_THREADS)
        stage_row(buffer, values, 0, row, rows, COLUMNS)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP_THREADS)
        if row == 0:
            chunk = target[tile.kv_head, block, (group * half + c) // COLUMNS, None, None, None]
            bulk_reduce_add(chunk.iterator, buffer.iterator, rows * COLUMNS * 4)
            cute.arch.cp_async_bulk_commit_group()
