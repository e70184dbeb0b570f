"""One launch in several processes: the same as in one if its CTAs are independent, and in one if they are not."""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
import time

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the emulator's extra is not installed")
pytest.importorskip("numba", reason="the emulator's extra is not installed")

from ptx_machine import kernel, kinds, machine, request
from refluent.emulator import parallel
from refluent.emulator.errors import DeadlockError, FaultError, ProcessError
from refluent.emulator.footprint import Footprint, independent
from refluent.emulator.memory import GlobalMemory

pytestmark = pytest.mark.emulator
GRID, THREADS = 6, 64

SQUARES = kernel("mad.lo.s32 %r1, index, index, tid; st.global.b32 [mine], %r1;")
COPY = kernel(
    "mad.wide.u32 %d8, index, 4, %d1; ld.global.b32 %r1, [%d8]; add.s32 %r1, %r1, 1; st.global.b32 [mine], %r1;",
    params=2,
)
# Warp 0 leaves a row in shared memory that warp 1 stores; without the barrier that is a race in each CTA.
THROUGH_SHARED = """
    mad.lo.s32 %r1, lane, 4, smem;
    setp.ne.u32 %p1, warp, 0;
    @%p1 bra READ;
    st.shared.b32 [%r1], index;
READ:
    {barrier}
    @!%p1 bra END;
    ld.shared.b32 %r2, [%r1];
    st.global.b32 [mine], %r2;
END:
"""
# Dependent, in ways that are no race.
ATOMICS = kernel("atom.global.add.u32 %r1, [%d0], 1;")
TURNS = kernel("""
    setp.ne.u32 %p1, tid, 0;
    @%p1 bra END;
WAIT:
    ld.acquire.gpu.global.b32 %r1, [%d0];
    setp.ne.u32 %p2, %r1, cta;
    @%p2 bra WAIT;
    add.s32 %r1, %r1, 1;
    st.release.gpu.global.b32 [%d0], %r1;
END:
""")
BYTES = kernel("cvt.u64.u32 %d8, cta; add.s64 %d8, %d0, %d8; cvt.u16.u32 %h1, cta; st.global.b8 [%d8], %h1;")
NEIGHBOUR = kernel("""
    st.global.b32 [mine], 7;
    xor.b32 %r1, index, 64;
    mad.wide.u32 %d8, %r1, 4, %d0;
    ld.global.b32 %r2, [%d8];
""")


def words(count=GRID * THREADS, start=0):
    return np.full(count, start, np.uint32)


def run(ptx, *arrays, processes, grid=GRID, options=None, **launch):
    """(machine, whatever it raised) after one launch."""
    gpu = machine(processes=processes, **(options or {}))
    gpu.launch(request(ptx, *arrays, grid=grid, **launch))
    try:
        gpu.synchronize()
    except Exception as error:
        return gpu, error
    return gpu, None


def launches(report):
    """The launches but for where they ran."""
    return [dataclasses.replace(launch, processes=1, obstacle="") for launch in report.launches]


# Independent


@pytest.mark.parametrize("checks", ["all", "none"])
@pytest.mark.parametrize("processes", [2, 3, 99])
def test_an_independent_launch_is_shared_out(processes, checks):
    one, several, source = words(), words(), np.arange(GRID * THREADS, dtype=np.uint32)
    alone, _ = run(COPY, one, source, processes=1, options={"checks": checks})
    gpu, error = run(COPY, several, source, processes=processes, options={"checks": checks})
    assert error is None
    np.testing.assert_array_equal(several, source + 1)
    assert gpu.report.launches[0].processes == min(processes, GRID)
    assert f"in {min(processes, GRID)} processes" in str(gpu.report)
    assert launches(gpu.report) == launches(alone.report)
    assert not gpu.report.findings


@pytest.mark.parametrize("schedule", ["fair", "early", "late", "random"])
def test_nothing_depends_on_how_many_processes_there_are(schedule):
    ptx = kernel(THROUGH_SHARED.format(barrier=""))
    seen = []
    for processes in (2, 3, 3):
        out = words()
        options = {"schedule": schedule, "seed": 5, "trace": True, "num_sms": 1}
        gpu, _ = run(ptx, out, processes=processes, shared=256, options=options)
        assert gpu.report.launches[0].processes == processes
        texts = [str(finding).replace(hex(out.ctypes.data), "") for finding in gpu.report.findings]
        seen.append((out.tolist(), launches(gpu.report), texts, gpu.trace.bars))
    assert seen[0] == seen[1] == seen[2]


def test_findings_inside_a_cta_are_the_same_and_entered_once():
    faulty, mended = (kernel(THROUGH_SHARED.format(barrier=barrier)) for barrier in ("", "bar.sync 0;"))
    found = []
    for processes in (1, 2):
        gpu, _ = run(faulty, words(), processes=processes, shared=256)
        found.append({(finding.kind, finding.lines) for finding in gpu.report.findings})
        assert len(gpu.report.findings) == len(found[-1])
    assert found[0] == found[1]
    assert "race" in {kind for kind, _ in found[0]} or "uninitialised" in {kind for kind, _ in found[0]}
    gpu, _ = run(mended, words(), processes=2, shared=256)
    assert (gpu.report.launches[0].processes, gpu.report.findings) == (2, [])


