"""cp.async, and cp.async.bulk without a tensor map: loads, stores, and reduce-add in turns."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

THREADS = 128
TILE = 512  # float32 elements a CTA


@cute.kernel
def _double(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    memory = cutlass.memory.SmemAllocator()
    tile = memory.allocate_tensor(cutlass.Float32, cute.make_layout(TILE), byte_alignment=128)
    loaded = memory.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(loaded, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    source = cute.local_tile(x, (TILE,), (block,))
    target = cute.local_tile(y, (TILE,), (block,))
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=TILE * 32)
    store = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), cutlass.Float32, num_bits_per_copy=TILE * 32)
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(loaded, TILE * 4)
        cute.copy(load, source, tile, mbar_ptr=loaded)
    cute.arch.mbarrier_wait(loaded, 0)
    for i in cutlass.range(thread, TILE, THREADS):
        tile[i] = tile[i] * 2.0
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if thread == 0:
        cute.copy(store, tile, target)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def double(x: cute.Tensor, y: cute.Tensor):
    """y = 2 x by bulk copies; the length is a multiple of TILE."""
    _double(x, y).launch(grid=[cute.size(x) // TILE, 1, 1], block=[THREADS, 1, 1])


@cute.jit
def bulk_reduce_add(target: cute.Pointer, source: cute.Pointer, nbytes: cutlass.Constexpr):
    """cp.reduce.async.bulk of float32 from shared to global memory."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), cutlass.Int32(nbytes)],
    )


@cute.kernel
def _accumulate(x: cute.Tensor, total: cute.Tensor, turn: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    tile = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(TILE), byte_alignment=128)
    for i in cutlass.range(thread, TILE, THREADS):
        tile[i] = x[row, i]
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if thread == 0:
        arrived = cutlass.Int32(-1)
        while arrived != row:
            arrived = cute.arch.load(turn.iterator, cutlass.Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")
        bulk_reduce_add(total.iterator, tile.iterator, TILE * 4)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        cute.arch.red(turn.iterator, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def accumulate(x: cute.Tensor, total: cute.Tensor, turn: cute.Tensor):
    """total += rows of x (n, TILE), in their order: bit for bit the sequential sum."""
    _accumulate(x, total, turn).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _reverse(x: cute.Tensor, y: cute.Tensor, stages: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    memory = cutlass.memory.SmemAllocator()
    ring = memory.allocate_tensor(cutlass.Float32, cute.make_layout((THREADS * 4, stages)), byte_alignment=16)
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), cutlass.Float32, num_bits_per_copy=128
    )
    tiles = cute.size(x) // (THREADS * 4)
    source = cute.logical_divide(x, cute.make_layout(4))  # (4, quads)
    for s in cutlass.range_constexpr(stages - 1):
        if s < tiles:
            slot = cute.local_tile(ring[None, s], (4,), (thread,))
            cute.copy(atom, source[None, s * THREADS + thread], slot)
        cute.arch.cp_async_commit_group()
    for t in cutlass.range(tiles):
        ahead = t + stages - 1
        if ahead < tiles:
            slot = cute.local_tile(ring[None, ahead % stages], (4,), (thread,))
            cute.copy(atom, source[None, ahead * THREADS + thread], slot)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(4):
            j = i * THREADS + thread
            y[t * THREADS * 4 + j] = ring[THREADS * 4 - 1 - j, t % stages]
        cute.arch.sync_threads()


@cute.jit
def reverse_tiles(x: cute.Tensor, y: cute.Tensor, stages: cutlass.Constexpr = 3):
    """Each run of 512 elements of x, reversed, by one CTA and a ring of cp.async stages."""
    _reverse(x, y, stages).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])
