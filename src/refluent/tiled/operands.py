"""Copies of q, k, v and do in the layout and the types that the tiles' matrix products want."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from refluent.problem import Problem
from refluent.tiled.walk import Chunk

LOG2E = math.log2(math.e)


@functools.cache
def _fast_bfloat16_cpu() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (oneDNN; several times its float32 rate)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def product_dtype(problem: Problem) -> torch.dtype:
    """The type in which probabilities and their gradients enter matrix products.

    Where bf16 products are fast they are rounded to bf16, as every flash attention kernel does; scores and dp always
    come out of products in the accumulate type, since a bf16 product would return them rounded.
    """
    if problem.dtype == torch.bfloat16 and problem.device.type == "cpu" and _fast_bfloat16_cpu():
        return torch.bfloat16
    return problem.accum_dtype


def pack_rows(x: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """(b, h, tm, d) view -> (units, group * tm, d) contiguous: one matrix per key head, its query heads stacked."""
    packed = torch.empty(x.shape, dtype=dtype, device=x.device)
    packed.copy_(x)
    return packed.view(chunk.units, -1, x.shape[-1])


def pack_keys(x: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """(b, hkv, s, d) view -> (units, s, d) contiguous."""
    return pack_rows(x, chunk, dtype)


def minus_inf_to_zero(x: Tensor) -> Tensor:
    """x with 0 in place of -inf."""
    return x.masked_fill(x == -math.inf, 0.0)
