"""The MMA role, one warp: issues the five products of every step, in an order that keeps the tensor unit busy.

    prologue  S(0), dP(0), dV += P(0)^T dO(0)
    step i    S(i+1); dK += dS(i)^T Q(i); dQ(i) = dS(i) K; dP(i+1) once dQ(i) is drained; dV += P(i+1)^T dO(i+1)

S(i+1) needs no barrier against P(i), which lies in the same columns: dV of step i was issued before, and the unit works
in order. The same order makes dP(i+1) safe against dS(i), and dS(i+1) in shared memory against dQ(i).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.pipeline import commit
from refluent.gpu.device.work import Tile
from refluent.gpu.sm100.backward.context import Context
from refluent.gpu.sm100.backward.products import multiply


@dataclass(frozen=True)
class Fragments:
    """Operands as the MMAs take them: descriptors of shared memory, the last mode is the stage."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    do_t: cute.Tensor
    q_t: cute.Tensor
    ds: cute.Tensor
    k_t: cute.Tensor

    @staticmethod
    def make(ctx: Context) -> Fragments:
        p, shared = ctx.products, ctx.shared
        return Fragments(
            k=p.s.make_fragment_A(shared.k),
            q=p.s.make_fragment_B(shared.q),
            v=p.dp.make_fragment_A(shared.v),
            do=p.dp.make_fragment_B(shared.do),
            do_t=p.dv.make_fragment_B(shared.do_t),
            q_t=p.dk.make_fragment_B(shared.q_t),
            ds=p.dq.make_fragment_A(shared.ds),
            k_t=p.dq.make_fragment_B(shared.k_t),
        )


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
        q_stage = bars.q.stage(step)
        multiply(ctx.products.dk, ctx.accumulators.dk, ctx.accumulators.ds, frags.q_t[None, None, None, q_stage], i > 0)
        if following:
            commit(bars.q.empty_at(step))
        multiply(
            ctx.products.dq,
            ctx.accumulators.dq,
            frags.ds[None, None, None, 0],
            frags.k_t[None, None, None, 0],
            False,
        )
        if not following:
            commit(bars.q.empty_at(step))  # K shares Q's barrier, and dQ was its last reader
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
    q = frags.q[None, None, None, bars.q.stage(step)]
    multiply(ctx.products.s, ctx.accumulators.s, frags.k[None, None, None, 0], q, False)
    commit(bars.s.full_at(step))


@cute.jit
def grad_weights(ctx: Context, frags: Fragments, step: cutlass.Int32):
    """dP^T = V dO^T, over the dQ of the step before, once that is drained."""
    bars = ctx.barriers
    bars.do.wait_full(step)
    bars.dq.wait_empty(step)
    do = frags.do[None, None, None, bars.do.stage(step)]
    multiply(ctx.products.dp, ctx.accumulators.dp, frags.v[None, None, None, 0], do, False)
    commit(bars.dp.full_at(step))


@cute.jit
def grad_values(ctx: Context, frags: Fragments, step: cutlass.Int32, accumulate):
    """dV += P^T dO."""
    bars = ctx.barriers
    bars.s.wait_empty(step + 1)  # compute has read S and written P over it
    do_t = frags.do_t[None, None, None, bars.do.stage(step)]
    multiply(ctx.products.dv, ctx.accumulators.dv, ctx.accumulators.p, do_t, accumulate)
    commit(bars.do.empty_at(step))
