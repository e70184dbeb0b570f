"""What is walked over: segments of sequences, chunks of heads, tiles of rows and keys.

A *segment* is a set of sequences that share one loop over tiles. On the CPU lengths are read on the host: every
sequence with a length of its own is a segment of exactly its rows, so nothing outside it is ever touched. On other
devices nothing is read: one padded segment holds every sequence and its lengths stay tensors that masks look at.
A *chunk* is the part of a segment whose scores are computed in one batched matrix product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from refluent.problem import Inputs, Problem


@dataclass(frozen=True)
class TileSize:
    """Rows and keys per tile, and how many scores one batched product may hold (elements)."""

    m: int
    n: int
    scores: int


@dataclass(frozen=True)
class Segment:
    """Sequences ``batch`` and where their tokens stand, as slices of positions (padded) or of tokens (packed)."""

    batch: slice
    rows: slice
    keys: slice
    len_q: int
    len_k: int
    shift: int | Tensor
    """Sk - Sq, what the causal diagonal is moved by; (b, 1, 1, 1) where sequences differ and stay on the device."""
    used_q: Tensor | None = None  # (b, 1, 1, 1) int64: lengths that only the device knows
    used_k: Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """Part of a segment: ``num_b`` sequences from ``b0``, ``num_kv`` key heads from ``kv0`` and their query heads."""

    segment: Segment
    b0: int
    num_b: int
    kv0: int
    num_kv: int
    group: int

    @property
    def units(self) -> int:
        """Batch size of the matrix products: one unit is a key head of a sequence."""
        return self.num_b * self.num_kv

    @property
    def h0(self) -> int:
        return self.kv0 * self.group

    @property
    def num_h(self) -> int:
        return self.num_kv * self.group

    @property
    def batch(self) -> slice:
        return slice(self.b0, self.b0 + self.num_b)

    def query_side(self, x: Tensor, i0: int, i1: int) -> Tensor:
        """Rows [i0, i1) of a (b, s, h, d) or (t, h, d) tensor, as a view (b, h, s, d)."""
        return self._view(x, self.segment.rows.start, i0, i1, self.h0, self.num_h)

    def key_side(self, x: Tensor, j0: int, j1: int) -> Tensor:
        """Keys [j0, j1) of a (b, s, hkv, d) or (t, hkv, d) tensor, as a view (b, hkv, s, d)."""
        return self._view(x, self.segment.keys.start, j0, j1, self.kv0, self.num_kv)

    def row_side(self, x: Tensor, i0: int, i1: int) -> Tensor:
        """Rows [i0, i1) of a (b, h, s) or (h, t) tensor, as a view (b, h, s)."""
        start = self.segment.rows.start
        heads = slice(self.h0, self.h0 + self.num_h)
        if x.dim() == 2:
            return x[heads, start + i0 : start + i1].unsqueeze(0)
        return x[self.batch, heads, start + i0 : start + i1]

    def head_side(self, x: Tensor) -> Tensor:
        """This chunk's part of an (h,) tensor."""
        return x[self.h0 : self.h0 + self.num_h]

    def _view(self, x: Tensor, start: int, s0: int, s1: int, head0: int, heads: int) -> Tensor:
        x = x.narrow(-2, head0, heads)
        if x.dim() == 3:
            return x[start + s0 : start + s1].transpose(0, 1).unsqueeze(0)
        return x[self.batch, start + s0 : start + s1].transpose(1, 2)


def own_lengths(problem: Problem) -> bool:
    """Whether sequences have lengths of their own."""
    return problem.varlen_q or problem.varlen_k or problem.has_seqused_q or problem.has_seqused_k


def host_segments(problem: Problem, inputs: Inputs) -> list[Segment]:
    """Segments with exact lengths, read on the host."""
    if not own_lengths(problem):
        sq, sk = problem.seqlen_q, problem.seqlen_k
        return [Segment(slice(0, problem.batch), slice(0, sq), slice(0, sk), sq, sk, sk - sq)]
    rows = _spans(problem.batch, problem.seqlen_q, inputs.cu_seqlens_q, inputs.seqused_q)
    keys = _spans(problem.batch, problem.seqlen_k, inputs.cu_seqlens_k, inputs.seqused_k)
    segments = []
    for b, (q, k) in enumerate(zip(rows, keys)):
        len_q, len_k = q.stop - q.start, k.stop - k.start
        segments.append(Segment(slice(b, b + 1), q, k, len_q, len_k, len_k - len_q))
    return segments


def _spans(batch: int, seqlen: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[slice]:
    starts = [0] * batch
    lengths = [seqlen] * batch
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        starts = bounds[:-1]
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if seqused is not None:
        lengths = [min(length, used) for length, used in zip(lengths, seqused.tolist())]
    return [slice(start, start + length) for start, length in zip(starts, lengths)]


def covers_everything(problem: Problem) -> bool:
    """Whether chunks reach every row and key: no lengths of sequences' own, and rows to start from."""
    return not own_lengths(problem) and problem.seqlen_q > 0


def default_tile(problem: Problem) -> TileSize:
    """Tile sizes by device: near a core's cache on the CPU, large batches elsewhere."""
    if problem.device.type != "cpu":
        return TileSize(m=512, n=512, scores=1 << 24)
    options = problem.options
    left, right = options.window
    if options.causal:
        right = 0
    narrow = left is not None and right is not None and left + right < 160
    # Long tiles mean fewer calls; a mask_mod or a block mask skips more with short ones.
    n = 128 if narrow else 256 if options.mask_mod is not None or options.block_mask is not None else 512
    # The rows of a group's heads are stacked in one product: a large group gets fewer rows per head.
    m = min(128 if narrow else 256, max(32, 2048 // problem.group // 16 * 16))
    return TileSize(m=m, n=n, scores=1 << 19)


def chunks(
    segment: Segment, problem: Problem, tile: TileSize, by_batch: bool, by_head: bool, parts: int = 1
) -> Iterator[Chunk]:
    """Cut a segment so that one tile of a chunk stays within ``tile.scores``, into ``parts`` chunks or more.

    ``by_batch`` and ``by_head``: what is visible differs between sequences or heads, so each gets chunks of its own
    that skip what it alone does not see. Heads are not cut further to get more parts.
    """
    tile_m, tile_n = min(tile.m, max(segment.len_q, 1)), min(tile.n, max(segment.len_k, 1))
    num_b = segment.batch.stop - segment.batch.start
    units = max(1, tile.scores // (problem.group * tile_m * tile_n))
    units = min(units, max(1, -(-num_b * problem.heads_kv // parts)))
    step_kv = 1 if by_head else min(units, problem.heads_kv)
    step_b = 1 if by_batch or step_kv < problem.heads_kv else max(1, min(units // problem.heads_kv, num_b))
    for b0 in range(segment.batch.start, segment.batch.stop, step_b):
        for kv0 in range(0, problem.heads_kv, step_kv):
            yield Chunk(
                segment,
                b0,
                min(step_b, segment.batch.stop - b0),
                kv0,
                min(step_kv, problem.heads_kv - kv0),
                problem.group,
            )


def accumulator(problem: Problem, shape: tuple[int, ...], fill: float = 0.0) -> Tensor:
    """A new tensor of the accumulate type."""
    return torch.full(shape, fill, dtype=problem.accum_dtype, device=problem.device)
