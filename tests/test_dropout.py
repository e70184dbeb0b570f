"""Dropout: its rate, its bits, its place after the softmax, and how it repeats."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import refluent as rf
from refluent import reference

SEED, OFFSET = 0x1234_5678_9ABC, 0x7_0000_0003


def kept(sq, sk, *, b=1, h=2, p=0.3, dtype=torch.float32, seed=SEED, offset=OFFSET, **options):
    """Which positions a call keeps, (b, h, sq, sk): equal scores, and one-hot values 64 keys at a time."""
    q, k = torch.zeros(b, sq, h, 8, dtype=dtype), torch.zeros(b, sk, 1, 8, dtype=dtype)
    parts = []
    for start in range(0, sk, 64):
        v = torch.zeros(b, sk, 1, 64, dtype=dtype)
        width = min(64, sk - start)
        v[:, range(start, start + width), 0, range(width)] = 1
        o = rf.attention(q, k, v, dropout_p=p, dropout_seed=seed, dropout_offset=offset, **options)
        parts.append((o != 0)[..., :width].transpose(1, 2))
    return torch.cat(parts, -1)


def reference_bits(sq, sk, b=1, h=2, p=0.3, seed=SEED, offset=OFFSET):
    return torch.from_numpy(np.stack([reference.dropout_mask(seed, offset, n, h, sq, sk, p) for n in range(b)]))


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (2, 3), (65, 127), (130, 200), (300, 520)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_are_the_references(sq, sk, dtype):
    assert torch.equal(kept(sq, sk, b=2, dtype=dtype), reference_bits(sq, sk, b=2))


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (-1, 0), (2**63 - 1, 2**63 - 1), (-(2**63), 5), (1, 2**32), (1, -(2**63)), (2**32, 1), (1, 2**32 - 1)],
)
def test_bits_at_the_ends_of_seed_and_offset(seed, offset):
    assert torch.equal(kept(20, 33, seed=seed, offset=offset), reference_bits(20, 33, seed=seed, offset=offset))


def test_bits_do_not_depend_on_shape_masks_or_tiles():
    """Position (i, j) of head h keeps its bit whatever surrounds it."""
    whole = kept(300, 300)
    assert torch.equal(kept(37, 41), whole[:, :, :37, :41])
    assert torch.equal(kept(300, 300, window=(70, 40)) | ~band(300, 70, 40), whole | ~band(300, 70, 40))
    assert not kept(300, 300, window=(70, 40))[:, :, ~band(300, 70, 40)].any()
    assert torch.equal(kept(300, 300, score_mod=lambda s, b, h, i, j: s + 0.0 * i), whole)


def band(size, left, right):
    i, j = torch.arange(size)[:, None], torch.arange(size)[None, :]
    return (j >= i - left) & (j <= i + right)


def test_bits_of_a_packed_sequence_count_from_its_start():
    cu = torch.tensor([0, 5, 5, 42], dtype=torch.int32)
    q, k = torch.zeros(42, 2, 8), torch.zeros(42, 1, 8)
    v = torch.zeros(42, 1, 40)
    for start, end in ((0, 5), (5, 42)):
        v[range(start, end), 0, range(end - start)] = 1
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 37, "max_seqlen_k": 37}
    o = rf.attention_varlen(q, k, v, dropout_p=0.4, dropout_seed=SEED, dropout_offset=OFFSET, **options)
    for b, start, end in ((0, 0, 5), (2, 5, 42)):
        n = end - start
        expected = torch.from_numpy(reference.dropout_mask(SEED, OFFSET, b, 2, n, n, 0.4))
        assert torch.equal((o[start:end] != 0)[..., :n].transpose(0, 1), expected)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_rate(p):
    bits = kept(512, 512, h=4, p=p).double()
    deviation = (p * (1 - p) / bits.numel()) ** 0.5
    assert abs(bits.mean().item() - (1 - p)) < 5 * deviation
    # neither rows, columns nor heads stand out
    for axes in ((0, 1, 2), (0, 1, 3), (0, 2, 3)):
        means = bits.mean(axes)
        spread = (p * (1 - p) * means.numel() / bits.numel()) ** 0.5
        assert (means - (1 - p)).abs().max() < 6 * spread


def test_lse_and_max_score_do_not_see_dropout():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 50, 2, 16) for _ in range(3))
    flags = {"return_lse": True, "return_max_score": True}
    _, lse, top = rf.attention(q, k, v, causal=True, **flags)
    _, lse_dropped, top_dropped = rf.attention(q, k, v, causal=True, dropout_p=0.7, **flags)
    torch.testing.assert_close(lse_dropped, lse)
    torch.testing.assert_close(top_dropped, top)


def step(q, k, v, **options):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o = rf.attention(*leaves, causal=True, dropout_p=0.5, **options)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


def test_manual_seed_repeats_it_and_calls_differ():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    torch.manual_seed(7)
    first, second = step(q, k, v), step(q, k, v)
    torch.manual_seed(7)
    again = step(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])


def test_given_seed_leaves_the_generator_alone():
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    state = torch.get_rng_state()
    step(q, k, v, dropout_seed=3, dropout_offset=9)
    rf.attention(q, k, v, causal=True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_it(use_reentrant):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))

    def run(checkpointed):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        torch.manual_seed(11)

        def block(*x):
            return rf.attention(*x, dropout_p=0.5, causal=True)

        o = checkpoint(block, *leaves, use_reentrant=use_reentrant) if checkpointed else block(*leaves)
        torch.rand(3)  # the generator moves on before the backward
        return (
            [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)] if not use_reentrant else backward(o, leaves)
        )

    def backward(o, leaves):
        o.square().sum().backward()
        return [o.detach(), *(t.grad for t in leaves)]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)
