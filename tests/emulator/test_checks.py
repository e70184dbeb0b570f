"""The checks: every kind of finding on faulty kernels, and their mended twins silent."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the emulator's extra is not installed")
pytest.importorskip("numba", reason="the emulator's extra is not installed")

from faulty_ptx import CASES
from ptx_machine import SCHEDULES, kernel, kinds, machine, request
from refluent.emulator.errors import EmulatorError

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_fault_is_named_under_every_schedule(case):
    for schedule, seed in case.schedules:
        report = case.run(case.broken(), schedule, seed)
        expected = set(case.kind.split("|"))
        assert kinds(report) & expected, f"{schedule} {seed}: {report}"
        found = [str(f) for f in report.findings if f.kind in expected]
        assert any(case.text in text for text in found), found


@pytest.mark.parametrize("body", {case.body: case for case in CASES}.values(), ids=repr)
def test_the_mended_twin_is_silent(body):
    for schedule, seed in SCHEDULES:
        report = body.run(body.body, schedule, seed)
        assert not report.findings, "\n".join(map(str, report.findings))


# across launches


PRIMARY = kernel("griddepcontrol.launch_dependents; st.global.b32 [mine], 5;", params=2)


def secondary(body):
    return kernel(body, params=2)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("ld.global.b32 %r1, [mine]; griddepcontrol.wait;", "reads global memory"),
        ("st.global.b32 [mine], 6; griddepcontrol.wait;", "writes global memory"),
        ("ld.global.b32 %r1, [mine];", "in the earlier launch of k"),
        ("setp.eq.u32 %p1, warp, 0; @%p1 griddepcontrol.wait; ld.global.b32 %r1, [mine];", "warp 1"),
    ],
)
def test_what_an_earlier_kernel_writes_needs_griddepcontrol_wait(body, text):
    mended = [
        "griddepcontrol.wait; ld.global.b32 %r1, [mine]; st.global.b32 [mine], 6;",
        "setp.eq.u32 %p1, warp, 0; @%p1 griddepcontrol.wait; bar.sync 0; ld.global.b32 %r1, [mine];",
    ]
    for schedule, seed in SCHEDULES:
        for second, faulty in [(body, True), *((m, False) for m in mended)]:
            arrays = np.zeros(256, np.uint32), np.zeros(4, np.uint32)
            gpu = machine(schedule=schedule, seed=seed)
            gpu.launch(request(PRIMARY, *arrays, grid=4))
            gpu.launch(request(secondary(second), *arrays, grid=4, programmatic=True))
            gpu.synchronize()
            assert bool(gpu.report.findings) is faulty, f"{schedule} {seed} {gpu.report}"
            if faulty:
                assert any(text in str(f) for f in gpu.report.findings), str(gpu.report)


def test_a_launch_that_is_not_programmatic_is_ordered():
    arrays = np.zeros(256, np.uint32), np.zeros(4, np.uint32)
    gpu = machine()
    gpu.launch(request(PRIMARY, *arrays, grid=4))
    gpu.launch(request(secondary("ld.global.b32 %r1, [mine]; st.global.b32 [mine], 1;"), *arrays, grid=4))
    gpu.synchronize()
    assert not gpu.report.findings


@pytest.mark.parametrize("offset", [0, 256])
def test_fresh_global_memory(offset):
    out, scratch = np.zeros(64, np.uint32), np.zeros(256, np.uint32)
    body = f"""
        mul.wide.u32 %d8, tid, 4;
        add.s64 %d9, %d1, %d8;
        st.global.b32 [%d9+{offset}], tid;
        bar.sync 0;
        ld.global.b32 %r1, [%d9+256];
        st.global.b32 [mine], %r1;
    """
    gpu = machine()
    gpu.launch(request(kernel(body, params=2), out, scratch, fresh=(1,)))
    gpu.synchronize()
    assert kinds(gpu.report) == ({"uninitialised"} if offset == 0 else set())
    if offset == 0:
        assert "of array 1), which nothing has written" in str(gpu.report.findings[0])
    else:
        # What a kernel wrote stays written for the next one.
        gpu.launch(request(kernel("ld.global.b32 %r1, [%d1+300];", params=2), out, scratch, fresh=(1,)))
        gpu.synchronize()
        assert not gpu.report.findings


# warpgroups and tensor memory

TWO, DEC = "setp.eq.u32 %p1, warp, 2", "setmaxnreg.dec.sync.aligned.u32"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (f"{TWO}; @%p1 {DEC} 24; @!%p1 {DEC} 32;", "warpgroup 0 executed different ones"),
        (f"{TWO}; @!%p1 {DEC} 24;", "warp 2: "),
        (f"{DEC} 24; {DEC} 40;", "asks for more registers"),
    ],
)
def test_setmaxnreg_differs(body, text):
    out = np.zeros(128, np.uint32)
    gpu = machine()
    gpu.launch(request(kernel(body, threads=128), out, threads=128))
    gpu.synchronize()
    assert kinds(gpu.report) == {"setmaxnreg"}
    assert text in str(gpu.report)
    mended = "setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.dec.sync.aligned.u32 24;"
    gpu = machine()
    gpu.launch(request(kernel(mended, threads=128), out, threads=128))
    gpu.synchronize()
    assert not gpu.report.findings


TENSOR = """
    setp.ne.u32 %p1, warp, 0;
    @%p1 bra READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
