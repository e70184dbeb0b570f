"""The machine: scheduling, barriers, mbarriers, atomics, copies, launches, on hand-written PTX."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the emulator's extra is not installed")
pytest.importorskip("numba", reason="the emulator's extra is not installed")

from ptx_machine import SCHEDULES, check, kernel, machine, request, run
from refluent.emulator.errors import DeadlockError, FaultError

pytestmark = pytest.mark.emulator


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


# launches


def test_launches_run_in_order_and_memory_passes_between_them():
    double = kernel("ld.global.b32 %r1, [mine]; shl.b32 %r1, %r1, 1; st.global.b32 [mine], %r1;")
    increment = kernel("ld.global.b32 %r1, [mine]; add.s32 %r1, %r1, 1; st.global.b32 [mine], %r1;")
    for schedule, seed in SCHEDULES:
        out = np.arange(256, dtype=np.uint32)
        gpu = machine(schedule=schedule, seed=seed)
        for ptx in (double, increment, double):
            gpu.launch(request(ptx, out, grid=4))
        gpu.synchronize()
        assert not gpu.report.findings
        np.testing.assert_array_equal(out, (2 * np.arange(256) + 1) * 2)
        assert [launch.grid for launch in gpu.report.launches] == [(4, 1, 1)] * 3


PRIMARY = """
    setp.ne.u32 %p1, tid, 0;
    griddepcontrol.launch_dependents;
SPIN:
    ld.volatile.global.b32 %r1, [%d1];
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra SPIN;
    st.global.b32 [mine], 5;
"""
SECONDARY = """
    st.volatile.global.b32 [%d1], 1;
    griddepcontrol.wait;
    ld.global.b32 %r2, [mine];
    add.s32 %r2, %r2, 1;
    st.global.b32 [mine], %r2;
"""


def test_programmatic_launches_overlap():
    # The first kernel can only end when the second one, started early, has set the flag.
    out, flag = np.zeros(128, np.uint32), np.zeros(1, np.uint32)
    gpu = machine()
    gpu.launch(request(kernel(PRIMARY, params=2), out, flag, grid=2))
    gpu.launch(request(kernel(SECONDARY, params=2), out, flag, grid=2, programmatic=True))
    gpu.synchronize()
    assert (out == 6).all()
    out[:], flag[:] = 0, 0
    gpu.launch(request(kernel(PRIMARY, params=2), out, flag, grid=2))
    gpu.launch(request(kernel(SECONDARY, params=2), out, flag, grid=2))
    with pytest.raises(DeadlockError, match=r"livelock(.|\n)*ld\.volatile\.global"):
        gpu.synchronize()


CANCEL = """
    setp.ne.u32 %p1, tid, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [smem+16], 1;
    fence.mbarrier_init.release.cluster;
READY:
    mov.b32 %r1, 0;
    mov.b32 %r9, cta;
LOOP:
    bar.sync 0;
    mad.wide.u32 %d8, %r9, 4, %d0;
    @!%p1 red.global.add.u32 [%d8], 1;
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [smem+16], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [smem], [smem+16];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [smem+16], %r1;
    @!%p2 bra WAIT;
    ld.shared.b128 %q1, [smem];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;
    @!%p3 bra END;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r9, %q1;
    xor.b32 %r1, %r1, 1;
    bra LOOP;
