"""Causal and window ranges, and block masks to and from torch's BlockMask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from refluent.mods import Mod, TracedMod
from refluent.mods import mask_mod as trace_mask_mod

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


def normalize_window(window: tuple[int | None, int | None] | None) -> Window:
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


_DENSE_FUNCTION = "noop_mask"  # what torch puts where a BlockMask has no function of its own


def bind_block_mask(
    block_mask: Any, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> tuple[BlockSpec, BlockTensors, TracedMod | None]:
    """Take a torch BlockMask apart: static facts, lists, and its own mask_mod, traced (None: it has none).

    seqlen_q, seqlen_k in tokens (of a packed side: the max sequence length). A mask over longer sequences is cropped.
    Reads no values, so that nothing waits for the device. Raises TypeError for anything but a BlockMask, ValueError
    for a block size that is no multiple of 16, for a batch or head dimension that is neither 1 nor full, for a mask
    shorter than the sequences, and for one on another device.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a torch BlockMask or None, got {type(block_mask).__name__}")
    block_m, block_n = block_mask.BLOCK_SIZE
    if block_m <= 0 or block_n <= 0 or block_m % 16 or block_n % 16:
        raise ValueError(f"block_mask BLOCK_SIZE must be multiples of 16, got {block_mask.BLOCK_SIZE}")
    if block_mask.kv_num_blocks.device != device:
        raise ValueError(f"block_mask must be on {device}, got {block_mask.kv_num_blocks.device}")
    given = block_mask.kv_num_blocks.shape
    if len(given) != 3 or given[0] not in (1, batch) or given[1] not in (1, heads):
        raise ValueError(
            f"block_mask batch and head dimensions must be 1 or full ({batch}, {heads}), got {tuple(given[:-1])}"
        )
    num_m, num_n = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    have = (block_mask.kv_indices.shape[2], block_mask.kv_indices.shape[3])
    if have[0] < num_m or have[1] < num_n:
        raise ValueError(
            f"block_mask covers {have[0] * block_m} queries and {have[1] * block_n} keys, "
            f"but the sequences have {seqlen_q} and {seqlen_k}"
        )
    fn = block_mask.mask_mod
    traced = None if fn is None or getattr(fn, "__name__", "") == _DENSE_FUNCTION else trace_mask_mod(fn)
    has_full = block_mask.full_kv_num_blocks is not None
    spec = BlockSpec(block_m, block_n, None if traced is None else traced.mod, has_full)
    return spec, _tensors_of(block_mask, num_m, num_n, have), traced


def is_traced(block_mask: Any) -> bool:
    """Whether nothing is left to trace: the block mask has no function of its own, or rf.mask_mod made it."""
    fn = getattr(block_mask, "mask_mod", None)
    return fn is None or isinstance(fn, TracedMod) or getattr(fn, "__name__", "") == _DENSE_FUNCTION


def _tensors_of(block_mask: BlockMask, num_m: int, num_n: int, have: tuple[int, int]) -> BlockTensors:
    """The lists by query block and by key block, cropped to num_m x num_n blocks, transposed where torch has none."""
    lists: list[Tensor | None] = []
    transposed: list[Tensor | None] = []
    for num, idx, q_num, q_idx in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.q_num_blocks, block_mask.q_indices),
        (
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
            block_mask.full_q_num_blocks,
            block_mask.full_q_indices,
        ),
    ):
        if num is None or idx is None:
            lists += [None, None]
            transposed += [None, None]
        elif have == (num_m, num_n) and q_num is not None and q_idx is not None:
            lists += [_int32(num), _int32(idx)]
            transposed += [_int32(q_num), _int32(q_idx)]
        else:
            dense = dense_blocks(num, idx, have[1])[..., :num_m, :num_n]
            lists += list_blocks(dense)
            transposed += list_blocks(dense.transpose(-1, -2))
    return BlockTensors(*lists, *transposed)  # type: ignore[arg-type]


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def dense_blocks(num: Tensor, idx: Tensor, num_n: int) -> Tensor:
    """Lists (Bm, Hm, num_m), (Bm, Hm, num_m, >= num entries) as a bool map (Bm, Hm, num_m, num_n) of listed blocks."""
    listed = torch.arange(idx.shape[-1], device=idx.device) < num[..., None]
    # Entries past the count may hold anything: they go to an extra column.
    target = torch.where(listed, idx.long().clamp(0, max(num_n - 1, 0)), num_n)
    dense = torch.zeros(*num.shape, num_n + 1, dtype=torch.bool, device=idx.device)
    return dense.scatter_(-1, target, True)[..., :num_n]


