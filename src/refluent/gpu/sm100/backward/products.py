"""The five matrix products of a step: their MMAs, and the shared memory layouts of their operands.

product         (M, N, K)              A                        B                  accumulator
S^T  = K Q^T    tile_n, tile_m, D      K, K-major               Q, K-major         S
dP^T = V dO^T   tile_n, tile_m, Dv     V, K-major               dO, K-major        dP
dV  += P^T dO   tile_n, Dv, tile_m     P^T, tensor memory       dO, MN-major       dV
dK  += dS^T Q   tile_n, D, tile_m      dS^T, tensor memory      Q, MN-major        dK
dQ   = dS K     tile_m, D, tile_n      dS, MN-major             K, MN-major        dQ, over dP

Q, K and dO are read both K-major and MN-major: the two layouts put the same element at the same byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.utils import blackwell_helpers

from refluent.gpu.plans.sm100 import BackwardPlan

K_MAJOR, MN_MAJOR = tcgen05.OperandMajorMode.K, tcgen05.OperandMajorMode.MN
SHARED, TENSOR = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM


@dataclass(frozen=True)
class Products:
    """The MMAs by what they compute."""

    s: cute.TiledMma
    dp: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma

    @staticmethod
    def make(dtype, plan: BackwardPlan) -> Products:
        m, n = plan.tile_m, plan.tile_n

        def mma(a_major, b_major, rows, columns, a_source=SHARED):
            return blackwell_helpers.make_trivial_tiled_mma(
                dtype,
                dtype,
                a_major,
                b_major,
                cutlass.Float32,
                tcgen05.CtaGroup.ONE,
                (rows, columns),
                a_source,
            )

        return Products(
            s=mma(K_MAJOR, K_MAJOR, n, m),
            dp=mma(K_MAJOR, K_MAJOR, n, m),
            dv=mma(K_MAJOR, MN_MAJOR, n, plan.head_dim_v, TENSOR),
            dk=mma(K_MAJOR, MN_MAJOR, n, plan.head_dim, TENSOR),
            dq=mma(MN_MAJOR, MN_MAJOR, m, plan.head_dim),
        )


@dataclass(frozen=True)
class Layouts:
    """Shared memory layouts; `*_t` is the MN-major reading of the same bytes."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout
    q_t: cute.ComposedLayout
    k_t: cute.ComposedLayout
    do_t: cute.ComposedLayout

    @staticmethod
    def make(products: Products, dtype, plan: BackwardPlan) -> Layouts:
        m, n, d, dv = plan.tile_m, plan.tile_n, plan.head_dim, plan.head_dim_v
        a, b = blackwell_helpers.make_smem_layout_a, blackwell_helpers.make_smem_layout_b
        return Layouts(
            q=b(products.s, (n, m, d), dtype, plan.stages_q),
            k=a(products.s, (n, m, d), dtype, 1),
            v=a(products.dp, (n, m, dv), dtype, 1),
            do=b(products.dp, (n, m, dv), dtype, plan.stages_do),
            ds=a(products.dq, (m, d, n), dtype, 1),
            q_t=b(products.dk, (n, d, m), dtype, plan.stages_q),
            k_t=b(products.dq, (m, d, n), dtype, 1),
            do_t=b(products.dv, (n, dv, m), dtype, plan.stages_do),
        )


@cute.jit
def multiply(product: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate):
    """acc = a b^T, or acc += a b^T: fragments of one stage, all steps of K."""
    mma = cute.make_tiled_mma(cute.make_mma_atom(product.op))  # its accumulate flag must not outlive this scope
    mma.set(tcgen05.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
        mma.set(tcgen05.Field.ACCUMULATE, True)
