"""The machine: scheduling, barriers, mbarriers, atomics, copies, launches, on hand-written PTX."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the emulator's extra is not installed")
pytest.importorskip("numba", reason="the emulator's extra is not installed")

from ptx_machine import SCHEDULES, kernel, machine, request, run  # noqa: E402
from refluent.emulator.errors import DeadlockError, FaultError  # noqa: E402

pytestmark = pytest.mark.emulator


def check(ptx, expected, *inputs, out=None, **launch):
    """Right and without findings under every schedule, with checks and without."""
    expected = np.asarray(expected)
    for schedule, seed in SCHEDULES:
        got = np.zeros_like(expected) if out is None else out.copy()
        report = run(ptx, got, *inputs, options={"schedule": schedule, "seed": seed}, **launch)
        assert not report.findings, "\n".join(map(str, report.findings))
        np.testing.assert_array_equal(got, expected, err_msg=f"{schedule} {seed}")
    got = np.zeros_like(expected) if out is None else out.copy()
    run(ptx, got, *inputs, options={"checks": "none"}, **launch)
    np.testing.assert_array_equal(got, expected)


def test_shared_memory_through_a_named_barrier():
    ptx = kernel("""
        mad.lo.s32 %r1, tid, 4, smem;
        mul.lo.s32 %r2, tid, 3;
        st.shared.b32 [%r1], %r2;
        bar.sync 0;
        xor.b32 %r3, tid, 63;
        mad.lo.s32 %r4, %r3, 4, smem;
        ld.shared.b32 %r5, [%r4];
        st.global.b32 [mine], %r5;
    """)
    check(ptx, 3 * np.arange(64, dtype=np.uint32)[::-1], shared=256)


def test_producer_and_consumer_through_arrive_and_sync():
    # Warp 0 fills a slot and arrives on barrier 1; warp 1 syncs on it, and frees the slot on barrier 2.
    ptx = kernel("""
        mov.b32 %r9, 0;
        mov.b32 %r8, 0;
        setp.ne.u32 %p1, warp, 0;
        mad.lo.s32 %r1, lane, 4, smem;
    LOOP:
        @%p1 bra CONSUMER;
        setp.eq.u32 %p2, %r9, 0;
        @%p2 bra FILL;
        bar.sync 2, 64;
    FILL:
        add.s32 %r2, %r9, lane;
        st.shared.b32 [%r1], %r2;
        bar.arrive 1, 64;
        bra NEXT;
    CONSUMER:
        bar.sync 1, 64;
        ld.shared.b32 %r3, [%r1];
        add.s32 %r8, %r8, %r3;
        setp.eq.u32 %p2, %r9, 4;
        @%p2 bra NEXT;
        bar.arrive 2, 64;
    NEXT:
        add.s32 %r9, %r9, 1;
        setp.lt.u32 %p3, %r9, 5;
        @%p3 bra LOOP;
        st.global.b32 [mine], %r8;
    """)
    expected = np.concatenate([np.zeros(32), 10 + 5 * np.arange(32)]).astype(np.uint32)
    check(ptx, expected, shared=128)


def test_barrier_reductions():
    ptx = kernel("""
        setp.lt.u32 %p1, tid, 40;
        bar.red.popc.u32 %r1, 0, %p1;
        bar.red.and.pred %p2, 0, %p1;
        bar.red.or.pred %p3, 0, 64, !%p1;
        selp.b32 %r2, 100, 0, %p2;
        selp.b32 %r3, 1000, 0, %p3;
        add.s32 %r1, %r1, %r2;
        add.s32 %r1, %r1, %r3;
        st.global.b32 [mine], %r1;
    """)
    check(ptx, np.full(64, 1040, np.uint32))


def test_barrier_counts_no_warps_that_have_left():
    ptx = kernel(
        """
        setp.eq.u32 %p1, warp, 2;
        @%p1 bra END;
        bar.sync 0;
        st.global.b32 [mine], 7;
    END:
    """,
        threads=96,
    )
    check(ptx, np.repeat([7, 7, 0], 32).astype(np.uint32), threads=96)


PIPELINE = """
    // Warp 0 fills a ring of two slots by bulk copies, warp 1 adds them up. full[2] at 0, empty[2] at 16, data at 128.
    setp.ne.u32 %p9, tid, 0;
    @%p9 bra READY;
    mbarrier.init.shared.b64 [smem], 1;
    mbarrier.init.shared.b64 [smem+8], 1;
    mbarrier.init.shared.b64 [smem+16], 32;
    mbarrier.init.shared.b64 [smem+24], 32;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    mov.b32 %r1, 0;   // step
    mov.b32 %r10, 0;  // sum
    setp.ne.u32 %p1, warp, 0;
LOOP:
    and.b32 %r2, %r1, 1;
    mad.lo.s32 %r3, %r2, 8, smem;       // full
    shr.u32 %r4, %r1, 1;
    and.b32 %r4, %r4, 1;                // parity
    mad.lo.s32 %r5, %r2, 128, smem;
    add.s32 %r5, %r5, 128;              // slot
    @%p1 bra CONSUME;
    xor.b32 %r6, %r4, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3+16], %r6;
    @!%p2 bra EMPTY;
    elect.sync _|%p3, -1;
    @!%p3 bra NEXT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
    mad.wide.u32 %d8, %r1, 128, %d1;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%d8], 128, [%r3];
    bra NEXT;