READY:
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r1, [smem];
    shl.b32 %r2, warp, 21;
    add.s32 %r3, %r1, %r2;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {tid, lane};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r4, %r5}, [%r3];
    tcgen05.wait::ld.sync.aligned;
    add.s32 %r4, %r4, %r5;
    st.global.b32 [mine], %r4;
    bar.sync 0;
    @%p1 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
END:
"""


def run_tensor(body):
    out = np.zeros(128, np.uint32)
    gpu = machine(arch="sm_100a")
    gpu.launch(request(kernel(body, threads=128, arch="sm_100a"), out, threads=128, shared=128))
    gpu.synchronize()
    return gpu.report, out


@pytest.mark.parametrize(
    ("good", "bad", "kind"),
    [
        ("    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;\n", "", "tensor memory"),
        ("b32 %r1, 32;", "b32 %r1, 64;", "tensor memory"),
        ("{%r4, %r5}, [%r3]", "{%r4, %r5}, [%r3+1]", "uninitialised"),
        ("[%r3], {tid, lane}", "[%r3+8], {tid, lane}", "uninitialised"),
        ("[%r3], {tid, lane}", "[%r3+40], {tid, lane}", "tensor memory"),
        ("    tcgen05.wait::st.sync.aligned;\n", "", "race"),
        ("    bar.sync 0;\n    tcgen05.fence::after", "    tcgen05.fence::after", "race"),
        ("    bar.sync 0;\n    @%p1 bra END;\n    tcgen05.de", "    @%p1 bra END;\n    tcgen05.de", "race"),
    ],
)
def test_tensor_memory(good, bad, kind):
    report, out = run_tensor(TENSOR)
    assert not report.findings, str(report)
    tid = np.arange(128)
    np.testing.assert_array_equal(out, tid + tid % 32)
    assert good in TENSOR
    try:
        report, _ = run_tensor(TENSOR.replace(good, bad))
    except EmulatorError as error:
        report = str(error)
        assert "fault" in report
        return
    assert kind in kinds(report), str(report)


# choosing


def test_chosen_checks_only():
    case = next(case for case in CASES if case.name == "no barrier before the read")
    out = np.zeros(64, np.uint32)
    for checks, expected in [("race", {"race"}), (["uninitialised", "race"], None), ("proxy", set()), ("none", set())]:
        gpu = machine(checks=checks)
        gpu.launch(request(kernel(case.broken()), out, shared=4096))
        gpu.synchronize()
        assert expected is None or kinds(gpu.report) == expected
    with pytest.raises(ValueError, match="checks: everything not among race, rewrite, lanes, proxy"):
        machine(checks="everything")
    with pytest.raises(ValueError, match="schedule must be one of fair, random, late, early"):
        machine(schedule="lucky")


def test_a_finding_carries_its_places():
    case = next(case for case in CASES if case.name == "no barrier before the read")
    finding = next(f for f in case.run(case.broken()).findings if f.kind == "race")
    assert finding.kernel == "k"
    assert finding.cta == (0, 0, 0)
    assert len(finding.lines) == len(finding.instructions) == 2
    assert finding.addresses is not None
    assert "st.shared.b32" in finding.text
    assert "ld.shared.b32" in finding.text