def test_what_processes_wrote_counts_as_written():
    fresh, out, gpu = words(), words(), machine(processes=2)
    ahead = fresh[: GRID * THREADS - THREADS]  # what the first launch writes
    gpu.launch(request(SQUARES, fresh, grid=GRID - 1, fresh=(0,)))
    gpu.launch(request(COPY, out, fresh, grid=GRID - 1, fresh=(1,)))
    gpu.synchronize()
    assert [launch.processes for launch in gpu.report.launches] == [2, 2]
    np.testing.assert_array_equal(out[: len(ahead)], ahead + 1)
    assert not gpu.report.findings
    gpu.launch(request(COPY, out, fresh, grid=GRID, fresh=(1,)))
    gpu.synchronize()
    assert kinds(gpu.report) == {"uninitialised"}


@pytest.mark.parametrize(
    ("first", "text"),
    [(SQUARES, "ordered after the write by CTA ("), (COPY, "ordered after the read by CTA (")],
)
def test_a_later_launch_that_does_not_wait_races_with_what_processes_did(first, text):
    target, other = words(), words()
    arrays = (other, target) if first == COPY else (target,)
    second = kernel("st.global.b32 [mine], 1; griddepcontrol.wait;")
    for ptx, found in ((second, True), (kernel("griddepcontrol.wait; st.global.b32 [mine], 1;"), False)):
        gpu = machine(processes=2)
        gpu.launch(request(first, *arrays, grid=GRID))
        gpu.synchronize()
        gpu.launch(request(ptx, target, grid=GRID, programmatic=True))
        gpu.synchronize()
        assert [launch.processes for launch in gpu.report.launches] == [2, 2]
        assert any(text in str(f) and "earlier launch" in str(f) for f in gpu.report.findings) is found


def test_launches_that_may_overlap_run_in_one_process():
    target, gpu = words(), machine(processes=2, schedule="early")
    first = kernel("griddepcontrol.launch_dependents; st.global.b32 [mine], 5;")
    second = kernel("griddepcontrol.wait; ld.global.b32 %r1, [mine]; add.s32 %r1, %r1, 1; st.global.b32 [mine], %r1;")
    gpu.launch(request(first, target, grid=GRID))
    gpu.launch(request(second, target, grid=GRID, programmatic=True))
    gpu.synchronize()
    assert [launch.processes for launch in gpu.report.launches] == [1, 1]
    assert ["overlap" in launch.obstacle for launch in gpu.report.launches] == [True, True]
    assert (target == 6).all()
    assert not gpu.report.findings


def test_the_timeline_has_every_cta_in_a_place_of_its_own():
    rows = []
    for processes in (1, 2):
        gpu, _ = run(SQUARES, words(), processes=processes, options={"trace": True, "num_sms": 1})
        rows.append(gpu.trace.rows())
        assert len({row[0] for row in rows[-1]}) == GRID
    assert rows[0] == rows[1]


# Dependent


@pytest.mark.parametrize("checks", ["all", "none"])
@pytest.mark.parametrize(("ptx", "result"), [(ATOMICS, GRID * THREADS), (TURNS, GRID)])
def test_ctas_that_meet_in_global_memory_run_in_one_process(ptx, result, checks):
    out, gpu = words(), machine(processes=2, checks=checks)
    for times in (1, 2):
        out[:] = 0
        gpu.launch(request(ptx, out, grid=GRID))
        gpu.synchronize()
        assert out[0] == result
        assert len(gpu.report.launches) == times
        assert gpu.report.launches[-1].processes == 1
        assert gpu.report.launches[-1].obstacle == parallel.DEPENDENT
    assert f"in one process: {parallel.DEPENDENT}" in str(gpu.report)
    assert not gpu.report.findings


def test_ctas_in_different_processes_are_compared(monkeypatch):
    original = parallel._run_cluster

    def slowly(*arguments):
        time.sleep(0.2)  # so that each process gets one
        return original(*arguments)

    monkeypatch.setattr(parallel, "_run_cluster", slowly)
    out = words()
    gpu, _ = run(ATOMICS, out, processes=2, grid=2, options={"checks": "none"})
    assert (gpu.report.launches[0].processes, out[0]) == (1, 2 * THREADS)


def test_atomics_that_each_cta_keeps_to_itself_are_independent():
    out = words()
    ptx = kernel("mad.wide.u32 %d8, cta, 4, %d0; atom.global.add.u32 %r1, [%d8], 1; red.global.add.u32 [%d8], 1;")
    gpu, _ = run(ptx, out, processes=2)
    assert gpu.report.launches[0].processes == 2
    assert out.tolist() == [2 * THREADS] * GRID + [0] * (GRID * THREADS - GRID)


def test_a_granule_is_two_bytes():
    out = np.zeros(GRID + 1, np.uint8)
    gpu, _ = run(BYTES, out, processes=2)
    assert gpu.report.launches[0].processes == 1
    assert out.tolist() == [*range(GRID), 0]


