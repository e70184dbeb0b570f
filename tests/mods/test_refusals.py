"""What is refused, and that the message says why and where."""

import math
import re

import numpy as np
import pytest
import torch

import refluent.mods as mods
from mods.tiles import positions

slope = torch.randn(3)
table = torch.randn(3, 7)
array = np.ones(3)
five = torch.randn(2, 2, 2, 2, 2)
numbers = [1.0, 2.0, 3.0]


def branch(s, b, h, i, j):
    if j > i:  # the line in the message
        return s
    return -s


def write_in_place(s, b, h, i, j):
    slope[0].add_(1)
    return s


def fill_alias(s, b, h, i, j):
    x = slope.detach()
    x.zero_()
    return s


def assign(s, b, h, i, j):
    slope[h] = s
    return s


def without_grad(s, b, h, i, j):
    with torch.no_grad():
        return s * 2


REFUSED = {
    "if": (branch, "needs the value of a score", "if j > i:  # the line in the message"),
    "and": (lambda s, b, h, i, j: s if i and j else -s, "needs the value", None),
    "not": (lambda s, b, h, i, j: s * (not i), "needs the value", None),
    "max": (lambda s, b, h, i, j: s * max(i, j), "torch.maximum", None),
    "int": (lambda s, b, h, i, j: s * int(i), "needs the value", None),
    "item": (lambda s, b, h, i, j: s * slope[h].item(), "needs the value", None),
    "math": (lambda s, b, h, i, j: s * math.exp(i), "needs the value", None),
    "captured value": (lambda s, b, h, i, j: s if slope[0] > 0 else -s, "needs the value", None),
    "list": (lambda s, b, h, i, j: s * numbers[h], "needs the value", None),
    "numpy": (lambda s, b, h, i, j: s * array[h], "needs the value", None),
    "range": (lambda s, b, h, i, j: s * sum(k for k in range(j)), "needs the value", None),
    "whole": (lambda s, b, h, i, j: s + slope.exp()[h], r"whole tensor slope.*compute it outside", "slope.exp()[h]"),
    "whole sum": (lambda s, b, h, i, j: s + slope.sum(), "whole tensor slope", None),
    "transpose": (lambda s, b, h, i, j: s + table.t()[i, h], "whole tensor table", None),
    "two whole": (lambda s, b, h, i, j: s + (table + slope[:, None])[h, i], "slope", None),
    "half indexed": (lambda s, b, h, i, j: s + table[h], "whole tensor table", None),
    "row returned": (lambda s, b, h, i, j: table[h], r"returns a tensor of shape \(7,\)", None),
    "none": (lambda s, b, h, i, j: None, "returns a NoneType", None),
    "tuple": (lambda s, b, h, i, j: (s, s), "returns a tuple", None),
    "bool": (lambda s, b, h, i, j: i > j, "give a mask as mask_mod", None),
    "too many": (lambda s, b, h, i, j: s + slope[h, i], "indexes slope with 2 indices", None),
    "slice": (lambda s, b, h, i, j: s + slope[0:2][h], "indexes slope with slice", None),
    "float index": (lambda s, b, h, i, j: s + slope[i * 0.5], r"type torch.float32; an index is", None),
    "bool index": (lambda s, b, h, i, j: s + slope[i > j], "type torch.bool; an index is", None),
    "score index": (lambda s, b, h, i, j: s + slope[(s * 2).long()], "depends on the score", None),
    "five dimensions": (lambda s, b, h, i, j: s + five[b, h, i, j, 0], "at most 4", None),
    "complex": (lambda s, b, h, i, j: torch.complex(s, s), "complex", None),
    "random": (lambda s, b, h, i, j: s + torch.rand(()), "random", None),
    "random like": (lambda s, b, h, i, j: s + torch.rand_like(s), "random", None),
    "made inside": (lambda s, b, h, i, j: s + torch.arange(3)[h], "made inside the function", None),
    "made inside, whole": (lambda s, b, h, i, j: s + torch.arange(3).float(), "made inside the function", None),
    "stacked": (lambda s, b, h, i, j: torch.stack([s, s]).amax(), "not an operation on single numbers", None),
    "in place": (write_in_place, "writes to a captured tensor", "slope[0].add_(1)"),
    "in place through an alias": (fill_alias, "writes to a captured tensor", "x.zero_()"),
    "assignment": (assign, "assigns to an element", "slope[h] = s"),
    "no_grad": (without_grad, r"use \.detach\(\)", "with torch.no_grad():"),
    "sparse": (lambda s, b, h, i, j: s + sparse[h], "dense", None),
    "own error": (lambda s, b, h, i, j: s + undefined[h], "NameError", "undefined[h]"),  # noqa: F821
}
sparse = torch.eye(3).to_sparse()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_and_line(name):
    fn, reason, source = REFUSED[name]
    before = slope.clone()
    with pytest.raises(ValueError, match=re.compile(reason, re.S)) as caught:
        mods.score_mod(fn)
    text = str(caught.value)
    assert text.startswith("score_mod ")
    assert __file__ in text
    if source is not None:
        assert source in text
    assert torch.equal(slope, before)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda b, h, i, j: i - j, "returns torch.int64, but a mask_mod returns a bool"),
        (lambda b, h, i, j: 1, "returns torch.int64, but a mask_mod returns a bool"),
        (lambda b, h, i, j: slope[h], "returns torch.float32, but a mask_mod returns a bool"),
        (lambda b, h, i, j: i > j and i > 2, "needs the value"),
    ],
)
def test_masks_must_return_a_bool(fn, reason):
    with pytest.raises(ValueError, match=reason):
        mods.mask_mod(fn)


