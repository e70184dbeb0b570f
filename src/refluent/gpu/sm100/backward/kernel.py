"""The Blackwell backward kernel: host entry and the CTA that its roles make up.

Algorithm 4 of FlashAttention-2 (Dao, 2023) with the roles of a warp-specialised Blackwell kernel: see
docs/kernels/sm100-backward.md for the pipeline and the memory maps.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from refluent.gpu.device.blocks import Blocks
from refluent.gpu.device.copies import sequence_view
from refluent.gpu.device.numerics import log2_factor
from refluent.gpu.device.scores import Scores
from refluent.gpu.device.seqlen import Side
from refluent.gpu.device.tensors import Sources, Targets
from refluent.gpu.device.visible import Window
from refluent.gpu.device.work import Call, Order, heads_of_bundle
from refluent.gpu.plans.sm100 import REGISTERS, THREADS
from refluent.gpu.sm100.backward import context
from refluent.gpu.sm100.backward.compute import compute
from refluent.gpu.sm100.backward.context import Context, Static, tuple_of
from refluent.gpu.sm100.backward.load import load
from refluent.gpu.sm100.backward.mma import mma
from refluent.gpu.sm100.backward.products import Layouts, Products
from refluent.gpu.sm100.backward.reduce import reduce
from refluent.gpu.sm100.backward.storage import init_barriers, make_accumulators, make_barriers, make_shared


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
        captured: tuple | None,
        mask_captured: tuple | None,
        sums: tuple | None,
        blocks: Blocks | None,
        stream,
    ):
        """q (b, s, h, d) or packed (t, h, d), k, v, do likewise; workspaces as Sources and Targets say. `ctas`: CTAs of
        the grid at most (whole clusters, one at least), each walks tiles with that stride; 0: one for every tile.
        captured, mask_captured and sums: as Scores says."""
        plan, dtype, cluster = self.static.plan, self.static.dtype, self.static.cluster
        packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
        queries = Side(cu_seqlens_q, seqused_q, seqlen_q, q.shape[0] if packed_q else seqlen_q)
        keys = Side(cu_seqlens_k, seqused_k, seqlen_k, k.shape[0] if packed_k else seqlen_k)
        heads = q.shape[1 if packed_q else 2]
        window = Window(left, right, self.has_left, self.has_right)
        bundle = heads_of_bundle(heads, seqlen_q, plan.query_bytes)
        order = Order.make(keys, batch, heads, plan.tile_n * cluster, bundle)
        sizes = self.group, plan.tile_m, plan.tile_n, cluster
        call = Call(queries, keys, window, heads, batch, scale, *sizes, order, blocks)
        products = Products.make(dtype, plan)
        layouts = Layouts.make(products, dtype, plan)
        q_view = sequence_view(q, seqlen_q, queries.ragged, packed_q)
        do_view = sequence_view(do, seqlen_q, queries.ragged, packed_q)
        k_view = sequence_view(k, seqlen_k, keys.ragged, packed_k)
        v_view = sequence_view(v, seqlen_k, keys.ragged, packed_k)
        sources = make_sources(q_view, k_view, v_view, do_view, lse_log2, dpsum, products, layouts, self.static)
        read = tuple_of(captured), tuple_of(mask_captured), tuple_of(sums)
        scores = Scores(log2_factor(scale), softcap, philox, keep_from, keep_scale, *read)
        grid = call.tiles()
        if ctas > 0:
            grid = cutlass.min(grid, cutlass.max(ctas // cluster, 1) * cluster)
        self.kernel(call, scores, sources, targets).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], cluster=[cluster, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        call: Call,
        scores: Scores,
        sources: Sources,
        targets: Targets,
    ):
        """One CTA: allocate, start the roles, free."""
        plan, dtype = self.static.plan, self.static.dtype
        products = Products.make(dtype, plan)
        layouts = Layouts.make(products, dtype, plan)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        barriers = make_barriers(memory, plan)
        address = memory.allocate_array(cutlass.Int32, 1)
        shared = make_shared(memory, dtype, plan, layouts)
        if warp == context.MMA_WARP:
            cute.arch.alloc_tmem(plan.tmem_columns, address)
            cute.arch.relinquish_tmem_alloc_permit()
        if cute.arch.thread_idx()[0] == 0:
            init_barriers(barriers, self.static.cluster)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.static.cluster > 1):  # the others' barriers are there too
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)
        accumulators = make_accumulators(tmem, dtype, plan, products)
        ctx = Context(self.static, call, scores, sources, targets, products, shared, barriers, accumulators, tmem)
        if warp < context.COMPUTE_WARP:
            set_registers(plan.reduce_registers)
            reduce(ctx)
        elif warp < context.MMA_WARP:
            set_registers(plan.compute_registers)
            compute(ctx)
        else:
            set_registers(plan.other_registers)
            if warp == context.MMA_WARP:
                mma(ctx)
            if warp == context.LOAD_WARP:
                load(ctx)
        cute.arch.sync_threads()
        if warp == context.MMA_WARP:
            cute.arch.dealloc_tmem(tmem, plan.tmem_columns)


@cute.jit
def set_registers(count: cutlass.Constexpr):
    """Of every thread of the warpgroup; all start with the same share."""
    if cutlass.const_expr(count < REGISTERS // THREADS):
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)


def make_sources(q, k, v, do, lse_log2, dpsum, products: Products, layouts: Layouts, static: Static) -> Sources:
    """TMA atoms for the operands' boxes; those of Q and dO bring a CTA's share to its whole cluster."""
    plan = static.plan
    m, n, d, dv = plan.tile_m, plan.tile_n, plan.head_dim, plan.head_dim_v
    own_op = shared_op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    if static.cluster > 1:
        shared_op = cpasync.CopyBulkTensorTileG2SMulticastOp(tcgen05.CtaGroup.ONE)
    cluster = (1, static.cluster, 1, 1)

    def stage(layout):
        return cute.select(layout, mode=[0, 1, 2])

    atom_a, atom_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
    q_atom, q = atom_b(shared_op, q, stage(layouts.q), (n, m, d), products.s[0], cluster)
    k_atom, k = atom_a(own_op, k, stage(layouts.k), (n, m, d), products.s[0], cluster)
    v_atom, v = atom_a(own_op, v, stage(layouts.v), (n, m, dv), products.dp[0], cluster)
    do_atom, do = atom_b(shared_op, do, stage(layouts.do), (n, m, dv), products.dp[0], cluster)
    return Sources(q_atom, q, k_atom, k, v_atom, v, do_atom, do, lse_log2, dpsum)
