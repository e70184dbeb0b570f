"""Calls the tiled backend directly, so that a test can choose tile sizes and how lengths are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refluent import accuracy, ops, reference, tiled
from refluent.binding import bind as bind_call
from refluent.problem import Gradients, Inputs, Needs, Problem
from refluent.tiled.walk import TileSize

DEFAULTS: dict[str, Any] = {
    "scale": None,
    "causal": False,
    "window": None,
    "softcap": 0.0,
    "score_mod": None,
    "mask_mod": None,
    "block_mask": None,
    "sink": None,
    "seqused_q": None,
    "seqused_k": None,
    "dropout_p": 0.0,
    "dropout_seed": None,
    "dropout_offset": None,
    "deterministic": None,
    "return_max_score": True,
    "backend": "torch",
}


@dataclass
class Ran:
    """What one forward and backward gave."""

    o: Tensor
    lse: Tensor
    max_score: Tensor | None
    gradients: Gradients
    names: tuple[str, ...]  # of score_mod's captured tensors

    @property
    def dcaptured(self) -> dict[str, Tensor]:
        pairs = zip(self.names, self.gradients.dcaptured, strict=True)
        return {name: grad for name, grad in pairs if grad is not None}

    def tensors(self) -> dict[str, Tensor]:
        g = self.gradients
        made = {"o": self.o, "lse": self.lse, "max_score": self.max_score, "dq": g.dq, "dk": g.dk, "dv": g.dv}
        return {name: x for name, x in {**made, "dsink": g.dsink, **self.dcaptured}.items() if x is not None}


def bind(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Problem, Inputs, tuple[str, ...]]:
    bound = bind_call(q, k, v, **{**DEFAULTS, **options})
    problem = ops.problem_of(bound.call)
    names = () if bound.score_mod is None else bound.score_mod.mod.captured_names
    return problem, ops.inputs_of(bound.call, problem), names


@torch.no_grad()
def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    tile: TileSize | None = None,
    host_lengths: bool | None = None,
    **options: Any,
) -> Ran:
    problem, inputs, names = bind(q, k, v, **options)
    o, lse, max_score = tiled.forward(problem, inputs, tile, host_lengths)
    needs = Needs(dsink=inputs.sink is not None, dcaptured=tuple(x.is_floating_point() for x in inputs.score_captured))
    gradients = tiled.backward(problem, inputs, o, lse, do, dlse, needs, tile, host_lengths)
    return Ran(o, lse, max_score, gradients, names)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    tile: TileSize | None = None,
    host_lengths: bool | None = None,
    **options: Any,
) -> Ran:
    """Run, and judge every tensor against the float64 reference by the accuracy rule."""
    got = run(q, k, v, do, dlse, tile=tile, host_lengths=host_lengths, **options)
    expected = accuracy.expect(q, k, v, do, dlse, **options)
    expected.check_forward(got.o, got.lse, got.max_score)
    g = got.gradients
    expected.check_backward(g.dq, g.dk, g.dv, g.dsink, got.dcaptured)
    return got


def check_exactly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    tile: TileSize | None = None,
    host_lengths: bool | None = None,
    **options: Any,
) -> None:
    """Float64 calls: every tensor equals the reference's but for rounding, far below what any wrong term would be."""
    got = run(q, k, v, do, dlse, tile=tile, host_lengths=host_lengths, **options)
    forward = reference.attention(q, k, v, **options)
    backward = reference.attention_backward(do, q, k, v, dlse, **options)
    expected = {"o": forward.o, "lse": forward.lse, "max_score": forward.max_score, **backward.dcaptured}
    expected |= {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
    if backward.dsink is not None:
        expected["dsink"] = backward.dsink
    tensors = got.tensors()
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12, msg=name)
    assert not tensors["dk"][~forward.reached].any()
    assert not tensors["dv"][~forward.reached].any()
