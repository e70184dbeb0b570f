"""Which tiles a chunk visits, and which scores inside a tile may be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from refluent import masks
from refluent.mods.mod import Mod, Origin
from refluent.problem import Inputs, Problem
from refluent.tiled.walk import Chunk, TileSize

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_MINUS_INF = {torch.float32: -(1 << 23), torch.float64: -(1 << 52)}  # the bit pattern of -inf as a signed integer


class Keep:
    """The visible elements of a tile, as integers to AND with the bits of floats: -1 visible, 0 masked.

    Integer AND clears what stands at a masked place whatever it is, inf and NaN included, and runs at memory speed
    on the CPU where a select by a bool tensor is 25 times slower.
    """

    def __init__(self, allowed: Tensor, dtype: torch.dtype) -> None:
        """allowed: bool, broadcastable to the tiles that it will be used on; dtype: of those tiles."""
        self._type = _BITS[dtype]
        self._bits = allowed.to(self._type).neg_()
        self._fill: Tensor | None = None
        self._minus_inf = _MINUS_INF[dtype]

    def zero_(self, x: Tensor) -> None:
        """Masked elements of x become exactly 0."""
        x.view(self._type).bitwise_and_(self._bits)

    def scores(self, x: Tensor, out: Tensor) -> None:
        """out = x with -inf in masked places; out may be x."""
        if self._fill is None:
            self._fill = self._bits.bitwise_not().bitwise_and_(self._minus_inf)
        target = out.view(self._type)
        torch.bitwise_and(x.view(self._type), self._bits, out=target)
        target.bitwise_or_(self._fill)


@dataclass(frozen=True)
class Positions:
    """b (b, 1, 1, 1), h (1, h, 1, 1), i (1, 1, tm, 1), j (1, 1, 1, tn), int64."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    origin: Origin | None  # set when every one of them ascends by one


@dataclass(frozen=True)
class Tile:
    """Rows [i0, i1) by keys [j0, j1); ``keep`` is None when all of it is visible."""

    i0: int
    i1: int
    j0: int
    j1: int
    keep: Keep | None


