"""The accuracy rule passes plain eager attention and refuses what is wrong."""

import math

import pytest
import torch

from refluent import accuracy


def inputs(dtype, b=2, sq=33, sk=40, h=4, hkv=2, d=16):
    torch.manual_seed(1)
    q, k, v = (torch.randn(b, s, n, d).to(dtype) for s, n in ((sq, h), (sk, hkv), (sk, hkv)))
    return q, k, v, torch.randn(b, sq, h, d).to(dtype), torch.randn(b, h, sq)


@pytest.mark.parametrize("dtype", list(accuracy.UNIT))
def test_eager_passes_the_rule_that_it_sets(dtype):
    q, k, v, do, dlse = inputs(dtype)
    slope = torch.tensor([0.1, 0.2, -0.1, 0.0])

    def mod(s, b, h, i, j):
        return s + slope[h] * (i - j)

    sink = torch.randn(4)
    options = {
        "causal": True,
        "softcap": 5.0,
        "sink": sink,
        "score_mod": mod,
        "seqused_k": torch.tensor([40, 11], dtype=torch.int32),
        "dropout_p": 0.2,
        "dropout_seed": 3,
        "dropout_offset": 4,
    }
    expected = accuracy.expect(q, k, v, do, dlse, **options)
    eager = expected.eager
    errors = expected.check_forward(eager["o"])
    errors += expected.check_backward(eager["dq"], eager["dk"], eager["dv"], dcaptured={"slope": eager["slope"]})
    assert [e.name for e in errors] == ["o", "dq", "dk", "dv", "slope"]
    for e in errors:
        assert e.ratio == 1.0
        assert 0 < e.max_error < e.max_bound


def test_eager_gives_no_nan_for_empty_rows():
    q, k, v, do, dlse = inputs(torch.float32, sk=7)
    dlse[:, :, 0] = math.nan
    expected = accuracy.expect(q, k, v, do, dlse, causal=True)
    eager = expected.eager
    expected.check_forward(eager["o"])
    expected.check_backward(eager["dq"], eager["dk"], eager["dv"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("damage", ["one element", "one row left out", "nan", "scaled", "not zero outside"])
def test_wrong_gradients_are_refused(dtype, damage):
    q, k, v, do, dlse = inputs(dtype)
    used = torch.tensor([33, 20], dtype=torch.int32)
    expected = accuracy.expect(q, k, v, do, dlse, seqused_q=used)
    dq = expected.backward.dq.to(dtype)
    expected.check_backward(dq=dq)
    if damage == "one element":
        dq[0, 3, 1, 5] += 0.1 if dtype == torch.bfloat16 else 1e-4
    elif damage == "one row left out":
        dq[1, 4, 2] = 0
    elif damage == "nan":
        dq[1, 4, 2, 0] = math.nan
    elif damage == "scaled":
        dq *= 1.5
    else:
        dq[1, 20, 0, 0] = 1e-30
    with pytest.raises(accuracy.AccuracyError, match="dq"):
        expected.check_backward(dq=dq)


def test_lse_rule():
    expected = torch.tensor([0.0, 100.0, -math.inf], dtype=torch.float64)
    accuracy.check_lse("lse", torch.tensor([0.9e-5, 100.0009, -math.inf]), expected, torch.float32)
    for wrong in ([1.1e-5, 100.0, -math.inf], [0.0, 100.002, -math.inf], [0.0, 100.0, -1e30], [0.0, -math.inf, 0.0]):
        with pytest.raises(accuracy.AccuracyError, match="lse"):
            accuracy.check_lse("lse", torch.tensor(wrong), expected, torch.float32)
    with pytest.raises(accuracy.AccuracyError, match="lse"):
        accuracy.check_lse("lse", torch.tensor([math.nan, 100.0, -math.inf]), expected, torch.float32)


def test_sink_rule():
    expected = torch.tensor([1.0, 0.0], dtype=torch.float64)
    unit = 2.0**-23
    accuracy.check_sink(torch.tensor([1.0 + 4 * unit, 19 * unit]), expected, 1.0, 100, torch.float32)
    with pytest.raises(accuracy.AccuracyError, match="dsink"):
        accuracy.check_sink(torch.tensor([1.0, 21 * unit]), expected, 1.0, 100, torch.float32)


def test_a_wrong_shape_is_refused():
    q, k, v, do, dlse = inputs(torch.float32)
    expected = accuracy.expect(q, k, v, do, dlse)
    with pytest.raises(accuracy.AccuracyError, match="shape"):
        expected.check_forward(expected.eager["o"][:1])
