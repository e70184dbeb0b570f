"""Which tile a CTA works on next: key block, head and sequence, and the query blocks that it walks.

Tiles are numbered in launch order. The CTAs of a cluster take neighbouring key blocks of a head and sequence, a span.
Spans are numbered (bundle of heads, sequence, span, head of the bundle), the head innermost: so many heads take turns
that what their tiles read and add to stays in L2, and tiles that run side by side add to different dQ. The spans of a
head are those of a workspace of as large blocks, so that many short packed sequences need few tiles more than they have
blocks. Under a causal mask or a window the last key block comes first: see docs/kernels/sm100-backward.md. Ranks are
counted in launch order, so that a tile waits only on tiles that started before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.locate import locate
from refluent.gpu.device.seqlen import Side, workspace_blocks
from refluent.gpu.device.visible import Window

L2_BYTES = 48 << 20  # for what a bundle of heads reads and adds to: of 126 MB, two halves that may hold the same lines


@dataclass(frozen=True)
class Order:
    """In which tiles are numbered: a bundle's heads take turns. Counted once, on the host.

    clusters: of all heads; bundle: heads of a bundle, but for the last; bundle_clusters: theirs.
    """

    clusters: cutlass.Int32
    bundle: cutlass.Int32
    bundle_clusters: cutlass.Int32

    @staticmethod
    def make(keys: Side, batch, heads, span_n: int, bundle) -> Order:
        """span_n: keys of a cluster."""
        spans = workspace_blocks(batch, keys.seqlen, keys.tokens, span_n, keys.cu_seqlens is not None)
        return Order(spans * heads, bundle, spans * bundle)


@cute.jit
def heads_of_bundle(
    heads: cutlass.Int32, rows: cutlass.Int32, row_bytes: cutlass.Constexpr, l2_bytes: cutlass.Constexpr = L2_BYTES
) -> cutlass.Int32:
    """How many heads take turns; `rows` of a sequence, `row_bytes` of Q, dO and the accumulator of dQ in each."""
    fit = l2_bytes // row_bytes // cutlass.max(rows, 1)
    return cutlass.min(cutlass.max(fit, 1), heads)


@dataclass(frozen=True)
class Call:
    """What every role knows of the call; tile sizes, `group` (query heads a key head) and `cluster` (its CTAs) are
    compile-time."""

    queries: Side
    keys: Side
    window: Window
    heads: cutlass.Int32
    batch: cutlass.Int32
    scale: cutlass.Float32
    group: cutlass.Constexpr
    tile_m: cutlass.Constexpr
    tile_n: cutlass.Constexpr
    cluster: cutlass.Constexpr
    order: Order
    blocks: Any = None  # Blocks

    @property
    def last_key_block_first(self) -> bool:
        return self.window.bounded

    @property
    def span_n(self) -> int:
        """Keys of a cluster."""
        return self.cluster * self.tile_n

    def tiles(self):
        """Tiles, and CTAs of a grid that has one for each: a multiple of the cluster's."""
        return self.order.clusters * self.cluster

    @cute.jit
    def place(self, index):
        """(head, span of all sequences) of a cluster."""
        order = self.order
        number = index // order.bundle_clusters
        within, first = index - number * order.bundle_clusters, number * order.bundle
        width = cutlass.min(order.bundle, self.heads - first)
        return first + within % width, within // width

    @cute.jit
    def tile(self, index) -> Tile:
        """The tile of this number; without steps if no key of its cluster exists. By whole warps."""
        head, span = self.place(index // self.cluster)
        batch, span = locate(self.keys, span, self.batch, self.span_n)
        rank = index % self.cluster
        len_q, len_k = self.queries.length(batch), self.keys.length(batch)
        if cutlass.const_expr(self.last_key_block_first):
            span = (len_k + self.span_n - 1) // self.span_n - 1 - span
            rank = self.cluster - 1 - rank
        n_block = cutlass.max(span, 0) * self.cluster + rank
        exists = span >= 0 and n_block * self.tile_n < len_k
        begin, end = self.window.query_blocks(n_block * self.tile_n, self.tile_n, self.tile_m, len_q, len_k)
        if cutlass.const_expr(self.blocks is not None):
            begin, end = self.blocks.queries(batch, head, n_block, begin, end)
        end = end if exists else begin
        own_begin, own_end = begin, end
        if cutlass.const_expr(self.cluster > 1):
            begin, end = self.window.query_blocks(span * self.span_n, self.span_n, self.tile_m, len_q, len_k)
            end = end if span >= 0 else begin
        return Tile(batch, head, head // self.group, n_block, len_q, len_k, begin, end, own_begin, own_end, exists)

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
    """Key block n_block of (batch, head), to walk query blocks [m_begin, m_end), those that see a key of its cluster.

    With a block mask those are places in the key block's list.
    [own_begin, own_end) see keys of the block itself: with the others its scores are masked and it adds nothing. A
    block behind the last one, which does not exist, has no keys and walks with the other of its cluster.
    """

    batch: cutlass.Int32
    head: cutlass.Int32
    kv_head: cutlass.Int32
    n_block: cutlass.Int32
    len_q: cutlass.Int32
    len_k: cutlass.Int32
    m_begin: cutlass.Int32
    m_end: cutlass.Int32
    own_begin: cutlass.Int32
    own_end: cutlass.Int32
    exists: cutlass.Boolean

    @property
    def steps(self):
        return self.m_end - self.m_begin

    @property
    def seen(self):
        """Whether any query sees its keys."""
        return self.own_begin < self.own_end

    @cute.jit
    def adds(self, m_block):
        """Whether its keys have a part in the query block's dQ."""
        return self.own_begin <= m_block and m_block < self.own_end
