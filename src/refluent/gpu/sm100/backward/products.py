"""The five matrix products of a step: their MMAs, and the shared memory layouts of their operands.

product         (M, N, K)              A                        B                  accumulator
S^T  = K Q^T    tile_n, tile_m, D      K, K-major               Q, K-major         S
dP^T = V dO^T   tile_n, tile_m, Dv     V, K-major               dO, K-major        dP
dV  += P^T dO   tile_n, Dv, tile_m     P^T, tensor memory       dO, MN-major       dV
dK  += dS^T Q   tile_n, D, tile_m      dS^T, tensor memory      Q, MN-major        dK
dQ   = dS K     tile_m, D, tile_n      dS, MN-major             K, MN-major        dQ

A plan may turn the last three, so that their rows run along the head dimension, in blocks of 128 (the last of 64):

dV^T += dO^T P  Dv, tile_n, tile_m     dO, MN-major             P^T, K-major       dV^T
dK^T += Q^T dS  D, tile_n, tile_m      Q, MN-major              dS^T, K-major      dK^T
dQ^T  = K^T dS^T  D, tile_m, tile_n    K, MN-major              dS, MN-major       dQ^T

Q, K, dO, P and dS may be read both K-major and MN-major: the two layouts put the same element at the same byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers

from refluent.gpu.plans.sm100 import Accumulator, BackwardPlan

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SHARED, TENSOR = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM

Product = tuple[cute.TiledMma, ...]  # one MMA for each block of the accumulator's rows


@dataclass(frozen=True)
class Products:
    """The MMAs by what they compute."""

    s: Product
    dp: Product
    dv: Product
    dk: Product
    dq: Product

    @staticmethod
    def make(dtype, plan: BackwardPlan) -> Products:
        def product(acc: Accumulator, a_major, b_major, a_source=SHARED) -> Product:
            return tuple(
                blackwell_helpers.make_trivial_tiled_mma(
                    dtype,
                    dtype,
                    a_major,
                    b_major,
                    cutlass.Float32,
                    tcgen05.CtaGroup.ONE,
                    (block.rows, acc.columns),
                    a_source,
                )
                for block in acc.blocks
            )

        kv = (MN_MAJOR, K_MAJOR) if plan.transposed_kv else (K_MAJOR, MN_MAJOR, TENSOR)
        return Products(
            s=product(plan.s, K_MAJOR, K_MAJOR),
            dp=product(plan.dp, K_MAJOR, K_MAJOR),
            dv=product(plan.dv, *kv),
            dk=product(plan.dk, *kv),
            dq=product(plan.dq, MN_MAJOR, MN_MAJOR),
        )


@dataclass(frozen=True)
class Layouts:
    """Shared memory layouts; `*_t` is the MN-major reading of the same bytes (of ds the K-major one), in blocks of a
    product's rows where it is A."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout
    ds_t: cute.ComposedLayout | None  # where dK takes dS from shared memory
    q_t: tuple[cute.ComposedLayout, ...]
    k_t: tuple[cute.ComposedLayout, ...]
    do_t: tuple[cute.ComposedLayout, ...]

    @staticmethod
    def make(products: Products, dtype, plan: BackwardPlan) -> Layouts:
        m, n, d, dv = plan.tile_m, plan.tile_n, plan.head_dim, plan.head_dim_v
        a, b = blackwell_helpers.make_smem_layout_a, blackwell_helpers.make_smem_layout_b
        s, dp = products.s[0], products.dp[0]

        def turned(product: Product, acc: Accumulator, transposed: bool, depth: int, stages: int):
            """The operand of a gradient that holds the inputs: B whole, or A in blocks."""
            if not transposed:
                return (b(product[0], (acc.rows, acc.columns, depth), dtype, stages),)
            blocks = (a(mma, (block.rows, acc.columns, depth), dtype, 1) for mma, block in zip(product, acc.blocks))
            return tuple(restage(layout, stages, acc.rows * depth) for layout in blocks)

        ds = b(products.dq[0], (d, m, n), dtype, plan.score_stages) if plan.transposed_q else None
        return Layouts(
            q=b(s, (n, m, d), dtype, plan.stages_q),
            k=a(s, (n, m, d), dtype, 1),
            v=a(dp, (n, m, dv), dtype, 1),
            do=b(dp, (n, m, dv), dtype, plan.stages_do),
            ds=ds or a(products.dq[0], (m, d, n), dtype, 1),
            ds_t=b(products.dk[0], (d, n, m), dtype, plan.score_stages) if plan.transposed_kv else None,
            q_t=turned(products.dk, plan.dk, plan.transposed_kv, m, plan.stages_q),
            k_t=turned(products.dq, plan.dq, plan.transposed_q, n, 1),
            do_t=turned(products.dv, plan.dv, plan.transposed_kv, m, plan.stages_do),
        )


def restage(layout: cute.ComposedLayout, stages: int, stride: int) -> cute.ComposedLayout:
    """The layout of one stage, repeated every `stride` elements."""
    outer = cute.append(cute.select(layout.outer, mode=[0, 1, 2]), cute.make_layout(stages, stride=stride))
    return cute.make_composed_layout(layout.inner, layout.offset, outer)


@dataclass(frozen=True)
class Operands:
    """Both sides of a product, a fragment each for every block of the accumulator's rows; a last mode is the stage."""

    a: tuple[cute.Tensor, ...]
    b: tuple[cute.Tensor, ...]


@cute.jit
def multiply(product: Product, acc, operands: Operands, stage, accumulate):
    """acc = a b^T, or acc += a b^T, all steps of K; `stage` is that of the operand that has several."""
    for block in cutlass.range_constexpr(len(product)):
        mma = cute.make_tiled_mma(cute.make_mma_atom(product[block].op))  # its accumulate flag must not outlive this
        mma.set(tcgen05.Field.ACCUMULATE, accumulate)
        a, b = at_stage(operands.a[block], stage), at_stage(operands.b[block], stage)
        for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
            cute.gemm(mma, acc[block], a[None, None, k], b[None, None, k], acc[block])
            mma.set(tcgen05.Field.ACCUMULATE, True)


def at_stage(fragment: cute.Tensor, stage) -> cute.Tensor:
    """One stage of a fragment; those without the mode, and with one stage, have nothing to choose."""
    if cute.rank(fragment) == 3:
        return fragment
    return fragment[None, None, None, stage if cute.size(fragment, mode=[3]) > 1 else 0]