class BlockMap:
    """A block mask as one small table: 0 skipped, 1 partial, 2 full; (Bm, Hm, num_m, num_n) int8."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        spec, lists = problem.options.block_mask, inputs.blocks
        if spec is None or lists is None:
            raise ValueError("block_mask: got its specification without its lists; allowed: both")
        self.spec = spec
        self.state = torch.zeros(
            (*lists.kv_idx.shape[:-1], lists.kv_idx.shape[-1] + 1), dtype=torch.int8, device=problem.device
        )
        self._mark(lists.kv_num, lists.kv_idx, 1)
        if lists.full_kv_num is not None and lists.full_kv_idx is not None:
            self._mark(lists.full_kv_num, lists.full_kv_idx, 2)
        self.state = self.state[..., :-1]

    @property
    def by_batch(self) -> bool:
        return self.state.shape[0] > 1

    @property
    def by_head(self) -> bool:
        return self.state.shape[1] > 1

    def _mark(self, num: Tensor, index: Tensor, value: int) -> None:
        columns = index.shape[-1]
        listed = torch.arange(columns, device=index.device) < num[..., None]
        # Entries past the count go to a spare last column: nothing is read on the host.
        where = torch.where(listed, index.long().clamp(0, max(columns - 1, 0)), columns)
        self.state.scatter_(-1, where, value)

    def part(self, chunk: Chunk, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """The states of the blocks that a tile touches, for this chunk's sequences and heads."""
        state = self.state
        if self.by_batch:
            state = state[chunk.batch]
        if self.by_head:
            state = state[:, chunk.h0 : chunk.h0 + chunk.num_h]
        m, n = self.spec.block_m, self.spec.block_n
        return state[..., i0 // m : (i1 - 1) // m + 1, j0 // n : (j1 - 1) // n + 1]

    def spread(self, part: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """``part`` with one element per score."""
        m, n = self.spec.block_m, self.spec.block_n
        row = torch.arange(i0, i1, device=part.device) // m - i0 // m
        column = torch.arange(j0, j1, device=part.device) // n - j0 // n
        return part[..., row[:, None], column]


class Visibility:
    """The tiles of one chunk. Tiles that causal, window or the block mask empty are never produced."""

    def __init__(self, problem: Problem, inputs: Inputs, chunk: Chunk, tile: TileSize, blocks: BlockMap | None) -> None:
        self._options = problem.options
        self._inputs = inputs
        self._dtype = problem.accum_dtype
        self._device = problem.device
        self._chunk = chunk
        self._segment = chunk.segment
        self._tile = tile
        self._blocks = blocks
        self._bands: dict[tuple[int, int, int], Keep] = {}
        self._b = torch.arange(chunk.b0, chunk.b0 + chunk.num_b, device=self._device)[:, None, None, None]
        self._h = torch.arange(chunk.h0, chunk.h0 + chunk.num_h, device=self._device)[None, :, None, None]
        left, right = self._options.window
        if self._options.causal:
            right = 0 if right is None else min(right, 0)
        self._left, self._right = left, right

    @property
    def clamp(self) -> bool:
        """Whether reads of captured tensors are clamped, not checked: checking would wait for the device."""
        return self._device.type != "cpu" or self._padded

    @property
    def _padded(self) -> bool:
        return self._segment.used_q is not None or self._segment.used_k is not None

    def batch_head(self, heads_q: int) -> Tensor:
        """b * heads_q + h, (b, h, 1, 1)."""
        return self._b * heads_q + self._h

    def positions(self, i0: int, i1: int, j0: int, j1: int) -> Positions:
        """The positions of a tile's scores.

        Where only the device knows the lengths some lie outside; then reads of captured tensors are clamped, and what
        they return is masked.
        """
        i = torch.arange(i0, i1, device=self._device)[None, None, :, None]
        j = torch.arange(j0, j1, device=self._device)[None, None, None]
        origin = None if self._padded else (self._chunk.b0, self._chunk.h0, i0, j0)
        return Positions(self._b, self._h, i, j, origin)

    def tiles(self, i0: int, i1: int) -> Iterator[Tile]:
        """Tiles of rows [i0, i1), each within one step of ``tile.n`` keys and cut to what may be seen."""
        lo, hi = self._key_range(i0, i1)
        step = self._tile.n
        for start in range(lo // step * step, hi, step):
            tile = self._tile_at(i0, i1, max(lo, start), min(hi, start + step))
            if tile is not None:
                yield tile

    def _key_range(self, i0: int, i1: int) -> tuple[int, int]:
        segment = self._segment
        if isinstance(segment.shift, Tensor):
            return 0, segment.len_k
        return masks.key_range(
            i0,
            i1 - 1,
            seqlen_q=segment.len_q,
            seqlen_k=segment.len_k,
            causal=self._options.causal,
            window=self._options.window,
        )

    def _tile_at(self, i0: int, i1: int, j0: int, j1: int) -> Tile | None:
        """The tile with its mask, None when its mask is known to be empty."""
        allowed: Tensor | None = None
        if self._blocks is not None:
            part = self._blocks.part(self._chunk, i0, i1, j0, j1)
            low, high = self._block_states(part)
            if high == 0:
                return None
            if low < 2:
                allowed = self._block_allowed(self._blocks, part, low == high == 1, i0, i1, j0, j1)
        if self._options.mask_mod is not None:
            mod, captured = self._options.mask_mod, self._inputs.mask_captured
            allowed = _both(allowed, self._evaluate(mod, captured, i0, i1, j0, j1))
        if allowed is not None and self._device.type == "cpu":
            if not allowed.any():
                return None
            if allowed.all():
                allowed = None
        if not self._inside_band(i0, i1, j0, j1):
            if allowed is None and not isinstance(self._segment.shift, Tensor):
                return Tile(i0, i1, j0, j1, self._band_keep(i0, i1, j0, j1))
            allowed = _both(allowed, self._band(i0, i1, j0, j1))
        allowed = _both(allowed, self._inside_lengths(i0, i1, j0, j1))
        return Tile(i0, i1, j0, j1, None if allowed is None else Keep(allowed, self._dtype))

    def _evaluate(self, mod: Mod, captured: tuple[Tensor, ...], i0: int, i1: int, j0: int, j1: int) -> Tensor:
        at = self.positions(i0, i1, j0, j1)
        return mod.evaluate(None, at.b, at.h, at.i, at.j, captured, origin=at.origin, clamp=self.clamp)

    def _block_states(self, part: Tensor) -> tuple[int, int]:
        """Lowest and highest state in a tile; elsewhere than on the CPU they stay unknown: anything may occur."""
        if self._device.type != "cpu":
            return 0, 2
        low, high = torch.aminmax(part)
        return int(low), int(high)

    def _block_allowed(
        self, blocks: BlockMap, part: Tensor, all_partial: bool, i0: int, i1: int, j0: int, j1: int
    ) -> Tensor | None:
        """What the block mask allows in a tile that is not full; None for everything."""
        seen: Tensor | None = None
        if blocks.spec.mask_mod is not None:
            seen = self._evaluate(blocks.spec.mask_mod, self._inputs.block_captured, i0, i1, j0, j1)
        if all_partial:
            return seen
        state = blocks.spread(part, i0, i1, j0, j1)
        return state > 0 if seen is None else (state == 2) | ((state == 1) & seen)

    def _inside_band(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Whether causal and window leave the whole tile visible."""
        if self._left is None and self._right is None:
            return True
        shift = self._segment.shift
        if isinstance(shift, Tensor):
            return False
        left_ok = self._left is None or i1 - 1 + shift - self._left <= j0
        return left_ok and (self._right is None or j1 - 1 <= i0 + shift + self._right)

    def _band(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """Causal and window as bool, (tm, tn) or (b, 1, tm, tn)."""
        i = torch.arange(i0, i1, device=self._device)[:, None]
        distance = torch.arange(j0, j1, device=self._device) - i  # key minus row
        shift = self._segment.shift
        if isinstance(shift, Tensor):
            shift = shift[self._batch()]
        seen: Tensor | None = None
        if self._left is not None:
            seen = distance >= shift - self._left
        if self._right is not None:
            seen = _both(seen, distance <= shift + self._right)
        return torch.ones_like(distance, dtype=torch.bool) if seen is None else seen

    def _band_keep(self, i0: int, i1: int, j0: int, j1: int) -> Keep:
        """The band depends on j0 - i0 alone, so tiles along a diagonal share it."""
        key = (j0 - i0, i1 - i0, j1 - j0)
        if key not in self._bands:
            self._bands[key] = Keep(self._band(i0, i1, j0, j1), self._dtype)
        return self._bands[key]

    def _inside_lengths(self, i0: int, i1: int, j0: int, j1: int) -> Tensor | None:
        inside: Tensor | None = None
        used_q, used_k = self._used(self._segment.used_q), self._used(self._segment.used_k)
        if used_q is not None:
            inside = torch.arange(i0, i1, device=self._device)[:, None] < used_q
        if used_k is not None:
            inside = _both(inside, torch.arange(j0, j1, device=self._device) < used_k)
        return inside

    def _used(self, used: Tensor | None) -> Tensor | None:
        return None if used is None else used[self._batch()]

    def _batch(self) -> slice:
        start = self._chunk.b0 - self._segment.batch.start
        return slice(start, start + self._chunk.num_b)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b
