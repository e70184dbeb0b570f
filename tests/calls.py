"""Runs a case through the public API and judges it against the oracle."""

from typing import Any

import torch
from torch import Tensor

import refluent as rf
from poison import poisoned_memory
from refluent import accuracy
from refluent.accuracy import Errors
from strategies import Built, Case, build

REFERENCE_ONLY = ("return_lse", "return_max_score", "deterministic", "backend")


def call(built: Built, **more: Any) -> Any:
    """rf.attention or rf.attention_varlen, as the options ask, in poisoned memory."""
    options = built.options | more
    varlen = "cu_seqlens_q" in options or "cu_seqlens_k" in options
    with poisoned_memory():
        return (rf.attention_varlen if varlen else rf.attention)(built.q, built.k, built.v, **options)


def expect(built: Built) -> accuracy.Expected:
    options = {name: value for name, value in built.options.items() if name not in REFERENCE_ONLY}
    return accuracy.expect(built.q, built.k, built.v, built.do, built.dlse, **options)


def leaves(built: Built) -> dict[str, Tensor]:
    """Everything that can get a gradient, by name."""
    found = {"q": built.q, "k": built.k, "v": built.v}
    if "sink" in built.options:
        found["sink"] = built.options["sink"]
    return found | built.captured


def judge(case: Case) -> list[Errors]:
    """Forward and autograd backward of a case against the oracle; nothing of the caller's may change."""
    built = build(case)
    before = [t.detach().clone() for t in (*leaves(built).values(), built.do)]
    expected = expect(built)
    o, lse, max_score = call(built, return_lse=True, return_max_score=True)
    assert o.dtype == case.dtype
    assert lse.dtype == max_score.dtype == case.wide
    assert not max_score.requires_grad
    errors = expected.check_forward(o, lse, max_score)
    with poisoned_memory():
        outputs, cotangents = ([o], [built.do]) if built.dlse is None else ([o, lse], [built.do, built.dlse])
        torch.autograd.backward(outputs, cotangents)
    errors += judge_gradients(built, expected)
    for old, new in zip(before, (*leaves(built).values(), built.do), strict=True):
        torch.testing.assert_close(new.detach(), old, rtol=0, atol=0, equal_nan=True)
    return errors


def judge_gradients(built: Built, expected: accuracy.Expected) -> list[Errors]:
    """The .grad of every leaf that asked for one; the others must have none."""
    for name, leaf in leaves(built).items():
        assert (leaf.grad is not None) == leaf.requires_grad, name
        if leaf.grad is not None:
            assert leaf.grad.dtype == leaf.dtype, name
    return expected.check_backward(
        built.q.grad,
        built.k.grad,
        built.v.grad,
        built.options["sink"].grad if "sink" in built.options else None,
        {name: leaf.grad for name, leaf in built.captured.items() if leaf.grad is not None},
    )
