"""Packed and partly used sequences on devices whose values are not read: padded copies, and back.

Every index is computed on the device and clamped into the tensor, so nothing waits for the host and no access leaves
a tensor whatever cu_seqlens hold. Rows outside every sequence become zeros here: NaN in them ends with this copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from refluent.problem import Inputs, Problem
from refluent.tiled.walk import Segment


@dataclass(frozen=True)
class Side:
    """How one side's tokens (queries or keys) stand in memory and in the padded copy."""

    seqlen: int  # positions per sequence in the padded copy
    tokens: int  # of a packed tensor; positions of a padded one
    starts: Tensor | None  # (b,) int64, packed only
    used: Tensor | None  # (b,) int64: how many positions of each sequence count

    @staticmethod
    def of(x: Tensor, seqlen: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> Side:
        """x: (b, s, h, d), or (t, h, d) with cu_seqlens."""
        tokens = x.shape[-3]
        if cu_seqlens is None:
            used = None if seqused is None else seqused.long().clamp(0, seqlen)
            return Side(seqlen, tokens, None, used)
        bounds = cu_seqlens.long().clamp(0, tokens)
        used = (bounds[1:] - bounds[:-1]).clamp(0, seqlen)
        if seqused is not None:
            used = torch.minimum(used, seqused.long().clamp(min=0))
        return Side(seqlen, tokens, bounds[:-1], used)

    def pad(self, x: Tensor) -> Tensor:
        """(t, h, d) or (b, s, h, d) -> (b, seqlen, h, d), zeros outside the sequences."""
        if self.used is None:
            return x
        position = torch.arange(self.seqlen, device=x.device)
        if self.starts is not None:
            index = (self.starts[:, None] + position).clamp(0, max(self.tokens - 1, 0))
            x = x[index] if self.tokens else x.new_zeros(*index.shape, *x.shape[1:])
        return torch.where((position < self.used[:, None])[:, :, None, None], x, 0)

    def pad_rows(self, x: Tensor, fill: float) -> Tensor:
        """(h, t) or (b, h, s) -> (b, h, seqlen), ``fill`` outside the sequences."""
        if self.used is None:
            return x
        position = torch.arange(self.seqlen, device=x.device)
        if self.starts is not None:
            index = (self.starts[:, None] + position).clamp(0, max(self.tokens - 1, 0))
            x = x[:, index].transpose(0, 1) if self.tokens else x.new_zeros(index.shape[0], x.shape[0], self.seqlen)
        return torch.where((position < self.used[:, None])[:, None], x, fill)

    def unpad(self, x: Tensor) -> Tensor:
        """(b, seqlen, h, d) -> (t, h, d); padded tensors stay as they are (their foreign rows are zeros)."""
        if self.starts is None or self.used is None:
            return x
        if x.numel() == 0:
            return x.new_zeros(self.tokens, *x.shape[2:])
        sequence, position, inside = self._owners(self.starts, self.used)
        return torch.where(inside[:, None, None], x[sequence, position], 0)

    def unpad_rows(self, x: Tensor, fill: float) -> Tensor:
        """(b, h, seqlen) -> (h, t), or (b, h, seqlen) again, with ``fill`` outside the sequences."""
        if self.starts is None or self.used is None:
            return self.pad_rows(x, fill)
        if x.numel() == 0:
            return x.new_full((x.shape[1], self.tokens), fill)
        sequence, position, inside = self._owners(self.starts, self.used)
        return torch.where(inside, x[sequence, :, position].transpose(0, 1), fill)

    def _owners(self, starts: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each packed token its sequence, its position there and whether it counts."""
        token = torch.arange(self.tokens, device=starts.device)
        # Empty sequences share their start with the next one: the last that starts here owns the token.
        sequence = (torch.searchsorted(starts.contiguous(), token, right=True) - 1).clamp(min=0)
        position = token - starts[sequence]
        inside = (position >= 0) & (position < used[sequence])
        return sequence, position.clamp(0, self.seqlen - 1), inside


@dataclass(frozen=True)
class Padded:
    """A call whose sequences became one padded segment."""

    inputs: Inputs
    segment: Segment
    queries: Side
    keys: Side


def pad(problem: Problem, inputs: Inputs) -> Padded:
    """Bring a call into padded form without reading a value on the host."""
    queries = Side.of(inputs.q, problem.seqlen_q, inputs.cu_seqlens_q, inputs.seqused_q)
    keys = Side.of(inputs.k, problem.seqlen_k, inputs.cu_seqlens_k, inputs.seqused_k)
    padded = replace(inputs, q=queries.pad(inputs.q), k=keys.pad(inputs.k), v=keys.pad(inputs.v))
    used_q = None if queries.used is None else queries.used[:, None, None, None]
    used_k = None if keys.used is None else keys.used[:, None, None, None]
    same = (
        inputs.cu_seqlens_q is inputs.cu_seqlens_k
        and inputs.seqused_q is inputs.seqused_k
        and problem.seqlen_q == problem.seqlen_k
    )
    shift: int | Tensor = problem.seqlen_k - problem.seqlen_q
    if not same and (used_q is not None or used_k is not None):
        shift = (problem.seqlen_k if used_k is None else used_k) - (problem.seqlen_q if used_q is None else used_q)
    segment = Segment(
        slice(0, problem.batch),
        slice(0, problem.seqlen_q),
        slice(0, problem.seqlen_k),
        problem.seqlen_q,
        problem.seqlen_k,
        shift,
        used_q,
        used_k,
    )
    return Padded(padded, segment, queries, keys)