CONSUME:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], %r4;
    @!%p2 bra CONSUME;
    mad.lo.s32 %r7, lane, 4, %r5;
    ld.shared.b32 %r8, [%r7];
    add.s32 %r10, %r10, %r8;
    mbarrier.arrive.shared.b64 %d9, [%r3+16];
NEXT:
    bar.warp.sync -1;
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p4, %r1, 6;
    @%p4 bra LOOP;
    st.global.b32 [mine], %r10;
"""


def test_pipeline_of_bulk_copies():
    data = np.random.default_rng(1).integers(0, 1000, (6, 32), dtype=np.uint32)
    expected = np.concatenate([np.zeros(32, np.uint32), data.sum(0, dtype=np.uint32)])
    check(kernel(PIPELINE, params=2), expected, data, shared=384)


def test_mbarrier_tokens_counts_and_drop():
    # arrive returns a token; test_wait on it; pending_count; arrive with a count; arrive_drop lowers the next phase.
    ptx = kernel(
        """
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra END;
        mbarrier.init.shared.b64 [smem], 3;
        mbarrier.arrive.shared.b64 %d8, [smem];
        mbarrier.pending_count.b64 %r1, %d8;
        mbarrier.test_wait.shared.b64 %p2, [smem], %d8;
        selp.b32 %r2, 1, 0, %p2;
        mbarrier.arrive_drop.shared.b64 %d9, [smem];
        mbarrier.arrive.shared.b64 %d10, [smem], 1;
        mbarrier.test_wait.shared.b64 %p3, [smem], %d8;
        selp.b32 %r3, 1, 0, %p3;
        mbarrier.arrive.noComplete.shared.b64 %d11, [smem], 1;
        mbarrier.pending_count.b64 %r4, %d11;
        mbarrier.expect_tx.relaxed.cta.shared.b64 [smem], 16;
        mbarrier.arrive.shared.b64 %d12, [smem];
        mbarrier.test_wait.parity.shared.b64 %p4, [smem], 1;
        selp.b32 %r5, 1, 0, %p4;
        mbarrier.complete_tx.relaxed.cta.shared.b64 [smem], 16;
        mbarrier.test_wait.parity.shared.b64 %p4, [smem], 1;
        selp.b32 %r6, 1, 0, %p4;
        mbarrier.inval.shared.b64 [smem];
        st.global.v4.b32 [%d0], {%r1, %r2, %r3, %r4};
        st.global.v2.b32 [%d0+16], {%r5, %r6};
    END:
    """,
        threads=32,
    )
    check(ptx, np.array([3, 0, 1, 2, 0, 1], np.uint32), threads=32, shared=64)


def test_remote_arrive_and_distributed_shared_memory():
    # Every CTA writes into the next one's shared memory and arrives on its barrier.
    ptx = kernel(
        """
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [smem], 32;
        fence.mbarrier_init.release.cluster;
    READY:
        barrier.cluster.arrive.relaxed;
        barrier.cluster.wait;
        add.s32 %r1, rank, 1;
        and.b32 %r1, %r1, 3;
        mapa.shared::cluster.u32 %r2, smem, %r1;
        mad.lo.s32 %r3, lane, 4, %r2;
        mad.lo.s32 %r4, rank, 100, lane;
        st.shared::cluster.b32 [%r3+64], %r4;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
    WAIT:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [smem], 0;
        @!%p2 bra WAIT;
        mad.lo.s32 %r5, lane, 4, smem;
        ld.shared.b32 %r6, [%r5+64];
        st.global.b32 [mine], %r6;
        barrier.cluster.arrive.relaxed;
        barrier.cluster.wait;
    """,
        threads=32,
    )
    expected = np.concatenate([100 * ((r + 3) % 4) + np.arange(32) for r in range(4)]).astype(np.uint32)
    check(ptx, expected, grid=4, cluster=4, threads=32, shared=256)


def test_multicast_and_copy_between_ctas():
    # CTA 0 multicasts 128 bytes to both; CTA 1 copies them into CTA 0's second slot.
    ptx = kernel(
        """
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [smem], 1;
        mbarrier.init.shared.b64 [smem+8], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
        mbarrier.arrive.expect_tx.shared.b64 _, [smem+8], 128;
    READY:
        barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;
        mov.b16 %h1, 3;
        setp.eq.u32 %p2, rank, 0;
        setp.eq.u32 %p3, tid, 0;
        and.pred %p4, %p2, %p3;
        @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [smem+128], [%d1], 128, [smem], %h1;
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p5, [smem], 0, 1000;
        @!%p5 bra WAIT;
        xor.b32 %r1, rank, 1;
        mapa.shared::cluster.u32 %r2, smem, %r1;
        @%p3 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
            [%r2+256], [smem+128], 128, [%r2+8];
    AGAIN:
        mbarrier.try_wait.parity.shared.b64 %p5, [smem+8], 0;
        @!%p5 bra AGAIN;
        mad.lo.s32 %r5, lane, 4, smem;
        ld.shared.b32 %r6, [%r5+128];
        ld.shared.b32 %r7, [%r5+256];
        add.s32 %r6, %r6, %r7;
        st.global.b32 [mine], %r6;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """,
        params=2,
        threads=32,
    )
    data = np.arange(32, dtype=np.uint32) * 7
    check(ptx, np.concatenate([2 * data, 2 * data]), data, grid=2, cluster=2, threads=32, shared=512)
