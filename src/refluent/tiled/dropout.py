"""Dropout bits of a tile by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The bit of a score depends on (seed, offset; b * heads_q + h, i, j) alone, never on tiles: key = (low half of seed,
high half of seed XOR high half of offset), counter = (i // 2, j // 2, b * heads_q + h, low half of offset), and the
four output words belong to (i % 2, j % 2) = (0, 0), (0, 1), (1, 0), (1, 1). A score is kept iff its word is at least
round(dropout_p * 2**32).
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit product wraps as a signed integer; shifting and masking recover both of its halves.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _WORD, (product1 >> 32) & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def threshold(dropout_p: float) -> int:
    """Words below it drop their score."""
    return min(round(dropout_p * 2.0**32), _WORD)


def keep_mask(seed_offset: Tensor, dropout_p: float, rows_of: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
    """Which scores of a tile stay.

    seed_offset: int64 (2,); rows_of: b * heads_q + h, int64 (b, h, 1, 1). Returns bool (b, h, i1 - i0, j1 - j0).
    """
    device = seed_offset.device
    seed, offset = seed_offset[0], seed_offset[1]
    key = (seed & _WORD, ((seed >> 32) ^ (offset >> 32)) & _WORD)
    i = torch.arange(i0 // 2, (i1 + 1) // 2, device=device)[:, None]
    j = torch.arange(j0 // 2, (j1 + 1) // 2, device=device)[None]
    words = philox((i, j, rows_of, offset & _WORD), key)
    limit = threshold(dropout_p)
    shape = (*rows_of.shape[:2], i.shape[0], j.shape[1])
    kept = torch.empty((*shape[:2], shape[2], 2, shape[3], 2), dtype=torch.bool, device=device)
    for number, word in enumerate(words):
        torch.ge(word, limit, out=kept[:, :, :, number // 2, :, number % 2])
    kept = kept.view(*shape[:2], 2 * shape[2], 2 * shape[3])
    return kept[:, :, i0 % 2 : i0 % 2 + i1 - i0, j0 % 2 : j0 % 2 + j1 - j0]
