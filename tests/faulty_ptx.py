"""Kernels that are right, and what makes each of them wrong in a way that a check must name."""

from __future__ import annotations

import contextlib

import numpy as np

from ptx_machine import SCHEDULES, kernel, machine, request
from refluent.emulator.errors import EmulatorError


class Case:
    """A kernel, and the same with one piece replaced, which is wrong."""

    def __init__(self, name, body, fault, kind, text="", *, params=1, only=None, **launch):
        self.schedules = [entry for entry in SCHEDULES if only is None or entry[0] in only]
        self.name, self.body, self.fault, self.kind, self.text = name, body, fault, kind, text
        self.params, self.launch = params, launch

    def __repr__(self):
        return self.name

    def broken(self):
        good, bad = self.fault
        assert good in self.body, good
        return self.body.replace(good, bad)

    def run(self, body, schedule="fair", seed=0):
        arrays = [np.zeros(512, np.uint32) for _ in range(self.params)]
        launch = {"shared": 4096, **self.launch}
        ptx = kernel(body, params=self.params, threads=launch.get("threads", 64))
        options = {"schedule": schedule, "seed": seed, "idle_limit": 200}
        gpu = machine(**options)
        gpu.launch(request(ptx, *arrays, **launch))
        with contextlib.suppress(EmulatorError):
            gpu.synchronize()
        return gpu.report


EXCHANGE = """
    mad.lo.s32 %r1, tid, 4, smem;
    st.shared.b32 [%r1], tid;
    bar.sync 0;
    xor.b32 %r2, tid, 63;
    mad.lo.s32 %r3, %r2, 4, smem;
    ld.shared.b32 %r4, [%r3];
    st.global.b32 [mine], %r4;
    bar.sync 1, 64;
    st.shared.b32 [%r1], 0;
"""

LANES = """
    mad.lo.s32 %r1, tid, 4, smem;
    st.shared.b32 [%r1], tid;
    bar.warp.sync -1;
    xor.b32 %r2, tid, 1;
    mad.lo.s32 %r3, %r2, 4, smem;
    ld.shared.b32 %r4, [%r3];
    bar.warp.sync 0xffffffff;
    st.shared.b32 [%r1], 5;
    st.global.b32 [mine], %r4;
"""

SETUP = """
    setp.ne.u32 %p9, tid, 0;
    @%p9 bra READY;
    mbarrier.init.shared.b64 [smem], 1;
    mbarrier.init.shared.b64 [smem+8], 32;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""

# Warp 0 loads a tile by bulk copy, twice into the same place; warp 1 reads it and gives it back.
LOAD = (
    SETUP
    + """
    mov.b32 %r1, 0;
    setp.ne.u32 %p1, warp, 0;
LOOP:
    @%p1 bra CONSUME;
    xor.b32 %r2, %r1, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r2;
    @!%p2 bra EMPTY;
    elect.sync _|%p3, -1;
    @!%p3 bra NEXT;
    mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+128], [%d1], 128, [smem];
    bra NEXT;
CONSUME:
    mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r1;
    @!%p2 bra CONSUME;
    mad.lo.s32 %r3, lane, 4, smem;
    ld.shared.b32 %r4, [%r3+128];
    mbarrier.arrive.shared.b64 _, [smem+8];
NEXT:
    bar.warp.sync -1;
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p4, %r1, 2;
    @%p4 bra LOOP;
    st.global.b32 [mine], %r4;
"""
)

STORE = """
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

# CTA 0 stores a row by bulk copy and releases a semaphore; CTA 1 acquires it and reads the row.
PUBLISH = """
    setp.ne.u32 %p1, tid, 0;
    setp.ne.u32 %p2, cta, 0;
    @%p2 bra READER;
    mad.lo.s32 %r1, tid, 4, smem;
    st.shared.b32 [%r1], tid;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [smem], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    red.release.gpu.global.add.u32 [%d1], 1;
    bra END;
READER:
    @%p1 bra GO;
SPIN:
    ld.acquire.gpu.global.b32 %r2, [%d1];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra SPIN;
GO:
    bar.sync 0;
    mul.wide.u32 %d8, tid, 4;
    add.s64 %d9, %d0, %d8;
    ld.global.b32 %r4, [%d9];
    st.global.b32 [%d9+1024], %r4;
END:
"""

