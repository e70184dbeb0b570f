"""Which calls torch's fused GPU kernels may serve: those whose function is theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from refluent.gpu import sdpa
from tiled.calls import bind


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"causal": True, "scale": 0.3}, True),
        ({"scale": -0.3}, False),
        ({"causal": True, "scale": 0.0}, False),
        ({"causal": True, "scale": 1e-50}, False),  # 0 in float32
        ({"window": (None, 0)}, False),
        ({"softcap": 3.0}, False),
        ({"seqused_k": torch.tensor([5], dtype=torch.int32)}, False),
        ({"score_mod": lambda s, b, h, i, j: s + j}, False),
        ({"return_max_score": True}, False),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_what_is_theirs(options: dict[str, Any], theirs: bool) -> None:
    x = torch.randn(1, 9, 2, 16, dtype=torch.bfloat16)
    problem, _, _ = bind(x, x, x, **{"return_max_score": False, **options})
    assert sdpa.same_function(problem) is theirs


def test_causal_of_other_lengths_is_not() -> None:
    q, k = torch.randn(1, 9, 2, 16, dtype=torch.bfloat16), torch.randn(1, 12, 2, 16, dtype=torch.bfloat16)
    assert sdpa.same_function(bind(q, k, k, return_max_score=False)[0])
    assert not sdpa.same_function(bind(q, k, k, causal=True, return_max_score=False)[0])
