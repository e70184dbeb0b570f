"""Which queries see which keys under causal masks and windows: by block for the tile walk, by column for a tile.

Query i sees key j iff i + shift - left <= j <= i + shift + right, shift = len_k - len_q (bottom-right alignment);
causal is right = 0. An open side is None, known when the kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class Window:
    """Sides of the window in keys; `has_*` are known at compile time, the values at run time."""

    left: cutlass.Int32
    right: cutlass.Int32
    has_left: cutlass.Constexpr
    has_right: cutlass.Constexpr

    @property
    def bounded(self) -> bool:
        return self.has_left or self.has_right

    @cute.jit
    def query_blocks(self, first_key, tile_n: cutlass.Constexpr, tile_m: cutlass.Constexpr, len_q, len_k):
        """[begin, end): blocks of queries that see any of the keys first_key .. first_key + tile_n - 1."""
        last_key = cutlass.min(first_key + tile_n, len_k) - 1
        begin, end = cutlass.Int32(0), (len_q + tile_m - 1) // tile_m
        shift = len_k - len_q
        if cutlass.const_expr(self.has_right):
            begin = cutlass.max(first_key - shift - self.right, 0) // tile_m
        if cutlass.const_expr(self.has_left):
            stop = cutlass.max(last_key - shift + self.left + 1, 0)
            end = cutlass.min(end, (stop + tile_m - 1) // tile_m)
        end = end if first_key < len_k else cutlass.Int32(0)
        return begin, cutlass.max(begin, end)

    @cute.jit
    def key_blocks(self, first_query, tile_m: cutlass.Constexpr, tile_n: cutlass.Constexpr, len_q, len_k):
        """[begin, end): blocks of keys whose walk visits the query block that starts at first_query."""
        last_query = cutlass.min(first_query + tile_m, len_q) - 1
        begin, end = cutlass.Int32(0), (len_k + tile_n - 1) // tile_n
        shift = len_k - len_q
        if cutlass.const_expr(self.has_left):
            begin = cutlass.max(first_query + shift - self.left, 0) // tile_n
        if cutlass.const_expr(self.has_right):
            stop = cutlass.max(last_query + shift + self.right + 1, 0)
            end = cutlass.min(end, (stop + tile_n - 1) // tile_n)
        return begin, cutlass.max(begin, end)

    @cute.jit
    def columns(self, key, first_query, len_q, len_k):
        """[low, high]: columns of a tile (queries from first_query) that see `key`."""
        low, high = cutlass.Int32(0), len_q - 1 - first_query
        shift = len_k - len_q
        if cutlass.const_expr(self.has_right):
            low = key - shift - self.right - first_query
        if cutlass.const_expr(self.has_left):
            high = cutlass.min(high, key - shift + self.left - first_query)
        high = high if key < len_k else cutlass.Int32(-1)
        return low, high

    @cute.jit
    def whole(self, first_key, first_query, tile_n: cutlass.Constexpr, tile_m: cutlass.Constexpr, len_q, len_k):
        """Whether every query of the tile sees every key of it."""
        shift = len_k - len_q
        inside = first_key + tile_n <= len_k and first_query + tile_m <= len_q
        if cutlass.const_expr(self.has_right):
            inside = inside and first_query >= first_key + tile_n - 1 - shift - self.right
        if cutlass.const_expr(self.has_left):
            inside = inside and first_query + tile_m - 1 <= first_key - shift + self.left
        return inside