def test_a_race_between_ctas_is_named():
    found = []
    for processes in (1, 2):
        gpu, _ = run(NEIGHBOUR, words(), processes=processes, grid=2)
        found.append([(finding.kind, finding.lines) for finding in gpu.report.findings])
        assert gpu.report.launches[0].processes == 1
    assert found[0] == found[1]
    assert "race" in {kind for kind, _ in found[0]}


# Each CTA has written a row of 256 bytes; %d9 is its own, or a neighbour's.
WAYS = {
    "ld": "ld.global.b32 %r2, [%d9];",
    "generic ld": "ld.b32 %r2, [%d9+64];",
    "relaxed ld": "ld.relaxed.gpu.global.b32 %r2, [%d9];",
    "st": "st.global.b32 [%d9+4], tid;",
    "st.release": "st.release.gpu.global.b32 [%d9], tid;",
    "red": "red.global.add.u32 [%d9], 1;",
    "cp.async": "cp.async.ca.shared.global [smem], [%d9], 4; cp.async.wait_all;",
    "short cp.async": "cp.async.ca.shared.global [smem], [%d9], 16, 8; cp.async.wait_all;",
    "bulk load": """
        mbarrier.init.shared.b64 [smem], 1;
        mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+128], [%d9], 128, [smem];
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;
        @!%p2 bra WAIT;
    """,
    "bulk store": "cp.async.bulk.global.shared::cta.bulk_group [%d9], [smem], 128; cp.async.bulk.commit_group;",
    "bulk reduce": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d9], [smem], 128;",
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_touch_memory_counts(way):
    body = """
        st.global.b32 [mine], tid;
        xor.b32 %r1, cta, {neighbour};
        mad.wide.u32 %d9, %r1, 256, %d0;
        setp.ne.u32 %p1, tid, 0;
        @%p1 bra END;
        {touch}
    END:
    """
    for neighbour in (0, 1):
        ptx = kernel(body.format(neighbour=neighbour, touch=WAYS[way]))
        gpu, error = run(ptx, words(), processes=2, shared=512, options={"checks": "none"})
        assert error is None
        assert gpu.report.launches[0].processes == 2 - neighbour


@pytest.mark.parametrize("starts", [(0, 0), (0, 1)])
def test_only_reads_are_shared(starts):
    data = np.zeros(64, np.uint8)
    for writes in ((False, False), (True, False), (False, True), (True, True)):
        expected = not any(writes)
        memory = GlobalMemory()
        block = memory.register(data.ctypes.data, data.nbytes)
        parts, together = [], Footprint(memory.blocks)
        for cluster, (start, write) in enumerate(zip(starts, writes)):
            footprint = Footprint(memory.blocks)
            for each in (footprint, together):
                each.begin(cluster)
                each.note(block, np.array([block.base + start]), 1, write)
            parts.append(footprint.touched(0))
        assert independent(parts, {block.base: block}) is expected
        assert (together.conflicts == 0) is expected


def test_memory_that_a_fork_shares_is_not_written_by_forks():
    out = np.frombuffer(mmap.mmap(-1, 4096), np.uint32)
    gpu, _ = run(SQUARES, out, processes=2)
    assert "shared with other processes" in gpu.report.launches[0].obstacle
    assert out[THREADS + 3] == (THREADS + 3) ** 2 + 3


# What goes wrong


@pytest.mark.parametrize(
    ("ptx", "error"),
    [
        ("st.global.b32 [mine], 1; setp.eq.u32 %p1, cta, 3; @%p1 st.global.b32 [%d0+1536], 1;", FaultError),
        ("st.global.b32 [mine], 1; setp.eq.u32 %p1, cta, 3; @%p1 trap;", FaultError),
        ("st.global.b32 [mine], 1; setp.eq.u32 %p1, cta, 3; @%p1 bar.sync 1, 128;", DeadlockError),
    ],
)
def test_a_failing_kernel_fails_as_in_one_process(ptx, error):
    out, seen = words(), []
    for processes in (1, 2):
        out[:] = 0
        gpu, raised = run(kernel(ptx), out, processes=processes)
        seen.append((type(raised), str(raised), out.tolist(), [str(f) for f in gpu.report.findings]))
    assert seen[0] == seen[1]
    assert seen[0][0] is error


def test_a_killed_process_is_an_error_and_nothing_is_written(monkeypatch):
    original = parallel._run_cluster

    def dying(machine, launch, position, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(machine, launch, position, index)

    monkeypatch.setattr(parallel, "_run_cluster", dying)
    out, gpu = words(), machine(processes=2)
    gpu.launch(request(SQUARES, out, grid=GRID))
    with pytest.raises(ProcessError, match=r"a process was killed \(SIGKILL\); nothing of this launch"):
        gpu.synchronize()
    assert not out.any()
    monkeypatch.undo()
    gpu.launch(request(SQUARES, out, grid=GRID))
    gpu.synchronize()
    assert out[THREADS] == THREADS**2
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # none is left


def test_the_number_is_checked():
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        machine(processes=0)
