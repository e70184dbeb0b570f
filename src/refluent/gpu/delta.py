"""The kernel before the backward: dPsum = rowsum(o * do) - dlse and LSE in base 2 per row, cleared accumulators, dsink.

Both statistics are float32 (heads, blocks * tile_m), in whole blocks of each sequence (device/seqlen.py). Rows that
must not count, those past the length and those that see no key (lse = -inf), hold lse_log2 = +inf and dPsum = 0, so
that the main kernel's P = exp2(s - lse_log2) is 0 there (Dao et al. 2022, appendix B.4, for the rest).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.locate import locate, token

VECTOR = 8  # 16-bit elements of a 16-byte load
LOG2E = math.log2(math.e)
SUM_THREADS = 128  # of the kernel that adds dsink's parts


@dataclass(frozen=True)
class DeltaTensors:
    """What delta reads and writes; o, do (b, sq, h, dv) or packed (tq, h, dv), last stride 1, others whole 16 bytes."""

    o: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor  # (b, h, sq) or (h, tq) float32, any strides
    dlse: cute.Tensor | None  # like lse
    sink: cute.Tensor | None  # (h,)
    lse_log2: cute.Tensor  # (h, blocks * tile_m) float32
    dpsum: cute.Tensor  # (h, blocks * tile_m) float32
    clear: cute.Tensor  # (4, quads) float32: everything that later kernels add to
    dsink_parts: cute.Tensor | None  # (h, blocks) float32
    dsink: cute.Tensor | None  # (h,), typed like sink


class Delta:
    """One CTA a query block and head; `head_dim_v` is the padded one, lanes beyond the true one idle."""

    def __init__(self, tile_m: int, head_dim_v: int):
        self.tile_m = tile_m
        self.lanes = 1 << (-(-head_dim_v // VECTOR) - 1).bit_length()  # threads a row, a power of two up to 32
        self.threads = min(max(tile_m * self.lanes // 8, 128), 512)
        self.rows = self.threads // self.lanes  # a pass
        self.passes = tile_m // self.rows

    @cute.jit
    def __call__(self, tensors: DeltaTensors, side, heads, batch, blocks, stream):
        """`blocks`: of the workspace, for all sequences."""
        self.kernel(tensors, side, heads, batch).launch(
            grid=[blocks * heads, 1, 1], block=[self.threads, 1, 1], stream=stream
        )
        if cutlass.const_expr(tensors.sink is not None):
            sum_parts(tensors.dsink_parts, tensors.dsink).launch(
                grid=[heads, 1, 1], block=[SUM_THREADS, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, tensors: DeltaTensors, side, heads: cutlass.Int32, batch: cutlass.Int32):
        index, _, _ = cute.arch.block_idx()
        self.clear(tensors.clear)
        block = index // heads
        head = index - block * heads  # innermost: neighbouring CTAs read neighbouring bytes
        sequence, m_block = locate(side, block, batch, self.tile_m)
        length, start = side.length(sequence), side.start(sequence)
        first = m_block * self.tile_m
        rows = _Rows(tensors, side.cu_seqlens is not None, sequence, head, start)
        thread = cute.arch.thread_idx()[0]
        at = cutlass.Int64(block) * self.tile_m + thread
        sums = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(self.tile_m))
        i = first + thread
        counts = thread < self.tile_m and i < length
        lse, dlse = self.statistics(rows, i, counts)  # on their way while the products are worked out
        self.products(rows, first, length, sums)
        cute.arch.sync_threads()
        lse_log2, dpsum, dsink = cutlass.Float32(math.inf), cutlass.Float32(0), cutlass.Float32(0)
        if counts and lse != -math.inf:
            lse_log2, dpsum = lse * LOG2E, sums[thread] - dlse
            if cutlass.const_expr(tensors.sink is not None):
                sink = tensors.sink[head].to(cutlass.Float32)
                dsink = -cute.math.exp2((sink - lse) * LOG2E, fastmath=True) * dpsum
        if thread < self.tile_m:
            tensors.lse_log2[head, at] = lse_log2
            tensors.dpsum[head, at] = dpsum
        if cutlass.const_expr(tensors.sink is not None):
            total = block_sum(dsink, self.threads)
            if thread == 0:
                tensors.dsink_parts[head, block] = total

    @cute.jit
    def clear(self, quads: cute.Tensor):
        """Zeros, 16 bytes a store, over the whole grid."""
        thread, index, grid = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        zeros = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
        zeros.fill(0.0)
        count, step = cutlass.Int64(quads.shape[1]), cutlass.Int64(grid) * self.threads
        at = cutlass.Int64(index) * self.threads + thread
        for _ in cutlass.range(cutlass.Int32((count + step - 1) // step)):
            if at < count:
                cute.autovec_copy(zeros, quads[None, at])
            at += step

    @cute.jit
    def statistics(self, rows, i, counts):
        """lse and dlse of row i; -inf and 0 where it does not count."""
        lse, dlse = cutlass.Float32(-math.inf), cutlass.Float32(0)
        if counts:
            lse = rows.statistic(rows.tensors.lse, i)
            if cutlass.const_expr(rows.tensors.dlse is not None):
                dlse = rows.statistic(rows.tensors.dlse, i)
        return lse, dlse

    @cute.jit
    def products(self, rows, first, length, sums: cute.Tensor):
        """sums[r] = <o, do> of row r; `lanes` threads a row. All loads are issued before any is used."""
        thread = cute.arch.thread_idx()[0]
        lane, row = thread % self.lanes, thread // self.lanes
        shape = cute.make_layout((VECTOR, self.passes))
        o = cute.make_rmem_tensor(shape, rows.tensors.o.element_type)
        do = cute.make_rmem_tensor(shape, rows.tensors.o.element_type)
        o.fill(0.0)
        do.fill(0.0)
        head_dim_v = rows.tensors.o.shape[cute.rank(rows.tensors.o) - 1]
        for p in cutlass.range_constexpr(self.passes):
            i = first + p * self.rows + row
            if i < length and lane * VECTOR < head_dim_v:
                cute.autovec_copy(rows.vector(rows.tensors.o, i, lane), o[None, p])
                cute.autovec_copy(rows.vector(rows.tensors.do, i, lane), do[None, p])
        for p in cutlass.range_constexpr(self.passes):
            wide_o, wide_do = o[None, p].load().to(cutlass.Float32), do[None, p].load().to(cutlass.Float32)
            total = cutlass.Float32(0)
            for e in cutlass.range_constexpr(VECTOR):
                total = wide_o[e] * wide_do[e] + total
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)
            if lane == 0:
                sums[p * self.rows + row] = total


@dataclass(frozen=True)
class _Rows:
    """The rows of one sequence and head."""

    tensors: DeltaTensors
    packed: cutlass.Constexpr
    sequence: cutlass.Int32
    head: cutlass.Int32
    start: cutlass.Int32

    def vector(self, tensor, i, lane):
        """16 bytes of row i of o or do."""
        row = token(tensor, self.packed, self.sequence, self.start + i, self.head)
        return cute.local_tile(row, (VECTOR,), (lane,))

    def statistic(self, tensor, i):
        """lse or dlse of row i."""
        return tensor[self.head, self.start + i] if self.packed else tensor[self.sequence, self.head, i]


@cute.jit
def block_sum(value: cutlass.Float32, threads: cutlass.Constexpr) -> cutlass.Float32:
    """The sum over the CTA's threads in every thread, always in the same order."""
    warps = threads // cute.arch.WARP_SIZE
    partial = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps))
    value = cute.arch.warp_reduction_sum(value)
    warp = cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        partial[warp] = value
    cute.arch.sync_threads()
    total = cutlass.Float32(0)
    for w in cutlass.range_constexpr(warps):
        total += partial[w]
    return total


@cute.kernel
def sum_parts(parts: cute.Tensor, dsink: cute.Tensor):
    """dsink[h] = sum of parts[h, :], always in the same order; one CTA a head."""
    thread, _, _ = cute.arch.thread_idx()
    head, _, _ = cute.arch.block_idx()
    value = cutlass.Float32(0)
    for block in cutlass.range(thread, parts.shape[1], SUM_THREADS):
        value += parts[head, block]
    total = block_sum(value, SUM_THREADS)
    if thread == 0:
        dsink[head] = total.to(dsink.element_type)
