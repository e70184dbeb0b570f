"""The Hopper backward on a Hopper GPU: the cases that the emulator proves, and the same bits every time where asked."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.calls import call
from kernels.sm90.cases import CASES
from refluent import accuracy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="there is no Hopper GPU here",
    ),
]
REPEATS = 100


def on_device(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    torch.manual_seed(0)
    q, k, v, do, options = call(*CASES[name])
    expected = accuracy.expect(q, k, v, do, **options)
    lse, o = expected.forward.lse.float(), expected.forward.o.to(q.dtype)
    tensors = [on_device(x) for x in (do, q, k, v, o, lse)]
    options = {key: on_device(value) for key, value in options.items()}
    got = rf.attention_backward(*tensors, backend="sm90", **options)
    expected.check_backward(got.dq.cpu(), got.dk.cpu(), got.dv.cpu())
    if options.get("deterministic"):
        for _ in range(REPEATS):
            again = rf.attention_backward(*tensors, backend="sm90", **options)
            assert all(torch.equal(getattr(got, name), getattr(again, name)) for name in ("dq", "dk", "dv"))


def test_training_step():
    """Forward by torch, backward by ours, on a stream of its own, as autograd runs it."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 1024, h, 128).bfloat16().cuda().requires_grad_() for h in (8, 2, 2)]
    with torch.cuda.stream(torch.cuda.Stream()):
        o = rf.attention(*leaves, causal=True, backend="sm90")
        do = torch.randn_like(o)
        o.backward(do)
    torch.cuda.synchronize()
    expected = accuracy.expect(*(x.detach().cpu() for x in leaves), do.cpu(), causal=True)
    expected.check_backward(*(x.grad.cpu() for x in leaves))
