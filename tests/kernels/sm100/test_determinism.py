"""deterministic=True: the same bits whatever the order in which warps, CTAs and copies take their turns."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from kernels.layout import Rows
from kernels.sm100.runs import Run

pytestmark = pytest.mark.emulator
BF16 = torch.bfloat16


def run(queries, keys, heads=2, heads_kv=2, d=64, dv=64, dtype=BF16, ctas=0, cluster=1, **options):
    torch.manual_seed(7)
    q, do = queries.tensor(heads, d, dtype), queries.tensor(heads, dv, dtype)
    k, v = keys.tensor(heads_kv, d, dtype), keys.tensor(heads_kv, dv, dtype)
    for name, rows in (("q", queries), ("k", keys)):
        if rows.packed:
            options |= {f"cu_seqlens_{name}": rows.cu_seqlens(), f"max_seqlen_{name}": rows.seqlen}
    return Run(do, q, k, v, queries.statistic(heads), {"deterministic": True, **options}, ctas, cluster)


def packed(*lengths):
    return Rows(max(lengths), lengths, lengths)


CASES = {
    "causal": lambda: run(Rows(400, (400,)), Rows(420, (420,)), causal=True, sink=torch.randn(2)),
    "grouped": lambda: run(Rows(270, (270,)), Rows(400, (400,)), 3, 1, ctas=5),
    "cluster": lambda: run(Rows(270, (270,)), Rows(300, (300,)), 2, 1, ctas=4, cluster=2, causal=True),
    "window, two sequences": lambda: run(Rows(300, (300,) * 2), Rows(390, (390,) * 2), window=(140, 60), ctas=3),
    "packed, grouped, causal": lambda: run(
        packed(130, 0, 300), packed(260, 40, 0), 4, 2, 32, 96, torch.float16, causal=True
    ),
    "192 and 128, grouped": lambda: run(Rows(200, (200,)), Rows(300, (300,)), 2, 1, 192, 128, window=(None, 50)),
    "256": lambda: run(Rows(150, (150,)), Rows(200, (200,)), 2, 1, 256, 256),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.full if i > 3 else ()) for i, c in enumerate(CASES)]
)
def test_bits(case):
    """Under 20 schedules, on chips of different sizes."""
    call = CASES[case]()
    first = call()
    call.check(first)
    sms = (8, max(2, call.ctas), max(3, call.ctas))  # a persistent grid has to fit, or tiles wait for what never starts
    for seed in range(20):
        again = call(("random", "late", "early")[seed % 3] if seed > 16 else "random", seed, num_sms=sms[seed % 3])
        for name, one, other in zip(first._fields, first, again):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other), f"{name}, schedule {seed}"


def test_other_calls_are_not():
    """Without it the order shows: the schedules above do differ in what matters."""
    call = run(Rows(300, (300,)), Rows(700, (700,)), deterministic=False)
    made = [call("random", seed).dq for seed in range(6)]
    assert not all(torch.equal(made[0], other) for other in made[1:])
