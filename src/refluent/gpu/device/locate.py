"""Which sequence and block of it a workspace's block is (the inverse of Side.block_offset); where its tokens lie."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


@cute.jit
def locate(side, block, batch, tile: cutlass.Constexpr):
    """(sequence, block within it) of workspace block `block`, of `batch` sequences.

    A block that no sequence owns comes out behind the last block of the sequence before it. Packed sequences are found
    by bisection, so that a grid covers the tokens that there are, however long the longest sequence may be.
    """
    if cutlass.const_expr(side.cu_seqlens is None):
        blocks = (side.seqlen + tile - 1) // tile
        sequence = block // blocks
        return sequence, block - sequence * blocks
    low, high = cutlass.Int32(0), cutlass.Int32(batch) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if side.block_offset(middle, tile) <= block:
            low = middle
        else:
            high = middle - 1
    return low, block - side.block_offset(low, tile)


def token(tensor: cute.Tensor, packed: bool, sequence, i, head) -> cute.Tensor:
    """(d,): one token and head of (b, s, h, d), or of packed (t, h, d), where i counts from the first token of all."""
    return tensor[i, head, None] if packed else tensor[sequence, i, head, None]
