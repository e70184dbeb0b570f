"""Runs a Mod tile by tile, and the function that it came from densely: what the mods' tests compare."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from refluent.mods import TracedMod

Sizes = tuple[int, int, int, int]


def positions(sizes: Sizes, start: Sizes = (0, 0, 0, 0)) -> list[Tensor]:
    """b, h, i, j of a box as (B, 1, 1, 1), (1, H, 1, 1), (1, 1, Tm, 1), (1, 1, 1, Tn)."""
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    return [torch.arange(o, o + n).view(shape) for n, o, shape in zip(sizes, start, shapes)]


def boxes(sizes: Sizes, tile: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """(start, sizes) of the tiles that cover a (B, H, Sq, Sk) problem, ragged at the ends."""
    for b in range(0, sizes[0], tile[0]):
        for h in range(0, sizes[1], tile[1]):
            for i in range(0, sizes[2], tile[2]):
                for j in range(0, sizes[3], tile[3]):
                    start = (b, h, i, j)
                    yield start, tuple(min(t, n - o) for t, n, o in zip(tile, sizes, start))  # type: ignore[misc]


def window(x: Tensor, start: Sizes, sizes: Sizes) -> Tensor:
    return x[tuple(slice(o, o + n) for o, n in zip(start, sizes))]


def run_tiled(
    traced: TracedMod,
    score: Tensor,
    g: Tensor,
    tile: Sizes,
    *,
    use_origin: bool = True,
    needs: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Result, d score and captured gradients of a traced score_mod over ``score`` (B, H, Sq, Sk), poisoned before."""
    mod = traced.mod
    needs = [t.is_floating_point() for t in traced.captured] if needs is None else needs
    out = mod.grad_buffers(traced.captured, needs, score.dtype)
    result, dscore = torch.full_like(score, torch.nan), torch.full_like(score, torch.nan)
    for start, sizes in boxes(tuple(score.shape), tile):
        origin = start if use_origin else None
        s, gg = window(score, start, sizes).contiguous(), window(g, start, sizes).contiguous()
        before = s.clone(), gg.clone()
        at = positions(sizes, start)
        value = mod.evaluate(s, *at, traced.captured, origin=origin)
        assert value.dtype == score.dtype
        window(result, start, sizes).copy_(value)
        raw = s if mod.uses_score_in_grad else None
        back = mod.backward(raw, *at, traced.captured, gg, needs=needs, out=out, origin=origin)
        window(dscore, start, sizes).copy_(back)
        torch.testing.assert_close((s, gg), before, rtol=0, atol=0, equal_nan=True)  # inputs are never written to
    return result, dscore, list(out)


def run_dense(
    make: Callable[..., Callable[..., Tensor]], captured: Sequence[Tensor], score: Tensor, g: Tensor
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """The same in float64 by plain broadcasting and autograd; ``make(*captured)`` gives the function."""
    leaves = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in captured]
    s = score.double().requires_grad_()
    result = torch.as_tensor(make(*leaves)(s, *positions(tuple(score.shape)))).double()
    result = result.expand(score.shape)
    wanted = [t for t in [s, *leaves] if t.is_floating_point()]
    if not result.requires_grad:
        return result, None, [None] * len(captured)
    grads = iter(torch.autograd.grad(result, wanted, g.double(), allow_unused=True))
    ds = next(grads)
    return result.detach(), ds, [next(grads) if t.is_floating_point() else None for t in leaves]


def compare(
    make: Callable[..., Callable[..., Tensor]],
    captured: Sequence[Tensor],
    traced: TracedMod,
    sizes: Sizes,
    tile: Sizes,
    dtype: torch.dtype = torch.float64,
    use_origin: bool = True,
) -> None:
    """Assert that a traced score_mod, tile by tile, gives what its function gives densely in float64."""
    score, g = torch.randn(sizes, dtype=dtype), torch.randn(sizes, dtype=dtype)
    result, dscore, out = run_tiled(traced, score, g, tile, use_origin=use_origin)
    ref, ref_ds, ref_out = run_dense(make, captured, score, g)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-4}
    torch.testing.assert_close(result.double(), ref, **tolerance)
    torch.testing.assert_close(dscore.double(), torch.zeros_like(ref) if ref_ds is None else ref_ds, **tolerance)
    for tensor, got in zip(traced.captured, out):
        number = next(n for n, t in enumerate(captured) if t is tensor)
        expected = ref_out[number]
        if got is not None:
            expected = torch.zeros_like(got) if expected is None else expected
            torch.testing.assert_close(got.double(), expected.double(), **tolerance)
