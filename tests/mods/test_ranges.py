"""The range of every whole number in a graph holds what it can be, at the ends of what positions may be too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import refluent.mods as mods
from mods.test_random import WHOLES, evaluate
from refluent.mods.graph import constant, dtype_of, read, replay
from refluent.mods.ranges import POSITION, fits, ranges_of

BUCKET = torch.tensor([0, 6, -(2**31), 2**31 - 1, 3, 1], dtype=torch.int32)
PLACES = st.sampled_from([*POSITION, 1, 5, 12345])


def values_of(graph: fx.Graph, at: dict[str, int]) -> dict[fx.Node, torch.Tensor]:
    """What every whole number of a graph is at one position."""
    found = {n: torch.tensor(at.get(n.name, 0)) for n in graph.nodes if n.op == "placeholder"}

    def run(node, args, kwargs):
        if node.target is constant:
            return torch.tensor(args[0], dtype=args[1])
        return BUCKET[int(args[2]) % 6] if node.target is read else node.target(*args, **kwargs)

    env = dict(found)
    replay(graph, env, run)
    return {n: v for n, v in env.items() if n.op == "call_function" and not dtype_of(n).is_floating_point}


@given(tree=WHOLES, at=st.fixed_dictionaries(dict.fromkeys("bhij", PLACES)))
def test_values_lie_in_their_ranges(tree, at):
    mods.clear_cache()
    traced = mods.mask_mod(lambda b, h, i, j: evaluate(tree, {"bucket": BUCKET, "b": b, "h": h, "i": i, "j": j}) == 3)
    (graph,) = traced.mod.graphs.values()
    ranges = ranges_of(graph)
    for node, value in values_of(graph, at).items():
        low, high = ranges[node]
        assert low <= int(value) <= high, node


@pytest.mark.parametrize(
    ("fn", "narrow"),
    [
        (lambda b, h, i, j: j - i - 1000, True),
        (lambda b, h, i, j: (i + j) // 3 % 7, True),
        (lambda b, h, i, j: (i * j) % 64, True),
        (lambda b, h, i, j: i * j, False),
        (lambda b, h, i, j: i << 4, False),
        (lambda b, h, i, j: (i << 4) & 255, True),
        (lambda b, h, i, j: torch.where(i > j, i ^ j, -1), True),
        (lambda b, h, i, j: i.float().log().long(), False),
        (lambda b, h, i, j: i.float().log().long().clamp(0, 9), True),
    ],
)
def test_what_fits_32_bits(fn, narrow):
    (graph,) = mods.mask_mod(lambda b, h, i, j: fn(b, h, i, j) == 3).mod.graphs.values()
    compared = next(n for n in graph.nodes if "eq" in str(n.target)).args[0]
    assert fits(ranges_of(graph)[compared], torch.int32) == narrow
