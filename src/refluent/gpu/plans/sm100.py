"""What a Blackwell backward kernel looks like: tiles, stages, tensor memory columns, shared memory bytes, registers."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_COLUMNS = 512
SHARED_BYTES = 232_448  # a CTA's limit, 227 KB
REDUCE_COLUMNS = 32  # of dQ that leave tensor memory at a time


@dataclass(frozen=True)
class BackwardPlan:
    """One CTA owns tile_n keys and walks tile_m queries at a time; head dimensions are the padded ones, in elements."""

    head_dim: int
    head_dim_v: int
    tile_m: int = 128
    tile_n: int = 128
    stages_q: int = 2
    stages_do: int = 1
    stages_reduce: int = 2
    reduce_registers: int = 152
    compute_registers: int = 136
    other_registers: int = 88

    @property
    def tmem_s(self) -> int:
        """First column of S; P^T lies over it in 16 bits."""
        return 0

    @property
    def tmem_dv(self) -> int:
        return self.tmem_s + self.tile_m

    @property
    def tmem_dp(self) -> int:
        """First column of dP; dS^T (16 bits) and then dQ lie over it."""
        return self.tmem_dv + self.head_dim_v

    @property
    def tmem_dk(self) -> int:
        return self.tmem_dp + max(self.tile_m, self.head_dim)

    @property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two."""
        used = self.tmem_dk + self.head_dim
        return max(32, 1 << (used - 1).bit_length())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the operand and staging buffers, barriers aside."""
        q = self.stages_q * self.tile_m * self.head_dim * 2
        do = self.stages_do * self.tile_m * self.head_dim_v * 2
        k, v = self.tile_n * self.head_dim * 2, self.tile_n * self.head_dim_v * 2
        ds = self.tile_m * self.tile_n * 2
        staging = self.stages_reduce * self.tile_m * REDUCE_COLUMNS * 4
        statistics = (self.stages_q + self.stages_do) * self.tile_m * 4
        return q + do + k + v + ds + staging + statistics


PADDED = (32, 64, 96, 128)  # head dimensions that have a plan of their own; others pad to the next


def pad_head_dim(head_dim: int) -> int | None:
    """The next head dimension with a plan, None beyond the largest."""
    return next((padded for padded in PADDED if head_dim <= padded), None)


def backward_plan(head_dim: int, head_dim_v: int) -> BackwardPlan | None:
    """The plan for these head dimensions, None where there is none yet."""
    d, dv = pad_head_dim(head_dim), pad_head_dim(head_dim_v)
    if d is None or dv is None:
        return None
    plan = BackwardPlan(d, dv)
    assert plan.tmem_columns <= TENSOR_COLUMNS
    assert plan.shared_bytes <= SHARED_BYTES
    return plan
