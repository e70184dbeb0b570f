"""Scales that are not positive, and NaN where no gradient may come from."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.sm100.runs import BACKEND, Run

pytestmark = pytest.mark.emulator


def inputs(sq, sk, d, dtype=torch.bfloat16):
    return [torch.randn(1, s, 2, d).to(dtype) for s in (sq, sq, sk, sk)]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_scale(scale, options):
    torch.manual_seed(0)
    do, q, k, v = inputs(150, 140, 64)
    run = Run(do, q, k, v, None, options | {"scale": scale})
    run.check(run("random", 1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_nan_in_do_of_an_empty_row(packed, sink):
    """Causal, more queries than keys: the first rows see nothing."""
    torch.manual_seed(0)
    do, q, k, v = inputs(137, 130, 64, torch.float16)
    do[:, :7] = float("nan")
    options = {"causal": True} | ({"sink": torch.randn(2)} if sink else {})
    if packed:
        do, q, k, v = do[0], q[0], k[0], v[0]
        lengths = {"q": torch.tensor([0, 137]), "k": torch.tensor([0, 130])}
        options |= {f"cu_seqlens_{name}": cu.to(torch.int32) for name, cu in lengths.items()}
        options |= {"max_seqlen_q": 137, "max_seqlen_k": 130}
    run = Run(do, q, k, v, None, options)
    run.check(run())


def test_do_stays_as_it_is_where_every_row_sees_a_key(monkeypatch):
    from refluent.gpu.launch import call

    monkeypatch.setattr(call, "silence", None)
    torch.manual_seed(0)
    do, q, k, v = inputs(40, 70, 32)
    for options in ({}, {"causal": True}, {"window": (8, 0)}):
        run = Run(do, q, k, v, None, options)
        run.check(run())
    cu = torch.tensor([0, 40], dtype=torch.int32)
    leaves = [x[0, :40].requires_grad_() for x in (q, k, v)]
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 40, "max_seqlen_k": 40}
    rf.attention_varlen(*leaves, **lengths, causal=True, backend=BACKEND).sum().backward()