def list_blocks(dense: Tensor) -> tuple[Tensor, Tensor]:
    """A bool map (Bm, Hm, num_m, num_n) as counts (Bm, Hm, num_m) and ascending indices (..., num_n), int32."""
    idx = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), idx.to(torch.int32).contiguous()


def check_block_tensors(tensors: BlockTensors) -> None:
    """Read the lists and raise ValueError where they contradict themselves.

    That is: a count or an index out of range, a block listed twice, lists by key block that are not the transpose of
    those by query block.
    """
    num_m, num_n = tensors.kv_idx.shape[-2:]
    maps: list[Tensor | None] = []
    for name, num, idx, limit in (
        ("kv", tensors.kv_num, tensors.kv_idx, num_n),
        ("full_kv", tensors.full_kv_num, tensors.full_kv_idx, num_n),
        ("q", tensors.q_num, tensors.q_idx, num_m),
        ("full_q", tensors.full_q_num, tensors.full_q_idx, num_m),
    ):
        if num is None or idx is None:
            maps.append(None)
            continue
        _check_between(f"{name}_num_blocks", num, torch.ones_like(num, dtype=torch.bool), min(limit, idx.shape[-1]))
        listed = torch.arange(idx.shape[-1], device=idx.device) < num[..., None]
        _check_between(f"{name}_indices", idx, listed, limit - 1)
        dense = dense_blocks(num, idx, limit)
        if bool((dense.sum(-1) != num).any()):
            raise ValueError(f"block_mask {name}_indices lists a block twice in one row")
        maps.append(dense)
    kv, full_kv, q, full_q = maps
    if kv is not None and full_kv is not None and bool((kv & full_kv).any()):
        raise ValueError("block_mask lists a block both as partial and as full")
    for by_query, by_key in ((kv, q), (full_kv, full_q)):
        if by_query is not None and by_key is not None and not torch.equal(by_query, by_key.transpose(-1, -2)):
            raise ValueError("block_mask q_indices are not the transpose of its kv_indices")


def _check_between(name: str, values: Tensor, counts: Tensor, most: int) -> None:
    wrong = values[counts & ((values < 0) | (values > most))]
    if wrong.numel():
        raise ValueError(f"block_mask {name} must be between 0 and {most}, got {int(wrong[0])}")


def to_block_mask(
    spec: BlockSpec, tensors: BlockTensors, mask_mod: Callable[..., Any] | None, *, seqlen_q: int, seqlen_k: int
) -> BlockMask:
    """Put a torch BlockMask together again; ``mask_mod``: the function of ``spec.mask_mod``."""
    return BlockMask.from_kv_blocks(
        tensors.kv_num,
        tensors.kv_idx,
        tensors.full_kv_num,
        tensors.full_kv_idx,
        BLOCK_SIZE=(spec.block_m, spec.block_n),
        mask_mod=mask_mod,
        seq_lengths=(seqlen_q, seqlen_k),
    )


