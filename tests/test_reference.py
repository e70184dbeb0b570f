"""The oracle itself, judged by formulas simple enough to trust and by published vectors."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from refluent import reference


def inputs(b=2, sq=7, sk=9, h=4, hkv=2, d=8, dv=16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return make(b, sq, h, d), make(b, sk, hkv, d), make(b, sk, hkv, dv), make(b, sq, h, dv), make(b, h, sq)


def naive(q, k, v, *, bias=None, allowed=None, softcap=0.0, sink=None, mod=None, z=None):
    """(b, s, h, d) attention as a differentiable formula; ``mod`` takes and returns the whole score tensor."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if mod is not None:
        s = mod(s)
    if allowed is not None:
        s = s.masked_fill(~allowed, -math.inf)
    logits = s if sink is None else torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = logits.logsumexp(-1)
    p = torch.exp(s - lse[..., None])
    return ((p if z is None else p * z) @ v).transpose(1, 2), lse


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def compare(q, k, v, do, dlse, extra=(), formula=None, **options):
    """Forward and all gradients against autograd through ``naive``; returns the oracle's gradients."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o, lse = naive(*leaves, **(formula or {}))
    result = reference.attention(q, k, v, **options)
    assert_same(result.o, o.detach())
    assert_same(result.lse, lse.detach())
    expected = torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), [*leaves, *extra])
    got = reference.attention_backward(do, q, k, v, dlse, **options)
    for name, grad in zip(("dq", "dk", "dv"), expected, strict=False):
        assert_same(getattr(got, name), grad)
    return got, expected[3:]


def test_plain_grouped_heads_against_autograd():
    compare(*inputs())


def test_against_torch_sdpa():
    q, k, v, _, _ = inputs(sk=7)
    flat = [t.transpose(1, 2) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*flat, is_causal=True, enable_gqa=True)
    assert_same(reference.attention(q, k, v, causal=True).o, expected.transpose(1, 2))


def test_weights_of_less_than_1e_300():
    """Some rows' and columns' weights all round to 0 or to numbers whose last bits are no numbers any more."""
    q, k, v, do, dlse = inputs()
    compare(30 * q, 30 * k, v, do, dlse)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"causal": True}, lambda i, j: j <= i + 2),
        ({"window": (1, 2)}, lambda i, j: (j >= i + 2 - 1) & (j <= i + 2 + 2)),
        ({"window": (1, None), "causal": True}, lambda i, j: (j >= i + 1) & (j <= i + 2)),
        ({"window": (-1, 0)}, lambda i, j: j <= i + 2),
        ({"window": (None, None)}, lambda i, j: (i + j) >= 0),
        ({"mask_mod": lambda b, h, i, j: (i + j) % 3 != 1}, lambda i, j: (i + j) % 3 != 1),
    ],
)
def test_masks_against_autograd(options, rule):
    allowed = rule(torch.arange(7)[:, None], torch.arange(9)[None, :])
    compare(*inputs(), formula={"allowed": allowed}, **options)


def test_softcap_sink_and_dlse_against_autograd():
    q, k, v, do, dlse = inputs()
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    got, (dsink,) = compare(q, k, v, do, dlse, (sink,), {"sink": sink, "softcap": 1.5}, sink=sink.detach(), softcap=1.5)
    assert_same(got.dsink, dsink)


def test_score_mod_and_captured_gradients_against_autograd():
    q, k, v, do, dlse = inputs()
    slope = torch.tensor([0.1, -0.2, 0.3, 0.05], dtype=torch.float64, requires_grad=True)
    table = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    gain = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)

    def mod(s, b, h, i, j):
        return torch.sin(s) * gain + slope[h] * (j - i) + table[i, j]

    distance = torch.arange(9)[None, :] - torch.arange(7)[:, None]
    got, expected = compare(
        q,
        k,
        v,
        do,
        dlse,
        (slope, table, gain),
        {"mod": lambda s: torch.sin(s) * gain + slope[:, None, None] * distance + table},
        score_mod=mod,
    )
    assert sorted(got.dcaptured) == ["gain", "slope", "table"]
    for name, grad in zip(("slope", "table", "gain"), expected, strict=True):
        assert_same(got.dcaptured[name], grad)


def test_dropout_scales_after_the_softmax_against_autograd():
    q, k, v, do, dlse = inputs()
    seed, offset, p = 1234567890123, 2**40 + 3, 0.3
    z = np.stack([reference.dropout_mask(seed, offset, b, 4, 7, 9, p) for b in range(2)])
    assert 0 < z.mean() < 1
    compare(
        q,
        k,
        v,
        do,
        dlse,
        formula={"z": torch.from_numpy(z).double() / (1 - p)},
        dropout_p=p,
        dropout_seed=seed,
        dropout_offset=offset,
    )


def test_block_mask_equals_its_mask_mod():
    def mask(b, h, i, j):
        return (j <= i) & ((i - j) < 20)

    q, k, v, _do, _ = inputs(sq=37, sk=37)
    block_mask = create_block_mask(mask, None, None, 37, 37, device="cpu", BLOCK_SIZE=16)
    assert int(block_mask.full_kv_num_blocks.sum()) == 0
    one, other = (reference.attention(q, k, v, **o) for o in ({"block_mask": block_mask}, {"mask_mod": mask}))
    assert torch.equal(one.o, other.o)
    wide = create_block_mask(lambda b, h, i, j: j <= i, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert int(wide.full_kv_num_blocks.sum()) == 6
    assert torch.equal(reference.attention(q, k, v, block_mask=wide).o, reference.attention(q, k, v, causal=True).o)


def test_full_blocks_skip_their_own_mask_mod_alone():
    q, k, v, _, _ = inputs(sq=32, sk=32)
    block_mask = create_block_mask(lambda b, h, i, j: j >= 0, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    assert int(block_mask.full_kv_num_blocks.sum()) == 4
    got = reference.attention(q, k, v, block_mask=block_mask, causal=True)
    assert torch.equal(got.o, reference.attention(q, k, v, causal=True).o)


def test_varlen_and_seqused_equal_the_sequences_alone():
    q, k, v, do, _ = inputs(b=1, sq=20, sk=20)
    q, k, v, do = (t[0] for t in (q, k, v, do))
    cu_q, cu_k = torch.tensor([0, 5, 5, 12]), torch.tensor([0, 3, 9, 15])
    used_k = torch.tensor([2, 6, 9])  # the last is longer than its sequence, which ends at 6
    sink = torch.zeros(4, dtype=torch.float64)
    poison = [t.clone() for t in (q, k, v, do)]
    poison[0][12:] = poison[3][12:] = math.nan
    for t in poison[1:3]:
        t[2:3] = t[15:] = math.nan
    dlse = torch.randn(4, 20, dtype=torch.float64)
    dlse[:, 12:] = math.nan
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": used_k, "causal": True, "sink": sink}
    got = reference.attention(*poison[:3], **options)
    grads = reference.attention_backward(poison[3], *poison[:3], dlse, **options)
    o, lse, dq, dk, dv = (torch.zeros_like(t) for t in (do, dlse, q, k, v))
    lse.fill_(-math.inf)
    dsink = torch.zeros(4, dtype=torch.float64)
    for a, b, c, d in [(0, 5, 0, 2), (5, 12, 9, 15)]:
        part = [q[None, a:b], k[None, c:d], v[None, c:d]]
        alone = reference.attention(*part, causal=True, sink=sink)
        o[a:b], lse[:, a:b] = alone.o[0], alone.lse[0]
        back = reference.attention_backward(do[None, a:b], *part, dlse[None, :, a:b], causal=True, sink=sink)
        dq[a:b], dk[c:d], dv[c:d] = back.dq[0], back.dk[0], back.dv[0]
        dsink += back.dsink
    for one, other in [(got.o, o), (got.lse, lse), (grads.dq, dq), (grads.dk, dk), (grads.dv, dv)]:
        assert torch.equal(one, other)
    assert_same(grads.dsink, dsink)


@pytest.mark.parametrize("with_sink", [False, True])
def test_empty_rows_and_their_gradients(with_sink):
    q, k, v, do, dlse = inputs(sq=9, sk=4)  # causal: the first five rows see nothing
    sink = torch.tensor([1.0, -2.0, 0.0, -math.inf], dtype=torch.float64) if with_sink else None
    do[:, :5] = math.inf
    if not with_sink:
        dlse[:, :, :5] = math.nan
    got = reference.attention(q, k, v, causal=True, sink=sink)
    back = reference.attention_backward(do, q, k, v, dlse, causal=True, sink=sink)
    assert torch.equal(got.o[:, :5], torch.zeros_like(got.o[:, :5]))
    assert torch.equal(got.max_score[:, :, :5], torch.full((2, 4, 5), -math.inf, dtype=torch.float64))
    expected = torch.full((4,), -math.inf, dtype=torch.float64) if sink is None else sink
    assert torch.equal(got.lse[:, :, :5], expected[None, :, None].expand(2, 4, 5))
    assert torch.equal(back.dq[:, :5], torch.zeros_like(back.dq[:, :5]))
    below = reference.attention_backward(do[:, 5:], q[:, 5:], k, v, dlse[:, :, 5:], causal=True, sink=sink)
    assert_same(back.dk, below.dk)
    assert_same(back.dv, below.dv)
    if sink is not None:
        own = torch.where(sink > -math.inf, dlse[:, :, :5].sum((0, 2)), 0.0)
        assert_same(back.dsink, below.dsink + own)


def test_masked_positions_never_meet_an_infinite_derivative():
    q, k, v, do, dlse = inputs(sq=6, sk=6)
    root = torch.full((6,), 0.5, dtype=torch.float64)

    def mod(s, b, h, i, j):  # at j > i: the square root of a negative number, then of zero
        return s + torch.sqrt((i - j).to(s.dtype) * root[i])

    strict = {"mask_mod": lambda b, h, i, j: j < i, "score_mod": mod}
    got = reference.attention(q, k, v, **strict)
    back = reference.attention_backward(do, q, k, v, dlse, **strict)
    for t in (got.o, back.dq, back.dk, back.dv, back.dcaptured["root"]):
        assert torch.isfinite(t).all()
    assert back.dcaptured["root"][0] == 0


def test_rows_of_infinite_scores_are_empty():
    q, k, v, do, dlse = inputs()

    def mod(s, b, h, i, j):
        return torch.where(i == 2, -math.inf, s)

    got = reference.attention(q, k, v, score_mod=mod)
    back = reference.attention_backward(do, q, k, v, dlse, score_mod=mod)
    assert torch.equal(got.lse[:, :, 2], torch.full((2, 4), -math.inf, dtype=torch.float64))
    assert (got.o[:, 2] == 0).all()
    assert (back.dq[:, 2] == 0).all()
    assert torch.isfinite(back.dk).all()
    assert torch.isfinite(back.dv).all()


def test_bhsd_layout_is_the_transpose():
    q, k, v, do, dlse = inputs()
    flat = [t.transpose(1, 2) for t in (do, q, k, v)]
    got, same = reference.attention(*flat[1:], layout="bhsd"), reference.attention(q, k, v)
    assert torch.equal(got.o, same.o.transpose(1, 2))
    assert torch.equal(got.lse, same.lse)
    one, two = (
        reference.attention_backward(*flat, dlse, layout="bhsd"),
        reference.attention_backward(do, q, k, v, dlse),
    )
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(one, name), getattr(two, name).transpose(1, 2))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    """The vectors published with Random123 (Salmon et al., SC 2011) for philox4x32-10."""
    got = reference.philox4x32(tuple(np.array([c]) for c in counter), key)
    assert tuple(int(w[0]) for w in got) == words


def test_dropout_mask_is_laid_out_by_pairs():
    keep = reference.dropout_mask(seed=7, offset=5, b=1, heads=2, sq=5, sk=3, p=0.5)
    h, i, j = 1, 3, 2
    words = reference.philox4x32(tuple(np.array([c]) for c in (i // 2, j // 2, 1 * 2 + h, 5)), (7, 0))
    assert keep.shape == (2, 5, 3)
    assert keep[h, i, j] == (words[2 * (i % 2) + j % 2][0] >= 2**31)
    assert keep[h, 2, 2] == (words[0][0] >= 2**31)
