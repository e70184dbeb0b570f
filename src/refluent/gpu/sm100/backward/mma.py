"""The MMA role, one warp: issues the five products of every step, in an order that keeps the tensor unit busy.

    prologue  S(0), dP(0), dV += P(0)^T dO(0)
    step i    S(i+1); dK += dS(i)^T Q(i); dQ(i) = dS(i) K; dP(i+1) once dQ(i) is drained; dV += P(i+1)^T dO(i+1)

S(i+1) needs no barrier against P(i), which lies in the same columns: dV of step i was issued before, and the unit works
in order. The same order makes dP(i+1) safe against dS(i), and dS(i+1) in shared memory against dQ(i). Where dQ has
columns of its own, it is dQ(i+1), not dP(i+1), that waits until dQ(i) is drained.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.pipeline import commit
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.context import Context
from refluent.gpu.sm100.backward.products import Operands, Product, multiply
from refluent.gpu.sm100.backward.storage import DS, P


@dataclass(frozen=True)
class Fragments:
    """Operands of every product as its MMAs take them: descriptors of shared memory, or tensor memory."""

    s: Operands
    dp: Operands
    dv: Operands
    dk: Operands
    dq: Operands

    @staticmethod
    def make(ctx: Context) -> Fragments:
        plan, products, shared, acc = ctx.plan, ctx.products, ctx.shared, ctx.accumulators
        s, dp = products.s[0], products.dp[0]
        scores = (acc.p, acc.ds)
        if plan.transposed_kv:
            scores = tuple(
                product[0].make_fragment_B(shared.ds_t)[None, None, None, stage]
                for product, stage in ((products.dv, P), (products.dk, DS))
            )
        side = products.dq[0].make_fragment_B if plan.transposed_q else products.dq[0].make_fragment_A
        return Fragments(
            s=Operands((s.make_fragment_A(shared.k),), (s.make_fragment_B(shared.q),)),
            dp=Operands((dp.make_fragment_A(shared.v),), (dp.make_fragment_B(shared.do),)),
            dv=gradient(products.dv, scores[0], shared.do_t, plan.transposed_kv),
            dk=gradient(products.dk, scores[1], shared.q_t, plan.transposed_kv),
            dq=gradient(products.dq, side(shared.ds)[None, None, None, DS], shared.k_t, plan.transposed_q),
        )


def gradient(product: Product, scores: cute.Tensor, inputs: tuple[cute.Tensor, ...], transposed: bool) -> Operands:
    """`scores`, a fragment of P or dS, times `inputs`; the other way round where the product is transposed."""
    if transposed:
        blocks = tuple(mma.make_fragment_A(block) for mma, block in zip(product, inputs))
        return Operands(blocks, (scores,) * len(blocks))
    return Operands((scores,), (product[0].make_fragment_B(inputs[0]),))


@cute.jit
def mma(ctx: Context):
    frags = Fragments.make(ctx)
    step, tiles = cutlass.Int32(0), cutlass.Int32(0)
    first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    for index in cutlass.range(first, ctx.call.tiles(), stride):
        tile = ctx.call.tile(index)
        if tile.steps > 0:
            step = multiply_tile(ctx, frags, tile, step, tiles)
            tiles += 1


@cute.jit
def multiply_tile(ctx: Context, frags: Fragments, tile: Tile, step: cutlass.Int32, tiles: cutlass.Int32):
    """All products of one tile; returns the step count after it."""
    bars = ctx.barriers
    scores(ctx, frags, step)
    grad_weights(ctx, frags, step)
    bars.dkv.wait_empty(tiles)  # the last tile's dV and dK have left tensor memory
    grad_values(ctx, frags, step, False)
    for i in cutlass.range(tile.steps):
        following = i + 1 < tile.steps
        if following:
            scores(ctx, frags, step + 1)
        bars.ds.wait_full(step)
        multiply(ctx.products.dk, ctx.accumulators.dk, frags.dk, bars.q.stage(step), i > 0)
        if following:
            commit(bars.q.empty_at(step), ctx.static.cluster)
        if cutlass.const_expr(not ctx.plan.dq_over_dp):
            bars.dq.wait_empty(step)
        multiply(ctx.products.dq, ctx.accumulators.dq, frags.dq, 0, False)
        if not following:
            commit(bars.q.empty_at(step), ctx.static.cluster)  # K shares Q's barrier, and dQ was its last reader
        commit(bars.dq.full_at(step))
        if following:
            grad_weights(ctx, frags, step + 1)
            grad_values(ctx, frags, step + 1, True)
        step += 1
    commit(bars.dkv.full_at(tiles))
    return step


@cute.jit
def scores(ctx: Context, frags: Fragments, step: cutlass.Int32):
    """S^T = K Q^T."""
    bars = ctx.barriers
    bars.q.wait_full(step)
    multiply(ctx.products.s, ctx.accumulators.s, frags.s, bars.q.stage(step), False)
    commit(bars.s.full_at(step))


@cute.jit
def grad_weights(ctx: Context, frags: Fragments, step: cutlass.Int32):
    """dP^T = V dO^T; where it lies over the dQ of the step before, once that is drained."""
    bars = ctx.barriers
    bars.do.wait_full(step)
    if cutlass.const_expr(ctx.plan.dq_over_dp):
        bars.dq.wait_empty(step)
    multiply(ctx.products.dp, ctx.accumulators.dp, frags.dp, bars.do.stage(step), False)
    commit(bars.dp.full_at(step))


@cute.jit
def grad_values(ctx: Context, frags: Fragments, step: cutlass.Int32, accumulate):
    """dV += P^T dO."""
    bars = ctx.barriers
    bars.s.wait_empty(step + 1)  # compute has read S and written P over it
    multiply(ctx.products.dv, ctx.accumulators.dv, frags.dv, bars.do.stage(step), accumulate)
    commit(bars.do.empty_at(step), ctx.static.cluster)
