"""Hand-written PTX kernels on the emulated machine, for its tests."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from refluent.emulator.launch import Allocation, LaunchRequest
from refluent.emulator.machine import Machine
from refluent.emulator.report import Report

SCHEDULES = [("fair", 0), ("early", 0), ("late", 0), ("late", 1), ("random", 1), ("random", 2), ("random", 3)]


def kernel(body: str, *, params: int = 1, threads: int = 64, arch: str = "sm_90a", name: str = "k") -> str:
    """PTX of a kernel whose parameters p0, p1, ... are 64-bit pointers (in %d0, %d1, ...).

    Set up: tid, lane, warp, rank, cta (%ctaid.x), smem (dynamic shared memory, own CTA), mine (64 bits:
    p0 + 4 * (cta * threads + tid)). Free: %p, %h (16), %r (32), %f (32, float), %d from %d8 (64).
    """
    listed = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.b64 %d{i}, [p{i}];" for i in range(params))
    return f"""
.version 9.0
.target {arch}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry {name}({listed})
.reqntid {threads}, 1, 1
{{
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .f32 %f<32>; .reg .b64 %d<32>; .reg .b128 %q<4>;
.reg .b32 tid, lane, warp, rank, smem, cta, index; .reg .b64 mine;
{loads}
mov.u32 tid, %tid.x;
and.b32 lane, tid, 31;
shr.u32 warp, tid, 5;
mov.u32 rank, %cluster_ctarank;
mov.u32 cta, %ctaid.x;
mov.u32 smem, dynamic;
mad.lo.s32 index, cta, {threads}, tid;
mad.wide.u32 mine, index, 4, %d0;
{body}
ret;
}}
"""


def machine(
    *, arch: str = "sm_90a", checks: Any = "all", schedule: str = "fair", seed: int = 0, **options: Any
) -> Machine:
    return Machine(arch, checks=checks, schedule=schedule, seed=seed, **options)


def request(
    ptx: str,
    *arrays: np.ndarray,
    grid: int = 1,
    threads: int = 64,
    cluster: int = 1,
    shared: int = 0,
    fresh: tuple[int, ...] = (),
    programmatic: bool = False,
    name: str = "k",
) -> LaunchRequest:
    """A launch with the arrays as its parameters; `fresh`: which of them nothing has written."""
    allocations = tuple(
        Allocation(a.ctypes.data, a.nbytes, f"array {i}", fresh=i in fresh, owner=a) for i, a in enumerate(arrays)
    )
    params = tuple(struct.pack("<Q", a.ctypes.data) for a in arrays)
    return LaunchRequest(
        ptx,
        name,
        "sm_90a",
        (grid, 1, 1),
        (threads, 1, 1),
        (cluster, 1, 1),
        shared,
        params,
        programmatic=programmatic,
        allocations=allocations,
    )


def run(ptx: str, *arrays: np.ndarray, options: dict[str, Any] | None = None, **launch: Any) -> Report:
    """Launch once and run; the arrays hold the results."""
    gpu = machine(**(options or {}))
    gpu.launch(request(ptx, *arrays, **launch))
    gpu.synchronize()
    return gpu.report


def check(ptx: str, expected: Any, *inputs: np.ndarray, out: np.ndarray | None = None, **launch: Any) -> None:
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


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}
