"""ldmatrix, mma.sync and stmatrix: a 16 x 8 x 16 product by one warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp


@cute.kernel
def _product(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    memory = cutlass.memory.SmemAllocator()
    a_tile = memory.allocate_tensor(cutlass.Float16, cute.make_layout((16, 16), stride=(16, 1)), byte_alignment=16)
    b_tile = memory.allocate_tensor(cutlass.Float16, cute.make_layout((8, 16), stride=(16, 1)), byte_alignment=16)
    c_tile = memory.allocate_tensor(cutlass.Float16, cute.make_layout((16, 8), stride=(8, 1)), byte_alignment=16)
    for i in cutlass.range(lane, 256, 32):
        a_tile[i // 16, i % 16] = a[i // 16, i % 16]
    for i in cutlass.range(lane, 128, 32):
        b_tile[i // 16, i % 16] = b[i // 16, i % 16]
    cute.arch.sync_warp()
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16)))
    slice_ = mma.get_slice(lane)
    load4 = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), cutlass.Float16)
    load2 = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 2), cutlass.Float16)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 2), cutlass.Float16)
    a_frag = mma.make_fragment_A(slice_.partition_A(a_tile))
    b_frag = mma.make_fragment_B(slice_.partition_B(b_tile))
    acc = cute.make_rmem_tensor(slice_.partition_C(c_tile).shape, cutlass.Float32)
    acc.fill(0.0)
    a_copy = cute.make_tiled_copy_A(load4, mma).get_slice(lane)
    b_copy = cute.make_tiled_copy_B(load2, mma).get_slice(lane)
    cute.copy(a_copy, a_copy.partition_S(a_tile), a_copy.retile(a_frag))
    cute.copy(b_copy, b_copy.partition_S(b_tile), b_copy.retile(b_frag))
    cute.gemm(mma, acc, a_frag, b_frag, acc)
    half = cute.make_rmem_tensor(acc.shape, cutlass.Float16)
    half.store(acc.load().to(cutlass.Float16))
    c_copy = cute.make_tiled_copy_C(store, mma).get_slice(lane)
    cute.copy(c_copy, c_copy.retile(half), c_copy.partition_D(c_tile))
    cute.arch.sync_warp()
    for i in cutlass.range(lane, 128, 32):
        c[i // 8, i % 8] = c_tile[i // 8, i % 8]


@cute.jit
def product(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """c (16, 8) = a (16, 16) @ b (8, 16)^T, float16, accumulated in float32."""
    _product(a, b, c).launch(grid=[1, 1, 1], block=[32, 1, 1])
