"""The Hopper backward in the emulator: gradients against float64, all checks on, under several schedules."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.calls import call
from kernels.sm90.cases import CASES
from poison import poisoned_memory
from refluent import accuracy, emulator
from refluent.gpu.plans.sm90 import LINEAR_PLANS, PLANS, REGISTERS, SHARED_BYTES, backward_plan

pytestmark = pytest.mark.emulator
ARCH, BACKEND = "sm_90a", "emulate:sm90"
BARRIERS = 1024  # bytes of shared memory that barriers and alignment may take beside the buffers

SAMPLE = {
    "64 causal, odd", "64 seqused, grouped", "128 window, deterministic", "128 packed", "128 softcap, dropout, fp16",
    "88/40 packed, grouped",
}  # fmt: skip


def cases():
    """The sample is in CI, the rest is not."""
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in CASES]


def run(name, schedule, seed, dlse=False, ctas=0):
    """The case's gradients under a schedule, judged; returns the report."""
    from refluent.gpu import launch

    torch.manual_seed(seed)
    q, k, v, do, options = call(*CASES[name])
    grad = torch.randn(q.shape[0], q.shape[2], q.shape[1]) if dlse else None
    expected = accuracy.expect(q, k, v, do, grad, **options)
    lse, o = expected.forward.lse.float(), expected.forward.o.to(q.dtype)
    main, checks = launch.backward, ("all", "order") if options.get("deterministic") else "all"

    def backward(*arguments):
        return main(*arguments, ctas=ctas)

    chip = emulator.gpu(ARCH, schedule=schedule, seed=seed, checks=checks, strict=True)
    with mock.patch.object(launch, "backward", backward), poisoned_memory(), chip:
        got = rf.attention_backward(do, q, k, v, o, lse, dlse=grad, backend=BACKEND, **options)
    expected.check_backward(got.dq, got.dk, got.dv)
    return chip.report()


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize(("schedule", "seed"), [("random", 1), ("late", 2)])
def test_gradients(name, schedule, seed):
    run(name, schedule, seed)


@pytest.mark.full
@pytest.mark.parametrize("name", ["64 causal, odd", "128", "128 grouped, deterministic", "64 seqused, grouped"])
@pytest.mark.parametrize(("schedule", "seed"), [("fair", 0), ("early", 0), *(("random", seed) for seed in range(5))])
def test_schedules(name, schedule, seed):
    run(name, schedule, seed)


@pytest.mark.parametrize("name", ["128 causal, odd", "64 seqused, grouped"])
def test_ctas_walk_tiles(name):
    """A persistent grid: the next tile's loads begin while the last one's gradients leave."""
    run(name, "random", 3, ctas=2)


def test_gradient_of_lse():
    run("64 grouped", "random", 4, dlse=True)


def test_training_step():
    """Through autograd, with sinks and a scale."""
    q, k, v = (torch.randn(1, 140, h, 64, dtype=torch.bfloat16, requires_grad=True) for h in (2, 1, 1))
    sink = torch.randn(2, requires_grad=True)
    do = torch.randn(1, 140, 2, 64, dtype=torch.bfloat16)
    options = {"causal": True, "scale": 0.2, "sink": sink}
    expected = accuracy.expect(q, k, v, do, None, **options)
    with poisoned_memory():
        o = rf.attention(q, k, v, backend=BACKEND, **options)
        *got, dsink = torch.autograd.grad(o, (q, k, v, sink), do)
    expected.check_backward(*got, dsink=dsink)


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_scales_that_are_not_positive(scale, options):
    torch.manual_seed(0)
    q, k, v, do, options = call(64, 64, (1, 150, 140, 1, 1), options | {"scale": scale})
    expected = accuracy.expect(q, k, v, do, None, **options)
    lse, o = expected.forward.lse.float(), expected.forward.o.to(q.dtype)
    with poisoned_memory():
        got = rf.attention_backward(do, q, k, v, o, lse, backend=BACKEND, **options)
    expected.check_backward(got.dq, got.dk, got.dv)


@pytest.mark.parametrize("name", ["score_mod", "mask_mod", "block_mask"])
def test_mods_are_refused(name):
    mods = {
        "score_mod": lambda s, b, h, i, j: s * 2,
        "mask_mod": lambda b, h, i, j: i >= j,
        "block_mask": rf.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40),
    }
    q = torch.randn(1, 40, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(rf.UnsupportedError, match=f"backend '{BACKEND}': its kernels do not take a {name} yet"):
        rf.attention(q, q, q, backend=BACKEND, **{name: mods[name]})


def test_a_launch_is_as_planned():
    """Shared memory and registers of a launch, against the plan's own arithmetic."""
    plan = backward_plan(128, 128)
    report = run("128 more queries", "fair", 0)
    (launch,) = (launch for launch in report.launches if "Backward" in launch.kernel)
    assert plan.shared_bytes <= launch.shared_bytes <= min(plan.shared_bytes + BARRIERS, SHARED_BYTES)
    registers = {warp: role.registers for role in launch.roles for warp in role.warps}
    assert {registers[warp] for warp in range(4)} == {plan.other_registers}
    assert {registers[warp] for warp in range(4, 12)} == {plan.compute_registers}


@pytest.mark.parametrize(
    "plan", [*LINEAR_PLANS, *PLANS], ids=lambda plan: f"{plan.head_dim}/{plan.head_dim_v} {plan.narrow_weights}"
)
def test_plans_fit(plan):
    assert plan.shared_bytes + BARRIERS <= SHARED_BYTES
    assert plan.registers <= REGISTERS


def test_every_head_dimension_has_the_smallest_plan():
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            for linear in (True, False):
                plan = backward_plan(head_dim, head_dim_v, linear)
                holds = [p for p in (*LINEAR_PLANS, *PLANS) if p.head_dim >= head_dim and p.head_dim_v >= head_dim_v]
                assert plan in holds
                assert plan.head_dim + plan.head_dim_v == min(p.head_dim + p.head_dim_v for p in holds)
                assert plan.narrow_weights == linear


def test_the_device_backend_inside_the_emulator():
    """There a tensor is on a GPU of capability 9.0: the backend for real devices runs as it would on one."""
    q, k, v = (torch.randn(1, 40, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with emulator.gpu(ARCH):
        rf.attention(q, k, v, backend="sm90", window=(3, 5)).sum().backward()
    assert q.grad.abs().max() > 0
    with pytest.raises(rf.UnsupportedError, match="backend 'sm90': it needs tensors on a Hopper GPU, got cpu"):
        rf.attention(q, k, v, backend="sm90", window=(3, 5))
