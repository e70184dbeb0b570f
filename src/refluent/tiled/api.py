"""The backend protocol on top of chunks: torch's own kernel or tiles, threads, padding, results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from refluent.problem import Gradients, Inputs, Needs, Problem
from refluent.tiled import cpu_flash, parallel
from refluent.tiled.backward import Upstream, add, backward_chunks, empty_gradients, finish, private
from refluent.tiled.forward import Outputs, forward_chunks
from refluent.tiled.padding import pad
from refluent.tiled.visible import BlockMap
from refluent.tiled.walk import Chunk, Segment, TileSize, chunks, covers_everything, default_tile, host_segments

_SHARED_SCORES = 1 << 18
"""Scores of a call from which several threads are worth waking (about 0.1 ms)."""
_SHARED_GRADIENT = 1 << 22
"""Elements of captured tensors' gradients up to which every thread may hold its own."""


def supports(problem: Problem) -> str | None:
    """None when this backend can run the problem, else the reason."""
    if problem.device.type == "mps" and problem.accum_dtype.itemsize == 8:
        return "float64 does not exist on mps devices; use float32 or the CPU"
    return None


@dataclass(frozen=True)
class _Walk:
    """How a call's segments become chunks."""

    problem: Problem
    tile: TileSize
    blocks: BlockMap | None
    workers: int

    @staticmethod
    def of(problem: Problem, inputs: Inputs, tile: TileSize | None, segments: Sequence[Segment]) -> _Walk:
        blocks = None if problem.options.block_mask is None else BlockMap(problem, inputs)
        workers = 1
        if problem.device.type == "cpu":
            scores = sum(s.len_q * s.len_k * (s.batch.stop - s.batch.start) for s in segments) * problem.heads_q
            workers = torch.get_num_threads() if scores >= _SHARED_SCORES else 1
        return _Walk(problem, tile or default_tile(problem), blocks, workers)

    def chunks(self, segments: Sequence[Segment]) -> list[Chunk]:
        by_batch, by_head = (False, False) if self.blocks is None else (self.blocks.by_batch, self.blocks.by_head)
        parts = self.workers if len(segments) == 1 else 1
        return [
            chunk
            for segment in segments
            if segment.len_q > 0
            for chunk in chunks(segment, self.problem, self.tile, by_batch, by_head, parts)
        ]


def forward(
    problem: Problem, inputs: Inputs, tile: TileSize | None = None, host_lengths: bool | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o (b, sq, h, dv) or (tq, h, dv), lse (b, h, sq) or (h, tq), max_score like lse or None.

    ``tile`` (by default torch's own CPU kernel where that fits, else a size by device) and ``host_lengths`` (read
    lengths on the host; by default on the CPU alone) change how the result is computed, never what it is.
    """
    if not _reads_lengths(problem, host_lengths):
        return _forward_padded(problem, inputs, tile)
    segments = host_segments(problem, inputs)
    calls = [cpu_flash.plan_forward(problem, segment) if tile is None else None for segment in segments]
    if covers_everything(problem) and calls[0] is not None:
        alone = cpu_flash.forward_alone(problem, inputs, calls[0])
        if alone is not None:
            return alone.o, alone.lse, None
    out = Outputs.empty(problem, inputs.q)
    tiled = [
        segment
        for segment, call in zip(segments, calls)
        if call is None or not cpu_flash.forward_segment(problem, inputs, call, out)
    ]
    _forward_tiles(problem, inputs, tile, tiled, out)
    return out.o, out.lse, out.max_score


def _forward_padded(problem: Problem, inputs: Inputs, tile: TileSize | None) -> tuple[Tensor, Tensor, Tensor | None]:
    padded = pad(problem, inputs)
    out = Outputs.empty(problem, padded.inputs.q)
    _forward_tiles(problem, padded.inputs, tile, [padded.segment], out)
    queries = padded.queries
    max_score = None if out.max_score is None else queries.unpad_rows(out.max_score, -math.inf)
    return queries.unpad(out.o), queries.unpad_rows(out.lse, -math.inf), max_score


def _forward_tiles(
    problem: Problem, inputs: Inputs, tile: TileSize | None, segments: Sequence[Segment], out: Outputs
) -> None:
    walk = _Walk.of(problem, inputs, tile, segments)

    def work(part: Sequence[Chunk]) -> None:
        forward_chunks(problem, inputs, part, walk.tile, walk.blocks, out)

    parallel.share(walk.chunks(segments), work, walk.workers)


def backward(
    problem: Problem,
    inputs: Inputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    needs: Needs,
    tile: TileSize | None = None,
    host_lengths: bool | None = None,
) -> Gradients:
    """Gradients of q, k, v, sink and captured tensors; o, lse as :func:`forward` made them, do any strides."""
    upstream = Upstream(o, lse, do, dlse)
    if not _reads_lengths(problem, host_lengths):
        return _backward_padded(problem, inputs, upstream, needs, tile)
    out = empty_gradients(problem, inputs, needs)
    tiled: list[Segment] = []
    for segment in host_segments(problem, inputs):
        call = cpu_flash.plan_backward(problem, segment, dlse) if tile is None else None
        if call is None or not cpu_flash.backward_segment(problem, inputs, call, upstream, out):
            tiled.append(segment)
    _backward_tiles(problem, inputs, tile, tiled, upstream, needs, out)
    return finish(inputs, out)


def _backward_padded(
    problem: Problem, inputs: Inputs, upstream: Upstream, needs: Needs, tile: TileSize | None
) -> Gradients:
    padded = pad(problem, inputs)
    queries, keys = padded.queries, padded.keys
    upstream = Upstream(
        queries.pad(upstream.o),
        queries.pad_rows(upstream.lse, -math.inf),
        queries.pad(upstream.do),
        None if upstream.dlse is None else queries.pad_rows(upstream.dlse, 0.0),
    )
    out = empty_gradients(problem, padded.inputs, needs)
    _backward_tiles(problem, padded.inputs, tile, [padded.segment], upstream, needs, out)
    out = replace(
        out,
        dq=None if out.dq is None else queries.unpad(out.dq),
        dk=None if out.dk is None else keys.unpad(out.dk),
        dv=None if out.dv is None else keys.unpad(out.dv),
    )
    return finish(inputs, out)


def _backward_tiles(
    problem: Problem,
    inputs: Inputs,
    tile: TileSize | None,
    segments: Sequence[Segment],
    upstream: Upstream,
    needs: Needs,
    out: Gradients,
) -> None:
    walk = _Walk.of(problem, inputs, tile, segments)
    parts = walk.chunks(segments)
    if walk.workers == 1 or sum(x.numel() for x in out.dcaptured if x is not None) > _SHARED_GRADIENT:
        backward_chunks(problem, inputs, parts, walk.tile, walk.blocks, upstream, needs, out)
        return

    def work(part: Sequence[Chunk]) -> Gradients:
        mine = private(out)
        backward_chunks(problem, inputs, part, walk.tile, walk.blocks, upstream, needs, mine)
        return mine

    for part in parallel.share(parts, work, walk.workers):
        add(out, part)


def _reads_lengths(problem: Problem, host_lengths: bool | None) -> bool:
    """Whether lengths are read on the host. Dense calls have none to read and take the same way on every device."""
    return problem.device.type == "cpu" if host_lengths is None else host_lengths
