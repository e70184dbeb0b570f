"""Scopes of releases and acquires, and reductions whose order nothing fixes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the emulator's extra is not installed")
pytest.importorskip("numba", reason="the emulator's extra is not installed")

from ptx_machine import SCHEDULES, kernel, kinds, machine, request

pytestmark = pytest.mark.emulator

# Thread 0 of CTA 0 hands a word to the last thread of the grid, through a flag.
HANDED_ON = """
    setp.ne.u32 %p1, index, 0;
    @%p1 bra POLL;
    st.global.b32 [%d1+64], 7;
    {release}
POLL:
    setp.ne.u32 %p1, index, {last};
    @%p1 bra END;
AGAIN:
    {acquire}
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    {fence}
    ld.global.b32 %r2, [%d1+64];
    st.global.b32 [mine], %r2;
END:
"""
BY_ACCESS = (
    "red.release.{scope}.global.add.u32 [%d1], 1;",
    "ld.acquire.{scope}.global.b32 %r1, [%d1];",
    "",
)
BY_FENCE = (
    "fence.acq_rel.{scope}; st.relaxed.gpu.global.b32 [%d1], 1;",
    "ld.relaxed.gpu.global.b32 %r1, [%d1];",
    "fence.acq_rel.{scope};",
)


def handed_on(way, releases, acquires, grid, cluster, schedule):
    release, acquire, fence = way
    body = HANDED_ON.format(
        release=release.format(scope=releases),
        acquire=acquire.format(scope=acquires),
        fence=fence.format(scope=acquires),
        last=64 * grid - 1,
    )
    gpu = machine(schedule=schedule[0], seed=schedule[1])
    arrays = np.zeros(256, np.uint32), np.zeros(32, np.uint32)
    gpu.launch(request(kernel(body, params=2), *arrays, grid=grid, cluster=cluster))
    gpu.synchronize()
    return gpu.report


@pytest.mark.parametrize("way", [BY_ACCESS, BY_FENCE], ids=["accesses", "fences"])
@pytest.mark.parametrize(
    ("grid", "cluster", "needed"), [(1, 1, 0), (2, 2, 1), (2, 1, 2)], ids=["one CTA", "one cluster", "two clusters"]
)
def test_a_scope_has_to_reach_the_other_side(way, grid, cluster, needed):
    scopes = ("cta", "cluster", "gpu", "sys")
    for releases, acquires in product(scopes, scopes):
        reaches = min(scopes.index(releases), scopes.index(acquires)) >= needed
        for schedule in SCHEDULES[:4]:
            report = handed_on(way, releases, acquires, grid, cluster, schedule)
            assert kinds(report) == (set() if reaches else {"race"}), f"{releases} {acquires} {schedule} {report}"


REDUCE = """
    mad.lo.s32 %r1, tid, 4, smem;
    st.shared.b32 [%r1], 1;
    fence.proxy.async;
    bar.sync 0;
    setp.ne.u32 %p1, tid, 0;
    @%p1 bra END;
AGAIN:
    ld.acquire.gpu.global.b32 %r2, [%d1];
    setp.ne.u32 %p1, %r2, cta;
    @%p1 bra AGAIN;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [smem], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    red.release.gpu.global.add.u32 [%d1], 1;
END:
"""


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("ld.acquire", "ld.relaxed"),
        ("red.release", "red.relaxed"),
        ("wait_group 0", "wait_group.read 0"),
        ("@%p1 bra AGAIN", "@!%p1 bra END"),
    ],
)
def test_reductions_in_any_order(good, bad):
    assert good in REDUCE
    for checks, (schedule, seed) in product(("all", ("all", "order")), SCHEDULES):
        for body, faulty in ((REDUCE, False), (REDUCE.replace(good, bad), True)):
            out, turn = np.zeros(256, np.uint32), np.zeros(4, np.uint32)
            gpu = machine(checks=checks, schedule=schedule, seed=seed)
            gpu.launch(request(kernel(body, params=2), out, turn, grid=4, shared=1024))
            gpu.synchronize()
            assert kinds(gpu.report) == ({"order"} if faulty and checks != "all" else set()), str(gpu.report)


def test_two_reductions_of_one_thread_come_in_any_order():
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [smem], 256; cp.async.bulk.commit_group;"
    gpu = machine(checks=("all", "order"))
    out, turn = np.zeros(256, np.uint32), np.zeros(4, np.uint32)
    body = REDUCE.replace("    cp.reduce", f"    {copy}\n    cp.reduce")
    gpu.launch(request(kernel(body, params=2), out, turn, shared=1024))
    gpu.synchronize()
    assert kinds(gpu.report) == {"order"}
