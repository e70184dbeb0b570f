"""TMA tensor copies, ranks 1 to 5, every swizzle: one side is the tensor memory accelerator, the other plain accesses.

A swizzle that were wrong the same way in a load and in a store would not show in a round trip, so each kernel uses
TMA in one direction only. Tiles lie one after another in the packed tensor (tiles, elements of a tile), the elements
of a tile in Fortran order.
"""

from __future__ import annotations

from math import prod

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

THREADS = 64
SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}


class TileCopy:
    """Copies between a row-major tensor and packed tiles. `swizzle` is 0, 32, 64 or 128 bytes."""

    def __init__(self, tile: tuple[int, ...], swizzle: int = 0, reduce: bool = False):
        self.tile = tile
        self.swizzle = swizzle
        self.reduce = reduce

    def smem_layout(self):
        rank = len(self.tile)
        layout = cute.make_ordered_layout(self.tile, order=tuple(range(rank - 1, -1, -1)))
        return cute.make_composed_layout(cute.make_swizzle(SWIZZLE_BITS[self.swizzle], 4, 3), 0, layout)

    @cute.jit
    def load(self, x: cute.Tensor, packed: cute.Tensor):
        """packed <- tiles of x, zero outside x."""
        layout = self.smem_layout()
        atom, coordinates = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, self.tile)
        self._load(atom, coordinates, packed, layout).launch(
            grid=[cute.size(packed, mode=[0]), 1, 1], block=[THREADS, 1, 1]
        )

    @cute.kernel
    def _load(self, atom: cute.CopyAtom, x: cute.Tensor, packed: cute.Tensor, layout: cute.ComposedLayout):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        memory = cutlass.memory.SmemAllocator()
        tile = memory.allocate_tensor(packed.element_type, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        loaded = memory.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tile_elements = cutlass.const_expr(prod(self.tile))
        s, g = _partition(atom, tile, x, self.tile)
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, tile_elements * packed.element_type.width // 8)
            cute.copy(atom, g[None, block], s, tma_bar_ptr=loaded)
        cute.arch.mbarrier_wait(loaded, 0)
        for i in cutlass.range(thread, tile_elements, THREADS):
            packed[block, i] = tile[i]

    @cute.jit
    def store(self, packed: cute.Tensor, x: cute.Tensor):
        """Tiles of x <- packed (added to x with `reduce`); what lies outside x goes nowhere."""
        layout = self.smem_layout()
        op = cpasync.CopyReduceBulkTensorTileS2GOp() if self.reduce else cpasync.CopyBulkTensorTileS2GOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(op, x, layout, self.tile)
        self._store(atom, packed, coordinates, layout).launch(
            grid=[cute.size(packed, mode=[0]), 1, 1], block=[THREADS, 1, 1]
        )

    @cute.kernel
    def _store(self, atom: cute.CopyAtom, packed: cute.Tensor, x: cute.Tensor, layout: cute.ComposedLayout):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        memory = cutlass.memory.SmemAllocator()
        tile = memory.allocate_tensor(packed.element_type, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        for i in cutlass.range(thread, prod(self.tile), THREADS):
            tile[i] = packed[block, i]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        s, g = _partition(atom, tile, x, self.tile)
        if cute.arch.warp_idx() == 0:
            if cutlass.const_expr(self.reduce):  # elects a thread by itself
                cute.copy(atom, s, g[None, block])
            else:
                with cute.arch.elect_one():
                    cute.copy(atom, s, g[None, block])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _partition(atom: cute.CopyAtom, tile: cute.Tensor, x: cute.Tensor, shape: cutlass.Constexpr):
    """The shared tile and every tile of x, as the copy takes them: (elements), (elements, tiles)."""
    tiles = cute.zipped_divide(x, shape)
    s, g = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, cute.rank(tile)), tiles)
    return s, cute.group_modes(g, 1, cute.rank(g))
