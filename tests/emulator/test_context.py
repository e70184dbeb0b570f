"""The emulated GPU between calls: which memory kernels reach, and what is known of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from refluent.emulator import FaultError
from refluent.emulator.launch import Allocation
from refluent.emulator.memory import GlobalMemory, MemoryFault

cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from emulator.kernels import elementwise  # noqa: E402

pytestmark = pytest.mark.emulator
N = 128


@cute.kernel
def _fill(x: cute.Tensor, count: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    if thread < count:
        x[thread] = cutlass.Float32(1.0)


@cute.jit
def fill(x: cute.Tensor, count: cutlass.Int32):
    _fill(x, count).launch(grid=[1, 1, 1], block=[N, 1, 1])


@cute.kernel
def _read_at(address: cutlass.Int64, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    out[thread] = cute.make_tensor(pointer, cute.make_layout(N))[thread]


@cute.jit
def read_at(address: cutlass.Int64, out: cute.Tensor):
    """Reads memory that no argument names."""
    _read_at(address, out).launch(grid=[1, 1, 1], block=[N, 1, 1])


def add(x, y):
    elementwise.axpy(from_dlpack(x), from_dlpack(y), 1.0, N)


def test_memory_of_an_earlier_call_is_out_of_reach(emulated):
    x, out = torch.ones(N), torch.zeros(N)
    with emulated("sm_90a"):
        fill(from_dlpack(x), N)
        with pytest.raises(FaultError, match="outside the global memory handed in"):
            read_at(x.data_ptr(), from_dlpack(out))
        add(x, out)
    assert (out == 1).all()


def test_reading_what_nothing_wrote_is_found_whichever_call_reads(emulated):
    with emulated("sm_90a", on_finding="record") as chip:
        x, y = torch.empty(N), torch.zeros(N)
        fill(from_dlpack(x), N // 2)
        add(x, y)
    assert [finding.kind for finding in chip.report().findings] == ["uninitialised"]
    chip.report().findings.clear()


def test_what_a_kernel_wrote_is_remembered(emulated):
    with emulated("sm_90a"):
        x, y = torch.empty(N), torch.zeros(N)
        fill(from_dlpack(x), N)
        add(x, y)
    assert (y == 1).all()


def test_what_the_host_wrote_is_noticed(emulated):
    with emulated("sm_90a"):
        x, y = torch.empty(N), torch.zeros(N)
        fill(from_dlpack(x), N // 2)
        x.fill_(2.0)
        add(x, y)
    assert (y == 2).all()


def test_memory_is_known_again_while_its_owner_lives():
    memory, data, living = GlobalMemory(shadowed=True), np.zeros(64, np.uint8), [True]
    part = Allocation(data.ctypes.data, 64, "x", fresh=True, owner=data, alive=lambda: living[0])
    first = memory.hand_in(part)
    memory.take_back()
    with pytest.raises(MemoryFault, match="was not handed in"):
        memory.find(part.address)
    assert first.owner is None  # not kept alive between calls
    assert memory.hand_in(part) is first
    memory.take_back()
    living[0] = False
    again = memory.hand_in(part)  # other memory at the same address
    assert again is not first
    assert again.fresh


def test_a_fault_leaves_the_gpu_usable(emulated):
    x, y = torch.ones(N), torch.zeros(N)
    with emulated("sm_100a") as chip:
        with pytest.raises(FaultError):
            read_at(0, from_dlpack(y))
        add(x, y)
    assert (y == 1).all()
    assert [finding.kind for finding in chip.report().findings] == ["fault"]
