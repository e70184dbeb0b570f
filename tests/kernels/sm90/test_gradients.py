"""The Hopper backward in the emulator: gradients against float64, all checks on, under several schedules."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.calls import call
from poison import poisoned_memory
from refluent import accuracy, emulator
from refluent.gpu.plans.sm90 import LINEAR_PLANS, PLANS, REGISTERS, SHARED_BYTES, backward_plan

pytestmark = pytest.mark.emulator
ARCH, BACKEND = "sm_90a", "emulate:sm90"
BARRIERS = 1024  # bytes of shared memory that barriers and alignment may take beside the buffers

CASES = {  # head dimensions, (batch, seqlen_q, seqlen_k, heads, heads_kv), options
    "64": (64, 64, (2, 256, 256, 2, 2), {}),
    "64 causal, odd": (64, 64, (1, 301, 333, 2, 2), {"causal": True}),
    "64 window, more queries": (64, 64, (1, 391, 259, 2, 2), {"window": (70, 31)}),
    "64 grouped": (64, 64, (1, 200, 190, 4, 2), {"causal": True}),
    "64 deterministic": (64, 64, (2, 260, 300, 2, 2), {"causal": True, "deterministic": True}),
    "64 seqused, grouped": (64, 64, (3, 150, 340, 4, 2), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 340)}),
    "64 softcap, dropout, fp16": (64, 64, (1, 150, 150, 2, 2), {"softcap": 3.0, "dropout_p": 0.3}),
    "32": (32, 32, (1, 150, 140, 2, 1), {"causal": True, "deterministic": True}),
    "24/56 window": (24, 56, (1, 150, 300, 1, 1), {"window": (20, None)}),
    "128": (128, 128, (1, 256, 256, 2, 2), {}),
    "128 causal, odd": (128, 128, (1, 201, 333, 2, 2), {"causal": True}),
    "128 more queries": (128, 128, (1, 391, 100, 1, 1), {"causal": True}),
    "128 window, deterministic": (128, 128, (2, 200, 300, 2, 2), {"window": (70, 31), "deterministic": True}),
    "128 grouped, deterministic": (128, 128, (1, 140, 190, 6, 2), {"causal": True, "deterministic": True}),
    "128 packed": (128, 128, (None, 313, 362, 2, 2), {"q": (100, 0, 204), "k": (160, 10, 190), "causal": True}),
    "128 seqused": (128, 128, (3, 150, 140, 2, 2), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 140)}),
    "128 softcap, dropout, fp16": (128, 128, (1, 150, 150, 2, 1), {"softcap": 3.0, "dropout_p": 0.3, "window": (9, 9)}),
    "96": (96, 96, (1, 150, 260, 2, 2), {"causal": True}),
    "88/40 packed, grouped": (88, 40, (None, 213, 209, 4, 2), {"q": (100, 0, 104), "k": (60, 10, 130)}),
    "64/128 causal": (64, 128, (1, 190, 150, 1, 1), {"causal": True}),
    "192/128": (192, 128, (1, 150, 230, 2, 2), {"causal": True}),
    "192/128 grouped, deterministic": (192, 128, (1, 140, 130, 4, 2), {"causal": True, "deterministic": True}),
    "136/64 window, softcap, fp16": (136, 64, (1, 150, 150, 2, 2), {"window": (40, 70), "softcap": 3.0}),
    "256": (256, 256, (1, 150, 140, 2, 2), {}),
    "256 grouped, deterministic": (256, 256, (1, 129, 129, 4, 2), {"window": (50, 20), "deterministic": True}),
    "248/136 packed, grouped": (248, 136, (None, 213, 209, 2, 1), {"q": (100, 0, 104), "k": (60, 10, 130)}),
    "64/192 seqused": (64, 192, (3, 150, 140, 2, 2), {"seqused_q": (150, 0, 66), "seqused_k": (1, 30, 140)}),
}
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
