"""Common score_mods and mask_mods: each function returns a plain callable to give to attention().

i and j count inside each sequence. Where queries are the last ones of a longer key sequence, ``shift`` =
seqlen_k - seqlen_q puts the diagonal where causal and window have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """ALiBi's slopes, (heads,) float32: a geometric series that starts at 2^(-8/n) for n heads, n a power of two.

    Other numbers of heads take every other slope of the series for twice the power of two below, after that power's
    own (Press, Smith and Lewis, "Train Short, Test Long", 2022, section 3).
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    below = 2 ** int(math.log2(heads))
    series = [2.0 ** (-8.0 * (n + 1) / below) for n in range(below)]
    finer = [2.0 ** (-4.0 * (n + 1) / below) for n in range(0, 2 * below, 2)]
    return torch.tensor((series + finer)[:heads], device=device)


def alibi(slopes: Tensor, *, shift: int = 0) -> ScoreMod:
    """Adds slopes[h] * (j - i - shift); slopes (H,), learned if it requires grad (Press et al., 2022)."""
    _check_shape("slopes", slopes, 1)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + slopes[h] * (j - i - shift)

    return alibi


def relative_bias(table: Tensor, *, shift: int = 0) -> ScoreMod:
    """Adds table[h, n + d], d = j - i - shift clamped to [-n, n]; table (H, 2 n + 1), learned if it requires grad.

    The clipped relative positions of Shaw, Uszkoreit and Vaswani, 2018, as a bias on the scores.
    """
    _check_shape("table", table, 2)
    if table.shape[1] % 2 != 1:
        raise ValueError(f"table must have an odd number of columns (2 n + 1 distances), got {table.shape[1]}")
    reach = table.shape[1] // 2

    def relative_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (j - i - shift).clamp(-reach, reach) + reach]

    return relative_bias


def t5_bias(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128, shift: int = 0) -> ScoreMod:
    """Adds table[bucket(j - i - shift), h]; table (buckets, H), learned if it requires grad.

    Half of a direction's buckets hold one distance each, the others widen logarithmically up to ``max_distance``, and
    all further ones share the last (Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 2.1).
    ``bidirectional=False``: keys after the query share bucket 0.
    """
    _check_shape("table", table, 2)
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(f"table has too few buckets ({table.shape[0]}) for max_distance {max_distance}")
    per_octave = (buckets - exact) / math.log(max_distance / exact)

    def t5_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        past = i + shift - j
        distance = past.abs() if bidirectional else past.clamp(min=0)
        wide = exact + ((distance.clamp(min=1).float() / exact).log() * per_octave).floor().long()
        bucket = torch.where(distance < exact, distance, wide.clamp(exact, buckets - 1))
        if bidirectional:
            bucket = bucket + (past < 0) * buckets
        return score + table[bucket, h]

    return t5_bias


def additive_bias(bias: Tensor) -> ScoreMod:
    """Adds bias (1 or B, 1 or H, Sq, Sk), with a gradient if it requires grad."""
    _check_shape("bias", bias, 4)
    by_batch, by_head = bias.shape[0] > 1, bias.shape[1] > 1

    def additive_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b if by_batch else 0, h if by_head else 0, i, j]

    return additive_bias


def softcap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap), as the softcap argument, but where other mods can be put before or after it."""
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")

    def softcap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return softcap


def document_mask(query_ids: Tensor, key_ids: Tensor | None = None) -> MaskMod:
    """A query sees the keys of its own document; ids (B, S) or (S,), whole numbers; key_ids: query_ids if None."""
    keys = query_ids if key_ids is None else key_ids
    for name, ids in (("query_ids", query_ids), ("key_ids", keys)):
        if ids.ndim not in (1, 2) or ids.is_floating_point():
            raise ValueError(f"{name} must be whole numbers (B, S) or (S,), got {ids.dtype} {tuple(ids.shape)}")

    def document_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query = query_ids[i] if query_ids.ndim == 1 else query_ids[b, i]
        key = keys[j] if keys.ndim == 1 else keys[b, j]
        return query == key

    return document_mask


def prefix_lm(prefix: int | Tensor, *, shift: int = 0) -> MaskMod:
    """Everyone sees the first ``prefix`` keys (a number, or whole numbers (B,)), and what lies before themselves."""
    if isinstance(prefix, Tensor):
        _check_shape("prefix", prefix, 1)

    def prefix_lm(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        length = prefix[b] if isinstance(prefix, Tensor) else prefix
        return (j < length) | (j <= i + shift)

    return prefix_lm


def sink_window(first: int, last: int, *, shift: int = 0) -> MaskMod:
    """The first ``first`` keys and the ``last`` ones up to the query itself, causal.

    The attention sinks of Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024.
    """
    if first < 0 or last < 1:
        raise ValueError(f"first must be >= 0 and last >= 1, got {first} and {last}")

    def sink_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + shift) & ((j < first) | (j > i + shift - last))

    return sink_window


def dilated(step: int, *, shift: int = 0) -> MaskMod:
    """Every ``step``-th key, counted from the query: j - i - shift is a multiple of step."""
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")

    def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j - i - shift) % step == 0

    return dilated


def _check_shape(name: str, tensor: Tensor, ndim: int) -> None:
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(tensor.shape)}")