REMOTE = """
    setp.ne.u32 %p1, tid, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [smem], 64;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    xor.b32 %r1, rank, 1;
    mapa.shared::cluster.u32 %r2, smem, %r1;
    mad.lo.s32 %r3, tid, 4, %r2;
    st.shared::cluster.b32 [%r3+64], tid;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [smem], 0;
    @!%p2 bra WAIT;
    mad.lo.s32 %r5, tid, 4, smem;
    ld.shared.b32 %r6, [%r5+64];
    st.global.b32 [mine], %r6;
    barrier.cluster.arrive.release;
    barrier.cluster.wait.acquire;
"""

COPY = """
    mad.lo.s32 %r1, tid, 4, smem;
    mul.wide.u32 %d8, tid, 4;
    add.s64 %d9, %d1, %d8;
    cp.async.ca.shared.global [%r1], [%d9], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    xor.b32 %r4, tid, 1;
    mad.lo.s32 %r5, %r4, 4, smem;
    ld.shared.b32 %r10, [%r5];
    st.global.b32 [mine], %r10;
"""

GLOBAL = """
    setp.ne.u32 %p1, tid, 0;
    setp.ne.u32 %p2, cta, 0;
    @%p2 bra READER;
    mul.wide.u32 %d8, tid, 4;
    add.s64 %d9, %d0, %d8;
    st.global.b32 [%d9], tid;
    bar.sync 0;
    @%p1 bra END;
    fence.acq_rel.gpu;
    st.relaxed.gpu.global.b32 [%d1], 1;
    bra END;
READER:
    ld.relaxed.gpu.global.b32 %r2, [%d1];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra READER;
    fence.acq_rel.gpu;
    mul.wide.u32 %d8, tid, 4;
    add.s64 %d9, %d0, %d8;
    ld.global.b32 %r4, [%d9];
    st.global.b32 [%d9+1024], %r4;
END:
"""

CONSUMER_WAIT = """CONSUME:
    mbarrier.try_wait.parity.shared.b64 %p2, [smem], %r1;
    @!%p2 bra CONSUME;"""
PRODUCER_WAIT = """    mbarrier.try_wait.parity.shared.b64 %p2, [smem+8], %r2;
    @!%p2 bra EMPTY;
"""

