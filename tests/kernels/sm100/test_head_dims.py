"""Head dimensions over 128: the plans with turned products, one call a feature or more, beside the matrix."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.calls import call
from poison import poisoned_memory
from refluent import accuracy, emulator
from refluent.gpu.plans.sm100 import PLANS, REGISTERS, SHARED_BYTES, TENSOR_COLUMNS, backward_plan

pytestmark = pytest.mark.emulator
BARRIERS = 1024  # bytes of shared memory that barriers and alignment may take beside the buffers

CASES = {  # head dimensions, (batch, seqlen_q, seqlen_k, heads, heads_kv), options
    "192/128": (192, 128, (1, 150, 300, 2, 2), {}),
    "192/128 causal": (192, 128, (2, 137, 270, 2, 2), {"causal": True}),
    "192/128 grouped, deterministic": (192, 128, (1, 140, 130, 4, 2), {"causal": True, "deterministic": True}),
    "136/64 window, softcap, fp16": (136, 64, (1, 150, 150, 2, 2), {"window": (40, 70), "softcap": 3.0}),
    "160/128 seqused": (160, 128, (3, 150, 140, 2, 1), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 140)}),
    "192/64 packed": (192, 64, (None, 213, 262, 2, 2), {"q": (100, 0, 104), "k": (60, 10, 190), "causal": True}),
    "256/256": (256, 256, (1, 150, 140, 2, 2), {}),
    "256/256 causal, grouped": (256, 256, (2, 130, 199, 2, 1), {"causal": True}),
    "256/256 grouped, deterministic": (256, 256, (1, 129, 129, 4, 2), {"window": (50, 20), "deterministic": True}),
    "200/256 softcap, dropout": (200, 256, (1, 140, 150, 2, 2), {"softcap": 3.0, "dropout_p": 0.3, "window": (90, 9)}),
    "64/192 seqused": (64, 192, (3, 150, 140, 2, 2), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 140)}),
    "248/136 packed, grouped": (248, 136, (None, 213, 209, 2, 1), {"q": (100, 0, 104), "k": (60, 10, 130)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("schedule", "seed"), [("random", 1), ("late", 2)])
def test_gradients(name, schedule, seed):
    torch.manual_seed(seed)
    q, k, v, do, options = call(*CASES[name])
    expected = accuracy.expect(q, k, v, do, **options)
    lse = expected.forward.lse.float()
    o = expected.forward.o.to(q.dtype)
    with emulator.gpu("sm_100a", schedule=schedule, seed=seed), poisoned_memory():
        got = rf.attention_backward(do, q, k, v, o, lse, backend="emulate:sm100", **options)
    expected.check_backward(got.dq, got.dk, got.dv)


def test_a_launch_is_as_planned():
    """Shared memory, tensor memory and registers of the launches, against the plan's own arithmetic."""
    for head_dim, head_dim_v in ((192, 128), (256, 256)):
        plan = backward_plan(head_dim, head_dim_v)
        q, k, v, do, _ = call(head_dim, head_dim_v, (1, 20, 20, 1, 1), {})
        o, lse = torch.zeros_like(do), torch.zeros(1, 1, 20)
        with emulator.gpu("sm_100a") as chip:
            rf.attention_backward(do, q, k, v, o, lse, backend="emulate:sm100")
        (launch,) = (launch for launch in chip.report().launches if "Backward" in launch.kernel)
        assert plan.shared_bytes <= launch.shared_bytes <= min(plan.shared_bytes + BARRIERS, SHARED_BYTES)
        registers = {warp: role.registers for role in launch.roles for warp in role.warps}
        assert (registers[0], registers[4], registers[8]) == (plan.reduce_registers, *2 * (plan.compute_registers,))
        assert {registers[warp] for warp in range(12, 16)} == {plan.other_registers}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.head_dim}/{plan.head_dim_v}")
def test_plans_fit(plan):
    assert plan.tmem_columns <= TENSOR_COLUMNS
    assert plan.shared_bytes + BARRIERS <= SHARED_BYTES
    assert plan.registers <= REGISTERS
    spans = [span for name, span in plan.tensor_map.items() if name != "dq" or not plan.dq_over_dp]
    spans.sort()
    assert all(end <= first for (_, end), (first, _) in zip(spans, spans[1:]))
    if plan.dq_over_dp:
        assert plan.dq.column == plan.dp.column
        assert plan.dq.end <= plan.dk.column


def test_every_head_dimension_has_the_smallest_plan():
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            plan = backward_plan(head_dim, head_dim_v)
            holds = [p for p in PLANS if p.head_dim >= head_dim and p.head_dim_v >= head_dim_v]
            assert plan in holds
            assert plan.head_dim + plan.head_dim_v == min(p.head_dim + p.head_dim_v for p in holds)
