"""torch's own flash attention kernel for the CPU, where it computes exactly what is asked and is the faster way.

It knows one scale, no mask or the square causal one (aligned top-left), and one head dimension; its backward takes no
gradient of lse. It divides by zero without keys. With 16-bit inputs its lse is off by 5e-5 and its backward adds up dk
and dv in 16 bits, with errors that grow with the sequence (4 times eager's at 4096 positions), so those run as
float32 copies. Being fused it is the faster way, unless oneDNN's float32 products, which the tiles use, run at twice
the rate of MKL's (hardware.py). Then it serves short sequences, where one call costs 0.1 ms and a walk over tiles 0.5,
and float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from refluent.problem import Gradients, Inputs, Problem
from refluent.tiled import hardware
from refluent.tiled.backward import Upstream
from refluent.tiled.forward import Outputs
from refluent.tiled.walk import Chunk, Segment

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


_SHORT = {torch.float32: 1 << 24, torch.bfloat16: 1 << 22, torch.float16: 1 << 22}
"""Multiplications in one product of one head up to which the kernel wins in any case (512 x 512 x 64, 256 x 256 x
64)."""
_BRIEF = 1 << 29
"""The same over all heads (8 heads of 1024 x 1024 x 64, 10 ms forward), where threads of chunks have no time to make up
for their start: they wait for OpenMP's, which spin for some milliseconds, and for each other. For backwards of float32
alone: 16-bit tiles are cheaper by more than that."""


@dataclass(frozen=True)
class Call:
    """How the kernel does a segment: the rows from ``first_row`` on (those before see nothing), causal or not."""

    segment: Segment
    first_row: int
    causal: bool


def plan_forward(problem: Problem, segment: Segment) -> Call | None:
    """The kernel's way to a segment's forward, None where it has none or a slower one."""
    return _exact(problem, segment) if _brief(problem, segment) or _wins(problem, segment) else None


def plan_backward(problem: Problem, segment: Segment, dlse: Tensor | None) -> Call | None:
    """The kernel's way to a segment's backward, None where it has none or a slower one."""
    brief = problem.dtype == torch.float32 and _brief(problem, segment)
    if dlse is not None or not (brief or _wins(problem, segment)):
        return None
    if problem.group > 1 and problem.dtype.itemsize >= 4:
        return None  # it adds a group's heads up in one running sum, which loses too much of wide types
    return _exact(problem, segment)


def _brief(problem: Problem, segment: Segment) -> bool:
    heads = problem.heads_q * (segment.batch.stop - segment.batch.start)
    return heads * segment.len_q * segment.len_k * problem.head_dim <= _BRIEF


def _wins(problem: Problem, segment: Segment) -> bool:
    """Whether the kernel is faster than tiles."""
    if problem.dtype == torch.float64 or not hardware.onednn_beats_mkl():
        return True
    return segment.len_q * segment.len_k * problem.head_dim < _SHORT[problem.dtype]


def _exact(problem: Problem, segment: Segment) -> Call | None:
    options = problem.options
    modified = options.softcap or options.score_mod or options.mask_mod or options.block_mask or options.dropout_p
    if modified or problem.has_sink or options.return_max_score or problem.head_dim != problem.head_dim_v:
        return None
    len_q, len_k, shift = segment.len_q, segment.len_k, segment.len_k - segment.len_q
    if len_q == 0 or len_k == 0:
        return None
    left, right = options.window
    if options.causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and left < len_q - 1 + shift:
        return None
    if right is None or right >= len_k - 1 - shift:
        return Call(segment, 0, False)
    if right == 0 and shift <= 0:
        return Call(segment, -shift, True)
    return None


def forward_alone(problem: Problem, inputs: Inputs, call: Call) -> Outputs | None:
    """The forward of a call that is one segment, in the kernel's own memory; None where some rows see nothing."""
    if call.first_row > 0:
        return None
    q, k, v = _operands(problem, inputs, call)
    o, lse = _forward(q, k, v, 0.0, call.causal, scale=problem.scale)
    return Outputs(o.transpose(1, 2).to(problem.dtype), lse, None)


def forward_segment(problem: Problem, inputs: Inputs, call: Call, out: Outputs) -> None:
    """Fill ``out`` for the rows of one segment."""
    whole, i0, i1 = _whole(problem, call), call.first_row, call.segment.len_q
    q, k, v = _operands(problem, inputs, call)
    o, lse = _forward(q, k, v, 0.0, call.causal, scale=problem.scale)
    whole.query_side(out.o, 0, i0).zero_()
    whole.query_side(out.o, i0, i1).copy_(o)
    whole.row_side(out.lse, i0, i1).copy_(lse)


def backward_segment(problem: Problem, inputs: Inputs, call: Call, upstream: Upstream, out: Gradients) -> None:
    """Fill the gradients that ``out`` has room for, for one segment."""
    whole, i0, i1 = _whole(problem, call), call.first_row, call.segment.len_q
    q, k, v = _operands(problem, inputs, call)
    do, o = (whole.query_side(x, i0, i1).to(problem.accum_dtype) for x in (upstream.do, upstream.o))
    lse = whole.row_side(upstream.lse, i0, i1)
    if do.stride(-1) != 1:
        do = do.contiguous()
    dq, dk, dv = _backward(do, q, k, v, o, lse, 0.0, call.causal, scale=problem.scale)
    if out.dq is not None:
        whole.query_side(out.dq, 0, i0).zero_()
        whole.query_side(out.dq, i0, i1).copy_(dq)
    for target, made in ((out.dk, dk), (out.dv, dv)):
        if target is not None:
            whole.key_side(target, 0, call.segment.len_k).copy_(made)


def _whole(problem: Problem, call: Call) -> Chunk:
    batch = call.segment.batch
    return Chunk(call.segment, batch.start, batch.stop - batch.start, 0, problem.heads_kv, problem.group)


def _operands(problem: Problem, inputs: Inputs, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (b, h, s, d): views, or copies in the accumulate type."""
    whole, len_k = _whole(problem, call), call.segment.len_k
    q = whole.query_side(inputs.q, call.first_row, call.segment.len_q).to(problem.accum_dtype)
    k, v = (whole.key_side(x, 0, len_k).to(problem.accum_dtype) for x in (inputs.k, inputs.v))
    return q, k, v
