"""Shared memory of one CTA, and every barrier: the pipeline table.

ring        full: producer -> consumer                       empty: consumer -> producer
k           TMA -> compute, once a tile                      compute: dK has left through the buffer
v           TMA -> compute, once a tile                      compute: dV has left through the buffer
q           TMA of Q, bulk copy of LSE -> compute            compute, 8 warps, after dK
do          TMA of dO, bulk copy of dPsum -> compute         compute, 8 warps, after dV
dq          compute -> reduce, a stage a warpgroup           reduce: the bulk reduce-add has read it

dS has no ring, nor has P in shared memory: the compute warpgroups meet at a named barrier when they are written, and of
two stages the one that a warpgroup writes next was read before the other one came to that barrier.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.pipeline import Ring
from refluent.gpu.plans.sm90 import GROUPS, ROWS, BackwardPlan
from refluent.gpu.sm90.backward.products import Layouts, turned

GROUP_WARPS = 4
COMPUTE_WARPS = GROUPS * GROUP_WARPS


@dataclass(frozen=True)
class Barriers:
    """The rings of the table above."""

    k: Ring
    v: Ring
    q: Ring
    do: Ring
    dq: Ring


# name -> (stages as a plan's attribute or a number, arrivals at full, arrivals at empty)
_TABLE = {
    "k": (1, 1, GROUPS),
    "v": (1, 1, GROUPS),
    "q": ("stages_q", 1, COMPUTE_WARPS),
    "do": ("stages_do", 1, COMPUTE_WARPS),
    "dq": (GROUPS, GROUP_WARPS, 1),
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
def init_barriers(barriers: Barriers):
    """By one thread, before anybody waits."""
    for name in cutlass.const_expr(tuple(_TABLE)):
        ring = getattr(barriers, name)
        for stage in range(ring.stages):
            cute.arch.mbarrier_init(ring.full + stage, _TABLE[name][1])
            cute.arch.mbarrier_init(ring.empty + stage, _TABLE[name][2])


@dataclass(frozen=True)
class Shared:
    """Operand and staging buffers (rows, columns, stages); `*_t` reads the same bytes as (columns, rows, stages).

    `staging` (64 * reduce_columns, warpgroups) and the statistics (tile_m, stages) are float32.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    q_t: cute.Tensor
    k_t: cute.Tensor
    do_t: cute.Tensor
    ds_t: cute.Tensor
    staging: cute.Tensor
    lse: cute.Tensor
    dpsum: cute.Tensor


def make_shared(memory, dtype, plan: BackwardPlan, layouts: Layouts) -> Shared:
    """Allocate the buffers, 1024-byte aligned for the swizzles. V follows K: grouped heads stage dV and dK in both."""

    def operand(layout):
        return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def statistic(stages):
        layout = cute.make_layout((plan.tile_m, stages))
        return memory.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)

    k, v, q, do, ds = (operand(layout) for layout in (layouts.k, layouts.v, layouts.q, layouts.do, layouts.ds))
    staged = cute.make_layout((ROWS * plan.reduce_columns, GROUPS))
    return Shared(
        q,
        k,
        v,
        do,
        ds,
        turned(q),
        turned(k),
        turned(do),
        turned(ds),
        memory.allocate_tensor(cutlass.Float32, staged, byte_alignment=1024),
        statistic(plan.stages_q),
        statistic(plan.stages_do),
    )