_CHUNK = 1 << 22
"""Positions that create_block_mask evaluates at once."""


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """torch's create_block_mask, without a (Q_LEN, KV_LEN) tensor: strips of at most 4 million positions at a time.

    ``mask_mod(b, h, i, j) -> bool`` or a traced one. B, H: batches and query heads, None or 1 where the mask is the
    same for all of them. Lengths in tokens; ``BLOCK_SIZE``: multiple of 16, or a pair (queries, keys) of them. The
    lists are on ``device`` (default: that of the function's captured tensors, else the CPU). Blocks at a ragged end
    are partial, as torch has them.
    """
    traced = trace_mask_mod(mask_mod)
    block_m, block_n = _block_size(BLOCK_SIZE)
    batch, heads = (1 if size is None else _at_least_one(name, size) for name, size in (("B", B), ("H", H)))
    for name, size in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        _at_least_one(name, size)
    device = _list_device(device, traced)
    num_m, num_n = -(-Q_LEN // block_m), -(-KV_LEN // block_n)
    partial = torch.zeros(batch, heads, num_m, num_n, dtype=torch.bool, device=device)
    full = torch.zeros_like(partial)
    blocks_at_once = max(1, _CHUNK // (batch * heads * block_m * block_n))
    for m in range(num_m):
        for n in range(0, num_n, blocks_at_once):
            counts = _count_allowed(
                traced,
                (batch, heads),
                (m * block_m, min(Q_LEN, (m + 1) * block_m)),
                (n * block_n, min(KV_LEN, (n + blocks_at_once) * block_n)),
                block_n,
                device,
            )
            full[:, :, m, n : n + blocks_at_once] = counts == block_m * block_n
            partial[:, :, m, n : n + blocks_at_once] = (counts > 0) & (counts < block_m * block_n)
    return BlockMask.from_kv_blocks(
        *list_blocks(partial),
        *list_blocks(full),
        BLOCK_SIZE=(block_m, block_n),
        mask_mod=mask_mod,
        seq_lengths=(Q_LEN, KV_LEN),
    )


def _block_size(given: Any) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
    if len(pair) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) for size in pair):
        raise TypeError(f"BLOCK_SIZE must be an int or a pair of ints (queries, keys), got {given!r}")
    if min(pair) <= 0 or pair[0] % 16 or pair[1] % 16:
        raise ValueError(f"BLOCK_SIZE must be multiples of 16, got {given}")
    return pair[0], pair[1]


def _at_least_one(name: str, size: Any) -> int:
    optional = " or None" if name in ("B", "H") else ""
    if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
        raise TypeError(f"{name} must be an int{optional}, got {size!r}")
    if size < 1:
        raise ValueError(f"{name} must be at least 1{optional}, got {size}")
    return size  # type: ignore[return-value]


def _list_device(given: Any, traced: TracedMod) -> torch.device:
    if given is None:
        return traced.captured[0].device if traced.captured else torch.device("cpu")
    if not isinstance(given, str | int | torch.device) or isinstance(given, bool):
        raise TypeError(f"device must be a torch.device, its name or None, got {given!r}")
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch.device, its name or None, got {given!r}") from error


def _count_allowed(
    traced: TracedMod,
    sizes: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    block_n: int,
    device: torch.device,
) -> Tensor:
    """How many positions of each block of a strip the mask allows: (B, H, number of blocks)."""
    b = torch.arange(sizes[0], device=device).view(-1, 1, 1, 1)
    h = torch.arange(sizes[1], device=device).view(1, -1, 1, 1)
    i = torch.arange(*rows, device=device).view(1, 1, -1, 1)
    j = torch.arange(*columns, device=device).view(1, 1, 1, -1)
    allowed = traced.mod.evaluate(None, b, h, i, j, traced.captured, origin=(0, 0, rows[0], columns[0]))
    per_column = allowed.expand(-1, -1, len(i.flatten()), j.shape[-1]).sum(2, dtype=torch.int32)
    ragged = -per_column.shape[-1] % block_n
    per_block = torch.nn.functional.pad(per_column, (0, ragged)).unflatten(-1, (-1, block_n)).sum(-1)
    return per_block.expand(*sizes, -1)
