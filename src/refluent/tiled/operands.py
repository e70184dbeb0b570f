"""Copies of q, k, v and do in the layout and the types that the tiles' matrix products want."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from refluent.problem import Problem
from refluent.tiled.walk import Chunk

LN2 = math.log(2.0)


def pack_rows(x: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """(b, h, tm, d) view -> (units, group * tm, d) contiguous: one matrix per key head, its query heads stacked."""
    packed = torch.empty(x.shape, dtype=dtype, device=x.device)
    packed.copy_(x)
    return packed.view(chunk.units, -1, x.shape[-1])


def pack_keys(x: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """(b, hkv, s, d) view -> (units, s, d) contiguous."""
    return pack_rows(x, chunk, dtype)


class Exponential:
    """exp(x - c) for a tile x and a number c per row, in two passes over the tile.

    ``binary``, for float32 on the CPU: 2 ** (x log2(e) - c log2(e)). torch's exp2 runs at four times the speed of its
    exp there and the multiplication is free, fused into the subtraction. Rounding c log2(e) costs up to
    2**-24 |c log2(e)|, the same for a whole row; :meth:`residual` tells how much it was, so that the row can be put
    right. :meth:`reaches` tells where c is so large that this leaves the type's range: there the other way serves.
    """

    def __init__(self, binary: bool) -> None:
        self.binary = binary
        # What the fused multiplication uses: log2(e) as a float32, 1.4426950216293335.
        self.factor = 12102203.0 / 2.0**23 if binary else 1.0

    @staticmethod
    def of_choice(problem: Problem) -> Exponential:
        """The faster way."""
        return Exponential(problem.accum_dtype == torch.float32 and problem.device.type == "cpu")

    def minus(self, c: Tensor) -> Tensor:
        """What stands for -c in :meth:`of`."""
        return c.mul(-self.factor)

    def reaches(self, minus_c: Tensor) -> bool:
        """Whether no row's exponentials are off by more than a factor of 2**64."""
        return not self.binary or largest(minus_c) < 2.0**31

    def of(self, x: Tensor, minus_c: Tensor, out: Tensor) -> Tensor:
        """exp(x - c) into ``out``, which may be x."""
        torch.add(minus_c, x, alpha=self.factor, out=out)
        return out.exp2_() if self.binary else out.exp_()

    def rescale(self, c: Tensor, minus_new: Tensor) -> Tensor:
        """What turns the exponentials of one c, -inf for none yet, into those of a new one; overwrites c."""
        torch.sub(minus_new, c.mul_(-self.factor), out=c)
        return c.exp2_() if self.binary else c.exp_()

    def residual(self, c: Tensor, minus_c: Tensor) -> Tensor | None:
        """The exponent that :meth:`of` adds by mistake, in units of log e; None when it is nothing."""
        if not self.binary:
            return None
        return (c.double() * self.factor + minus_c.double()).mul_(LN2).float()


def largest(x: Tensor) -> float:
    """The largest magnitude of x, NaN where it holds one; read on the host."""
    return float(torch.linalg.vector_norm(x, math.inf))


def minus_inf_to_zero(x: Tensor) -> Tensor:
    """x with 0 in place of -inf."""
    return x.masked_fill(x == -math.inf, 0.0)
