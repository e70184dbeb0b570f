"""Causal and window ranges, and block masks to and from torch's BlockMask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from refluent.mods.mod import Mod

Window = tuple[int | None, int | None]
"""(left, right): how many keys before and after the diagonal a row sees; None is open."""


@dataclass(frozen=True)
class BlockSpec:
    """The static facts of a block mask (no tensors): block_m query rows by block_n key columns.

    ``mask_mod`` is the block mask's own function, applied inside partial blocks (None: partial blocks are dense).
    ``has_full``: there are lists of full blocks, which skip ``mask_mod``.
    """

    block_m: int
    block_n: int
    mask_mod: Mod | None
    has_full: bool


class BlockTensors(NamedTuple):
    """A block mask's lists, int32, contiguous; Bm is 1 or B, Hm is 1 or H (query heads).

    By query block: ``kv_num`` (Bm, Hm, num_m) counts the partial key blocks, ``kv_idx`` (Bm, Hm, num_m, num_n) lists
    them (only the first kv_num entries of a row count); ``full_*`` likewise, None without full blocks.
    By key block: ``q_num`` (Bm, Hm, num_n), ``q_idx`` (Bm, Hm, num_n, num_m) and ``full_q_*``.
    """

    kv_num: Tensor
    kv_idx: Tensor
    full_kv_num: Tensor | None
    full_kv_idx: Tensor | None
    q_num: Tensor
    q_idx: Tensor
    full_q_num: Tensor | None
    full_q_idx: Tensor | None


def normalize_window(window: int | None | tuple[int | None, int | None]) -> Window:
    """Window as (left, right) with None for open; -1 and None mean open, anything else negative is refused."""
    if window is None:
        return (None, None)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be None or a pair (left, right) of ints or None, got {window!r}")
    sides: list[int | None] = []
    for name, side in zip(("left", "right"), window):
        if side is None:
            sides.append(None)
            continue
        if not isinstance(side, int) or isinstance(side, bool):
            raise TypeError(f"window {name} must be an int or None, got {side!r}")
        if side < -1:
            raise ValueError(f"window {name} must be >= 0, or -1 or None for open, got {side}")
        sides.append(None if side == -1 else side)
    return (sides[0], sides[1])


def key_range(
    first_row: int, last_row: int, *, seqlen_q: int, seqlen_k: int, causal: bool, window: Window
) -> tuple[int, int]:
    """Keys [lo, hi) that some row of first_row..last_row (inclusive) may see by causal and window."""
    shift = seqlen_k - seqlen_q
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    lo = 0 if left is None else max(0, first_row + shift - left)
    hi = seqlen_k if right is None else min(seqlen_k, last_row + shift + right + 1)
    return lo, max(lo, hi)


def interior_key_range(
    first_row: int, last_row: int, *, seqlen_q: int, seqlen_k: int, causal: bool, window: Window
) -> tuple[int, int]:
    """Keys [lo, hi) that every row of first_row..last_row (inclusive) sees by causal and window."""
    shift = seqlen_k - seqlen_q
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    lo = 0 if left is None else max(0, last_row + shift - left)
    hi = seqlen_k if right is None else min(seqlen_k, first_row + shift + right + 1)
    return lo, max(lo, hi)


def query_range(
    first_col: int, last_col: int, *, seqlen_q: int, seqlen_k: int, causal: bool, window: Window
) -> tuple[int, int]:
    """Rows [lo, hi) that may see some key of first_col..last_col (inclusive) by causal and window."""
    shift = seqlen_k - seqlen_q
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    lo = 0 if right is None else max(0, first_col - shift - right)
    hi = seqlen_q if left is None else min(seqlen_q, last_col - shift + left + 1)
    return lo, max(lo, hi)
