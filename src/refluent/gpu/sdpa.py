"""The forward by torch's fused kernels (cuDNN, flash attention), where they compute our function and return the LSE."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from refluent.problem import Inputs, Problem

_aten = torch.ops.aten


def same_function(problem: Problem) -> bool:
    """Plain or square causal attention over padded sequences that are not empty: what those kernels know."""
    options = problem.options
    causal = not options.causal or problem.seqlen_q == problem.seqlen_k  # torch aligns the diagonal top-left
    special = (
        problem.scale < torch.finfo(torch.float32).tiny  # flash attention applies it after the mask and the maximum
        or options.window != (None, None)
        or options.softcap > 0
        or options.dropout_p > 0
        or options.return_max_score
        or problem.has_sink
        or problem.varlen_q
        or problem.varlen_k
        or problem.has_seqused_q
        or problem.has_seqused_k
    )
    mods = any(mod is not None for mod in (options.score_mod, options.mask_mod, options.block_mask))
    return causal and not special and not mods and 0 not in (problem.batch, problem.seqlen_q, problem.seqlen_k)


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, None] | None:
    """o (b, sq, h, dv) and lse (b, h, sq), or None where no such kernel serves the problem."""
    if not same_function(problem):
        return None
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    causal, scale = problem.options.causal, problem.scale
    params = SDPAParams(q, k, v, None, 0.0, causal, problem.group > 1)
    if can_use_cudnn_attention(params):
        o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    elif can_use_flash_attention(params):
        o, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        return None
    return o.transpose(1, 2), lse.reshape(problem.batch, problem.heads_q, problem.seqlen_q), None
