"""Kernels of the CuTe DSL in one process and in two."""

from __future__ import annotations

import dataclasses

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from emulator.cases import CASES  # noqa: E402
from emulator.kernels import tma  # noqa: E402
from refluent import emulator  # noqa: E402

pytestmark = pytest.mark.emulator
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("axpy", "sm_90a"),
        ("tma_load-swizzle128", "sm_90a"),
        ("tma_reduce-swizzle128", "sm_90a"),
        ("rotate_async-two", "sm_90a"),
        ("wgmma_gemm-odd", "sm_90a"),
        ("tcgen05_gemm-odd", "sm_100a"),
        ("tcgen05_gemm-pair", "sm_100a"),
    ],
)
def test_independent_kernels_leave_the_same(name, arch):
    seen = []
    for processes in (1, 2):
        torch.manual_seed(0)
        with emulator.gpu(arch, processes=processes) as gpu:
            left = BY_NAME[name].run().left
        launches = gpu.report().launches
        assert [launch.processes for launch in launches] == [processes] * len(launches)
        seen.append((left, [dataclasses.replace(launch, processes=1) for launch in launches]))
    (one, counted), (two, counted_in_two) = seen
    assert all(map(torch.equal, one, two))
    assert counted == counted_in_two


@pytest.mark.parametrize(
    ("name", "arch", "text"),
    [
        ("persistent", "sm_90a", "depend on each other"),
        ("bulk_reduce_in_turns", "sm_90a", "depend on each other"),
        ("cancelling", "sm_100a", "cancel each other's launches"),
        ("dependent", "sm_90a", "overlap"),
    ],
)
def test_dependent_kernels_run_in_one(name, arch, text):
    case = BY_NAME[name]
    with emulator.gpu(arch, processes=2, num_sms=case.num_sms) as gpu:
        case.run()
    assert all(text in launch.obstacle for launch in gpu.report().launches), str(gpu.report())


@pytest.mark.parametrize("direction", ["load", "store"])
def test_boxes_count_as_touched(direction):
    for aliased in (False, True):
        x = torch.zeros(64, 64)
        packed = (x if aliased else x.clone()).view(8, 512)
        with emulator.gpu("sm_90a", checks="none", processes=2) as gpu:
            sides = [from_dlpack(tensor, assumed_align=16) for tensor in (x, packed)]
            copy = tma.TileCopy((16, 32), 128)
            copy.load(*sides) if direction == "load" else copy.store(*sides[::-1])
        assert gpu.report().launches[0].processes == 2 - aliased


@cute.kernel
def _talk(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread == 3:
        cute.printf("CTA %d has %.2f\n", block, x[block])


@cute.jit
def talk(x: cute.Tensor):
    _talk(x).launch(grid=[x.shape[0], 1, 1], block=[32, 1, 1])


def test_kernels_print_in_the_order_of_their_ctas(emulated, capfd):
    with emulated("sm_90a", processes=2) as gpu:
        talk(from_dlpack(torch.arange(5.0) / 2))
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines == [f"CTA {i} has {i / 2:.2f}" for i in range(5)]
    assert gpu.report().launches[0].processes == 2