def test_wrong_kinds():
    with pytest.raises(TypeError, match=r"score_mod must be a function \(score, b, h, i, j\) or None, got int"):
        mods.score_mod(3)
    with pytest.raises(
        TypeError, match=r"score_mod must take \(score, b, h, i, j\), but 'lambda' takes \(b, h, i, j\)"
    ):
        mods.score_mod(lambda b, h, i, j: i)
    with pytest.raises(TypeError, match=r"mask_mod must take \(b, h, i, j\)"):
        mods.mask_mod(lambda s, b, h, i, j: i > j)


def test_reads_out_of_range_are_refused_on_the_cpu():
    short = torch.randn(3, 5)
    traced = mods.score_mod(lambda s, b, h, i, j: s + short[h, i])
    s = torch.randn(1, 3, 7, 2)
    for origin in ((0, 0, 0, 0), None):
        with pytest.raises(ValueError, match=r"score_mod 'lambda' reads short, of shape \(3, 5\), out of range"):
            traced.mod.evaluate(s, *positions((1, 3, 7, 2)), traced.captured, origin=origin)
    out = traced.mod.grad_buffers(traced.captured, (True,), torch.float32)
    for origin in ((0, 0, 0, 0), None):
        with pytest.raises(ValueError, match="out of range"):
            traced.mod.backward(
                None, *positions((1, 3, 7, 2)), traced.captured, s, needs=(True,), out=out, origin=origin
            )
    assert torch.equal(out[0], torch.zeros(3, 5))


def test_clamp_reads_the_nearest_and_adds_there():
    short = torch.arange(5.0)
    traced = mods.score_mod(lambda s, b, h, i, j: s + short[i])
    at = positions((1, 1, 7, 2))
    value = traced.mod.evaluate(torch.zeros(1, 1, 7, 2), *at, traced.captured, origin=(0, 0, 0, 0), clamp=True)
    assert value[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 4, 4]
    out = traced.mod.grad_buffers(traced.captured, (True,), torch.float32)
    g = torch.ones(1, 1, 7, 2)
    g[:, :, 5:] = 0
    traced.mod.backward(None, *at, traced.captured, g, needs=(True,), out=out, origin=(0, 0, 0, 0), clamp=True)
    assert out[0].tolist() == [2, 2, 2, 2, 2]
    empty = torch.zeros(0)
    traced = mods.score_mod(lambda s, b, h, i, j: s + empty[i])
    with pytest.raises(ValueError, match="holds nothing"):
        traced.mod.evaluate(torch.zeros(1, 1, 7, 2), *at, traced.captured, clamp=True)


def test_scores_of_another_type():
    traced = mods.score_mod(lambda s, b, h, i, j: s)
    with pytest.raises(ValueError, match="runs on scores of type"):
        traced.mod.evaluate(torch.zeros(1, 1, 1, 1, dtype=torch.float16), *positions((1, 1, 1, 1)), ())