END:
"""


def test_cluster_launch_control_hands_out_every_cluster_once():
    for schedule, seed in SCHEDULES:
        out = np.zeros(9, np.uint32)
        ptx = kernel(CANCEL, arch="sm_100a")
        options = {"schedule": schedule, "seed": seed, "num_sms": 2, "arch": "sm_100a"}
        report = run(ptx, out, grid=9, shared=70000, options=options)
        assert not report.findings, "\n".join(map(str, report.findings))
        assert (out == 1).all()


def test_registers_move_between_warpgroups():
    ptx = kernel(
        """
        setp.lt.u32 %p1, warp, 4;
        @%p1 bra PRODUCER;
        setmaxnreg.inc.sync.aligned.u32 240;
        bra END;
    PRODUCER:
        setmaxnreg.dec.sync.aligned.u32 24;
    END:
        st.global.b32 [mine], 1;
    """,
        threads=384,
    )
    check(ptx, np.ones(384, np.uint32), threads=384)
    out = np.zeros(384, np.uint32)
    report = run(ptx, out, threads=384)
    assert [(role.warps, role.registers) for role in report.launches[0].roles] == [
        ([0, 1, 2, 3], 24),
        ([4, 5, 6, 7, 8, 9, 10, 11], 240),
    ]
    greedy = ptx.replace("setmaxnreg.dec.sync.aligned.u32 24;", "")
    with pytest.raises(DeadlockError, match=r"registers, of which the CTA's pool has"):
        run(greedy, out, threads=384)


# what stops a kernel


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("st.global.b32 [mine+4096], 1;", "outside the global memory handed in.*past the end of array 0"),
        ("st.global.b32 [mine+2], 1;", "misaligned access: lane 0"),
        ("mov.b64 %d8, 8; ld.global.b32 %r1, [%d8];", "outside the global memory"),
        ("st.shared.b32 [smem+256], 1;", r"outside the CTA's shared memory.*\[0x400, 0x500\)"),
        ("mov.b32 %r1, 16; st.shared.b32 [%r1], 1;", "outside the CTA's shared memory"),
        ("add.s32 %r1, smem, 16777216; ld.shared.b32 %r2, [%r1];", "names another CTA's shared memory"),
        ("mbarrier.arrive.shared.b64 _, [smem];", "no \\(initialised\\) mbarrier at 0x400"),
        ("mbarrier.init.shared.b64 [smem+4], 1;", "mbarrier.init at 0x404"),
        ("bar.sync 16;", "barriers 0 to 15"),
        ("bar.sync 1, 40;", "not a positive multiple of the warp size"),
        ("atom.global.add.u32 %r1, [mine+8192], 1;", "outside the global memory"),
        ("cp.async.ca.shared.global [smem+2], [%d0], 4;", "aligned"),
        ("mapa.shared::cluster.u32 %r1, smem, 3; st.shared::cluster.b32 [%r1], 1;", "shared memory"),
        ("trap;", "trap"),
    ],
)
@pytest.mark.parametrize("checks", ["all", "none"])
def test_faults(body, text, checks):
    out = np.zeros(64, np.uint32)
    with pytest.raises(FaultError, match=f"(?s){text}.*|.*") as caught:
        run(kernel(body), out, shared=256, options={"checks": checks})
    import re

    assert re.search(text, str(caught.value), re.DOTALL), str(caught.value)
    assert "PTX line" in str(caught.value)
    assert "in k" in str(caught.value)
    assert not out.any()


def test_parameters_are_read_only():
    with pytest.raises(FaultError, match="read-only memory"):
        run(kernel("mov.b64 %d8, p0; cvta.param.u64 %d8, %d8; st.b64 [%d8], %d0;"), np.zeros(64, np.uint32))


@pytest.mark.parametrize(
    "body",
    [
        "fence.proxy.async.sideways;",
        "mbarrier.arrive.sometimes.shared.b64 _, [smem];",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.backwards [smem], [%d0], 16, [smem];",
        "atom.global.mul.u32 %r1, [mine], 1;",
        "ld.acquire.solar.global.b32 %r1, [mine];",
        "barrier.cluster.arrive.eager;",
        "setmaxnreg.dec.sync.aligned.u32 25;",
        "clusterlaunchcontrol.try_cancel.async.b64 [smem], [smem];",
        "griddepcontrol.hope;",
    ],
)
def test_unknown_modifiers_are_refused_by_name(body):
    with pytest.raises(NotImplementedError) as caught:
        run(kernel(body), np.zeros(64, np.uint32))
    text = str(caught.value)
    assert body.split()[0].rstrip(";") in text
    assert "PTX line" in text
    assert "kernel k" in text


# deadlocks


def test_a_deadlock_report_names_barrier_phase_and_who_could_come():
    broken = PIPELINE.replace(
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128", "mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256"
    )
    data = np.zeros((6, 32), np.uint32)
    for schedule, seed in SCHEDULES:
        with pytest.raises(DeadlockError) as caught:
            run(
                kernel(broken, params=2),
                np.zeros(64, np.uint32),
                data,
                shared=384,
                options={"schedule": schedule, "seed": seed},
            )
        text = str(caught.value)
        assert "mbarrier 0x400 of CTA (0, 0, 0), phase 0" in text
        assert "missing 0 of 1 arrivals and 128 bytes" in text
        assert "warps 1 at PTX line" in text
        assert "mbarrier.arrive.expect_tx" in text
        assert "cp.async.bulk" in text


def test_a_deadlock_at_a_named_barrier_says_who_is_missing():
    body = "setp.eq.u32 %p1, warp, 1; @%p1 bra END; bar.sync 3, 64; END:"
    with pytest.raises(DeadlockError, match=r"named barrier 3, phase 0: 32 of 64 threads.*\(warps 0\)"):
        run(kernel(body), np.zeros(64, np.uint32))


def test_a_deadlock_at_the_cluster_barrier():
    body = "setp.eq.u32 %p1, rank, 1; @%p1 bra SPIN; barrier.cluster.arrive; barrier.cluster.wait; bra END;"
    body += "SPIN: bar.sync 1, 96; END:"
    with pytest.raises(DeadlockError, match=r"the cluster barrier, phase 0: not arrived: CTA \(1, 0, 0\) warps 0-1"):
        run(kernel(body), np.zeros(128, np.uint32), grid=2, cluster=2)


def test_the_machine_can_be_used_after_a_deadlock():
    gpu = machine()
    gpu.launch(request(kernel("bar.sync 1, 96;"), np.zeros(64, np.uint32)))
    with pytest.raises(DeadlockError):
        gpu.synchronize()
    out = np.zeros(64, np.uint32)
    gpu.launch(request(kernel("st.global.b32 [mine], 1;"), out))
    gpu.synchronize()
    assert out.all()


def test_try_wait_may_give_up_when_nothing_else_can_move():
    # The only warp peeks before it arrives itself: a chip's try_wait times out.
    ptx = kernel(
        """
        mbarrier.init.shared.b64 [smem], 32;
        mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0;
        selp.b32 %r1, 1, 0, %p1;
        mbarrier.arrive.shared.b64 _, [smem];
        mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0;
        selp.b32 %r2, 2, 0, %p1;
        add.s32 %r1, %r1, %r2;
        st.global.b32 [mine], %r1;
    """.replace("mbarrier.init", "setp.ne.u32 %p9, lane, 0; @!%p9 mbarrier.init"),
        threads=32,
    )
    check(ptx, np.full(32, 2, np.uint32), threads=32, shared=64)


# determinism, counters, timeline


def test_same_seed_same_run():
    data = np.random.default_rng(2).integers(0, 99, (6, 32), dtype=np.uint32)
    events = []
    for _ in range(2):
        gpu = machine(schedule="random", seed=11, trace=True)
        gpu.launch(request(kernel(PIPELINE, params=2), np.zeros(64, np.uint32), data, shared=384))
        gpu.synchronize()
        assert gpu.trace is not None
        events.append([(bar.row, bar.start, bar.end, bar.kind) for bar in gpu.trace.bars])
    assert events[0] == events[1]


def test_counters_and_timeline(tmp_path):
    data = np.ones((6, 32), np.uint32)
    gpu = machine(trace=True)
    gpu.launch(request(kernel(PIPELINE, params=2), np.zeros(64, np.uint32), data, shared=384))
    gpu.synchronize()
    launch = gpu.report.launches[0]
    assert launch.operations["bulk load"] == (6, 768, 0)
    assert [role.warps for role in launch.roles] == [[0], [1]]
    assert launch.roles[0].operations == {"bulk load": (6, 768, 0)}
    assert launch.roles[1].operations == {}
    assert launch.instructions > 200
    assert "bulk load: 6, 768 bytes" in str(gpu.report)
    assert [sum(role.names.values()) for role in launch.roles] == [role.instructions for role in launch.roles]
    assert launch.roles[0].names["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"] == 6
    assert gpu.trace is not None
    part = gpu.trace.longest(launch.kernel)
    assert [len(part.bars), min(bar.start for bar in part.bars)] == [len(gpu.trace.bars), 0]
    with pytest.raises(LookupError, match="nothing of another was traced"):
        gpu.trace.longest("another")
    assert ">first</text>" in part.svg({"warp 00": "first"})
    as_json, as_svg = gpu.trace.write(tmp_path)
    import json
    from xml.etree import ElementTree

    bars = [event for event in json.loads(as_json.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in bars} >= {"run", "bulk", "wait"}
    assert any("mbarrier" in event["args"]["what"] for event in bars)
    ElementTree.parse(as_svg)
