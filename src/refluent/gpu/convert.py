"""The kernel after the backward: float32 accumulators, as the reduce warps ordered them, to 16-bit gradients."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.locate import locate, token

VECTOR = 8  # 16-bit elements of a 16-byte store
QUAD = 4  # float32 elements that lie together
ROWS = 8  # a warp: 128 contiguous bytes of the accumulator a quad
THREADS = 256


class Convert:
    """out = factor * accumulator, for one of dq, dk, dv.

    The accumulator is (heads, blocks, padded head_dim / 4, tile, 4) float32, in whole blocks of each sequence
    (device/seqlen.py): element (row r, column c) of a block at [c // 4, r, c % 4]. The columns of the output alone are
    written; of a padded sequence, rows from its length on are written as zeros; of a packed one they are left alone.
    """

    def __init__(self, tile: int, head_dim: int):
        self.tile = tile
        self.columns = -(-head_dim // VECTOR)  # vectors a row, padded

    @cute.jit
    def __call__(self, accumulator: cute.Tensor, out: cute.Tensor, side, factor: cutlass.Float32, batch, stream):
        """accumulator as above; out (b, s, h, d) or packed (t, h, d)."""
        heads, blocks = accumulator.shape[0], accumulator.shape[1]
        self.kernel(accumulator, out, side, factor, heads, batch).launch(
            grid=[blocks * heads, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, accumulator: cute.Tensor, out: cute.Tensor, side, factor, heads, batch):
        index, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        block = index // heads
        head = index - block * heads
        sequence, own = locate(side, block, batch, self.tile)
        length, start = side.length(sequence), side.start(sequence)
        first = own * self.tile
        packed = side.cu_seqlens is not None
        head_dim = out.shape[cute.rank(out) - 1]
        limit = length if cutlass.const_expr(packed) else side.seqlen
        source = accumulator[head, block, None, None, None]  # (padded head_dim / 4, tile, 4)
        for item in cutlass.range(thread, self.tile * self.columns, THREADS):
            # ROWS neighbouring threads take neighbouring rows, the next ROWS the next 16 bytes of them.
            row = item // (ROWS * self.columns) * ROWS + item % ROWS
            vector = item // ROWS % self.columns
            i = first + row
            if i < limit and vector * VECTOR < head_dim:
                values = self.values(source, row, vector, factor, out.element_type, i < length)
                target = token(out, packed, sequence, start + i, head)
                cute.autovec_copy(values, cute.local_tile(target, (VECTOR,), (vector,)))

    @cute.jit
    def values(self, source, row, vector, factor, dtype: cutlass.Constexpr, inside):
        """8 columns of a row, scaled; zeros outside the sequence."""
        wide = cute.make_rmem_tensor(cute.make_layout((QUAD, VECTOR // QUAD)), cutlass.Float32)
        wide.fill(0.0)
        if inside:
            for half in cutlass.range_constexpr(VECTOR // QUAD):
                cute.autovec_copy(source[vector * (VECTOR // QUAD) + half, row, None], wide[None, half])
        narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), dtype)
        narrow.store((wide.load() * factor).reshape((VECTOR,)).to(dtype))
        return narrow
