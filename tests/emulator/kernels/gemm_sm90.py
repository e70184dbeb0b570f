"""A Hopper GEMM: one producer warp (TMA), consumer warpgroups (wgmma), a ring of stages between them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

GROUP = 128  # threads of a warpgroup


class Gemm:
    """c = a @ b^T, accumulated in float32. a (m, k), b (n, k) of one type, either mode contiguous; c (m, n) row-major.

    `tile` is (m, n, k) of a CTA. Any sizes whose contiguous extents are multiples of 16 bytes: TMA fills with zero
    what lies outside, and rows and columns outside c are not stored.
    """

    def __init__(self, tile: tuple[int, int, int] = (128, 64, 64), stages: int = 2, a_in_registers: bool = False):
        self.tile, self.stages, self.a_in_registers = tile, stages, a_in_registers
        self.groups = tile[0] // 64
        self.threads = (self.groups + 1) * GROUP

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        m, n, k = self.tile
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        source = warpgroup.OperandSource.RMEM if self.a_in_registers else warpgroup.OperandSource.SMEM
        mma = hopper_helpers.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            a_layout.sm90_mma_major_mode(),
            b_layout.sm90_mma_major_mode(),
            cutlass.Float32,
            (self.groups, 1, 1),
            (64, n),
            source,
        )
        a_smem = hopper_helpers.make_smem_layout_a(a_layout, self.tile, a.element_type, self.stages)
        b_smem = hopper_helpers.make_smem_layout_b(b_layout, self.tile, b.element_type, self.stages)
        op = cpasync.CopyBulkTensorTileG2SOp()
        a_atom, tma_a = cpasync.make_tiled_tma_atom(op, a, cute.select(a_smem, mode=[0, 1]), (m, k))
        b_atom, tma_b = cpasync.make_tiled_tma_atom(op, b, cute.select(b_smem, mode=[0, 1]), (n, k))
        self._kernel(mma, a_atom, tma_a, b_atom, tma_b, c, a_smem, b_smem).launch(
            grid=[cute.ceil_div(c.shape[0], m), cute.ceil_div(c.shape[1], n), 1], block=[self.threads, 1, 1]
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
        memory = cutlass.memory.SmemAllocator()
        full = memory.allocate_array(cutlass.Int64, self.stages)
        empty = memory.allocate_array(cutlass.Int64, self.stages)
        a_ring = memory.allocate_tensor(a_atom.value_type, a_smem.outer, byte_alignment=1024, swizzle=a_smem.inner)
        b_ring = memory.allocate_tensor(b_atom.value_type, b_smem.outer, byte_alignment=1024, swizzle=b_smem.inner)
        if cute.arch.thread_idx()[0] == 0:
            for s in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, self.groups * 4)  # one arrival a consumer warp
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tiles = cute.ceil_div(a.shape[1], self.tile[2])
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP)
        if group == self.groups:
            if cutlass.const_expr(self.groups == 2):  # 3 x 128 threads start with 168 registers each
                cute.arch.setmaxregister_decrease(40)
            if cute.arch.warp_idx() % 4 == 0:
                self._produce(a_atom, a, a_ring, b_atom, b, b_ring, full, empty, tiles)
        else:
            if cutlass.const_expr(self.groups == 2):
                cute.arch.setmaxregister_increase(232)
            self._consume(mma, a_ring, b_ring, c, full, empty, tiles)

    @cute.jit
    def _produce(
        self,
        a_atom: cute.CopyAtom,
        a: cute.Tensor,
        a_ring: cute.Tensor,
        b_atom: cute.CopyAtom,
        b: cute.Tensor,
        b_ring: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        tiles: cutlass.Int32,
    ):
        m, n, k = self.tile
        x, y, _ = cute.arch.block_idx()
        one = cute.make_layout(1)
        a_tiles = cute.group_modes(cute.local_tile(a, (m, k), (x, None)), 0, 2)
        b_tiles = cute.group_modes(cute.local_tile(b, (n, k), (y, None)), 0, 2)
        a_slots, a_source = cpasync.tma_partition(a_atom, 0, one, cute.group_modes(a_ring, 0, 2), a_tiles)
        b_slots, b_source = cpasync.tma_partition(b_atom, 0, one, cute.group_modes(b_ring, 0, 2), b_tiles)
        nbytes = (m + n) * k * a_ring.element_type.width // 8
        for t in cutlass.range(tiles):
            stage, phase = t % self.stages, (t // self.stages) % 2
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, nbytes)
            cute.copy(a_atom, a_source[None, t], a_slots[None, stage], tma_bar_ptr=full + stage)
            cute.copy(b_atom, b_source[None, t], b_slots[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def _consume(
        self,
        mma: cute.TiledMma,
        a_ring: cute.Tensor,
        b_ring: cute.Tensor,
        c: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        tiles: cutlass.Int32,
    ):
        m, n, _ = self.tile
        thread, _, _ = cute.arch.thread_idx()
        x, y, _ = cute.arch.block_idx()
        slice_ = mma.get_slice(thread)
        a_parts, b_parts = slice_.partition_A(a_ring), slice_.partition_B(b_ring)
        b_frag = mma.make_fragment_B(b_parts)
        place = slice_.partition_C(cute.make_identity_tensor((m, n)))
        acc = cute.make_rmem_tensor(place.shape, cutlass.Float32)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for t in cutlass.range(tiles):
            stage, phase = t % self.stages, (t // self.stages) % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            a_frag = mma.make_fragment_A(a_parts)
            if cutlass.const_expr(self.a_in_registers):
                a_frag = mma.make_fragment_A(a_parts[None, None, None, 0])
                cute.autovec_copy(a_parts[None, None, None, stage], a_frag)
            warpgroup.fence()
            for kk in cutlass.range_constexpr(cute.size(b_frag, mode=[2])):
                a_now = a_frag[None, None, kk] if self.a_in_registers else a_frag[None, None, kk, stage]
                cute.gemm(mma, acc, a_now, b_frag[None, None, kk, stage], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
        for i in cutlass.range_constexpr(cute.size(acc)):
            row, column = x * m + place[i][0], y * n + place[i][1]
            if row < c.shape[0] and column < c.shape[1]:
                c[row, column] = acc[i].to(c.element_type)
