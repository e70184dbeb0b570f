"""Faults that somebody could write into the kernel, each reported by a check, a deadlock or a wrong gradient."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from kernels.layout import Rows
from kernels.sm100.faulty import WRONG, Fault, planted, reports
from kernels.sm100.runs import Run

pytestmark = pytest.mark.emulator
BF16 = torch.bfloat16
COMPUTE, MMA, LOAD, REDUCE, EPILOGUE, STORAGE, KERNEL = (
    f"sm100/backward/{name}.py" for name in "compute mma load reduce epilogue storage kernel".split()
)
BARRIER = "    cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=THREADS)"


def call(queries, keys, heads=1, heads_kv=1, ctas=0, cluster=1, **options):
    torch.manual_seed(3)
    q, do = queries.tensor(heads, 64, BF16), queries.tensor(heads, 64, BF16)
    k, v = keys.tensor(heads_kv, 64, BF16), keys.tensor(heads_kv, 64, BF16)
    for name, rows in (("q", queries), ("k", keys)):
        if rows.packed:
            options |= {f"cu_seqlens_{name}": rows.cu_seqlens(), f"max_seqlen_{name}": rows.seqlen}
    return Run(do, q, k, v, None, options, ctas, cluster)


CALLS = {
    "plain": lambda: call(Rows(300, (300,)), Rows(140, (140,))),
    "causal": lambda: call(Rows(300, (300,)), Rows(300, (300,)), causal=True),
    "persistent": lambda: call(Rows(140, (140,)), Rows(270, (270,)), ctas=1),
    "ordered": lambda: call(Rows(300, (300,)), Rows(300, (300,)), deterministic=True),
    "ordered, causal": lambda: call(Rows(300, (300,)), Rows(300, (300,)), deterministic=True, causal=True),
    "grouped": lambda: call(Rows(140, (140,)), Rows(140, (140,)), 2, ctas=1),
    "grouped, ordered": lambda: call(Rows(140, (140,)), Rows(140, (140,)), 3, deterministic=True),
    "cluster": lambda: call(Rows(400, (400,)), Rows(300, (300,)), cluster=2),
    "cluster, ordered": lambda: call(
        Rows(300, (300,)), Rows(300, (300,)), cluster=2, deterministic=True, window=(30, 10)
    ),
    "packed": lambda: call(Rows(130, (130, 70), (130, 70)), Rows(150, (20, 150), (20, 150))),
}
LEFT = ("exit", "mbarrier")
RACE, PROXY, STUCK, EMPTY, ORDER = ("race",), ("proxy",), ("deadlock", "livelock"), ("uninitialised",), ("order",)

FAULTS = [
    Fault(
        "P stored before S is read",
        COMPUTE,
        "    cute.arch.fence_view_async_tmem_load()\n    lse =",
        "    lse =",
        RACE,
    ),
    Fault(
        "P stored over the other warpgroup's S",
        COMPUTE,
        "start = column + share.group_first + first // 2",
        "start = column + (share.group_first + first) // 2",
        RACE,
    ),
    Fault(
        "P announced before it is stored",
        COMPUTE,
        "    for c in cutlass.range_constexpr(0, share.columns, share.part):  # part",
        "    arrive(bars.s.empty_at(step))\n"
        "    for c in cutlass.range_constexpr(0, share.columns, share.part):  # part",
        RACE,
    ),
    Fault(
        "no wait for P in tensor memory",
        COMPUTE,
        "    else:\n        cute.arch.fence_view_async_tmem_store()\n    arrive(bars.s.empty_at(step))",
        "    arrive(bars.s.empty_at(step))",
        RACE,
    ),
    Fault(
        "dQ not drained before dP",
        MMA,
        "    if cutlass.const_expr(ctx.plan.dq_over_dp):\n        bars.dq.wait_empty(step)\n",
        "",
        RACE,
    ),
    Fault("swapped phase", "device/pipeline.py", "((step // self.stages) % 2) ^ 1", "(step // self.stages) % 2", STUCK),
    Fault("LSE never released", COMPUTE, "    arrive(bars.lse.empty_at(step))\n", "", STUCK),
    Fault(
        "no proxy fence for dS in shared memory",
        COMPUTE,
        "    cute.arch.fence_view_async_shared()\n    arrive(bars.ds.full_at(step))",
        "    arrive(bars.ds.full_at(step))",
        PROXY,
    ),
    Fault(
        "no proxy fence before the reduce-add of dQ",
        REDUCE,
        "        cute.arch.fence_view_async_shared()\n",
        "",
        PROXY,
    ),
    Fault("one arrival too few", STORAGE, '"ds": (1, COMPUTE_WARPS, 1)', '"ds": (1, COMPUTE_WARPS - 1, 1)', RACE),
    Fault("one arrival too many", STORAGE, '"dq": (1, 1, REDUCE_WARPS)', '"dq": (1, 1, REDUCE_WARPS + 1)', STUCK),
    Fault(
        "K reloaded too early",
        LOAD,
        "        if opening and step > 0:\n            bars.q.wait_empty(step + plan.stages_q - 1)",
        "        if opening and step < 0:\n            bars.q.wait_empty(step + plan.stages_q - 1)",
        RACE,
        "persistent",
    ),
    Fault(
        "K's bytes forgotten",
        LOAD,
        "m * d * element + (n * d * element if opening else 0)",
        "m * d * element",
        RACE,
    ),
    Fault(
        "turn released when the adds have been read",
        REDUCE,
        "        if thread == 0:\n            cute.arch.cp_async_bulk_wait_group(0)\n            turn",
        "        if thread == 0:\n            cute.arch.cp_async_bulk_wait_group(0, read=True)\n            turn",
        ORDER,
        "ordered",
    ),
    Fault(
        "turns counted from the wrong end",
        "device/work.py",
        "            return end - 1 - own\n",
        "            return own - begin\n",
        STUCK,
        "ordered, causal",
    ),
    Fault(
        "turns counted over blocks that never come",
        "device/work.py",
        "return end - 1 - own",
        "return end - own",
        STUCK,
        "ordered, causal",
    ),
    Fault(
        "turn of a group not waited for",
        EPILOGUE,
        "            wait_turn(turn.iterator + 2 * block + group, tile.head % ctx.call.group)\n",
        "            pass\n",
        ORDER,
        "grouped, ordered",
    ),
    Fault(
        "turn of dQ not waited for",
        REDUCE,
        "            wait_turn(turn.iterator + block, ctx.call.rank(tile, m_block))\n",
        "            pass\n",
        ORDER,
        "ordered",
    ),
    Fault(
        "mask off by one",
        "device/visible.py",
        "low = key - shift - self.right - first_query",
        "low = key - shift - self.right - first_query + 1",
        (WRONG,),
        "causal",
    ),
    Fault("LSE of the other stage", COMPUTE, "bars.lse.stage(step))", "bars.lse.stage(step + 1))", RACE),
    Fault(
        "staging of dQ reused too early",
        REDUCE,
        "cp_async_bulk_wait_group(plan.stages_reduce - 1, read=True)",
        "cp_async_bulk_wait_group(plan.stages_reduce, read=True)",
        RACE,
    ),
    Fault(
        "dQ released before it is in registers",
        REDUCE,
        "    cute.arch.fence_view_async_tmem_load()\n    arrive(bars.dq.empty_at(step))\n",
        "    arrive(bars.dq.empty_at(step))\n    cute.arch.fence_view_async_tmem_load()\n",
        RACE,
    ),
    Fault(
        "Q released before dK reads it",
        MMA,
        "        multiply(ctx.products.dk, ctx.accumulators.dk, frags.dk, bars.q.stage(step), i > 0)\n"
        "        if following:\n            commit(bars.q.empty_at(step), ctx.static.cluster)\n",
        "        if following:\n            commit(bars.q.empty_at(step), ctx.static.cluster)\n"
        "        multiply(ctx.products.dk, ctx.accumulators.dk, frags.dk, bars.q.stage(step), i > 0)\n",
        RACE,
    ),
    Fault(
        "dV starts from what is there",
        MMA,
        "    grad_values(ctx, frags, step, False)\n",
        "    grad_values(ctx, frags, step, True)\n",
        EMPTY,
    ),
    Fault(
        "dK and dV announced before the last products",
        MMA,
        "    bars.dkv.wait_empty(tiles)  # the last tile's dV and dK have left tensor memory\n",
        "    bars.dkv.wait_empty(tiles)\n    commit(bars.dkv.full_at(tiles))\n",
        RACE,
    ),
    Fault(
        "dK and dV read before they are done",
        COMPUTE,
        "            ctx.barriers.dkv.wait_full(tiles)\n",
        "            pass\n",
        RACE,
    ),
    Fault(
        "staging of a group overwritten by the next tile's dS",
        EPILOGUE,
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n    # Both",
        "        pass\n    # Both",
        RACE,
        "grouped",
    ),
    Fault(
        "rows of the next sequence",
        "device/seqlen.py",
        "return self.seqlen - length, self.start(batch) + length",
        "return self.seqlen - length - 1, self.start(batch) + length + 1",
        (WRONG,),
        "packed",
    ),
    Fault(
        "scale of dK forgotten",
        EPILOGUE,
        "targets.dk, plan.dk, ctx.call.scale)",
        "targets.dk, plan.dk, cutlass.Float32(1.0))",
        (WRONG,),
    ),
    Fault(
        "a release that reaches the own CTA alone",
        "device/pipeline.py",
        "mask(cluster) if cutlass.const_expr(cluster > 1) else None",
        "None",
        STUCK,
        "cluster",
    ),
    Fault(
        "a release by one CTA enough for both",
        STORAGE,
        " * (cluster if name in SHARED_RINGS else 1)",
        "",
        RACE + STUCK,
        "cluster",
    ),
    Fault(
        "a CTA leaves before the other's releases",
        LOAD,
        "        drain(ctx, step)\n",
        "        pass\n",
        LEFT,
        "cluster",
    ),
    Fault(
        "barriers of the other not waited for",
        KERNEL,
        "            cute.arch.cluster_arrive()\n            cute.arch.cluster_wait()\n",
        "            cute.arch.sync_threads()\n",
        LEFT + RACE,
        "cluster",
    ),
    Fault("half of Q waited for", LOAD, "expect(q_full, m * d", "expect(q_full, m // 2 * d", RACE, "cluster"),
    Fault(
        "a pair that does not walk together",
        "device/work.py",
        "self.window.query_blocks(span * self.span_n, self.span_n,",
        "self.window.query_blocks(n_block * self.tile_n, self.tile_n,",
        STUCK,
        "cluster, ordered",
    ),
    Fault(
        "a turn taken by who has nothing to add",
        REDUCE,
        "        if tile.adds(m_block):\n",
        "        if tile.steps > 0:\n",
        STUCK,
        "cluster, ordered",
    ),
]
CI = 2  # every how many of them


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=str(f), marks=pytest.mark.full if i % CI else ()) for i, f in enumerate(FAULTS)]
)
def test_fault_is_reported(fault, tmp_path):
    run = CALLS[fault.on]()
    with planted(fault, tmp_path):
        said = reports(run, num_sms=1 if fault.on == "ordered, causal" else 4)
    assert said & set(fault.found), said


@pytest.mark.parametrize("name", CALLS)
def test_without_a_fault(name):
    assert not reports(CALLS[name]())


def test_enough():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 12
