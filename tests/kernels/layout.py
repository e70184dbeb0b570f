"""Sequences of a call, and where their rows lie in tensors and in workspaces: plain Python, written for the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN = float("nan")


@dataclass(frozen=True)
class Rows:
    """One side of a call. lengths: what counts of each sequence; packed: what each owns (cu_seqlens), else `seqlen`."""

    seqlen: int
    lengths: tuple[int, ...]
    owned: tuple[int, ...] | None = None
    tail: int = 0  # packed tokens past the last offset

    @property
    def batch(self):
        return len(self.lengths)

    @property
    def packed(self):
        return self.owned is not None

    @property
    def tokens(self):
        return sum(self.owned) + self.tail if self.packed else self.seqlen

    def starts(self):
        return [sum(self.owned[:b]) for b in range(self.batch)] if self.packed else [0] * self.batch

    def cu_seqlens(self):
        return torch.tensor([*self.starts(), sum(self.owned)], dtype=torch.int32) if self.packed else None

    def seqused(self):
        whole = self.owned if self.packed else (self.seqlen,) * self.batch
        return None if self.lengths == whole else torch.tensor(self.lengths, dtype=torch.int32)

    def blocks(self, tile):
        """Of the workspace, for all sequences."""
        return self.tokens // tile + self.batch if self.packed else self.batch * -(-self.seqlen // tile)

    def first_block(self, sequence, tile):
        return (self.starts()[sequence] // tile + sequence) if self.packed else sequence * -(-self.seqlen // tile)

    def tensor(self, heads, width, dtype, fill=NAN):
        """(b, s, h, d) or (t, h, d): random where rows count, `fill` elsewhere."""
        shape = (self.tokens,) if self.packed else (self.batch, self.seqlen)
        out = torch.full((*shape, heads, width), fill, dtype=dtype)
        for b in range(self.batch):
            rows = self.of(out, b)
            rows.copy_(torch.randn(rows.shape))
        return out

    def of(self, tensor, sequence):
        """(length, h, d): the rows that count, as a view."""
        start, length = self.starts()[sequence], self.lengths[sequence]
        return tensor[start : start + length] if self.packed else tensor[sequence, :length]

    def statistic(self, heads, fill=NAN):
        """(b, h, s) or (h, t) float32: random where rows count, `fill` elsewhere."""
        shape = (heads, self.tokens) if self.packed else (self.batch, heads, self.seqlen)
        out = torch.full(shape, fill)
        for b in range(self.batch):
            rows = self.statistic_of(out, b)
            rows.copy_(torch.randn(rows.shape))
        return out

    def statistic_of(self, tensor, sequence):
        """(h, length): the rows that count, as a view."""
        start, length = self.starts()[sequence], self.lengths[sequence]
        return tensor[:, start : start + length] if self.packed else tensor[sequence, :, :length]


DENSE = Rows(150, (150, 150))
USED = Rows(150, (0, 131, 150))
PACKED = Rows(200, (130, 0, 5, 128, 0), (130, 0, 5, 128, 0), tail=9)
PACKED_USED = Rows(200, (100, 0, 0, 128), (130, 0, 5, 128), tail=1)
SIDES = {"dense": DENSE, "seqused": USED, "packed": PACKED, "packed seqused": PACKED_USED}
