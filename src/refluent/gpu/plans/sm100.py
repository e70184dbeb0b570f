"""What a Blackwell backward kernel looks like: tiles, stages, tensor memory columns, shared memory bytes, registers."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_COLUMNS = 512
SHARED_BYTES = 232_448  # a CTA's limit, 227 KB
LANES = 128  # of tensor memory
REGISTERS = 65_536  # a CTA's
THREADS = 512  # a CTA's, in four warpgroups: reduce, compute twice, the others
LIMBS = 9  # of 32 bits, each in an int64: a sum of float32 numbers that knows no rounding (device/exact.py)
EXACT = 2 * (LIMBS + 1)  # float32 elements that one takes, with a place for what is not finite
GROUP_STAGING_BYTES = 8192  # of dK or dV that a compute warpgroup stages at a time, for grouped heads


@dataclass(frozen=True)
class Block:
    """Rows [first, first + rows) of an accumulator: columns of tensor memory from `column` on.

    Of 128 rows each has a lane; of 64, row r has lane r % 16 + 32 * (r // 16) (PTX ISA, tcgen05.mma data path layouts
    D and F).
    """

    first: int
    rows: int
    column: int


@dataclass(frozen=True)
class Accumulator:
    """A float32 matrix in tensor memory, `rows` (a product's M) by `columns` (its N), from `column` on."""

    column: int
    rows: int
    columns: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Of 128 rows side by side, the last of 64 where they don't divide the rows."""
        return tuple(
            Block(first, min(LANES, self.rows - first), self.column + first // LANES * self.columns)
            for first in range(0, self.rows, LANES)
        )

    @property
    def end(self) -> int:
        """First column behind it."""
        return self.column + len(self.blocks) * self.columns

    def chunks(self, width: int) -> tuple[int, int, int, int]:
        """Its shape in chunks of `width` columns, as they are staged and added up in global memory."""
        return self.columns // width, width // 4, self.rows, 4

    def layout(self, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, strides) of a block of a workspace, as `chunks`; a width of 4 goes without the mode of 1."""
        shape, stride = self.chunks(width), (self.rows * width, self.rows * 4, 4, 1)
        return (shape, stride) if width != 4 else ((shape[0], *shape[2:]), (stride[0], *stride[2:]))


@dataclass(frozen=True)
class BackwardPlan:
    """One CTA owns tile_n keys and walks tile_m queries at a time; head dimensions are the padded ones, in elements.

    transposed_q: the product for dQ is dQ^T = K^T dS^T, with rows along the head dimension. transposed_kv: the same for
    dV^T = dO^T P and dK^T = Q^T dS, whose P and dS are then operands in shared memory, not in tensor memory.
    dq_over_dp: dQ lies over dP, and dP of a step waits until dQ of the one before has been drained.
    """

    head_dim: int
    head_dim_v: int
    tile_m: int = 128
    tile_n: int = 128
    transposed_q: bool = False
    transposed_kv: bool = False
    dq_over_dp: bool = True
    stages_q: int = 2
    stages_do: int = 1
    stages_reduce: int = 2
    # a thread's, by role; the MMA warp keeps a descriptor for every step of every product
    reduce_registers: int = 144
    compute_registers: int = 136
    other_registers: int = 96

    exchanged = False  # rows in the workspaces, see Convert

    @property
    def s(self) -> Accumulator:
        """S^T; P^T lies over it in 16 bits where it is an operand in tensor memory."""
        return Accumulator(0, self.tile_n, self.tile_m)

    @property
    def dv(self) -> Accumulator:
        return self._key_gradient(self.s.end, self.head_dim_v)

    @property
    def dp(self) -> Accumulator:
        """dP^T; dS^T lies over it in 16 bits where it is an operand in tensor memory."""
        return Accumulator(self.dv.end, self.tile_n, self.tile_m)

    @property
    def dq(self) -> Accumulator:
        column = self.dp.column if self.dq_over_dp else self.dp.end
        if self.transposed_q:
            return Accumulator(column, self.head_dim, self.tile_m)
        return Accumulator(column, self.tile_m, self.head_dim)

    @property
    def dk(self) -> Accumulator:
        return self._key_gradient(max(self.dp.end, self.dq.end), self.head_dim)

    def _key_gradient(self, column: int, head_dim: int) -> Accumulator:
        if self.transposed_kv:
            return Accumulator(column, head_dim, self.tile_n)
        return Accumulator(column, self.tile_n, head_dim)

    @property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two."""
        return max(32, 1 << (self.dk.end - 1).bit_length())

    @property
    def reduce_columns(self) -> int:
        """Columns of dQ's accumulator that the reduce role stages at a time."""
        return 16 if self.transposed_q else 32

    @property
    def group_columns(self) -> int:
        """Columns of dV's and dK's accumulators that a compute warpgroup stages at a time."""
        return GROUP_STAGING_BYTES // (4 * max(self.dv.rows, self.dk.rows))

    @property
    def dq_chunks(self) -> tuple[int, int, int, int]:
        """A query block of dQ's float32 workspace: (chunks, columns of one / 4, rows, 4)."""
        return self.dq.chunks(self.reduce_columns)

    @property
    def dk_chunks(self) -> tuple[int, int, int, int]:
        """A key block of the workspace of grouped heads' dK, likewise."""
        return self.dk.chunks(self.group_columns)

    @property
    def dv_chunks(self) -> tuple[int, int, int, int]:
        return self.dv.chunks(self.group_columns)

    @property
    def query_bytes(self) -> int:
        """Bytes of a row of Q, dO and dQ's workspace."""
        return 2 * (self.head_dim + self.head_dim_v) + 4 * self.head_dim

    @property
    def score_stages(self) -> int:
        """Buffers of tile_m x tile_n 16-bit elements: dS, and P where it is an operand in shared memory."""
        return 2 if self.transposed_kv else 1

    @property
    def shared_map(self) -> dict[str, int]:
        """Bytes of the operand and staging buffers by name, barriers aside."""
        statistics = self.tile_m * 4
        return {
            "q": self.stages_q * self.tile_m * self.head_dim * 2,
            "k": self.tile_n * self.head_dim * 2,
            "v": self.tile_n * self.head_dim_v * 2,
            "do": self.stages_do * self.tile_m * self.head_dim_v * 2,
            "ds and p" if self.transposed_kv else "ds": self.score_stages * self.tile_m * self.tile_n * 2,
            "dq staging": self.stages_reduce * self.dq.rows * self.reduce_columns * 4,
            "lse": self.stages_q * statistics,
            "dpsum": self.stages_do * statistics,
        }

    @property
    def registers(self) -> int:
        """What the four warpgroups have together."""
        return LANES * (self.reduce_registers + 2 * self.compute_registers + self.other_registers)

    @property
    def shared_bytes(self) -> int:
        return sum(self.shared_map.values())

    @property
    def tensor_map(self) -> dict[str, tuple[int, int]]:
        """First column and first column behind it of every accumulator, by name; they may overlap."""
        return {name: (acc.column, acc.end) for name, acc in self.accumulators.items()}

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        return {"s": self.s, "dv": self.dv, "dp": self.dp, "dq": self.dq, "dk": self.dk}


PADDED = (32, 64, 96, 128)  # head dimensions that 128 x 128 tiles serve

# Beyond 128 one CTA's tensor memory does not hold the accumulators of 128 x 128 tiles: (192, 128) halves the queries
# and turns dQ, (256, 256) halves both and turns all three gradients, so that their rows fill all lanes.
PLANS = (
    *(BackwardPlan(head_dim, head_dim_v) for head_dim in PADDED for head_dim_v in PADDED),
    BackwardPlan(
        192, 128, tile_m=64, transposed_q=True, reduce_registers=136, compute_registers=128, other_registers=120
    ),
    BackwardPlan(
        256,
        256,
        tile_m=64,
        tile_n=64,
        transposed_q=True,
        transposed_kv=True,
        dq_over_dp=False,
        reduce_registers=160,
        compute_registers=104,
        other_registers=144,
    ),
)


def backward_plan(head_dim: int, head_dim_v: int) -> BackwardPlan:
    """The smallest plan that holds these head dimensions, which may be all that a Problem allows."""
    return next(plan for plan in PLANS if head_dim <= plan.head_dim and head_dim_v <= plan.head_dim_v)
