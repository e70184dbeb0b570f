"""The five matrix products of a step: their MMAs, and the shared memory layouts of their operands.

product         (M, N, K)              A                        B                  a warpgroup has
S^T  = K Q^T    tile_n, tile_m, D      K, K-major               Q, K-major         64 keys
dP^T = V dO^T   tile_n, tile_m, Dv     V, K-major               dO, K-major        64 keys
dV  += P^T dO   tile_n, Dv, tile_m     P^T, registers           dO, MN-major       64 keys
dK  += dS^T Q   tile_n, D, tile_m      dS^T, registers          Q, MN-major        64 keys
dQ   = dS K     tile_m, D, tile_n      dS, K-major              K, MN-major        64 queries, or half of the columns

Of a plan with 64 keys a warpgroup has half of the columns of every product, and P^T and dS^T lie in shared memory.

The accumulators of S^T and dP^T hold, in 16 bits, what the fragments of P^T and dS^T are: value for value in the same
registers. Q, K and dO are read both K-major and MN-major: the two layouts put the same element at the same byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from refluent.gpu.plans.sm90 import GROUPS, ROWS, BackwardPlan

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SHARED, REGISTERS = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
KEYS, COLUMNS = (GROUPS, 1, 1), (1, GROUPS, 1)  # how the warpgroups share a product: its rows, or its columns


@dataclass(frozen=True)
class Product:
    """An MMA of all warpgroups, and how they share it."""

    mma: cute.TiledMma
    shares: cutlass.Constexpr


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
        def product(columns, a_major, b_major, shares, a_source=SHARED) -> Product:
            size = (ROWS, columns // shares[1])
            return Product(
                hopper_helpers.make_trivial_tiled_mma(
                    dtype, dtype, a_major, b_major, cutlass.Float32, shares, size, a_source
                ),
                shares,
            )

        shares = KEYS if plan.by_keys else COLUMNS
        a_major, a_source = (K_MAJOR, REGISTERS) if plan.by_keys else (MN_MAJOR, SHARED)
        return Products(
            s=product(plan.tile_m, K_MAJOR, K_MAJOR, shares),
            dp=product(plan.tile_m, K_MAJOR, K_MAJOR, shares),
            dv=product(plan.head_dim_v, a_major, MN_MAJOR, shares, a_source),
            dk=product(plan.head_dim, a_major, MN_MAJOR, shares, a_source),
            dq=product(plan.head_dim, K_MAJOR, MN_MAJOR, KEYS if plan.dq_by_rows else COLUMNS),
        )


@dataclass(frozen=True)
class Layouts:
    """Shared memory layouts (rows, columns, stages), columns contiguous in swizzled pieces."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout

    @staticmethod
    def make(dtype, plan: BackwardPlan) -> Layouts:
        m, n, d, dv = plan.tile_m, plan.tile_n, plan.head_dim, plan.head_dim_v
        return Layouts(
            q=layout(dtype, m, d, plan.stages_q, plan.part(d)),
            k=layout(dtype, n, d, 1, plan.dq_part),
            v=layout(dtype, n, dv, 1, plan.part(dv)),
            do=layout(dtype, m, dv, plan.stages_do, plan.part(dv)),
            ds=layout(dtype, m, n, plan.score_buffers, ROWS),
        )


def layout(dtype, rows: int, columns: int, stages: int, whole: int) -> cute.ComposedLayout:
    """Pieces as wide as a swizzle goes, and such that `whole` columns are whole pieces: an MMA reads that many."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = next(
        kind
        for width, kind in ((64, kinds.K_SW128), (32, kinds.K_SW64), (16, kinds.K_SW32), (8, kinds.K_INTER))
        if whole % width == 0
    )
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def turned(tensor: cute.Tensor) -> cute.Tensor:
    """The same elements as (columns, rows, stages)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))


@cute.jit
def multiply(product: Product, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr):
    """acc = a b^T, or acc += a b^T, all steps of K, as a group of its own; the caller waits for it."""
    mma = cute.make_tiled_mma(cute.make_mma_atom(product.mma.op), product.shares)  # its flag must not outlive this
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
