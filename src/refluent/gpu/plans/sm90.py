"""What a Hopper backward kernel looks like: tiles, stages, shared memory bytes, registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARED_BYTES = 232_448  # a CTA's limit, 227 KB
REGISTERS = 65_536  # a CTA's
GROUPS = 2  # compute warpgroups
THREADS = 128 * (GROUPS + 1)  # a CTA's, with the warpgroup of the load and reduce roles
ROWS = 64  # that a warpgroup's product has (wgmma's M)
QUAD = 4  # float32 elements that lie together in a workspace


@dataclass(frozen=True)
class Accumulator:
    """A float32 matrix in the registers of the compute warpgroups: 64 rows of it, or 64 rows of some columns, each."""

    rows: int
    columns: int

    def layout(self, width: int) -> tuple[tuple, tuple]:
        """(shape, strides) of its place in a workspace, in elements: blocks of 64 rows, columns in chunks of `width`.

        A chunk is what is staged and added at a time, contiguous. With a width of 4: (columns / 4, rows, 4), where the
        rows of every other quad of columns are exchanged, r ^ 4 for r (see copies.stage_fragment).
        """
        blocks, block = self.rows // ROWS, ROWS * self.columns
        if width == QUAD:
            return (self.columns // QUAD, (ROWS, blocks), QUAD), (ROWS * QUAD, (QUAD, block), 1)
        return (blocks, self.columns // width, ROWS * width), (block, ROWS * width, 1)


@dataclass(frozen=True)
class BackwardPlan:
    """One CTA owns tile_n keys and walks tile_m queries at a time; head dimensions are the padded ones, in elements.

    128 keys: a compute warpgroup has 64 of them, and P^T and dS^T go from its registers into dV and dK. 128 queries: it
    has 64 rows of dQ, else half of its columns. narrow_weights: dS takes P from the 16 bits that dV multiplies, and S's
    registers are free for more queries; not where dS needs something else (softcap's derivative, dropped weights).
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int = 128
    stages_q: int = 2
    stages_do: int = 2
    stages_ds: int = 2
    narrow_weights: bool = False
    compute_registers: int = 240  # a thread's, by role
    other_registers: int = 24

    # what the convert kernels ask of a plan
    transposed_q = False
    transposed_kv = False
    exchanged = True

    @property
    def dq_by_rows(self) -> bool:
        return self.tile_m == GROUPS * ROWS

    @property
    def dq(self) -> Accumulator:
        return Accumulator(self.tile_m, self.head_dim)

    @property
    def dk(self) -> Accumulator:
        return Accumulator(self.tile_n, self.head_dim)

    @property
    def dv(self) -> Accumulator:
        return Accumulator(self.tile_n, self.head_dim_v)

    @property
    def reduce_columns(self) -> int:
        """Columns of dQ that a warpgroup has."""
        return self.head_dim if self.dq_by_rows else self.head_dim // GROUPS

    @property
    def group_columns(self) -> int:
        """Columns of dV and dK that a warpgroup stages at a time, for grouped heads; K's and V's buffers hold them."""
        return math.gcd(self.head_dim, self.head_dim_v) // 2

    @property
    def shared_map(self) -> dict[str, int]:
        """Bytes of the operand and staging buffers by name, barriers aside."""
        statistics = self.tile_m * 4
        return {
            "q": self.stages_q * self.tile_m * self.head_dim * 2,
            "k": self.tile_n * self.head_dim * 2,
            "v": self.tile_n * self.head_dim_v * 2,
            "do": self.stages_do * self.tile_m * self.head_dim_v * 2,
            "ds": self.stages_ds * self.tile_m * self.tile_n * 2,
            "dq staging": self.tile_m * self.head_dim * 4,
            "lse": self.stages_q * statistics,
            "dpsum": self.stages_do * statistics,
        }

    @property
    def shared_bytes(self) -> int:
        return sum(self.shared_map.values())

    @property
    def registers(self) -> int:
        """What the three warpgroups have together."""
        return 128 * (GROUPS * self.compute_registers + self.other_registers)


PADDED = (32, 64, 96, 128)  # head dimensions, of q and k and of v
SMALL = 64  # up to which the accumulators leave registers for 128 queries

DIMS = tuple((d, dv) for d in PADDED for dv in PADDED)
WIDE = tuple(BackwardPlan(d, dv, tile_m=128, narrow_weights=True) for d, dv in DIMS if max(d, dv) <= SMALL)
PLANS = tuple(BackwardPlan(d, dv, tile_m=64, stages_q=3) for d, dv in DIMS)
LARGEST = PADDED[-1]


def backward_plan(head_dim: int, head_dim_v: int, linear: bool = True) -> BackwardPlan:
    """The smallest plan that holds these head dimensions, LARGEST at most. linear: dS is P times something."""
    plans = (*WIDE, *PLANS) if linear else PLANS
    return next(plan for plan in plans if head_dim <= plan.head_dim and head_dim_v <= plan.head_dim_v)
