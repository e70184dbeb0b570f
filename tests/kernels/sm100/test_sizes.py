"""Addresses past 2^31 elements and grids past 65,535 sequences."""

from __future__ import annotations

import mmap

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cutlass
import cutlass.cute as cute

import refluent as rf
from emulator.recorder import recording
from kernels.sm100.runs import ARCH, BACKEND, Run
from refluent import emulator
from refluent.gpu import cache
from refluent.gpu.launch import call, compiled, entry

pytestmark = pytest.mark.emulator
FAR = (1 << 31) + 4096  # elements: what a 32-bit index cannot reach
BF16 = torch.bfloat16
NO_RESERVE = 0x4000  # Linux; Python names it from 3.13 on


def lazily(count, dtype=BF16):
    """Zeros that take memory where they are touched alone."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype)


def apart(tensors, stride_of):
    """The tensors, copied into views of one storage whose rows of dimension `stride_of` are FAR elements apart."""
    room = max(tensor.numel() for tensor in tensors)
    base, views = lazily(FAR + (len(tensors) + 1) * room), []
    for n, tensor in enumerate(tensors):
        assert tensor.shape[stride_of] == 2
        strides = [FAR if i == stride_of else stride for i, stride in enumerate(tensor.contiguous().stride())]
        views.append(base.as_strided(tensor.shape, strides, n * room).copy_(tensor))
    return views


@pytest.mark.parametrize(("dimension", "name"), [(0, "sequences"), (1, "positions"), (2, "heads")])
def test_strides(monkeypatch, dimension, name):
    """Inputs and gradients alike; without checks, whose shadow of the memory would not fit."""
    torch.manual_seed(0)
    shape = [2, 40, 2, 32]
    if name == "positions":
        shape[1] = 2
    q, k, v, do = apart([torch.randn(shape).to(BF16) for _ in range(4)], dimension)
    outputs = []

    def output(like, cleared):
        outputs.extend(apart([torch.full(like.shape, float("nan"), dtype=like.dtype)], dimension))
        return outputs[-1]

    monkeypatch.setattr(call, "_output", output)
    plain = Run(do, q, k, v, None, {"causal": True})
    with emulator.gpu(ARCH, checks="none"):
        made = rf.attention_backward(do, q, k, v, plain.o, plain.lse, backend=BACKEND, causal=True)
    assert [gradient.stride(dimension) for gradient in outputs] == [FAR] * 3
    plain.check(made)


class FarViews(entry.Views):
    """Accumulators whose heads are FAR elements apart; they are zeros already, and clearing all would touch all."""

    def _accumulator(self, start, heads, blocks, acc, width):
        near = super()._accumulator(start, heads, blocks, acc, width)
        far = cute.assume(cutlass.Int64(FAR), divby=16)
        return cute.make_tensor(near.iterator, cute.make_layout(near.shape, stride=(far, *near.stride[1:])))

    def clear(self):
        return self._tensor(cutlass.Int64(0), (4, cutlass.Int64(1)), (1, cutlass.Int64(4)))


@pytest.mark.parametrize("heads", [2, 4])
def test_accumulators(monkeypatch, heads):
    """Of dQ, and of grouped heads' dK and dV."""
    torch.manual_seed(0)
    monkeypatch.setattr(entry, "Views", FarViews)
    monkeypatch.setattr(compiled, "_functions", {})
    empty, extra = torch.Tensor.new_empty, (heads - 1) * FAR

    def new_empty(self, shape, dtype=None):
        """The workspace, and whatever else is asked for."""
        return lazily(shape + extra, dtype) if isinstance(shape, int) else empty(self, shape, dtype=dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    before = cache.use(None)
    try:
        q, do = (torch.randn(1, 140, heads, 32).to(BF16) for _ in range(2))
        k, v = (torch.randn(1, 140, 2, 32).to(BF16) for _ in range(2))
        plain = Run(do, q, k, v, None, {})
        with emulator.gpu(ARCH, checks="none"):
            made = rf.attention_backward(do, q, k, v, plain.o, plain.lse, backend=BACKEND)
        plain.check(made)
    finally:
        cache.use(before)


def test_more_sequences_than_a_grid_is_high():
    """70,000 sequences of a query and a key: every launch has them in its grid's first dimension."""
    count = 70_000
    q, k, v, do = (torch.zeros(count, 1, 32, dtype=BF16) for _ in range(4))
    o, lse = torch.zeros(count, 1, 32, dtype=BF16), torch.zeros(1, count)
    offsets = torch.arange(count + 1, dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 1, "max_seqlen_k": 1}
    with recording(ARCH) as gpu:
        rf.attention_backward(do, q, k, v, o, lse, backend=BACKEND, **packed)
    grids = [launched.grid for launched in gpu.recorder.launches]
    assert len(grids) == 3
    assert all(x >= count and (y, z) == (1, 1) for x, y, z in grids)
