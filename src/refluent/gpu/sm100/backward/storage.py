"""Shared and tensor memory of one CTA, and every barrier: the pipeline table.

ring        full: producer -> consumer                       empty: consumer -> producer
q           TMA -> MMA (a tile's first carries K)            MMA commit (the tile's last after its dQ: K goes with it)
do          TMA -> MMA (a tile's first carries V)            MMA commit after dV
lse         bulk copy -> compute                             compute, 8 warps
dpsum       bulk copy -> compute                             compute, 8 warps
s           MMA commit -> compute                            compute, 8 warps: P is written, S is read
dp          MMA commit -> compute                            -
ds          compute, 8 warps -> MMA: dS is written           -
dq          MMA commit -> reduce                             reduce, 4 warps: tensor memory is drained
dkv         MMA commit -> compute, once a tile               compute, 8 warps: dV and dK are drained

The CTAs of a cluster load a share of every Q and dO each, for all: a stage is full when all shares are there, and empty
when the MMA roles of all CTAs have released it, each at everybody's barrier.

dS needs no empty barrier: dP of a step is issued after dQ of the one before, and the tensor unit works in order. Nor
does P in shared memory: S of a step is issued after dV of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.pipeline import Ring
from refluent.gpu.plans.sm100 import LANES, Accumulator, BackwardPlan
from refluent.gpu.sm100.backward.products import Layouts, Product, Products

COMPUTE_WARPS, REDUCE_WARPS = 8, 4


@dataclass(frozen=True)
class Barriers:
    """The rings of the table above."""

    q: Ring
    do: Ring
    lse: Ring
    dpsum: Ring
    s: Ring
    dp: Ring
    ds: Ring
    dq: Ring
    dkv: Ring


# name -> (stages as a plan's attribute or a number, arrivals at full, arrivals at empty)
_TABLE = {
    "q": ("stages_q", 1, 1),
    "do": ("stages_do", 1, 1),
    "lse": ("stages_q", 1, COMPUTE_WARPS),
    "dpsum": ("stages_do", 1, COMPUTE_WARPS),
    "s": (1, 1, COMPUTE_WARPS),
    "dp": (1, 1, 1),
    "ds": (1, COMPUTE_WARPS, 1),
    "dq": (1, 1, REDUCE_WARPS),
    "dkv": (1, 1, COMPUTE_WARPS),
}
SHARED_RINGS = ("q", "do")  # that a cluster fills and releases together


def _stages(plan: BackwardPlan, entry) -> int:
    return getattr(plan, entry) if isinstance(entry, str) else entry


def _releases(name: str, cluster: int) -> int:
    """Arrivals at a stage's empty barrier."""
    return _TABLE[name][2] * (cluster if name in SHARED_RINGS else 1)


def make_barriers(memory, plan: BackwardPlan) -> Barriers:
    """Allocate every barrier."""
    rings = {}
    for name, (entry, _, _) in _TABLE.items():
        stages = _stages(plan, entry)
        full = memory.allocate_array(cutlass.Int64, 2 * stages)
        rings[name] = Ring(full, full + stages, stages)
    return Barriers(**rings)


@cute.jit
def init_barriers(barriers: Barriers, cluster: cutlass.Constexpr):
    """By one thread, before anybody waits."""
    for name in cutlass.const_expr(tuple(_TABLE)):
        ring = getattr(barriers, name)
        for stage in range(ring.stages):
            cute.arch.mbarrier_init(ring.full + stage, _TABLE[name][1])
            cute.arch.mbarrier_init(ring.empty + stage, _releases(name, cluster))


# Stages of the buffer of scores: P is there only where a plan's products take it from shared memory.
DS, P = 0, 1


@dataclass(frozen=True)
class Shared:
    """Operand and staging buffers; `*_t` reads the same bytes with the other mode contiguous, in blocks of rows.

    `staging` (dq.rows * reduce_columns, stages) and the statistics (tile_m, stages) are float32.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    ds_t: cute.Tensor | None
    q_t: tuple[cute.Tensor, ...]
    k_t: tuple[cute.Tensor, ...]
    do_t: tuple[cute.Tensor, ...]
    staging: cute.Tensor
    lse: cute.Tensor
    dpsum: cute.Tensor


def make_shared(memory, dtype, plan: BackwardPlan, layouts: Layouts) -> Shared:
    """Allocate the buffers, 1024-byte aligned for the swizzles."""
    m, n = plan.tile_m, plan.tile_n

    def operand(layout):
        return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def statistic(stages):
        return memory.allocate_tensor(cutlass.Float32, cute.make_layout((m, stages)), byte_alignment=128)

    def reread(tensor, layout, offset=0):
        return cute.make_tensor(cute.recast_ptr(tensor.iterator + offset, layout.inner, dtype), layout.outer)

    def blocks(tensor, layouts, depth):
        return tuple(reread(tensor, layout, LANES * i * depth) for i, layout in enumerate(layouts))

    q, k, v, do = (operand(layout) for layout in (layouts.q, layouts.k, layouts.v, layouts.do))
    ds = operand(layouts.ds)
    staged = cute.make_layout((plan.dq.rows * plan.reduce_columns, plan.stages_reduce))
    return Shared(
        q,
        k,
        v,
        do,
        ds,
        reread(ds, layouts.ds_t) if plan.transposed_kv else None,
        blocks(q, layouts.q_t, m),
        blocks(k, layouts.k_t, n),
        blocks(do, layouts.do_t, m),
        memory.allocate_tensor(cutlass.Float32, staged, byte_alignment=1024),
        statistic(plan.stages_q),
        statistic(plan.stages_do),
    )


@dataclass(frozen=True)
class Accumulators:
    """Tensor memory of the products, as the MMAs see it, in blocks of rows.

    p and ds are the 16-bit operands that lie over s and dp; None where a plan's products take them from shared memory.
    """

    s: tuple[cute.Tensor, ...]
    dp: tuple[cute.Tensor, ...]
    dv: tuple[cute.Tensor, ...]
    dk: tuple[cute.Tensor, ...]
    dq: tuple[cute.Tensor, ...]
    p: cute.Tensor | None
    ds: cute.Tensor | None


def make_accumulators(tmem: cute.Pointer, dtype, plan: BackwardPlan, products: Products) -> Accumulators:
    """Lay the accumulators over the allocation at `tmem`, by the plan's map."""

    def accumulator(product: Product, acc: Accumulator):
        return tuple(
            cute.make_tensor(
                tmem + block.column, mma.make_fragment_C(mma.partition_shape_C((block.rows, acc.columns))).layout
            )
            for mma, block in zip(product, acc.blocks)
        )

    def operand(product: Product, column):
        """P or dS: the queries of a compute warpgroup over the first half of its columns of S or dP."""
        if plan.transposed_kv:
            return None
        half = product[0].make_fragment_A(product[0].partition_shape_A((plan.tile_n, plan.tile_m // 2))).layout
        shape, stride = (*half.shape[:2], (half.shape[2], 2)), (*half.stride[:2], (half.stride[2], plan.tile_m))
        layout = cute.make_layout(shape, stride=stride)
        return cute.make_tensor(cute.recast_ptr(tmem + column, dtype=dtype), layout)

    return Accumulators(
        s=accumulator(products.s, plan.s),
        dp=accumulator(products.dp, plan.dp),
        dv=accumulator(products.dv, plan.dv),
        dk=accumulator(products.dk, plan.dk),
        dq=accumulator(products.dq, plan.dq),
        p=operand(products.dv, plan.s.column),
        ds=operand(products.dk, plan.dp.column),
    )
