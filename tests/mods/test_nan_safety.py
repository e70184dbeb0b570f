"""Masked positions contribute nothing, whatever the function and its derivative give there; inputs stay untouched."""

import pytest
import torch

import refluent.mods as mods
from mods.tiles import positions, run_tiled

SIZES = (1, 2, 5, 6)

DANGEROUS = {
    "infinite derivative": lambda x: lambda s, b, h, i, j: torch.sqrt(s * x[h, j]),
    "log of nothing": lambda x: lambda s, b, h, i, j: s + torch.log(x[h, j]),
    "overflow": lambda x: lambda s, b, h, i, j: torch.exp(s * s * x[h, j]),
    "product with a read": lambda x: lambda s, b, h, i, j: s * x[h, j],
    "bias": lambda x: lambda s, b, h, i, j: s + x[h, j],
    "bias in whole numbers": lambda x: lambda s, b, h, i, j: s + x[h, j] * (i - j),
    "capped": lambda x: lambda s, b, h, i, j: 20 * torch.tanh((s + x[h, j]) / 20),
    "where": lambda x: lambda s, b, h, i, j: torch.where(j > 2, s / x[h, j], x[h, j]),
    "square": lambda x: lambda s, b, h, i, j: s * s * x[h, j] / (x[h, j] - s),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("use_origin", [True, False])
@pytest.mark.parametrize("name", DANGEROUS)
def test_masked_positions_add_nothing(name, use_origin, bad):
    """Scores and reads of masked columns hold ``bad``: the other gradients are those of a clean problem."""
    make = DANGEROUS[name]
    clean_x, clean_s = torch.rand(2, 6, dtype=torch.float64) + 0.5, torch.rand(SIZES, dtype=torch.float64) + 2
    masked = torch.tensor([False, True, False, False, True, False])
    g = torch.randn(SIZES, dtype=torch.float64).masked_fill(masked, 0.0)
    x = clean_x.masked_fill(masked, bad)
    s = clean_s.masked_fill(masked, bad)
    _, ds, (dx,) = run_tiled(mods.score_mod(make(x)), s, g, (1, 1, 3, 4), use_origin=use_origin)
    _, ref_ds, (ref_dx,) = run_tiled(mods.score_mod(make(clean_x)), clean_s, g, (1, 1, 3, 4), use_origin=use_origin)
    assert torch.equal(ds, ref_ds)
    assert torch.equal(dx, ref_dx)
    assert ds.isfinite().all()
    assert dx.isfinite().all()
    assert (ds[..., masked] == 0).all()
    assert (dx[:, masked] == 0).all()


def test_shared_elements_get_the_allowed_positions_alone():
    gain = torch.tensor(2.0)
    traced = mods.score_mod(lambda s, b, h, i, j: s * gain)
    s, g = torch.randn(SIZES), torch.randn(SIZES)
    s[..., 3], g[..., 3] = float("nan"), 0.0
    _, ds, (dgain,) = run_tiled(traced, s, g, (1, 1, 3, 4))
    torch.testing.assert_close(dgain, (g * s)[..., [0, 1, 2, 4, 5]].sum())
    assert ds.isfinite().all()


def test_clean_gradients_cost_no_extra_pass():
    """ALiBi's gradient needs no masking: g itself comes back and one contraction makes the slope's."""
    slope = torch.randn(2)
    mod = mods.score_mod(lambda s, b, h, i, j: s + slope[h] * (j - i)).mod
    g = torch.randn(SIZES)
    out = mod.grad_buffers([slope], (True,), torch.float32)
    assert mod.backward(None, *positions(SIZES), [slope], g, needs=(True,), out=out) is g
    source = mod._programs[torch.float32, (True,), False].__doc__
    assert "nothing" not in source
    assert "contract" in source


def test_only_needed_gradients_are_made():
    x, y = torch.randn(2), torch.randn(2)
    traced = mods.score_mod(lambda s, b, h, i, j: s * x[h] + y[h])
    s, g = torch.randn(SIZES), torch.randn(SIZES)
    _, ds, out = run_tiled(traced, s, g, SIZES, needs=(False, True))
    assert out[0] is None
    torch.testing.assert_close(out[1], g.sum((0, 2, 3)))
    torch.testing.assert_close(ds, g * x[:, None, None])


def test_gradients_are_the_same_bits_every_time():
    table, bucket = torch.randn(4, 2), torch.randint(0, 4, (40,))
    traced = mods.score_mod(lambda s, b, h, i, j: torch.tanh(s + table[bucket[j - i + 20], h]))
    s, g = torch.randn(2, 2, 19, 17), torch.randn(2, 2, 19, 17)
    assert traced.mod.captured_names == ("bucket", "table")
    first = run_tiled(traced, s, g, (1, 2, 8, 8))[2][1]
    for _ in range(20):
        assert torch.equal(first, run_tiled(traced, s, g, (1, 2, 8, 8))[2][1])
