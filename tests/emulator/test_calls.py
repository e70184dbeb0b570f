"""printf and assertions of kernels."""

from __future__ import annotations

import struct

import pytest
import torch

from refluent.emulator import FaultError
from refluent.emulator.isa.calls import layout, render
from refluent.emulator.memory import MemoryFault

cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("none %%", []),
        ("%d %f %d", [0, 8, 16]),
        ("%d%d%lld", [0, 4, 8]),
        ("%u %zu %c %p", [0, 8, 16, 24]),
    ],
)
def test_arguments_lie_as_in_a_c_structure(text, offsets):
    assert [at for at, _ in layout(text)] == offsets


def test_formats():
    raw = struct.pack("<ixxxxdQ", -5, 2.5, 1 << 40)
    assert render("[%4d|%-8.3f|%llx] 100%%", raw) == "[  -5|2.500   |10000000000] 100%"
    assert render("%c%c", struct.pack("<ii", ord("o"), ord("k"))) == "ok"
    assert render("%p", struct.pack("<Q", 255)) == "0xff"
    with pytest.raises(MemoryFault, match="%n is not known"):
        layout("%n")


@cute.kernel
def _talk(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread % 16 == 3:
        cute.printf("thread %d has %.2f\n", thread, x[thread])


@cute.jit
def talk(x: cute.Tensor):
    _talk(x).launch(grid=[1, 1, 1], block=[32, 1, 1])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_print(arch, emulated, capfd):
    with emulated(arch):
        talk(from_dlpack(torch.arange(32.0) / 2))
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines == ["thread 3 has 1.50", "thread 19 has 9.50"]


@cute.kernel
def _insist(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cute.testing.assert_(x[thread] < 5.0, "too large")  # noqa: PT009


@cute.jit
def insist(x: cute.Tensor):
    _insist(x).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_assertions_fail(emulated, capfd):
    import cutlass.cute.testing  # noqa: F401  (assert_ is looked up through cute)

    with emulated("sm_90a"):
        good, bad = from_dlpack(torch.zeros(32)), from_dlpack(torch.arange(32.0))
        compiled = cute.compile(insist, good, options="--enable-assertions")
        compiled(good)
        with pytest.raises(FaultError, match="trap"):
            compiled(bad)
    assert "Assertion Error: too large" in capfd.readouterr().out
