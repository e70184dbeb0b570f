"""Where a sequence lies: lengths, token offsets and the padded block offsets of workspaces.

One function owns each padded offset: the kernels before, at and after the main one all ask it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class Side:
    """The query or the key side of a call. Either tensor may be absent (None): lengths are then `seqlen`."""

    cu_seqlens: cute.Tensor | None  # (batch + 1,) int32
    seqused: cute.Tensor | None  # (batch,) int32
    seqlen: cutlass.Int32  # padded length; of packed tokens the longest sequence
    tokens: cutlass.Int32  # rows that the tensors hold: clamps what the device reads

    @property
    def ragged(self) -> bool:
        """Whether rows behind a sequence's end may belong to somebody else."""
        return self.cu_seqlens is not None or self.seqused is not None

    @cute.jit
    def start(self, batch) -> cutlass.Int32:
        """First token of a packed sequence, else 0 (padded tensors have a batch dimension)."""
        if cutlass.const_expr(self.cu_seqlens is None):
            return cutlass.Int32(0)
        return cutlass.min(cutlass.max(self.cu_seqlens[batch], 0), self.tokens)

    @cute.jit
    def length(self, batch) -> cutlass.Int32:
        """Tokens of the sequence that count, never more than there are."""
        length = self.seqlen
        if cutlass.const_expr(self.cu_seqlens is not None):
            stop = cutlass.min(self.cu_seqlens[batch + 1], self.tokens)
            length = cutlass.min(cutlass.max(stop - self.start(batch), 0), self.seqlen)
        if cutlass.const_expr(self.seqused is not None):
            length = cutlass.min(length, cutlass.max(self.seqused[batch], 0))
        return length

    def block_offset(self, batch, tile: cutlass.Constexpr) -> cutlass.Int32:
        """First block of the sequence in a workspace of whole blocks."""
        if cutlass.const_expr(self.cu_seqlens is None):
            return batch * ((self.seqlen + tile - 1) // tile)
        return self.start(batch) // tile + batch

    def row_view(self, batch, length):
        """(x, y): position of row 0 in the two row modes of a ragged view (see copies.sequence_view)."""
        return self.seqlen - length, self.start(batch) + length


def workspace_blocks(batch: int, seqlen: int, tokens: int, tile: int, packed: bool) -> int:
    """Blocks that a workspace needs so that block_offset + blocks of every sequence lie inside (host side)."""
    return tokens // tile + batch if packed else batch * ((seqlen + tile - 1) // tile)
