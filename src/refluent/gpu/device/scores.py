"""What softcap and dropout do to a pair of neighbouring scores, and their run-time numbers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.numerics import tanh


@dataclass(frozen=True)
class Scores:
    """Run-time numbers of the score function: s = scale q k, softcap tanh; dropout's key and threshold."""

    factor: cutlass.Float32  # log2(e) scale, never 0
    softcap: cutlass.Float32
    philox: cute.Tensor | None  # int64 (2,): seed, offset
    keep_from: cutlass.Uint32  # an element is kept iff its word is at least this
    keep_scale: cutlass.Float32  # 1 / (1 - dropout_p)
    captured: tuple = ()  # by score_mod; a 0-d tensor comes as one of one element
    mask_captured: tuple = ()  # by mask_mod
    sums: tuple = ()  # gradients of `captured`, float32 or exact (device/exact.py), or None


@cute.jit
def capped(scores: Scores, scale: cutlass.Float32, score):
    """tanh(scale s / softcap) of a pair of raw scores, and its derivative with respect to the scaled score."""
    inner = scale / scores.softcap
    t = tanh(score[0] * inner), tanh(score[1] * inner)
    return t, (1.0 - t[0] * t[0], 1.0 - t[1] * t[1])


@cute.jit
def kept_part(scores: Scores, dropout: cutlass.Constexpr, pair, kept: cutlass.Uint64, c: cutlass.Constexpr):
    """A pair of values where dropout keeps their scores, scaled; zeros elsewhere. Bits c and c + 1."""
    if cutlass.const_expr(not dropout):
        return pair
    bits = cutlass.Uint32(kept >> cutlass.Uint64(c))
    factor = scores.keep_scale
    first = pair[0] * factor if bits & 1 != 0 else cutlass.Float32(0.0)
    second = pair[1] * factor if bits & 2 != 0 else cutlass.Float32(0.0)
    return first, second
