"""A Blackwell GEMM: a TMA warp, an MMA warp (tcgen05, one CTA or a pair), four warps that store the accumulator."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

MMA_WARP, TMA_WARP = 4, 5
THREADS = 192
COLUMNS = 512  # of tensor memory: all of it


class Gemm:
    """c = a @ b^T, accumulated in float32. a (m, k), b (n, k) of one type, either mode contiguous; c (m, n) row-major.

    `tile` is (m, n, k) of one MMA: m 64 or 128 for one CTA, 128 or 256 for a pair (`pair`), which shares the rows of a
    and the columns of b between its CTAs.
    """

    def __init__(self, tile: tuple[int, int, int] = (128, 64, 64), stages: int = 2, pair: bool = False):
        self.tile, self.stages, self.pair = tile, stages, pair
        self.ctas = 2 if pair else 1
        self.group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        m, n, _ = self.tile
        mma = blackwell_helpers.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            LayoutEnum.from_tensor(a).mma_major_mode(),
            LayoutEnum.from_tensor(b).mma_major_mode(),
            cutlass.Float32,
            self.group,
            (m, n),
        )
        a_smem = blackwell_helpers.make_smem_layout_a(mma, self.tile, a.element_type, self.stages)
        b_smem = blackwell_helpers.make_smem_layout_b(mma, self.tile, b.element_type, self.stages)
        cluster = cute.tiled_divide(cute.make_layout((self.ctas, 1, 1)), (mma.thr_id.shape,))
        op = cpasync.CopyBulkTensorTileG2SOp(self.group)
        a_slot, b_slot = cute.select(a_smem, mode=[0, 1, 2]), cute.select(b_smem, mode=[0, 1, 2])
        a_atom, tma_a = cute.nvgpu.make_tiled_tma_atom_A(op, a, a_slot, self.tile, mma, cluster.shape)
        b_atom, tma_b = cute.nvgpu.make_tiled_tma_atom_B(op, b, b_slot, self.tile, mma, cluster.shape)
        grid = (cute.ceil_div(c.shape[0], m) * self.ctas, cute.ceil_div(c.shape[1], n), 1)
        self._kernel(mma, a_atom, tma_a, b_atom, tma_b, c, a_smem, b_smem).launch(
            grid=grid, block=[THREADS, 1, 1], cluster=[self.ctas, 1, 1]
        )

    @cute.kernel
    def _kernel(
        self,
        mma: cute.TiledMma,
        a_atom: cute.CopyAtom,
        a: cute.Tensor,
        b_atom: cute.CopyAtom,
        b: cute.Tensor,
        c: cute.Tensor,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        full = memory.allocate_array(cutlass.Int64, self.stages)
        empty = memory.allocate_array(cutlass.Int64, self.stages)
        done = memory.allocate_array(cutlass.Int64, 1)
        address = memory.allocate_array(cutlass.Int32, 1)
        a_ring = memory.allocate_tensor(a_atom.value_type, a_smem.outer, byte_alignment=1024, swizzle=a_smem.inner)
        b_ring = memory.allocate_tensor(b_atom.value_type, b_smem.outer, byte_alignment=1024, swizzle=b_smem.inner)
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(COLUMNS, address, is_two_cta=self.pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
        if cute.arch.thread_idx()[0] == 0:
            for s in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, 1)
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
        self._sync_all()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tiles = cute.ceil_div(a.shape[1], self.tile[2])
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)
        slice_ = mma.get_slice(rank)
        acc = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(self.tile[:2])).layout)
        if warp == TMA_WARP:
            self._load(slice_, a_atom, a, a_ring, b_atom, b, b_ring, full, empty, rank, tiles)
        if warp < MMA_WARP:
            cute.arch.mbarrier_wait(done, 0)
            self._store(slice_, acc, c)
        if warp == MMA_WARP and rank == 0:
            self._multiply(mma, a_ring, b_ring, acc, full, empty, done, tiles)
        self._sync_all()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem, COLUMNS, is_two_cta=self.pair)

    @cute.jit
    def _sync_all(self):
        if cutlass.const_expr(self.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _load(
        self,
        slice_: cute.ThrMma,
        a_atom: cute.CopyAtom,
        a: cute.Tensor,
        a_ring: cute.Tensor,
        b_atom: cute.CopyAtom,
        b: cute.Tensor,
        b_ring: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        rank: cutlass.Int32,
        tiles: cutlass.Int32,
    ):
        m, n, k = self.tile
        x, y, _ = cute.arch.block_idx()
        one = cute.make_layout(1)
        a_tiles = slice_.partition_A(cute.local_tile(a, (m, k), (x // self.ctas, None)))
        b_tiles = slice_.partition_B(cute.local_tile(b, (n, k), (y, None)))
        a_slots, a_source = cpasync.tma_partition(
            a_atom, 0, one, cute.group_modes(a_ring, 0, 3), cute.group_modes(a_tiles, 0, 3)
        )
        b_slots, b_source = cpasync.tma_partition(
            b_atom, 0, one, cute.group_modes(b_ring, 0, 3), cute.group_modes(b_tiles, 0, 3)
        )
        nbytes = (m + n) * k * a_ring.element_type.width // 8  # of both CTAs: they all count at the leader's barrier
        for t in cutlass.range(tiles):
            stage, phase = t % self.stages, (t // self.stages) % 2
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, nbytes)
            cute.copy(a_atom, a_source[None, t], a_slots[None, stage], tma_bar_ptr=full + stage)
            cute.copy(b_atom, b_source[None, t], b_slots[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def _multiply(
        self,
        mma: cute.TiledMma,
        a_ring: cute.Tensor,
        b_ring: cute.Tensor,
        acc: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        done: cute.Pointer,
        tiles: cutlass.Int32,
    ):
        a_frag, b_frag = mma.make_fragment_A(a_ring), mma.make_fragment_B(b_ring)
        both = 3 if self.pair else None
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for t in cutlass.range(tiles):
            stage, phase = t % self.stages, (t // self.stages) % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            for kk in cutlass.range_constexpr(cute.size(a_frag, mode=[2])):
                cute.gemm(mma, acc, a_frag[None, None, kk, stage], b_frag[None, None, kk, stage], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage, both, self.group)
        with cute.arch.elect_one():
            tcgen05.commit(done, both, self.group)

    @cute.jit
    def _store(self, slice_: cute.ThrMma, acc: cute.Tensor, c: cute.Tensor):
        m, n, _ = self.tile
        x, y, _ = cute.arch.block_idx()
        place = slice_.partition_C(cute.make_identity_tensor((m, n)))
        rows = m // self.ctas
        if cutlass.const_expr(rows == 64):
            op = tcgen05.Ld16x256bOp(tcgen05.Repetition.x1)
        else:
            op = tcgen05.Ld32x32bOp(tcgen05.Repetition.x8)
        atom = cute.make_copy_atom(op, cutlass.Float32)
        copy = tcgen05.make_tmem_copy(atom, acc[(None, None), 0, 0]).get_slice(cute.arch.thread_idx()[0])
        source = copy.partition_S(acc[(None, None), 0, 0])
        place = copy.partition_D(place[(None, None), 0, 0])
        values = cute.make_rmem_tensor(place.shape, cutlass.Float32)
        cute.copy(copy, source, values)
        cute.arch.fence_view_async_tmem_load()
        for i in cutlass.range_constexpr(cute.size(values)):
            row, column = x // self.ctas * m + place[i][0], y * n + place[i][1]
            if row < c.shape[0] and column < c.shape[1]:
                c[row, column] = values[i].to(c.element_type)
