"""Clusters: distributed shared memory by plain and by asynchronous stores, and multicast TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

THREADS = 64


@cute.jit
def store_remote(pointer: cute.Pointer, value: cutlass.Float32):
    cute.arch.inline_ptx("st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[pointer.toint(), value])


@cute.kernel
def _rotate(x: cute.Tensor, y: cute.Tensor, size: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    inbox = cutlass.memory.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout(THREADS), byte_alignment=16
    )
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    store_remote(cute.arch.map_dsmem_ptr(inbox.iterator + thread, (rank + 1) % size), x[block, thread])
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    y[block, thread] = inbox[thread]


@cute.jit
def rotate(x: cute.Tensor, y: cute.Tensor, size: cutlass.Constexpr):
    """y[i] = x of the CTA before, within clusters of `size`, through distributed shared memory."""
    _rotate(x, y, size).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], cluster=[size, 1, 1])


@cute.kernel
def _rotate_async(x: cute.Tensor, y: cute.Tensor, size: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    memory = cutlass.memory.SmemAllocator()
    inbox = memory.allocate_tensor(cutlass.Int32, cute.make_layout(THREADS), byte_alignment=16)
    full = memory.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(full, THREADS * 4)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.store_async_dsmem(inbox.iterator + thread, x[block, thread], full, (rank + 1) % size)
    cute.arch.mbarrier_wait(full, 0)
    y[block, thread] = inbox[thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def rotate_async(x: cute.Tensor, y: cute.Tensor, size: cutlass.Constexpr):
    """The same for int32, by st.async: the receiver's barrier counts the bytes."""
    _rotate_async(x, y, size).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], cluster=[size, 1, 1])


class Multicast:
    """Each CTA of a cluster loads its share of a tile for all of them, tile after tile, through a ring of stages."""

    def __init__(self, rows: int, columns: int, size: int, stages: int):
        self.rows, self.columns, self.size, self.stages = rows, columns, size, stages

    @cute.jit
    def sums(self, x: cute.Tensor, y: cute.Tensor):
        """y[c, j] = (c + 1) times the sum of column j of x (float32), in every CTA c of one cluster."""
        layout = cute.make_ordered_layout((self.rows, self.columns), order=(1, 0))
        atom, tma_x = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(), x, layout, (self.rows, self.columns), num_multicast=self.size
        )
        self._sums(atom, tma_x, y).launch(grid=[self.size, 1, 1], block=[THREADS, 1, 1], cluster=[self.size, 1, 1])

    @cute.kernel
    def _sums(self, atom: cute.CopyAtom, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        memory = cutlass.memory.SmemAllocator()
        layout = cute.make_ordered_layout((self.rows, self.columns, self.stages), order=(1, 0, 2))
        ring = memory.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
        full = memory.allocate_array(cutlass.Int64, self.stages)
        empty = memory.allocate_array(cutlass.Int64, self.stages)
        if thread == 0:
            for s in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, self.size)  # one arrival of every CTA that reads the stage
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        tiles = cute.flat_divide(x, (self.rows, self.columns))  # (rows, columns, tiles down, 1)
        s, g = cpasync.tma_partition(
            atom, rank, cute.make_layout(self.size), cute.group_modes(ring, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        total = cutlass.Float32(0)
        mask = cutlass.Int16((1 << self.size) - 1)
        for t in cutlass.range(cute.size(g, mode=[1])):
            stage = t % self.stages
            phase = (t // self.stages) % 2
            if cute.arch.warp_idx() == 0:
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.rows * self.columns * 4)
                cute.copy(atom, g[None, t, 0], s[None, stage], tma_bar_ptr=full + stage, mcast_mask=mask)
            cute.arch.mbarrier_wait(full + stage, phase)
            for i in cutlass.range(self.rows):
                if thread < self.columns:
                    total += ring[i, thread, stage]
            cute.arch.sync_threads()
            if thread < self.size:  # thread c tells CTA c
                cute.arch.mbarrier_arrive(empty + stage, thread)
        if thread < self.columns:
            y[rank, thread] = total * (rank + 1)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
