"""Sums: within a warp by shuffles, within a CTA through shared memory, over the grid by atomics or in a fixed order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

THREADS = 128
WARPS = THREADS // 32


@cute.jit
def block_sum(value: cutlass.Float32, partial: cute.Tensor) -> cutlass.Float32:
    """The sum over the CTA, in every thread; partial (WARPS,) float32 in shared memory."""
    value = cute.arch.warp_reduction_sum(value)
    warp = cute.arch.warp_idx()  # a shuffle: all lanes take part
    if cute.arch.lane_idx() == 0:
        partial[warp] = value
    cute.arch.sync_threads()
    total = cutlass.Float32(0)
    for w in cutlass.range_constexpr(WARPS):
        total += partial[w]
    return total


@cute.kernel
def _row_sums(x: cute.Tensor, sums: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    partial = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(WARPS))
    value = cutlass.Float32(0)
    for j in cutlass.range(thread, x.shape[1], THREADS):
        value += x[row, j]
    total = block_sum(value, partial)
    if thread == 0:
        sums[row] = total


@cute.jit
def row_sums(x: cute.Tensor, sums: cute.Tensor):
    """sums[i] = sum of x[i, :]; one CTA a row."""
    _row_sums(x, sums).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _total(x: cute.Tensor, total: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    partial = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(WARPS))
    value = cutlass.Float32(0)
    for j in cutlass.range(thread, x.shape[1], THREADS):
        value += x[row, j]
    value = block_sum(value, partial)
    if thread == 0:
        cute.arch.atomic_add(total.iterator, value)


@cute.jit
def total(x: cute.Tensor, result: cute.Tensor):
    """result[0] += sum of x, in whatever order the CTAs come."""
    _total(x, result).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _ordered_total(x: cute.Tensor, result: cute.Tensor, turn: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    partial = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(WARPS))
    value = cutlass.Float32(0)
    for j in cutlass.range(thread, x.shape[1], THREADS):
        value += x[row, j]
    value = block_sum(value, partial)
    if thread == 0:
        arrived = cutlass.Int32(-1)
        while arrived != row:
            arrived = cute.arch.load(turn.iterator, cutlass.Int32, sem="acquire", scope="gpu")
        result[0] += value
        cute.arch.red(turn.iterator, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def ordered_total(x: cute.Tensor, result: cute.Tensor, turn: cute.Tensor):
    """result[0] += sum of x, rows in order: turn (1,) int32 counts those that are done."""
    _ordered_total(x, result, turn).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])
