"""Batched matrix products of tiles, by the fastest way that the device has."""

from __future__ import annotations

import torch
from torch import Tensor

from refluent.problem import Problem
from refluent.tiled import hardware
from refluent.tiled.scores import Workspace

_ONEDNN_WORTH = 1 << 22
"""Multiplications in one matrix product from which oneDNN's call overhead (about 10 us) is worth it."""
_RUNNING_SUM = 128
"""Products that one sum of oneDNN's may hold."""


def product_dtype(problem: Problem) -> torch.dtype:
    """The type in which probabilities and their gradients enter matrix products.

    Where bf16 products are fast they are rounded to bf16, as every flash attention kernel does; scores and dp always
    come out of products in the accumulate type, since a bf16 product would return them rounded.
    """
    if problem.dtype == torch.bfloat16 and problem.device.type == "cpu" and hardware.fast_bfloat16():
        return torch.bfloat16
    return problem.accum_dtype


def _onednn_linear(a: Tensor, w: Tensor) -> Tensor:
    """a @ w.T of float32 matrices."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, w, None, "none", [], "")
    return out


def _onednn_linear_in_parts(a: Tensor, w: Tensor) -> Tensor:
    """The same for scores, whose errors p grows with.

    oneDNN adds up a whole row in one running sum, which loses twice as much over 256 products as MKL's and eager's.
    """
    out = _onednn_linear(a[:, :_RUNNING_SUM], w[:, :_RUNNING_SUM])
    for start in range(_RUNNING_SUM, a.shape[1], _RUNNING_SUM):
        part = slice(start, start + _RUNNING_SUM)
        out.add_(_onednn_linear(a[:, part], w[:, part]))
    return out


class Products:
    """a @ b for batches of matrices: a (units, m, k), b (units, k, n)."""

    def __init__(self, problem: Problem, workspace: Workspace) -> None:
        self.accum = problem.accum_dtype
        self._workspace = workspace
        on_cpu = problem.device.type == "cpu" and self.accum == torch.float32
        self._onednn = on_cpu and hardware.onednn_beats_mkl()

    def fresh(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in the accumulate type; valid until the same name is used again, free to be written to."""
        onednn = self._by_onednn(a, b)
        if onednn and a.shape[0] == 1:
            return _onednn_linear_in_parts(a[0], b[0].t()).unsqueeze(0)
        out = self._workspace.get(name, (a.shape[0], a.shape[1], b.shape[2]), self.accum)
        if not onednn:
            return torch.bmm(a, b, out=out)
        for unit in range(a.shape[0]):
            out[unit].copy_(_onednn_linear_in_parts(a[unit], b[unit].t()))
        return out

    def add(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        """acc += a @ b; a and b in the accumulate type or, rounded after each product, in bf16."""
        if self._by_onednn(a, b):
            for unit in range(a.shape[0]):
                acc[unit].add_(_onednn_linear(a[unit], b[unit].t()))
        elif a.dtype == acc.dtype and acc.is_contiguous():
            acc.baddbmm_(a, b)
        else:
            acc.add_(torch.bmm(a, b))

    def _by_onednn(self, a: Tensor, b: Tensor) -> bool:
        return self._onednn and a.dtype == torch.float32 and a.shape[1] * a.shape[2] * b.shape[2] >= _ONEDNN_WORTH
