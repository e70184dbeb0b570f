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
    (device/seqlen.py): element (row r, column c) of a block at [c // 4, r, c % 4]. Transposed it is (heads, blocks,
    tile / 4, padded head_dim, 4), with the element at [r // 4, c, r % 4]. Exchanged, row r of an odd c // 4 stands at
    r ^ 4. The columns of the output alone are written;
    of a padded sequence, rows from its length on are written as zeros; of a packed one they are left alone.
    """

    def __init__(self, tile: int, head_dim: int, transposed: bool = False, exchanged: bool = False):
        self.tile = tile
        self.columns = -(-head_dim // VECTOR)  # vectors a row, padded
        self.transposed, self.exchanged = transposed, exchanged
        self.rows = QUAD if transposed else 1  # that a thread takes at a time

    @cute.jit
    def __call__(self, accumulator: cute.Tensor, out: cute.Tensor, side, factor: cutlass.Float32, batch, stream):
        """accumulator as the class says; out (b, s, h, d) or packed (t, h, d)."""
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
        source = accumulator[head, block, None, None, None]
        for item in cutlass.range(thread, self.tile // self.rows * self.columns, THREADS):
            row, vector = self.place(item)
            if first + row < limit and vector * VECTOR < head_dim:
                values = self.values(source, row, vector)
                for r in cutlass.range_constexpr(self.rows):
                    i = first + row + r
                    if i < limit:
                        narrow = scaled(values[r, None], factor, out.element_type, i < length)
                        target = token(out, packed, sequence, start + i, head)
                        cute.autovec_copy(narrow, cute.local_tile(target, (VECTOR,), (vector,)))

    @cute.jit
    def place(self, item):
        """First row and vector of a thread's item, such that neighbours read neighbouring bytes."""
        if cutlass.const_expr(self.transposed):
            return item // self.columns * self.rows, item % self.columns
        # ROWS neighbouring threads take neighbouring rows, the next ROWS the next 16 bytes of them.
        return item // (ROWS * self.columns) * ROWS + item % ROWS, item // ROWS % self.columns

    @cute.jit
    def values(self, source, row, vector):
        """(rows, 8): the item's part of the accumulator."""
        wide = cute.make_rmem_tensor(cute.make_layout((self.rows, VECTOR)), cutlass.Float32)
        if cutlass.const_expr(self.transposed):
            for c in cutlass.range_constexpr(VECTOR):
                cute.autovec_copy(source[row // QUAD, vector * VECTOR + c, None], wide[None, c])
        else:
            for half in cutlass.range_constexpr(VECTOR // QUAD):
                part = cute.local_tile(wide[0, None], (QUAD,), (half,))
                place = row ^ (half * QUAD) if self.exchanged else row
                cute.autovec_copy(source[vector * (VECTOR // QUAD) + half, place, None], part)
        return wide


@cute.jit
def scaled(wide: cute.Tensor, factor, dtype: cutlass.Constexpr, inside):
    """8 columns of a row in 16 bits; zeros outside the sequence."""
    narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), dtype)
    narrow.fill(0.0)
    if inside:
        narrow.store((wide.load() * factor).to(dtype))
    return narrow
