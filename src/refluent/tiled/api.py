"""The backend protocol on top of segments: dispatch between torch's own kernel and tiles, padding, results."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from refluent.problem import Gradients, Inputs, Needs, Problem
from refluent.tiled import cpu_flash
from refluent.tiled.backward import Upstream, backward_segment, empty_gradients, finish
from refluent.tiled.forward import Outputs, forward_segment
from refluent.tiled.padding import pad
from refluent.tiled.scores import Workspace
from refluent.tiled.visible import BlockMap
from refluent.tiled.walk import TileSize, default_tile, host_segments


def supports(problem: Problem) -> str | None:
    """None when this backend can run the problem, else the reason."""
    if problem.device.type == "mps" and problem.accum_dtype.itemsize == 8:
        return "float64 does not exist on mps devices; use float32 or the CPU"
    return None


def forward(
    problem: Problem, inputs: Inputs, tile: TileSize | None = None, host_lengths: bool | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o (b, sq, h, dv) or (tq, h, dv), lse (b, h, sq) or (h, tq), max_score like lse or None.

    ``tile`` (by default torch's own CPU kernel where that fits, else a size by device) and ``host_lengths`` (read
    lengths on the host; by default on the CPU alone) change how the result is computed, never what it is.
    """
    own_kernel = tile is None and problem.device.type == "cpu"
    tile = tile or default_tile(problem)
    blocks = None if problem.options.block_mask is None else BlockMap(problem, inputs)
    workspace = Workspace(problem.device)
    if _reads_lengths(problem, host_lengths):
        out = Outputs.empty(problem, inputs.q)
        for segment in host_segments(problem, inputs):
            call = cpu_flash.plan_forward(problem, segment) if own_kernel else None
            if call is not None:
                cpu_flash.forward_segment(problem, inputs, call, out)
            else:
                forward_segment(problem, inputs, segment, tile, blocks, workspace, out)
        return out.o, out.lse, out.max_score
    padded = pad(problem, inputs)
    out = Outputs.empty(problem, padded.inputs.q)
    forward_segment(problem, padded.inputs, padded.segment, tile, blocks, workspace, out)
    queries = padded.queries
    max_score = None if out.max_score is None else queries.unpad_rows(out.max_score, -math.inf)
    return queries.unpad(out.o), queries.unpad_rows(out.lse, -math.inf), max_score


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
    own_kernel = tile is None and problem.device.type == "cpu"
    tile = tile or default_tile(problem)
    blocks = None if problem.options.block_mask is None else BlockMap(problem, inputs)
    workspace = Workspace(problem.device)
    if _reads_lengths(problem, host_lengths):
        out = empty_gradients(problem, inputs, needs)
        upstream = Upstream(o, lse, do, dlse)
        for segment in host_segments(problem, inputs):
            call = cpu_flash.plan_backward(problem, segment, dlse) if own_kernel else None
            if call is not None:
                cpu_flash.backward_segment(problem, inputs, call, upstream, out)
            else:
                backward_segment(problem, inputs, segment, tile, blocks, workspace, upstream, needs, out)
        return finish(inputs, out)
    padded = pad(problem, inputs)
    queries, keys = padded.queries, padded.keys
    upstream = Upstream(
        queries.pad(o),
        queries.pad_rows(lse, -math.inf),
        queries.pad(do),
        None if dlse is None else queries.pad_rows(dlse, 0.0),
    )
    out = empty_gradients(problem, padded.inputs, needs)
    backward_segment(problem, padded.inputs, padded.segment, tile, blocks, workspace, upstream, needs, out)
    out = replace(
        out,
        dq=None if out.dq is None else queries.unpad(out.dq),
        dk=None if out.dk is None else keys.unpad(out.dk),
        dv=None if out.dv is None else keys.unpad(out.dv),
    )
    return finish(inputs, out)


def _reads_lengths(problem: Problem, host_lengths: bool | None) -> bool:
    """Whether lengths are read on the host. Dense calls have none to read and take the same way on every device."""
    return problem.device.type == "cpu" if host_lengths is None else host_lengths
