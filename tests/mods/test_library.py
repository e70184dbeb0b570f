"""Every entry of mods/library.py against a formula written out here."""

import math

import pytest
import torch

import refluent.mods as mods
from mods.tiles import boxes, compare, positions, window
from refluent.mods import library

SIZES = (2, 3, 13, 17)
TILE = (1, 2, 5, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("captured_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["alibi", "relative_bias", "additive_bias", "additive_bias_shared", "t5", "t5_causal"])
def test_biases_against_their_formulas(name, captured_dtype, dtype):
    i, j = torch.arange(13)[:, None], torch.arange(17)[None, :]
    if name == "alibi":
        tensor, make = torch.randn(3), library.alibi
        expected = tensor.to(captured_dtype).double()[:, None, None] * (j - i)
    elif name == "relative_bias":
        tensor, make = torch.randn(3, 9), library.relative_bias
        expected = tensor.to(captured_dtype).double()[:, (j - i).clamp(-4, 4) + 4]
    elif name == "additive_bias":
        tensor, make = torch.randn(2, 3, 13, 17), library.additive_bias
        expected = tensor.to(captured_dtype).double()
    elif name == "additive_bias_shared":
        tensor, make = torch.randn(1, 1, 13, 17), library.additive_bias
        expected = tensor.to(captured_dtype).double()
    else:
        both = name == "t5"
        tensor = torch.randn(8, 3)

        def make(table):
            return library.t5_bias(table, bidirectional=both, max_distance=12)

        bucket = torch.tensor([[t5_bucket(int(c) - int(r), both, 8, 12) for c in range(17)] for r in range(13)])
        expected = tensor.to(captured_dtype).double()[bucket].permute(2, 0, 1)
    tensor = tensor.to(captured_dtype).requires_grad_()
    traced = mods.score_mod(make(tensor))
    zero = torch.zeros(SIZES, dtype=dtype)
    value = traced.mod.evaluate(zero, *positions(SIZES), traced.captured, origin=(0, 0, 0, 0))
    torch.testing.assert_close(value.double(), expected.expand(SIZES), rtol=1e-6, atol=1e-6)
    for use_origin in (True, False):
        compare(make, [tensor], traced, SIZES, TILE, dtype, use_origin)


def t5_bucket(distance, bidirectional, buckets, longest):
    """The published algorithm, one number at a time."""
    bucket = 0
    n = -distance
    if bidirectional:
        buckets //= 2
        if n < 0:
            bucket, n = buckets, -n
    else:
        n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return bucket + n
    return bucket + min(exact + int(math.log(n / exact) / math.log(longest / exact) * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_alibi_slopes(heads):
    slopes = library.alibi_slopes(heads)
    assert slopes.shape == (heads,)
    power = 2 ** int(math.log2(heads))
    torch.testing.assert_close(slopes[:power], 2.0 ** (-8.0 / power * torch.arange(1, power + 1)))
    assert len(set(slopes.tolist())) == heads


def test_softcap():
    compare(lambda: library.softcap(1.5), [], mods.score_mod(library.softcap(1.5)), SIZES, TILE)


IDS = torch.tensor([[0] * 6 + [1] * 4 + [2] * 7, [5] * 3 + [4] * 14])
MASKS = {
    "documents by batch": (library.document_mask(IDS), lambda b, h, i, j: IDS[b, i] == IDS[b, j]),
    "documents": (library.document_mask(IDS[0]), lambda b, h, i, j: IDS[0, i] == IDS[0, j]),
    "documents, two lists": (library.document_mask(IDS[0], IDS), lambda b, h, i, j: IDS[0, i] == IDS[b, j]),
    "prefix": (library.prefix_lm(5), lambda b, h, i, j: j < 5 or j <= i),
    "prefix by batch": (
        library.prefix_lm(torch.tensor([2, 7]), shift=4),
        lambda b, h, i, j: j < (2, 7)[b] or j <= i + 4,
    ),
    "sink window": (library.sink_window(2, 3, shift=4), lambda b, h, i, j: j <= i + 4 and (j < 2 or i + 4 - j < 3)),
    "dilated": (library.dilated(3, shift=4), lambda b, h, i, j: (j - i - 4) % 3 == 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_against_their_rules(name):
    fn, rule = MASKS[name]
    traced = mods.mask_mod(fn)
    expected = torch.tensor(
        [[[[bool(rule(b, h, i, j)) for j in range(17)] for i in range(13)] for h in range(3)] for b in range(2)]
    )
    assert 0 < expected.sum() < expected.numel()
    for start, sizes in boxes(SIZES, TILE):
        for origin in (start, None):
            allowed = traced.mod.evaluate(None, *positions(sizes, start), traced.captured, origin=origin)
            assert allowed.dtype == torch.bool
            assert torch.equal(allowed.expand(sizes), window(expected, start, sizes))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: library.alibi(torch.ones(2, 2)), r"slopes must have 1 dimensions, got shape \(2, 2\)"),
        (lambda: library.alibi_slopes(0), "heads must be at least 1, got 0"),
        (lambda: library.relative_bias(torch.ones(2, 4)), "odd number of columns"),
        (lambda: library.t5_bias(torch.ones(2, 4)), "too few buckets"),
        (lambda: library.additive_bias(torch.ones(4, 4)), "bias must have 4 dimensions"),
        (lambda: library.softcap(0.0), "cap must be positive"),
        (lambda: library.document_mask(torch.ones(4)), "query_ids must be whole numbers"),
        (lambda: library.sink_window(-1, 3), "first must be >= 0"),
        (lambda: library.dilated(0), "step must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
