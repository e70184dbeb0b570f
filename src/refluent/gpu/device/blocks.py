"""Block sparsity: which tiles a block mask leaves something of, as ascending lists by key tile and by query tile."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class Blocks:
    """int32, positions count inside a sequence; strides of 0 where sequences or heads share their lists."""

    query_counts: cute.Tensor  # (b, h, key tiles)
    query_tiles: cute.Tensor  # (b, h, key tiles, query tiles)
    key_counts: cute.Tensor  # (b, h, query tiles)
    key_tiles: cute.Tensor  # (b, h, query tiles, key tiles)

    @cute.jit
    def queries(self, batch, head, n_block, begin, end):
        """[first, last) places of the query tiles [begin, end) in the list of a key tile."""
        n_block = cutlass.min(n_block, self.query_counts.shape[2] - 1)
        tiles, count = self.query_tiles[batch, head, n_block, None], self.query_counts[batch, head, n_block]
        return place_of(tiles, count, begin), place_of(tiles, count, end)

    @cute.jit
    def query_tile(self, batch, head, n_block, place) -> cutlass.Int32:
        return self.query_tiles[batch, head, n_block, place]

    @cute.jit
    def keys(self, batch, head, m_block, begin, end, n_block):
        """The same for the key tiles of a query tile, and the place of one of them."""
        tiles, count = self.key_tiles[batch, head, m_block, None], self.key_counts[batch, head, m_block]
        return place_of(tiles, count, begin), place_of(tiles, count, end), place_of(tiles, count, n_block)


@cute.jit
def place_of(tiles: cute.Tensor, count: cutlass.Int32, tile: cutlass.Int32) -> cutlass.Int32:
    """How many of the first `count` tiles of an ascending list are below `tile`."""
    low, high = cutlass.Int32(0), count
    while low < high:
        middle = (low + high) // 2
        below = tiles[middle] < tile
        low = middle + 1 if below else low
        high = high if below else middle
    return low
