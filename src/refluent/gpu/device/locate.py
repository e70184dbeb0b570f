"""Which sequence and block of it a workspace's block is (the inverse of Side.block_offset); where its tokens lie."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

WARP = 32


@cute.jit
def locate(side, block, batch, tile: cutlass.Constexpr):
    """(sequence, block within it) of workspace block `block`, of `batch` sequences.

    A block that no sequence owns comes out behind the last block of the sequence before it. Packed sequences are
    searched, 32 at a time, so that a grid covers the tokens that there are, however long the longest sequence may be.
    All lanes of a warp call it together.
    """
    if cutlass.const_expr(side.cu_seqlens is None):
        blocks = (side.seqlen + tile - 1) // tile
        sequence = block // blocks
        return sequence, block - sequence * blocks
    low, high = cutlass.Int32(0), cutlass.Int32(batch) - 1
    lane = cute.arch.lane_idx()
    while low < high:
        step = (high - low + WARP - 1) // WARP
        probe = low + step * (lane + 1)
        before = probe <= high and side.block_offset(cutlass.min(probe, high), tile) <= block
        low += step * cute.arch.popc(cute.arch.vote_ballot_sync(before))
        high = cutlass.min(low + step - 1, high)
    return low, block - side.block_offset(low, tile)


def token(tensor: cute.Tensor, packed: bool, sequence, i, head) -> cute.Tensor:
    """(d,): one token and head of (b, s, h, d), or of packed (t, h, d), where i counts from the first token of all."""
    return tensor[i, head, None] if packed else tensor[sequence, i, head, None]
