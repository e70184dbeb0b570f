"""The Hopper backward kernel: host entry and the CTA that its roles make up.

Algorithm 4 of FlashAttention-2 (Dao, 2023) with the roles of a warp-specialised Hopper kernel: see
docs/kernels/sm90-backward.md for the pipeline and the memory map.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from refluent.gpu.device.copies import sequence_view
from refluent.gpu.device.numerics import log2_factor
from refluent.gpu.device.scores import Scores
from refluent.gpu.device.seqlen import Side
from refluent.gpu.device.tensors import Sources, Targets
from refluent.gpu.device.visible import Window
from refluent.gpu.device.work import Call, Order, heads_of_bundle
from refluent.gpu.plans.sm90 import L2_BYTES, ROWS, THREADS
from refluent.gpu.sm90.backward import context
from refluent.gpu.sm90.backward.compute import compute
from refluent.gpu.sm90.backward.context import Context, Static, Stores
from refluent.gpu.sm90.backward.load import load
from refluent.gpu.sm90.backward.products import Layouts, Products, layout
from refluent.gpu.sm90.backward.reduce import reduce
from refluent.gpu.sm90.backward.storage import init_barriers, make_barriers, make_shared


@dataclass(frozen=True)
class Backward:
    """A variant: everything that is known when the kernel is compiled.

    group: query heads a key head. has_left, has_right: which sides of the window are closed (causal closes the right).
    """

    static: Static
    group: int = 1
    has_left: bool = False
    has_right: bool = False

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        lse_log2: cute.Tensor,
        dpsum: cute.Tensor,
        targets: Targets,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        philox: cute.Tensor | None,
        batch: cutlass.Int32,
        seqlen_q: cutlass.Int32,
        seqlen_k: cutlass.Int32,
        left: cutlass.Int32,
        right: cutlass.Int32,
        scale: cutlass.Float32,
        softcap: cutlass.Float32,
        keep_from: cutlass.Uint32,
        keep_scale: cutlass.Float32,
        ctas: cutlass.Int32,
        stream,
    ):
        """q (b, s, h, d) or packed (t, h, d), k, v, do likewise; workspaces as Sources and Targets say. `ctas`: CTAs of
        the grid at most, each walks tiles with that stride; 0 means one for every tile."""
        plan, dtype = self.static.plan, self.static.dtype
        packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
        queries = Side(cu_seqlens_q, seqused_q, seqlen_q, q.shape[0] if packed_q else seqlen_q)
        keys = Side(cu_seqlens_k, seqused_k, seqlen_k, k.shape[0] if packed_k else seqlen_k)
        heads = q.shape[1 if packed_q else 2]
        window = Window(left, right, self.has_left, self.has_right)
        bundle = heads_of_bundle(heads, seqlen_q, plan.query_bytes, L2_BYTES)
        order = Order.make(keys, batch, heads, plan.tile_n, bundle)
        call = Call(queries, keys, window, heads, batch, scale, self.group, plan.tile_m, plan.tile_n, 1, order)
        layouts = Layouts.make(dtype, plan)
        views = (
            *(sequence_view(tensor, seqlen_q, queries.ragged, packed_q) for tensor in (q, do)),
            *(sequence_view(tensor, seqlen_k, keys.ragged, packed_k) for tensor in (k, v)),
        )
        sources = make_sources(views, lse_log2, dpsum, layouts, plan)
        stores = Stores(None, None, None, None)
        if cutlass.const_expr(self.group == 1):
            grads = tuple(sequence_view(tensor, seqlen_k, keys.ragged, packed_k) for tensor in (targets.dk, targets.dv))
            stores = make_stores(grads, dtype, plan)
        scores = Scores(log2_factor(scale), softcap, philox, keep_from, keep_scale)
        grid = call.tiles()
        if ctas > 0:
            grid = cutlass.min(grid, ctas)
        self.kernel(call, scores, sources, stores, targets).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, call: Call, scores: Scores, sources: Sources, stores: Stores, targets: Targets):
        """One CTA: allocate and start the roles."""
        plan, dtype = self.static.plan, self.static.dtype
        products = Products.make(dtype, plan)
        layouts = Layouts.make(dtype, plan)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        barriers = make_barriers(memory, plan)
        shared = make_shared(memory, dtype, plan, layouts)
        if cute.arch.thread_idx()[0] == 0:
            init_barriers(barriers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        ctx = Context(self.static, call, scores, sources, stores, targets, products, shared, barriers)
        if warp < context.COMPUTE_WARP:
            cute.arch.setmaxregister_decrease(plan.other_registers)
            if warp == context.LOAD_WARP:
                load(ctx)
            if warp == context.REDUCE_WARP:
                reduce(ctx)
        else:
            cute.arch.setmaxregister_increase(plan.compute_registers)
            compute(ctx)


def make_sources(views, lse_log2, dpsum, layouts: Layouts, plan) -> Sources:
    """TMA atoms for the boxes of q, do, k and v."""
    m, n, d, dv = plan.tile_m, plan.tile_n, plan.head_dim, plan.head_dim_v
    tiles = ((layouts.q, (m, d)), (layouts.do, (m, dv)), (layouts.k, (n, d)), (layouts.v, (n, dv)))
    op = cpasync.CopyBulkTensorTileG2SOp()
    q, do, k, v = (
        cpasync.make_tiled_tma_atom(op, view, cute.select(box, mode=[0, 1]), tile)
        for view, (box, tile) in zip(views, tiles)
    )
    return Sources(q[0], q[1], k[0], k[1], v[0], v[1], do[0], do[1], lse_log2, dpsum)


def make_stores(views, dtype, plan) -> Stores:
    """TMA atoms for a warpgroup's boxes of dk and dv, which leave through the buffers of K and V."""
    tiles = tuple(
        (layout(dtype, ROWS, plan.part(head_dim), 1, whole), (ROWS, plan.part(head_dim)))
        for head_dim, whole in ((plan.head_dim, plan.dq_part), (plan.head_dim_v, plan.part(plan.head_dim_v)))
    )
    op = cpasync.CopyBulkTensorTileS2GOp()
    dk, dv = (
        cpasync.make_tiled_tma_atom(op, view, cute.select(box, mode=[0, 1]), tile)
        for view, (box, tile) in zip(views, tiles)
    )
    return Stores(*dk, *dv)
