"""Atomics, semaphores and asynchronous copies on hand-written PTX."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the emulator's extra is not installed")
pytest.importorskip("numba", reason="the emulator's extra is not installed")

from ptx_machine import SCHEDULES, check, kernel, run

pytestmark = pytest.mark.emulator


# atomics


def atomics(kind, nbytes, op, old, value, expected, suffix=""):
    register = {2: "%h1", 4: "%r1", 8: "%d8"}[nbytes]
    result = {2: "%h2", 4: "%r2", 8: "%d9"}[nbytes]
    shift = {2: 1, 4: 2, 8: 3}[nbytes]
    bits = 8 * nbytes
    ptx = kernel(
        f"""
        shl.b32 %r9, tid, {shift};
        cvt.u64.u32 %d20, %r9;
        add.s64 %d21, %d1, %d20;
        ld.global.b{bits} {register}, [%d21];
        add.s64 %d22, %d0, %d20;
        atom.global.{op}{suffix}.{kind} {result}, [%d22], {register};
        add.s64 %d23, %d2, %d20;
        st.global.b{bits} [%d23], {result};
        """,
        params=3,
        threads=32,
    )
    got, before = old.copy(), np.zeros_like(old)
    report = run(ptx, got, value, before, threads=32)
    assert not report.findings
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(before, old)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("op", ["add", "min", "max"])
def test_integer_atomics(op, kind):
    dtype = np.dtype({"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}[kind])
    rng = np.random.default_rng(3)
    info = np.iinfo(dtype)
    old, value = (rng.integers(info.min, info.max, 32, dtype=dtype) for _ in range(2))
    with np.errstate(over="ignore"):
        expected = {"add": np.add, "min": np.minimum, "max": np.maximum}[op](old, value)
    if (op, kind) == ("add", "s64"):  # the manual has no such instruction
        with pytest.raises(NotImplementedError, match=r"atom\.global\.add\.s64"):
            atomics(kind, 8, op, old, value, expected)
        return
    atomics(kind, dtype.itemsize, op, old, value, expected)


@pytest.mark.parametrize("op", ["and", "or", "xor", "exch"])
@pytest.mark.parametrize("bits", [32, 64])
def test_bitwise_atomics(op, bits):
    rng = np.random.default_rng(4)
    old, value = (rng.integers(0, 2**32, 32).astype(f"u{bits // 8}") for _ in range(2))
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda a, b: b}
    atomics(f"b{bits}", bits // 8, op, old, value, functions[op](old, value))


def test_wrapping_atomics():
    old = np.array([0, 1, 5, 6, 7, 9] * 5 + [3, 4], np.uint32)
    bound = np.full(32, 6, np.uint32)
    atomics("u32", 4, "inc", old, bound, np.where(old >= 6, 0, old + 1).astype(np.uint32))
    atomics("u32", 4, "dec", old, bound, np.where((old == 0) | (old > 6), 6, old - 1).astype(np.uint32))


def test_floating_point_atomics():
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(32).astype(np.float32) for _ in range(2))
    a[0], b[0] = 1e-40, 2e-40  # subnormal: global memory flushes
    expected = a + b
    expected[0] = 0
    atomics("f32", 4, "add", a.view(np.uint32), b.view(np.uint32), expected.view(np.uint32))
    c, d = (rng.standard_normal(32) for _ in range(2))
    atomics("f64", 8, "add", c.view(np.uint64), d.view(np.uint64), (c + d).view(np.uint64))
    e, f = (rng.standard_normal(32).astype(np.float16) for _ in range(2))
    atomics("f16", 2, "add", e.view(np.uint16), f.view(np.uint16), (e + f).view(np.uint16), ".noftz")
    g, h = (rng.standard_normal(64).astype(np.float16) for _ in range(2))
    atomics("f16x2", 4, "add", g.view(np.uint32), h.view(np.uint32), (g + h).view(np.uint32), ".noftz")
    import torch

    p, q = (torch.randn(64, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    bits = [t.view(torch.int16).numpy().view(np.uint32) for t in (p, q, p + q)]
    atomics("bf16x2", 4, "add", *bits, ".noftz")


def test_reductions_of_colliding_lanes_and_vectors():
    ptx = kernel("""
        and.b32 %r1, tid, 3;
        mul.wide.u32 %d8, %r1, 4;
        add.s64 %d9, %d0, %d8;
        red.relaxed.gpu.global.add.u32 [%d9], tid;
        mad.lo.s32 %r2, %r1, 4, smem;
        mov.f32 %f1, 0f3F800000;
        mov.f32 %f2, 0f40000000;
        red.global.add.v2.f32 [%d0+16], {%f1, %f2};
    """)
    expected = np.zeros(6, np.uint32)
    for tid in range(64):
        expected[tid % 4] += tid
    expected[4:] = np.array([64, 128], np.float32).view(np.uint32)
    check(ptx, expected, shared=64)


def test_compare_and_swap_as_a_lock():
    # Every thread takes the lock in turn (one lane at a time) and increments a plain counter.
    ptx = kernel(
        """
        mov.b32 %r1, 0;
    NEXT:
        setp.ne.u32 %p1, lane, %r1;
        @%p1 bra SKIP;
    SPIN:
        atom.acquire.gpu.global.cas.b32 %r2, [%d0], 0, 1;
        setp.ne.u32 %p2, %r2, 0;
        @%p2 bra SPIN;
        ld.global.b32 %r3, [%d0+4];
        add.s32 %r3, %r3, 1;
        st.global.b32 [%d0+4], %r3;
        atom.release.gpu.global.exch.b32 %r4, [%d0], 0;
    SKIP:
        bar.warp.sync -1;
        add.s32 %r1, %r1, 1;
        setp.lt.u32 %p3, %r1, 4;
        @%p3 bra NEXT;
    """,
    )
    check(ptx, np.array([0, 4 * 2 * 3], np.uint32), grid=3)


def test_semaphore_between_ctas():
    # CTA i waits until the counter is i, adds to the sum, and passes on: ordered across CTAs.
    ptx = kernel(
        """
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra GO;
    SPIN:
        ld.acquire.gpu.global.b32 %r1, [%d1];
        setp.ne.u32 %p2, %r1, cta;
        @%p2 bra SPIN;
    GO:
        bar.sync 0;
        mul.wide.u32 %d8, tid, 4;
        add.s64 %d9, %d0, %d8;
        ld.global.b32 %r2, [%d9];
        mul.lo.s32 %r2, %r2, 3;
        add.s32 %r2, %r2, cta;
        st.global.b32 [%d9], %r2;
        bar.sync 0;
        @%p1 bra END;
        red.release.gpu.global.add.u32 [%d1], 1;
    END:
    """,
        params=2,
    )
    want = 0
    for cta in range(4):
        want = want * 3 + cta
    for schedule, seed in SCHEDULES:
        out, counter = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
        report = run(ptx, out, counter, grid=4, options={"schedule": schedule, "seed": seed, "num_sms": 4})
        assert not report.findings, "\n".join(map(str, report.findings))
        assert (out == want).all()
        assert counter[0] == 4


def test_fences_and_relaxed_accesses_as_a_semaphore():
    ptx = kernel(
        """
        setp.ne.u32 %p1, cta, 0;
        @%p1 bra CONSUMER;
        st.global.b32 [%d0+64], 42;
        fence.acq_rel.gpu;
        st.relaxed.gpu.global.b32 [%d1], 1;
        bra END;
    CONSUMER:
        ld.volatile.global.b32 %r1, [%d1];
        nanosleep.u32 20;
        setp.eq.u32 %p2, %r1, 0;
        @%p2 bra CONSUMER;
        membar.gl;
        ld.global.b32 %r2, [%d0+64];
        st.global.b32 [%d0], %r2;
    END:
    """,
        params=2,
        threads=1,
    )
    for schedule, seed in SCHEDULES:
        out, flag = np.zeros(17, np.uint32), np.zeros(1, np.uint32)
        report = run(ptx, out, flag, grid=2, threads=1, options={"schedule": schedule, "seed": seed})
        assert not report.findings, "\n".join(map(str, report.findings))
        assert out[0] == 42


# copies


def test_copy_groups_with_zero_fill():
    ptx = kernel(
        """
        mad.lo.s32 %r1, tid, 16, smem;
        mul.wide.u32 %d8, tid, 16;
        add.s64 %d9, %d1, %d8;
        and.b32 %r2, tid, 1;
        mul.lo.s32 %r2, %r2, 8;
        add.s32 %r2, %r2, 8;
        cp.async.cg.shared.global [%r1], [%d9], 16, %r2;
        cp.async.commit_group;
        mad.lo.s32 %r3, tid, 4, smem;
        mul.wide.u32 %d10, tid, 4;
        add.s64 %d11, %d1, %d10;
        cp.async.ca.shared.global [%r3+1024], [%d11], 4;
        cp.async.commit_group;
        cp.async.wait_group 1;
        bar.sync 0;
        xor.b32 %r4, tid, 1;
        mad.lo.s32 %r5, %r4, 16, smem;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r5];
        add.s32 %r10, %r10, %r11;
        add.s32 %r10, %r10, %r12;
        add.s32 %r10, %r10, %r13;
        cp.async.wait_all;
        ld.shared.b32 %r14, [%r3+1024];
        add.s32 %r10, %r10, %r14;
        st.global.b32 [mine], %r10;
    """,
        params=2,
    )
    data = np.arange(256, dtype=np.uint32).reshape(64, 4) ** 2
    sums = np.where(np.arange(64) % 2 == 0, data[:, :2].sum(1), data.sum(1)).astype(np.uint32)
    check(ptx, sums.reshape(32, 2)[:, ::-1].ravel() + data.ravel()[:64], data, shared=2048)


@pytest.mark.parametrize("noinc", [True, False])
def test_copies_that_arrive_on_an_mbarrier(noinc):
    ptx = kernel(
        f"""
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [smem], {64 if noinc else 1};
    READY:
        bar.sync 0;
        mad.lo.s32 %r1, tid, 4, smem;
        mul.wide.u32 %d8, tid, 4;
        add.s64 %d9, %d1, %d8;
        cp.async.ca.shared.global [%r1+64], [%d9], 4;
        cp.async.mbarrier.arrive{".noinc" if noinc else ""}.shared.b64 [smem];
        {"" if noinc else "bar.sync 0; @!%p1 mbarrier.arrive.shared.b64 _, [smem];"}
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;
        @!%p2 bra WAIT;
        xor.b32 %r2, tid, 63;
        mad.lo.s32 %r3, %r2, 4, smem;
        ld.shared.b32 %r4, [%r3+64];
        st.global.b32 [mine], %r4;
    """,
        params=2,
    )
    data = np.arange(64, dtype=np.uint32) * 5
    check(ptx, data[::-1], data, shared=512)


STORE = """
    mad.lo.s32 %r1, tid, 4, smem;
    add.s32 %r2, tid, 1;
    cvt.rn.f32.u32 %f1, %r2;
    st.shared.f32 [%r1], %f1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, tid, 0;
    @%p1 bra END;
    mul.wide.u32 %d8, cta, 256;
    add.s64 %d8, %d0, %d8;
    {copy}
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:
"""


def test_bulk_store_and_reduce():
    values = np.tile(np.arange(1, 65, dtype=np.float32), 2)
    store = STORE.format(copy="cp.async.bulk.global.shared::cta.bulk_group [%d8], [smem], 256;")
    check(kernel(store), values, grid=2, shared=256)
    reduce = "mov.b64 %d8, %d0; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d8], [smem], 256;"
    check(kernel(STORE.format(copy=reduce)), 3 * values[:64], grid=3, shared=256)


def test_bulk_group_read_wait_lets_the_source_be_reused():
    ptx = kernel(
        """
        mov.b32 %r3, 0;
    LOOP:
        mad.lo.s32 %r1, tid, 4, smem;
        add.s32 %r2, tid, %r3;
        st.shared.b32 [%r1], %r2;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra NEXT;
        mad.wide.u32 %d8, %r3, 256, %d0;
        cp.async.bulk.global.shared::cta.bulk_group [%d8], [smem], 256;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
    NEXT:
        bar.sync 0;
        add.s32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 3;
        @%p2 bra LOOP;
    """
    )
    check(ptx, (np.arange(3)[:, None] + np.arange(64)).astype(np.uint32), shared=256)


def test_asynchronous_store_to_another_cta():
    ptx = kernel(
        """
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [smem], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
    READY:
        barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;
        xor.b32 %r1, rank, 1;
        mapa.shared::cluster.u32 %r2, smem, %r1;
        mad.lo.s32 %r3, tid, 8, %r2;
        mad.lo.s32 %r4, rank, 1000, tid;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r3+64], {%r4, tid}, [%r2];
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;
        @!%p2 bra WAIT;
        mad.lo.s32 %r5, tid, 8, smem;
        ld.shared.v2.b32 {%r6, %r7}, [%r5+64];
        add.s32 %r6, %r6, %r7;
        st.global.b32 [mine], %r6;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """,
        threads=32,
    )
    lanes = np.arange(32)
    check(
        ptx, np.concatenate([1000 + 2 * lanes, 2 * lanes]).astype(np.uint32), grid=2, cluster=2, threads=32, shared=512
    )


def test_hints_do_nothing():
    ptx = kernel("""
        prefetch.global.L2 [mine];
        prefetch.global.L2::evict_last [mine];
        prefetchu.L1 [mine];
        cp.async.bulk.prefetch.L2.global [%d0], 64;
        discard.global.L2 [%d0+128], 128;
        applypriority.global.L2::evict_normal [%d0+128], 128;
        st.global.b32 [mine], tid;
    """)
    check(ptx, np.arange(64, dtype=np.uint32))
