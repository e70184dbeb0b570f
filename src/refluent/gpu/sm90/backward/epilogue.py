"""dV and dK of a tile out of registers: to 16-bit gradients, or added to the group's float32 accumulators.

They leave through the buffers of V and K, which nobody reads any more when both warpgroups have come here.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp

from refluent.gpu.device.copies import bulk_reduce_add, sequence_rows
from refluent.gpu.device.semaphore import release_turn, wait_turn
from refluent.gpu.device.work import Tile
from refluent.gpu.plans.sm90 import GROUPS, ROWS
from refluent.gpu.sm90.backward.chunks import held, stage_chunk
from refluent.gpu.sm90.backward.context import COMPUTE_BARRIER, GROUP_BARRIER, Context
from refluent.gpu.sm90.backward.products import Product

GROUP_THREADS = 128


@cute.jit
def store_grads(
    ctx: Context, tile: Tile, group: cutlass.Int32, thread: cutlass.Int32, dk: cute.Tensor, dv: cute.Tensor
):
    """Both gradients of the tile, of which the warpgroup has 64 keys, or half of the columns.

    Thread 0 returns when the buffers are free.
    """
    plan, products, shared, stores = ctx.plan, ctx.products, ctx.shared, ctx.stores
    cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=GROUPS * GROUP_THREADS)
    if cutlass.const_expr(ctx.call.group == 1):
        narrow(ctx, products.dv, dv, shared.v, cutlass.Float32(1.0), group, thread)
        narrow(ctx, products.dk, dk, shared.k, ctx.call.scale, group, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP_THREADS)
        if thread < 32:
            store_rows(ctx, tile, group, stores.dv_atom, stores.dv, shared.v, plan.part(plan.head_dim_v))
            store_rows(ctx, tile, group, stores.dk_atom, stores.dk, shared.k, plan.part(plan.head_dim))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()  # only one thread of the warp had something to wait for
    else:
        if tile.steps > 0:
            add_rows(ctx, tile, group, thread, dk, dv)


@cute.jit
def narrow(
    ctx: Context, product: Product, acc: cute.Tensor, shared: cute.Tensor, factor: cutlass.Float32, group, thread
):
    """A gradient, scaled, in 16 bits into the buffer of the operand that it is the gradient of."""
    packed = cute.make_rmem_tensor(acc.layout, ctx.static.dtype)
    packed.store((acc.load() * factor).to(ctx.static.dtype))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), ctx.static.dtype)
    copy = cute.make_tiled_copy_C(atom, product.mma).get_slice(group * GROUP_THREADS + thread)
    cute.copy(atom, copy.retile(packed), copy.partition_D(shared[None, None, 0]))


@cute.jit
def store_rows(
    ctx: Context,
    tile: Tile,
    group: cutlass.Int32,
    atom: cute.CopyAtom,
    target: cute.Tensor,
    shared: cute.Tensor,
    columns: cutlass.Constexpr,
):
    """The warpgroup's part from a buffer to global memory, by one warp; nothing outside the sequence is written."""
    rows = sequence_rows(target, ctx.call.keys, tile.batch, tile.head, tile.len_k)
    place, keys = ((group, 0), tile.n_block * GROUPS + group) if ctx.plan.by_keys else ((0, group), tile.n_block)
    boxes = cute.local_tile(rows, (ROWS, columns), (None, place[1]))
    part = cute.local_tile(shared[None, None, 0], (ROWS, columns), place)
    source, slots = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(part, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    cute.copy(atom, source, slots[None, keys])


@cute.jit
def add_rows(ctx: Context, tile: Tile, group: cutlass.Int32, thread: cutlass.Int32, dk: cute.Tensor, dv: cute.Tensor):
    """Grouped heads: bulk reduce-adds into the key head's accumulators."""
    plan, targets = ctx.plan, ctx.targets
    block = ctx.call.keys.block_offset(tile.batch, plan.tile_n) + tile.n_block
    if cutlass.const_expr(ctx.static.deterministic):
        if thread == 0:
            turn = targets.dkv_turn[tile.kv_head, None]
            wait_turn(turn.iterator + 2 * block + group, tile.head % ctx.call.group)
    staged = cute.recast_ptr(ctx.shared.k.iterator, cute.make_swizzle(0, 4, 3), dtype=cutlass.Float32)
    buffer = staged + group * (plan.tile_n * (plan.head_dim + plan.head_dim_v) // (2 * GROUPS))
    add_columns(ctx, group, thread, buffer, targets.dv_accum[tile.kv_head, block, None, None, None], dv)
    add_columns(ctx, group, thread, buffer, targets.dk_accum[tile.kv_head, block, None, None, None], dk)
    if thread == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
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
    acc: cute.Tensor,
):
    """A warpgroup's part of one accumulator to the workspace (64-row blocks, chunks of columns, elements of one)."""
    width = ctx.plan.group_columns
    chunks = cute.size(acc) // held(width)
    for chunk in cutlass.range_constexpr(chunks):
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP_THREADS)
        stage_chunk(buffer, acc.iterator + chunk * held(width), width, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP_THREADS)
        if thread == 0:
            rows, place = (group, chunk) if ctx.plan.by_keys else (0, group * chunks + chunk)
            bulk_reduce_add(target[rows, place, None].iterator, buffer, ROWS * width * 4)
            cute.arch.cp_async_bulk_commit_group()
