"""What a Hopper backward kernel looks like: tiles, stages, shared memory bytes, registers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SHARED_BYTES = 232_448  # a CTA's limit, 227 KB
REGISTERS = 65_536  # a CTA's
L2_BYTES = 20 << 20  # for what a bundle of heads reads and adds to: of 50 MB, two halves that may hold the same lines
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

    128 keys: a compute warpgroup has 64 of them, and P^T and dS^T go from its registers into dV and dK. 64 keys: it has
    half of the queries of S and dP and half of the columns of dV and dK, whose P and dS are then operands in shared
    memory. 128 queries: it has 64 rows of dQ, else half of its columns.
    narrow_weights: dS takes P from the 16 bits that dV multiplies, which frees S's registers early; not where dS needs
    something else (softcap's derivative, dropped weights).
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int = 128
    stages_q: int = 2
    stages_do: int = 2
    stages_ds: int = 2
    reduce_rounds: int = 1  # pieces of a warpgroup's dQ that take turns in its staging buffer
    narrow_weights: bool = False
    compute_registers: int = 240  # a thread's, by role
    other_registers: int = 24

    # what the convert kernels ask of a plan
    transposed_q = False
    transposed_kv = False
    exchanged = True

    @property
    def early_scores(self) -> bool:
        """Whether there are registers for S of the next step beside dP of this one."""
        return self.narrow_weights and self.tile_m <= ROWS

    @property
    def by_keys(self) -> bool:
        """Whether the warpgroups share S, dP, dV and dK by keys."""
        return self.tile_n == GROUPS * ROWS

    @property
    def dq_by_rows(self) -> bool:
        return self.tile_m == GROUPS * ROWS

    @property
    def queries(self) -> int:
        """Queries of S and dP that a warpgroup has."""
        return self.tile_m if self.by_keys else self.tile_m // GROUPS

    def part(self, head_dim: int) -> int:
        """Columns of dV or dK that a warpgroup has."""
        return head_dim if self.by_keys else head_dim // GROUPS

    @property
    def dq_part(self) -> int:
        """Columns of dQ that a warpgroup has."""
        return self.head_dim if self.dq_by_rows else self.head_dim // GROUPS

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
        """Columns of dQ that a warpgroup stages at a time."""
        return self.dq_part // self.reduce_rounds

    @property
    def group_columns(self) -> int:
        """Columns of dV and dK that a warpgroup stages at a time, for grouped heads; K's and V's buffers hold them."""
        return math.gcd(self.head_dim, self.head_dim_v) // 2

    @property
    def query_bytes(self) -> int:
        """Bytes of a row of Q, dO and dQ's workspace."""
        return 2 * (self.head_dim + self.head_dim_v) + 4 * self.head_dim

    @property
    def score_buffers(self) -> int:
        """Of tile_m x tile_n 16-bit elements: dS, and behind it P where it is an operand in shared memory."""
        return self.stages_ds if self.by_keys else 2 * self.stages_ds

    @property
    def shared_map(self) -> dict[str, int]:
        """Bytes of the operand and staging buffers by name, barriers aside."""
        statistics = self.tile_m * 4
        return {
            "q": self.stages_q * self.tile_m * self.head_dim * 2,
            "k": self.tile_n * self.head_dim * 2,
            "v": self.tile_n * self.head_dim_v * 2,
            "do": self.stages_do * self.tile_m * self.head_dim_v * 2,
            "ds" if self.by_keys else "ds and p": self.score_buffers * self.tile_m * self.tile_n * 2,
            "dq staging": GROUPS * ROWS * self.reduce_columns * 4,
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
SMALL = 64  # up to which the accumulators leave registers for 128 queries, if P's are narrow
DIMS = tuple((d, dv) for d in PADDED for dv in PADDED)

# of every call, and of those in which dS is P times something
PLANS = (
    *(BackwardPlan(d, dv, tile_m=64, stages_q=3) for d, dv in DIMS),
    BackwardPlan(192, 128, tile_m=64, tile_n=64),
    BackwardPlan(256, 256, tile_m=64, tile_n=64, stages_do=1, reduce_rounds=2),
)
LINEAR_PLANS = tuple(
    replace(plan, narrow_weights=True)
    if max(plan.head_dim, plan.head_dim_v) > SMALL
    else BackwardPlan(plan.head_dim, plan.head_dim_v, tile_m=128, narrow_weights=True)
    for plan in PLANS
)


def backward_plan(head_dim: int, head_dim_v: int, linear: bool = True) -> BackwardPlan:
    """The smallest plan that holds these head dimensions, which may be all that a Problem allows.

    linear: there is neither softcap nor dropout, so that dS is P times something.
    """
    plans = LINEAR_PLANS if linear else PLANS
    return next(plan for plan in plans if head_dim <= plan.head_dim and head_dim_v <= plan.head_dim_v)
