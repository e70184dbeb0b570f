"""Functions of j - i are computed once per distance: the same values and gradients as position by position."""

import pytest
import torch

import refluent.mods as mods
from mods.tiles import compare
from refluent.mods import distance
from refluent.mods.graph import dependencies
from refluent.mods.reads import Tile

SIZES = (2, 3, 11, 14)

FUNCTIONS = {
    "plain": lambda t, s, b, h, i, j: s + t[j - i + 13, h],
    "other sign": lambda t, s, b, h, i, j: s + t[i - j + 14, h],
    "shifted": lambda t, s, b, h, i, j: s + t[i + 20 - j - 6, 0],
    "doubled": lambda t, s, b, h, i, j: s * t[(j - i) * 2 % 27, b],
    "negated": lambda t, s, b, h, i, j: s - t[-(i - j) - 1, h].tanh(),
    "from a number": lambda t, s, b, h, i, j: s * t[3 - (i - j), h] + (5 - j + i),
    "twice": lambda t, s, b, h, i, j: t[j - i, h] * s * s + t[j - i, h] * t[i - j, h],
    "first in the sum": lambda t, s, b, h, i, j: t[j - i, h] + s,
    "subtracted from": lambda t, s, b, h, i, j: t[j - i, h] - s,
    "alone": lambda t, s, b, h, i, j: t[j - i, h],
    "compared": lambda t, s, b, h, i, j: torch.where(j - i > 2 * h, s, s * t[0, 0]),
    "with rows": lambda t, s, b, h, i, j: s + t[(j - i) * i % 27, h] + t[i, 0] * (j - i),
    "masked": lambda t, s, b, h, i, j: torch.where((i - j < 5) & (j != 3), s * t[j - i, h], -t[i, h]),
    "sum of two": lambda t, s, b, h, i, j: s + t[j - i, h] * t[h, b] + t[j - i, b],
    "row and column": lambda t, s, b, h, i, j: s + t[i + j, h] + t[2 * j - i, h],
}


@pytest.mark.parametrize("tile", [(2, 3, 11, 14), (1, 2, 4, 5), (1, 1, 1, 14), (2, 1, 11, 1)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_position_by_position(name, tile):
    fn = FUNCTIONS[name]

    def make(table):
        return lambda s, b, h, i, j: fn(table, s, b, h, i, j)

    table = torch.randn(40, 3, requires_grad=True)
    compare(make, [table], mods.score_mod(make(table)), SIZES, tile)


def test_what_counts_as_a_distance():
    table = torch.randn(40, 3)
    graph = mods.score_mod(lambda s, b, h, i, j: s + table[3 - (i - j) * 2, h] + (i + j) * (j - 1)).mod.graphs[
        torch.float32
    ]
    found = distance.Distances(graph, dependencies(graph))
    assert (2, 3) in found.roots.values()
    assert all(p != 0 for p, _ in found.roots.values())
    names = {str(n.target) for n in found.members}
    assert any("read" in name for name in names)
    assert not distance.Distances(None, {}).members


@pytest.mark.parametrize("limit", [1, 1 << 17])
def test_spread_and_diagonals(limit, monkeypatch):
    monkeypatch.setattr(distance, "_AT_ONCE", limit)
    rows, columns = 4, 7
    tile = Tile((0, 0, 5, 2), (2, 3, rows, columns), False)
    d = distance.distances(tile, torch.device("cpu"))
    assert d.flatten().tolist() == list(range(2 - 8, 2 + 7 - 5))
    i, j = torch.arange(5, 9)[:, None], torch.arange(2, 9)[None, :]
    assert torch.equal(distance.spread(d, tile)[0, 0], j - i)
    whole = distance.spread_whole(d, tile)
    assert whole.shape == (2, 3, rows, columns)
    assert whole.is_contiguous()
    x = torch.randn(2, 3, rows, columns, dtype=torch.float64)
    for axes in ((), (0,), (0, 1)):
        got = distance.diagonals(x, axes)
        summed = x.sum(axes, keepdim=True) if axes else x
        for k, value in enumerate(d.flatten().tolist()):
            torch.testing.assert_close(got[..., 0, k], (summed * (j - i == value)).sum((2, 3)))


def test_distances_need_an_origin():
    with pytest.raises(ValueError, match="need a tile with an origin"):
        distance.distances(Tile(None, (0, 0, 0, 0), False), torch.device("cpu"))
