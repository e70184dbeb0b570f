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

dS needs no empty barrier: dP of a step is issued after dQ of the one before, and the tensor unit works in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.pipeline import Ring
from refluent.gpu.plans.sm100 import REDUCE_COLUMNS, BackwardPlan
from refluent.gpu.sm100.backward.products import Layouts, Products

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


def _stages(plan: BackwardPlan, entry) -> int:
    return getattr(plan, entry) if isinstance(entry, str) else entry


def make_barriers(memory, plan: BackwardPlan) -> Barriers:
    """Allocate every barrier."""
    rings = {}
    for name, (entry, _, _) in _TABLE.items():
        stages = _stages(plan, entry)
        full = memory.allocate_array(cutlass.Int64, 2 * stages)
        rings[name] = Ring(full, full + stages, stages)
    return Barriers(**rings)


@cute.jit
def init_barriers(barriers: Barriers, plan: cutlass.Constexpr):
    """By one thread, before anybody waits."""
    for name in cutlass.const_expr(tuple(_TABLE)):
        ring = getattr(barriers, name)
        for stage in range(ring.stages):
            cute.arch.mbarrier_init(ring.full + stage, _TABLE[name][1])
            cute.arch.mbarrier_init(ring.empty + stage, _TABLE[name][2])


@dataclass(frozen=True)
class Shared:
    """Operand and staging buffers; `staging` (tile_m * 32, stages) and the statistics (tile_m, stages) are float32."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    q_t: cute.Tensor
    k_t: cute.Tensor
    do_t: cute.Tensor
    staging: cute.Tensor
    lse: cute.Tensor
    dpsum: cute.Tensor


def make_shared(memory, dtype, plan: BackwardPlan, layouts: Layouts) -> Shared:
    """Allocate the buffers, 1024-byte aligned for the swizzles."""

    def operand(layout):
        return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def reread(tensor, layout):
        return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner, dtype), layout.outer)

    q, k, v, do = (operand(layout) for layout in (layouts.q, layouts.k, layouts.v, layouts.do))
    ds = operand(layouts.ds)
    staged = cute.make_layout((plan.tile_m * REDUCE_COLUMNS, plan.stages_reduce))
    return Shared(
        q,
        k,
        v,
        do,
        ds,
        reread(q, layouts.q_t),
        reread(k, layouts.k_t),
        reread(do, layouts.do_t),
        memory.allocate_tensor(cutlass.Float32, staged, byte_alignment=1024),
        memory.allocate_tensor(cutlass.Float32, cute.make_layout((plan.tile_m, plan.stages_q)), byte_alignment=128),
        memory.allocate_tensor(cutlass.Float32, cute.make_layout((plan.tile_m, plan.stages_do)), byte_alignment=128),
    )


@dataclass(frozen=True)
class Accumulators:
    """Tensor memory of the products, as the MMAs see it; p and ds are the 16-bit operands that lie over s and dp."""

    s: cute.Tensor
    dp: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor
    dq: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor


def make_accumulators(tmem: cute.Pointer, dtype, plan: BackwardPlan, products: Products) -> Accumulators:
    """Lay the accumulators over the allocation at `tmem`, by the plan's map."""
    m, n = plan.tile_m, plan.tile_n

    def accumulator(mma, shape, column):
        return cute.make_tensor(tmem + column, mma.make_fragment_C(mma.partition_shape_C(shape)).layout)

    def operand(mma, column):
        layout = mma.make_fragment_A(mma.partition_shape_A((n, m))).layout
        return cute.make_tensor(cute.recast_ptr(tmem + column, dtype=dtype), layout)

    return Accumulators(
        s=accumulator(products.s, (n, m), plan.tmem_s),
        dp=accumulator(products.dp, (n, m), plan.tmem_dp),
        dv=accumulator(products.dv, (n, plan.head_dim_v), plan.tmem_dv),
        dk=accumulator(products.dk, (n, plan.head_dim), plan.tmem_dk),
        dq=accumulator(products.dq, (m, plan.head_dim), plan.tmem_dp),
        p=operand(products.dv, plan.tmem_s),
        ds=operand(products.dk, plan.tmem_dp),
    )