CASES = [
    # races through the generic proxy
    Case("no barrier before the read", EXCHANGE, ("bar.sync 0;", ""), "race", "not ordered after the write"),
    Case("no barrier before the overwrite", EXCHANGE, ("bar.sync 1, 64;", ""), "race", "overwrites shared memory"),
    Case(
        "two barriers instead of one", EXCHANGE, ("bar.sync 1, 64;", "add.s32 %r9, warp, 1; bar.sync %r9, 32;"), "race"
    ),
    Case(
        "no barrier between CTAs' accesses",
        GLOBAL,
        ("fence.acq_rel.gpu;\n    st.relaxed", "st.relaxed"),
        "race",
        "global",
    ),
    Case("no fence after the poll", GLOBAL, ("fence.acq_rel.gpu;\n    mul", "mul"), "race", "array 0"),
    Case("weak flag", GLOBAL, ("st.relaxed.gpu.global.b32 [%d1]", "st.global.b32 [%d1]"), "race", "array 1"),
    Case("release before the warps meet", GLOBAL, ("bar.sync 0;\n    @%p1 bra END", "@%p1 bra END"), "race"),
    Case("relaxed semaphore", PUBLISH, ("red.release.gpu", "red.relaxed.gpu"), "race", params=2, grid=2),
    Case("relaxed poll", PUBLISH, ("ld.acquire.gpu", "ld.relaxed.gpu"), "race", params=2, grid=2),
    Case(
        "relaxed remote arrival",
        REMOTE,
        (".release.cluster.shared::cluster", ".relaxed.cluster.shared::cluster"),
        "race",
    ),
    Case("wait that does not acquire", REMOTE, ("parity.acquire.cluster", "parity.relaxed.cluster"), "race"),
    Case("same value written by all", EXCHANGE, ("st.shared.b32 [%r1], 0;", "st.global.b32 [%d0+1024], 7;"), "rewrite"),
    # between lanes of a warp
    Case(
        "lanes exchange without a barrier",
        LANES,
        ("bar.warp.sync -1;", ""),
        "lanes",
        "without a convergent instruction",
    ),
    Case("lanes overwrite without a barrier", LANES, ("bar.warp.sync 0xffffffff;", ""), "lanes"),
    # asynchronous operations
    Case("consumer ignores the wait", LOAD, ("@!%p2 bra CONSUME;", ""), "race|uninitialised", params=2, only=("late",)),
    Case("consumer does not wait", LOAD, (CONSUMER_WAIT, "CONSUME:"), "race|uninitialised", params=2),
    Case("producer does not wait", LOAD, (PRODUCER_WAIT, ""), "race", params=2),
    Case(
        "producer waits for the wrong parity",
        LOAD,
        ("xor.b32 %r2, %r1, 1;", "mov.b32 %r2, 1;"),
        "race|deadlock",
        params=2,
    ),
    Case("no wait for the group", STORE, ("cp.async.bulk.wait_group.read 0;", ""), "race", "bulk source"),
    Case("one group too many left", STORE, ("wait_group.read 0", "wait_group.read 1"), "race", "bulk source"),
    Case("uncommitted group", STORE, ("cp.async.bulk.commit_group;", ""), "race"),
    Case("read wait before a release", PUBLISH, ("wait_group 0", "wait_group.read 0"), "race", params=2, grid=2),
    Case("no wait for cp.async", COPY, ("cp.async.wait_group 0;", ""), "race", "cp.async", params=2),
    Case("a group too many left", COPY, ("cp.async.wait_group 0;", "cp.async.wait_group 1;"), "race", params=2),
    # proxies
    Case(
        "no proxy fence before a bulk store",
        STORE,
        ("fence.proxy.async.shared::cta;", ""),
        "proxy",
        "no fence.proxy.async",
    ),
    Case("fence for the wrong space", STORE, ("fence.proxy.async.shared::cta", "fence.proxy.async.global"), "proxy"),
    Case(
        "fence before the write",
        STORE,
        (
            "st.shared.b32 [%r1], %r2;\n    fence.proxy.async.shared::cta;",
            "fence.proxy.async.shared::cta; st.shared.b32 [%r1], %r2;",
        ),
        "proxy",
    ),
    Case(
        "fence by one warp for the writes of another",
        STORE,
        (
            "fence.proxy.async.shared::cta;\n    bar.sync 0;",
            "setp.ne.u32 %p9, warp, 0; @!%p9 fence.proxy.async.shared::cta;\n    bar.sync 0;",
        ),
        "proxy",
    ),
    Case(
        "barrier not fenced for the copy",
        LOAD,
        ("fence.mbarrier_init.release.cluster;", ""),
        "proxy",
        "fence.mbarrier_init",
        params=2,
    ),
    # mbarriers
    Case(
        "used before it is initialised for all", LOAD, ("READY:\n    bar.sync 0;", "READY:"), "mbarrier|fault", params=2
    ),
    Case(
        "remote use without a fence",
        REMOTE,
        ("fence.mbarrier_init.release.cluster;", ""),
        "mbarrier",
        "not ordered after its init",
    ),
    Case("arrivals past the count", LOAD, ("_, [smem+8];", "_, [smem+8], 3;"), "mbarrier", "expects only", params=2),
    Case("count lower than the arrivals", LOAD, ("[smem+8], 32;", "[smem+8], 20;"), "exit|race|deadlock", params=2),
    Case("too few bytes expected", LOAD, ("[smem], 128;\n    cp", "[smem], 64;\n    cp"), "deadlock|race", params=2),
    Case(
        "bytes outstanding at exit",
        LOAD,
        (
            "setp.lt.u32 %p4, %r1, 2;",
            "setp.lt.u32 %p4, %r1, 2; @%p3 mbarrier.expect_tx.relaxed.cta.shared.b64 [smem+16], 8;",
        ),
        "exit|fault",
        params=2,
    ),
    Case(
        "barrier overwritten",
        LOAD,
        ("add.s32 %r1, %r1, 1;", "add.s32 %r1, %r1, 1; st.shared.b32 [smem+8], %r1;"),
        "object",
        "live mbarrier",
        params=2,
    ),
    Case(
        "barrier read as data",
        LOAD,
        ("add.s32 %r1, %r1, 1;", "add.s32 %r1, %r1, 1; ld.shared.b32 %r20, [smem];"),
        "object",
        params=2,
    ),
    # uninitialised
    Case(
        "shared memory that nothing wrote",
        EXCHANGE,
        ("ld.shared.b32 %r4, [%r3];", "ld.shared.b32 %r4, [%r3+1024];"),
        "uninitialised",
        "nothing has written",
    ),
    Case(
        "half of a word",
        EXCHANGE,
        ("st.shared.b32 [%r1], tid;", "cvt.u16.u32 %h1, tid; st.shared.b16 [%r1], %h1;"),
        "uninitialised",
    ),
    Case(
        "a byte of a word",
        EXCHANGE,
        ("st.shared.b32 [%r1], tid;", "st.shared.b8 [%r1], tid; st.shared.b8 [%r1+2], tid; st.shared.b8 [%r1+3], tid;"),
        "uninitialised",
    ),
    Case(
        "store of more than was written", STORE, ("[%d8], [smem], 256", "[%d8], [smem], 272"), "uninitialised", "bulk"
    ),
    # barriers
    Case(
        "counts differ",
        EXCHANGE,
        ("bar.sync 1, 64;", "mad.lo.s32 %r9, warp, 32, 64; bar.sync 1, %r9;"),
        "barrier",
        "expects",
    ),
    Case(
        "part of a warp",
        EXCHANGE,
        ("bar.sync 1, 64;", "setp.lt.u32 %p1, lane, 16; @%p1 bar.sync 1, 64; @!%p1 bar.sync 1, 64;"),
        "divergence",
        "lanes 0x0000ffff only",
    ),
    Case(
        "part of a warp never comes",
        EXCHANGE,
        ("bar.sync 1, 64;", "setp.lt.u32 %p1, lane, 16; @%p1 bar.sync 1, 64;"),
        "divergence",
    ),
    Case(
        "arrival nobody waits for",
        EXCHANGE,
        ("bar.sync 1, 64;", "bar.sync 1, 64; bar.arrive 2, 96;"),
        "exit",
        "left un-arrived",
    ),
    Case(
        "cluster wait without arrival",
        REMOTE,
        ("    barrier.cluster.arrive.release;\n", ""),
        "barrier",
        "without an arrive",
    ),
    Case(
        "cluster arrival twice",
        REMOTE,
        (
            "barrier.cluster.arrive.release;",
            "barrier.cluster.arrive.release; setp.eq.u32 %p5, rank, 0; @%p5 barrier.cluster.arrive.release;",
        ),
        "barrier",
        "twice",
    ),
    # leaving
    Case(
        "bulk store not waited for",
        STORE,
        ("cp.async.bulk.wait_group.read 0;", "setp.eq.u32 %p3, %r3, 2; @!%p3 cp.async.bulk.wait_group.read 0;"),
        "exit",
        "without waiting",
    ),
    Case(
        "phase half arrived",
        LOAD,
        ("setp.lt.u32 %p4, %r1, 2;", "setp.lt.u32 %p4, %r1, 2; @!%p1 mbarrier.arrive.shared.b64 _, [smem+8];"),
        "exit|mbarrier|deadlock",
        params=2,
    ),
    Case(
        "peer has gone",
        REMOTE,
        (
            "    barrier.cluster.arrive.release;\n    barrier.cluster.wait.acquire;\n",
            "setp.eq.u32 %p5, rank, 0; @%p5 bra END;"
            + 6 * "nanosleep.u32 5;"
            + "ld.shared::cluster.b32 %r7, [%r3+64]; END:\n",
        ),
        "fault",
        "has exited",
    ),
]

_LAUNCH = {id(GLOBAL): {"params": 2, "grid": 2}, id(REMOTE): {"grid": 2, "cluster": 2}}
for case in CASES:
    extra = dict(_LAUNCH.get(id(case.body), {}))
    case.params = extra.pop("params", case.params)
    case.launch = {**extra, **case.launch}
