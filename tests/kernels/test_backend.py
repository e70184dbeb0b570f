"""backend="emulate:sm100" through the public API: attention trains through it; what it cannot do it says in words."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from poison import poisoned_memory
from refluent import accuracy, emulator

pytestmark = pytest.mark.emulator
NAME = "emulate:sm100"
LABELS = torch.zeros(40, dtype=torch.uint64)


def tensors(b, sq, sk, h, hkv, d, dv, dtype=torch.bfloat16):
    shapes = ((b, sq, h, d), (b, sk, hkv, d), (b, sk, hkv, dv))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def train(q, k, v, do, dlse=None, **options):
    """Gradients by autograd, judged by the accuracy rule."""
    run = rf.attention_varlen if "cu_seqlens_q" in options or "cu_seqlens_k" in options else rf.attention
    expected = accuracy.expect(q, k, v, do, dlse, **options)
    sink = options.get("sink")
    leaves = [q, k, v] if sink is None else [q, k, v, sink]
    with poisoned_memory():
        o, lse = run(q, k, v, return_lse=True, backend=NAME, **options)
        outputs, cotangents = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
        got = torch.autograd.grad(outputs, leaves, cotangents)
    expected.check_backward(*got[:3], dsink=got[3] if sink is not None else None)
    return got


def test_training_step_with_everything_at_once():
    q, k, v = tensors(2, 150, 131, 4, 2, 72, 40)
    sink = torch.randn(4, requires_grad=True)
    do, dlse = torch.randn(2, 150, 4, 40, dtype=torch.bfloat16), torch.randn(2, 4, 150)
    train(q, k, v, do, dlse, causal=True, window=(90, 20), sink=sink, scale=0.11, deterministic=True)


def test_gradient_of_a_sum():
    """o.sum().backward() gives a do without strides."""
    q, k, v = tensors(1, 20, 30, 1, 1, 64, 64, torch.float16)
    train(q, k, v, torch.ones(1, dtype=torch.float16).expand(1, 20, 1, 64))


def test_packed_sequences_among_foreign_rows():
    offsets = torch.tensor([0, 100, 100, 230], dtype=torch.int32)
    keys = torch.tensor([0, 60, 70, 70], dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, 64, dtype=torch.bfloat16) for n in (240, 75, 75))
    for tensor, last in ((q, 230), (k, 70), (v, 70)):
        tensor[last:] = float("nan")
        tensor.requires_grad_()
    do = torch.randn(240, 2, 64, dtype=torch.bfloat16)
    do[230:] = float("nan")
    dq, dk, dv = train(
        q, k, v, do, cu_seqlens_q=offsets, cu_seqlens_k=keys, max_seqlen_q=130, max_seqlen_k=60, causal=True
    )
    assert not dq[230:].any()
    assert not dk[60:].any()
    assert not dv[70:].any()


def test_vectors_with_gaps():
    """Offsets, lengths and sinks that are slices or expanded, one of them of size 1."""
    q, k, v = (torch.randn(n, 2, 32, dtype=torch.bfloat16, requires_grad=True) for n in (30, 40, 40))
    offsets = torch.tensor([0, 9, 30, 9], dtype=torch.int32)[::2]
    keys = torch.tensor([[0, 7], [40, 7]], dtype=torch.int32)[:, 0]
    used = torch.tensor([33, 7], dtype=torch.int32)[::2]
    sink = torch.randn(1, requires_grad=True)
    do = torch.randn(30, 2, 32, dtype=torch.bfloat16)
    train(
        q, k, v, do, cu_seqlens_q=offsets, cu_seqlens_k=keys, max_seqlen_q=30, max_seqlen_k=40, seqused_k=used,
        sink=sink.expand(2),
    )  # fmt: skip


def test_learned_and_fixed_tensors_of_a_score_function():
    """By autograd: of two captured tensors the one that requires grad gets it; a mask, blocks and a 0-d tensor too."""
    q, k, v = tensors(2, 150, 131, 4, 2, 64, 64)
    slope, bias, gain = torch.randn(4, requires_grad=True), torch.randn(150, 131), torch.tensor(0.7, requires_grad=True)
    block_mask = rf.create_block_mask(
        lambda b, h, i, j: (i // 40 + j // 30) % 2 == 0, None, None, 150, 131, BLOCK_SIZE=32
    )
    options = {
        "score_mod": lambda s, b, h, i, j: s * gain + 0.01 * slope[h] * (j - i) + bias[i, j],
        "mask_mod": lambda b, h, i, j: j % 7 != 3,
        "block_mask": block_mask,
    }
    do = torch.randn(2, 150, 4, 64, dtype=torch.bfloat16)
    leaves, made = (q, k, v, slope, gain), {}
    for backend in (NAME, "torch"):
        made[backend] = torch.autograd.grad(rf.attention(q, k, v, backend=backend, **options), leaves, do)
    for got, expected in zip(made[NAME], made["torch"]):
        assert torch.linalg.vector_norm(got - expected) < 0.01 * torch.linalg.vector_norm(expected)


def test_captured_gradients_of_nothing():
    q, k, v = tensors(2, 0, 5, 2, 2, 64, 64)
    slope = torch.randn(2, requires_grad=True)
    rf.attention(q, k, v, backend=NAME, score_mod=lambda s, b, h, i, j: s + slope[h]).sum().backward()
    assert torch.equal(slope.grad, torch.zeros(2))


@pytest.mark.parametrize(("sq", "sk"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_to(sq, sk):
    q, k, v = tensors(2, sq, sk, 2, 2, 64, 64)
    sink = torch.randn(2, requires_grad=True)
    do, dlse = torch.randn(2, sq, 2, 64, dtype=torch.bfloat16), torch.randn(2, 2, sq)
    train(q, k, v, do, dlse, sink=sink)


def test_in_the_callers_own_context():
    q, k, v = tensors(1, 40, 40, 1, 1, 64, 64)
    with emulator.gpu("sm_100a", schedule="random", seed=3) as gpu:
        o = rf.attention(q, k, v, backend=NAME)
        o.sum().backward()
    assert any("Backward" in launch.kernel for launch in gpu.report().launches)
    assert q.grad.abs().max() > 0
    with emulator.gpu("sm_90a"), pytest.raises(rf.UnsupportedError, match="is sm_90a; open one of 'sm_100a'"):
        rf.attention(q, k, v, backend=NAME).sum().backward()


def test_the_device_backend_inside_the_emulator():
    """There a tensor is on a GPU of capability 10.0: the backend for real devices runs as it would on one."""
    q, k, v = tensors(1, 40, 40, 1, 1, 64, 64)
    with emulator.gpu("sm_100a"):
        rf.attention(q, k, v, backend="sm100", window=(3, 5)).sum().backward()
    assert q.grad.abs().max() > 0
    with pytest.raises(rf.UnsupportedError, match="backend 'sm100': it needs tensors on a Blackwell GPU, got cpu"):
        rf.attention(q, k, v, backend="sm100", window=(3, 5))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"block_mask": rf.create_block_mask(lambda b, h, i, j: i**9 > j, None, None, 40, 40)},
            "its kernels cannot compute pow of whole numbers beyond 8 of mask_mod 'lambda'; what they can is",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s.sin() + torch.erf(s)},
            "its kernels cannot compute cos, erf, sin of score_mod 'lambda'; what they can is abs, .* where; backend",
        ),
        (
            {"mask_mod": lambda b, h, i, j: i**9 > j},
            "its kernels cannot compute pow of whole numbers beyond 8 of mask_mod 'lambda'; what they can is",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s + LABELS[i].to(torch.int64)},
            "score_mod 'lambda' reads LABELS of type torch.uint64; its kernels read float32, float64, .* bool",
        ),
    ],
)
def test_what_is_not_there_yet(more, text):
    with pytest.raises(rf.UnsupportedError, match=f"backend '{NAME}': {text}"):
        rf.attention(*tensors(1, 40, 40, 1, 1, 64, 64), backend=NAME, **more)


def test_an_empty_captured_tensor():
    q, k, v = tensors(1, 40, 40, 1, 1, 64, 64)
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match=r"reads nothing, of shape \(0,\), which holds nothing"):
        rf.attention_backward(
            q, q, k, v, q, torch.zeros(1, 1, 40), score_mod=lambda s, b, h, i, j: s + nothing[j], backend=NAME
        )


def test_what_it_does_not_take():
    with pytest.raises(rf.UnsupportedError, match=r"and float16, got torch\.float32; backend='torch' takes it"):
        rf.attention(*tensors(1, 9, 9, 1, 1, 64, 64, torch.float32), backend=NAME)
