"""Dropout bits by Philox4x32-10 (Salmon et al., SC 2011), the same on every backend.

key = (low half of seed, high half of seed XOR high half of offset), counter = (i // 2, j // 2, b * heads + h, low half
of offset); the output words belong to (i % 2, j % 2) = (0, 0), (0, 1), (1, 0), (1, 1).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


@cute.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four 32-bit words for a counter and a key of 32-bit words."""
    for _ in cutlass.range_constexpr(ROUNDS):
        p0 = cutlass.Uint64(c0) * MULTIPLIERS[0]
        p1 = cutlass.Uint64(c2) * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            cutlass.Uint32(p1 >> 32) ^ c1 ^ k0,
            cutlass.Uint32(p1),
            cutlass.Uint32(p0 >> 32) ^ c3 ^ k1,
            cutlass.Uint32(p0),
        )
        k0, k1 = k0 + cutlass.Uint32(WEYL[0]), k1 + cutlass.Uint32(WEYL[1])
    return c0, c1, c2, c3


@cute.jit
def kept_queries(
    state: cute.Tensor,
    keep_from: cutlass.Uint32,
    stream,
    first_query,
    key,
    count: cutlass.Constexpr,
    stride: cutlass.Constexpr = 2,
):
    """Bits 2 p and 2 p + 1 of the result: whether the scores of query first_query (even) + stride p, of the one behind
    it, and `key` are kept; count up to 64.

    state: int64 (2,), seed and offset; stream: b * heads + h.
    """
    seed, offset = cutlass.Uint64(state[0]), cutlass.Uint64(state[1])
    k0, k1 = cutlass.Uint32(seed), cutlass.Uint32(seed >> 32) ^ cutlass.Uint32(offset >> 32)
    odd_key = key % 2 == 1
    bits = cutlass.Uint64(0)
    for pair in cutlass.range(count // 2):
        w0, w1, w2, w3 = philox(
            cutlass.Uint32(first_query // 2 + pair * (stride // 2)),
            cutlass.Uint32(key // 2),
            cutlass.Uint32(stream),
            cutlass.Uint32(offset),
            k0,
            k1,
        )
        even = w1 if odd_key else w0
        odd = w3 if odd_key else w2
        both = cutlass.Uint64(0)
        if even >= keep_from:
            both = cutlass.Uint64(1)
        if odd >= keep_from:
            both = both | cutlass.Uint64(2)
        bits = bits | (both << cutlass.Uint64(2 * pair))
    return bits
