"""Which tile a CTA works on next: key block, head and sequence, and the query blocks that it walks.

Tiles are numbered (head, sequence, key block), the key block innermost: the key blocks of a head are those of the
workspace, so that many short packed sequences need no more tiles than they have blocks. Under a causal mask or a window
to the right the last key block comes first: it has the fewest query blocks, and with ranks counted the same way a tile
waits only on tiles that started before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.locate import locate
from refluent.gpu.device.seqlen import Side, workspace_blocks
from refluent.gpu.device.visible import Window


@dataclass(frozen=True)
class Call:
    """What every role knows of the call; tile sizes and `group` (query heads a key head) are compile-time."""

    queries: Side
    keys: Side
    window: Window
    heads: cutlass.Int32
    batch: cutlass.Int32
    scale: cutlass.Float32
    group: cutlass.Constexpr
    tile_m: cutlass.Constexpr
    tile_n: cutlass.Constexpr
    blocks: Any = None  # Blocks

    @property
    def last_key_block_first(self) -> bool:
        return self.window.has_right

    def key_blocks(self):
        """Key blocks of a head, of all sequences."""
        keys = self.keys
        return workspace_blocks(self.batch, keys.seqlen, keys.tokens, self.tile_n, keys.cu_seqlens is not None)

    def tiles(self):
        return self.key_blocks() * self.heads

    @cute.jit
    def tile(self, index) -> Tile:
        """The tile of this number; without query blocks if its key block does not exist. By whole warps."""
        blocks = self.key_blocks()
        head = index // blocks
        batch, n_block = locate(self.keys, index - head * blocks, self.batch, self.tile_n)
        len_q, len_k = self.queries.length(batch), self.keys.length(batch)
        if cutlass.const_expr(self.last_key_block_first):
            n_block = (len_k + self.tile_n - 1) // self.tile_n - 1 - n_block
        exists = n_block >= 0 and n_block * self.tile_n < len_k
        n_block = cutlass.max(n_block, 0)
        begin, end = self.window.query_blocks(n_block * self.tile_n, self.tile_n, self.tile_m, len_q, len_k)
        if cutlass.const_expr(self.blocks is not None):
            begin, end = self.blocks.queries(batch, head, n_block, begin, end)
        end = end if exists else begin
        return Tile(batch, head, head // self.group, n_block, len_q, len_k, begin, end, exists)

    @cute.jit
    def query_block(self, tile: Tile, step) -> cutlass.Int32:
        """The query block of a step from tile.m_begin on."""
        if cutlass.const_expr(self.blocks is None):
            return step
        return self.blocks.query_tile(tile.batch, tile.head, tile.n_block, step)

    @cute.jit
    def rank(self, tile: Tile, m_block):
        """How many tiles add to this query block's dQ before this one."""
        first_query = m_block * self.tile_m
        begin, end = self.window.key_blocks(first_query, self.tile_m, self.tile_n, tile.len_q, tile.len_k)
        own = tile.n_block
        if cutlass.const_expr(self.blocks is not None):
            begin, end, own = self.blocks.keys(tile.batch, tile.head, m_block, begin, end, own)
        if cutlass.const_expr(self.last_key_block_first):
            return end - 1 - own
        return own - begin


@dataclass(frozen=True)
class Tile:
    """Key block n_block of (batch, head), to walk query blocks [m_begin, m_end), or those places of its list."""

    batch: cutlass.Int32
    head: cutlass.Int32
    kv_head: cutlass.Int32
    n_block: cutlass.Int32
    len_q: cutlass.Int32
    len_k: cutlass.Int32
    m_begin: cutlass.Int32
    m_end: cutlass.Int32
    exists: cutlass.Boolean

    @property
    def steps(self):
        return self.m_end - self.m_begin
