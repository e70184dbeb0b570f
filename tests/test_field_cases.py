"""Faults that users of this kind of software reported publicly, each as a test of what is right.

Names tell the fault.  Sizes are the reports' own where the oracle can follow, else smaller ones of the same kind.
"""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import refluent as rf
from calls import call, expect, judge, leaves
from poison import poisoned_memory
from refluent import accuracy
from strategies import Built, Case, build

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def judge_built(built: Built) -> None:
    expected = expect(built)
    o, lse = call(built, return_lse=True)
    expected.check_forward(o, lse)
    with poisoned_memory():
        if built.dlse is None:
            o.backward(built.do)
        else:
            torch.autograd.backward([o, lse], [built.do, built.dlse])
    expected.check_backward(*(t.grad for t in (built.q, built.k, built.v)))


def packed(q_lengths, k_lengths, dtype=F32, **more) -> Case:
    return Case(dtype, q_lengths, k_lengths, packed_q=True, packed_k=True, **more)


# Blocks and masks


def test_block_sparse_backward_equals_causal_without_the_block_list():
    case = Case(BF16, (384,), (384,), 1, 2, 64, 64, causal=True, use_lse=True)
    blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, 384, 384, device="cpu")
    built = build(dataclasses.replace(case, causal=False))
    built.options["block_mask"] = blocks
    expected = expect(build(case))
    o, lse = call(built, return_lse=True)
    expected.check_forward(o, lse)
    torch.autograd.backward([o, lse], [built.do, built.dlse])
    expected.check_backward(*(t.grad for t in (built.q, built.k, built.v)))


def test_block_sparse_backward_with_head_sizes_192_and_128():
    judge(Case(BF16, (512,), (512,), 1, 2, 192, 128, block_mask=("documents", 128, 128, False, False)))


def test_mask_mod_group_and_blocks_reach_the_backward():
    judge(Case(F32, (140,) * 2, (140,) * 2, 2, 3, 32, 32, mask_mod="sparse", block_mask=("heads", 64, 16, True, True)))


def test_full_blocks_skip_their_own_mask_mod_and_no_other_mask():
    """Lists of another origin than the mask_mod: full blocks are dense whatever it says."""
    partial, full = torch.eye(3, dtype=torch.int32), torch.ones(3, 3, dtype=torch.int32).triu(1)
    lists = []
    for chosen in (partial, full):
        order = chosen.argsort(descending=True, stable=True).to(torch.int32)
        lists += [chosen.sum(-1).to(torch.int32)[None, None], order[None, None]]
    blocks = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: (i + j) % 3 == 0)
    built = build(Case(F32, (48,), (48,), 2, 1, 16, 16, window=(40, 20), use_lse=True))
    built.options["block_mask"] = blocks
    judge_built(built)


@pytest.mark.parametrize("score_mod", [None, "alibi", "minus_inf"])
def test_block_mask_longer_than_the_sequence(score_mod):
    case = Case(F32, (257,), (257,), 2, 1, 16, 16, score_mod=score_mod, use_lse=True)
    built = build(case)
    rule = lambda b, h, i, j: j <= i  # noqa: E731
    built.options["block_mask"] = create_block_mask(rule, None, None, 4096, 4096, device="cpu")
    judge_built(built)


@pytest.mark.parametrize("score_mod", ["alibi", "table", "relative", "square"])
def test_columns_beyond_an_odd_length_are_masked_after_score_mod(score_mod):
    judge(Case(F32, (257,), (257,), 1, 2, 16, 16, score_mod=score_mod))


def test_lengths_that_no_tile_divides_give_finite_numbers():
    for n in (1, 31, 33, 97, 191, 513):
        judge(Case(F32, (n,), (n,), 1, 1, 16, 16, causal=True, softcap=10.0))


# Head sizes and strides


@pytest.mark.parametrize("dim", [72, 104])
def test_head_sizes_that_32_does_not_divide(dim):
    judge(packed((450, 450), (450, 450), BF16, heads_kv=2, head_dim=dim, head_dim_v=dim))


@pytest.mark.parametrize(("dim", "dim_v"), [(128, 96), (96, 128), (64, 72), (192, 128), (40, 256)])
def test_value_size_differs_from_key_size(dim, dim_v):
    judge(Case(BF16, (130,), (130,), 1, 2, dim, dim_v, causal=True))


def test_size_192_and_128_with_grouped_heads():
    judge(Case(BF16, (256,), (256,), 2, 4, 192, 128, causal=True))


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}])
def test_slices_of_one_fused_projection_at_head_size_256(options):
    torch.manual_seed(0)
    fused = torch.randn(2, 100, 3, 2, 256).to(BF16).requires_grad_()
    do = torch.randn(2, 100, 2, 256).to(BF16)
    q, k, v = (fused[:, :, n] for n in range(3))
    assert not q.is_contiguous()
    expected = accuracy.expect(q, k, v, do, causal=True, **options)
    o = rf.attention(q, k, v, causal=True, **options)
    expected.check_forward(o)
    o.backward(do)
    expected.check_backward(*(fused.grad[:, :, n] for n in range(3)))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_head_size_256_with_groups_and_batches(layout):
    judge(Case(BF16, (96, 96), (96, 96), 2, 8, 256, 256, causal=True, layout=layout, strides="transposed"))


@pytest.mark.parametrize("dim", [264, 512])
def test_larger_heads_are_refused_in_words(dim):
    q = torch.randn(1, 4, 1, dim)
    with pytest.raises((ValueError, rf.UnsupportedError), match="256"):
        rf.attention(q, q, q)


@pytest.mark.parametrize("do_strides", ["stride 0", "transposed", "last not 1", "sliced"])
@pytest.mark.parametrize("features", [{}, {"softcap": 5.0}])
def test_any_strides_of_do(do_strides, features):
    judge(Case(BF16, (70, 70), (70, 70), 1, 2, 32, 32, do_strides=do_strides, causal=True, **features))


def test_sum_backward():
    q, k, v = (torch.randn(2, 33, 2, 16, requires_grad=True) for _ in range(3))
    expected = accuracy.expect(q, k, v, torch.ones(2, 33, 2, 16))
    rf.attention(q, k, v).sum().backward()
    expected.check_backward(q.grad, k.grad, v.grad)


def test_do_with_an_outer_stride_beyond_32_bits():
    rows, stride = 3, 2**30 + 8
    q, k, v = (torch.randn(1, rows, 1, 8).to(BF16).requires_grad_() for _ in range(3))
    storage = torch.empty(2 * stride + 8, dtype=BF16)  # 4 GB of address space, of which three pages are touched
    do = storage.as_strided((1, rows, 1, 8), (0, stride, 8, 1))
    do.copy_(torch.randn(1, rows, 1, 8))
    expected = accuracy.expect(q, k, v, do)
    rf.attention(q, k, v).backward(do)
    expected.check_backward(q.grad, k.grad, v.grad)
    o, lse = rf.attention(q, k, v, softcap=5.0, return_lse=True)
    raw = rf.attention_backward(do, q, k, v, o, lse, softcap=5.0)
    accuracy.expect(q, k, v, do, softcap=5.0).check_backward(raw.dq, raw.dk, raw.dv)


# Scales


SCALED = {
    "plain": Case(F32, (33,), (33,), 2, 1, 16, 16),
    "causal": Case(F32, (33,) * 2, (33,) * 2, 2, 1, 16, 16, causal=True),
    "right window": Case(F64, (33,), (33,), 2, 1, 16, 16, window=(None, 0)),
    "grouped": Case(BF16, (33,), (33,), 2, 2, 16, 16, causal=True),
    "more queries": Case(F16, (40,), (25,), 1, 1, 16, 16, causal=True),
    "packed": packed(
        (20, 0, 13), (20, 4, 9), BF16, heads_kv=2, head_dim=16, head_dim_v=16, causal=True, tail_q=3, tail_k=2
    ),
    "used": Case(F16, (33,) * 2, (33,) * 2, 2, 1, 16, 16, used_q=(30, 7), used_k=(30, 5), causal=True),
}


@pytest.mark.parametrize("more", [{}, {"deterministic": True}, {"return_max_score": True}], ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, -2.0, 1e-50])
@pytest.mark.parametrize("case", SCALED.values(), ids=SCALED.keys())
def test_a_scale_that_is_not_positive(case, scale, more):
    """torch's own CPU kernel multiplies by it after masking with -inf; 1e-50 is 0 in float32."""
    built = build(dataclasses.replace(case, scale=scale))
    expected = expect(built)
    o, lse, *max_score = call(built, return_lse=True, **more)
    expected.check_forward(o, lse, *max_score)
    with poisoned_memory():
        o.backward(built.do)
    expected.check_backward(dv=built.v.grad)
    if scale == 1e-50:  # dq and dk are too small for float32
        assert built.q.grad.isfinite().all()
        assert built.k.grad.isfinite().all()
    else:
        expected.check_backward(built.q.grad, built.k.grad)


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"return_max_score": True}], ids=str)
@pytest.mark.parametrize(("dtype", "size"), [(F32, 1e25), (BF16, 1e25), (F64, 1e200)], ids=str)
def test_a_row_whose_scores_all_overflow_is_empty(dtype, size, more):
    """torch's own CPU kernel gives it an lse of 0; a row whose only score and value are 0 has that by right."""
    q, k, v = (torch.randn(2, 6, 1, 8).to(dtype) for _ in range(3))
    q[0, 3:] = size
    k[0] = -size
    q[0, 0] = v[:, 0] = 0
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o, lse, *_ = rf.attention(*leaves, return_lse=True, **more)
    assert (o[0, 3:] == 0).all()
    assert (lse[0, 0, 3:] == -math.inf).all()
    assert float(lse[0, 0, 0].detach()) == pytest.approx(0 if "causal" in more else math.log(6))
    assert (lse[1] > -math.inf).all()
    o.sum().backward()
    assert (q.grad[0, 3:] == 0).all()
    assert all(t.grad.isfinite().all() for t in leaves)


def cu(*starts):
    return torch.tensor(starts, dtype=torch.int32)


def test_overflow_in_one_of_several_sequences():
    q, k, v, do = (torch.randn(12, 2, 8) for _ in range(4))
    expected = accuracy.expect(q[6:][None], k[6:][None], v[6:][None], do[6:][None])
    q[:6], k[:6] = 1e25, -1e25
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o, lse = rf.attention_varlen(*leaves, cu_seqlens_q=cu(0, 6, 12), cu_seqlens_k=cu(0, 6, 12), return_lse=True)
    assert (o[:6] == 0).all()
    assert (lse[:, :6] == -math.inf).all()
    expected.check_forward(o[6:][None], lse[None, :, 6:])
    o.backward(do)
    assert all((t.grad[:6] == 0).all() for t in leaves)
    expected.check_backward(*(t.grad[6:][None] for t in leaves))


# lse, sink, windows, empty rows


@pytest.mark.parametrize("case", [Case(F32, (40,), (50,), 2, 2, 16, 16), packed((9, 40), (20, 30), head_dim=16)])
def test_the_gradient_of_lse_is_not_dropped(case):
    built = build(case)
    both = dataclasses.replace(built, do=torch.ones_like(built.do), dlse=torch.ones(()))
    o, lse = call(built, return_lse=True)
    both.dlse = torch.ones_like(lse)
    expected = expect(both)
    (o.sum() + lse.sum()).backward()
    expected.check_backward(built.q.grad, built.k.grad, built.v.grad)


def test_lse_alone_carries_a_gradient():
    q, k, v = (torch.randn(1, 20, 2, 8, requires_grad=True) for _ in range(3))
    _, lse = rf.attention(q, k, v, return_lse=True, causal=True)
    lse.sum().backward()
    expected = accuracy.expect(q, k, v, torch.zeros(1, 20, 2, 8), torch.ones(1, 2, 20), causal=True)
    expected.check_backward(q.grad, k.grad)
    assert v.grad is None or not v.grad.any()


def test_causal_varlen_with_more_queries_than_keys():
    case = packed((76, 34, 146), (1, 1, 1), head_dim=32, head_dim_v=32, causal=True, use_lse=True)
    judge(case)
    built = build(dataclasses.replace(case, use_lse=False))
    o, lse = call(built, return_lse=True)
    o.sum().backward()
    for start, end in ((0, 75), (76, 109), (110, 255)):  # all but each sequence's last row see nothing
        assert (o[start:end] == 0).all()
        assert (lse[:, start:end] == -math.inf).all()
        assert (built.q.grad[start:end] == 0).all()


@pytest.mark.parametrize("window", [(-1, 0), (None, 0), (-1, -1), (None, None)])
def test_minus_one_is_an_open_window_also_with_causal(window):
    judge(Case(F32, (100,), (100,), 1, 2, 16, 16, window=window, causal=True, use_lse=True))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 100, 2, 16) for _ in range(3))
    options = {"return_lse": True, "causal": True}
    for one, other in zip(
        rf.attention(q, k, v, window=window, **options), rf.attention(q, k, v, **options), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dim_v", [16, 192])
@pytest.mark.parametrize("features", [{}, {"causal": True, "softcap": 4.0}])
def test_sink_with_packed_sequences_and_lse(dim_v, features):
    judge(packed((30, 0, 64), (30, 7, 20), heads_kv=2, head_dim_v=dim_v, sink=True, use_lse=True, **features))


def test_a_query_without_keys_has_the_sink_as_lse():
    built = build(packed((5, 3), (0, 4), heads_kv=2, sink=True, use_lse=True))
    sink = built.options["sink"]
    o, lse = call(built, return_lse=True)
    assert (o[:5] == 0).all()
    assert torch.equal(lse[:, :5], sink.detach()[:, None].expand(2, 5))
    torch.autograd.backward([o, lse], [torch.zeros_like(o), torch.cat([built.dlse[:, :5], torch.zeros(2, 3)], 1)])
    torch.testing.assert_close(sink.grad, built.dlse[:, :5].sum(1))
    assert (built.q.grad == 0).all()


def test_a_mask_that_allows_nothing_gives_zeros():
    judge(Case(F32, (40,), (40,), 2, 2, 16, 16, mask_mod="nothing", use_lse=True, sink=True))
    judge(Case(BF16, (40,), (40,), 2, 2, 16, 16, mask_mod="nothing", use_lse=True))


def test_nan_in_dlse_of_rows_without_lse_is_ignored():
    built = build(Case(F32, (30,), (10,), 1, 1, 8, 8, causal=True, use_lse=True))
    built.dlse[:, :, :20] = math.nan
    judge_built(built)
    assert torch.isfinite(built.q.grad).all()


# Nothing to do


@pytest.mark.parametrize(
    "case",
    [
        Case(F32, (5, 5), (0, 0), use_lse=True),
        Case(F32, (0, 0), (5, 5), use_lse=True),
        Case(F32, (0,), (0,)),
        Case(F32, (5, 5), (0, 0), sink=True, causal=True, use_lse=True),
        packed((0, 0), (0, 0)),
        packed((0, 0), (5, 3)),
        packed((4, 3), (0, 0), use_lse=True),
        packed((0, 0, 0, 9, 0, 0), (0, 7, 0, 9, 0, 0), causal=True, use_lse=True),
        Case(F32, (9, 9), (9, 9), used_q=(0, 0), used_k=(0, 0), use_lse=True, softcap=3.0),
        packed((9, 9), (9, 9), used_q=(0, 4), used_k=(3, 0), score_mod="table"),
        packed((9, 9), (9, 9), used_k=(0, 0), score_mod="alibi", sink=True, use_lse=True),
    ],
)
def test_empty_tensors_and_sequences(case):
    judge(case)


def test_no_sequences_at_all():
    q = torch.randn(7, 2, 8, requires_grad=True)
    cu = torch.zeros(1, dtype=torch.int32)
    o, lse = rf.attention_varlen(
        q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=0, max_seqlen_k=0, return_lse=True
    )
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    o.sum().backward()
    assert (q.grad == 0).all()


@pytest.mark.parametrize("dim", [64, 256])
def test_keys_of_a_sequence_without_queries_get_zeros(dim):
    case = packed((0, 302, 210, 0), (634, 436, 210, 768), BF16, group=4, head_dim=dim, head_dim_v=dim)
    judge(case)
    built = build(case)
    call(built).sum().backward()
    assert (built.k.grad[:634] == 0).all()
    assert (built.v.grad[1280:] == 0).all()


def test_padding_sequences_at_the_end_are_free():
    """What a captured graph needs: cu_seqlens repeats its last entry, max_seqlen stays put."""
    judge(packed((40, 21, 0, 0, 0, 0), (40, 21, 0, 0, 0, 0), tail_q=10, tail_k=10, causal=True, use_lse=True))
    built = build(packed((40, 21), (40, 21), tail_q=10, tail_k=10))
    built.options |= {"max_seqlen_q": 64, "max_seqlen_k": 512}
    judge_built(built)


def test_many_short_sequences():
    n, length = 12000, 2
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(n * length, 1, 8) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    cu = torch.arange(0, n * length + 1, length, dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": length, "max_seqlen_k": length}
    o = rf.attention_varlen(*leaves, **lengths, causal=True)
    o.backward(do)
    exact = [t.double().view(n, length, 8).requires_grad_() for t in (q, k, v)]
    score = exact[0] @ exact[1].mT / math.sqrt(8)
    score = score.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    expected = score.softmax(-1) @ exact[2]
    expected.backward(do.double().view(n, length, 8))
    for got, right in zip((o, *(t.grad for t in leaves)), (expected, *(t.grad for t in exact)), strict=True):
        torch.testing.assert_close(got.view(n, length, 8).double(), right, rtol=1e-5, atol=1e-5)


# Dirty memory, determinism, repeated launches


def test_dirty_workspaces_change_nothing_in_packed_sequences_of_large_heads():
    case = packed((129, 3, 63), (70, 129, 1), BF16, heads_kv=2, head_dim=160, head_dim_v=136, causal=True)
    for _ in range(3):
        judge(case)


def test_softcap_backward_with_many_heads():
    judge(Case(BF16, (256,) * 2, (256,) * 2, 8, 1, 128, 128, causal=True, softcap=10.0))


@pytest.mark.parametrize(
    "case",
    [
        Case(F16, (256,) * 2, (256,) * 2, 3, 4, 64, 64),
        Case(F16, (256,) * 2, (256,) * 2, 3, 4, 64, 64, score_mod="table", softcap=9.0, use_lse=True, sink=True),
        packed((100, 33, 257), (257, 10, 90), BF16, heads_kv=2, group=2, window=(60, 20), causal=True),
        packed((100, 33), (257, 10), heads_kv=2, group=2, score_mod="kinds", dropout_p=0.3),
    ],
)
def test_deterministic_means_the_same_bits(case):
    def run():
        built = build(case)
        o, lse = call(built, return_lse=True, deterministic=True)
        outputs = [o] if built.dlse is None else [o, lse]
        torch.autograd.backward(outputs, [built.do] if built.dlse is None else [built.do, built.dlse])
        return [o.detach(), lse.detach(), *(leaf.grad for leaf in leaves(built).values())]

    threads = torch.get_num_threads()
    torch.set_num_threads(max(2, threads))
    try:
        first = run()
        for _ in range(9):
            for one, other in zip(first, run(), strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


def test_the_global_switch_asks_for_determinism():
    case = Case(F32, (150,), (150,), 2, 2, 16, 16, score_mod="table", causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        judge(case)
    finally:
        torch.use_deterministic_algorithms(False)


# Arguments


def test_everything_after_v_is_keyword_only():
    q = torch.randn(4, 1, 8)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="positional"):
        rf.attention_varlen(q, q, q, cu, cu, 4, 4)
    with pytest.raises(TypeError, match="positional"):
        rf.attention(q[None], q[None], q[None], 0.5)


def test_a_tensor_as_max_seqlen_is_refused():
    q = torch.randn(4, 1, 8)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="max_seqlen_q"):
        rf.attention_varlen(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=torch.tensor(4), max_seqlen_k=4)


def test_the_number_of_results_follows_the_flags_alone():
    q = torch.randn(1, 4, 1, 8)
    assert isinstance(rf.attention(q, q, q), torch.Tensor)
    assert len(rf.attention(q, q, q, return_lse=True)) == 2
    assert len(rf.attention(q, q, q, return_max_score=True)) == 2
    assert len(rf.attention(q, q, q, return_lse=True, return_max_score=True)) == 3


# What users asked for


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_additive_bias_gets_its_gradient_summed_over_the_batch(dtype):
    torch.manual_seed(0)
    bias = torch.randn(1, 2, 65, 65).to(dtype).requires_grad_()
    q, k, v, do = (torch.randn(3, 65, 2, 16).to(dtype) for _ in range(4))
    mod = lambda s, b, h, i, j: s + bias[0, h, i, j]  # noqa: E731
    expected = accuracy.expect(q, k, v, do, score_mod=mod)
    o = rf.attention(q, k, v, score_mod=mod)
    expected.check_forward(o)
    o.backward(do)
    assert bias.grad.dtype == dtype
    expected.check_backward(dcaptured={"bias": bias.grad})
    assert bias.grad.abs().max() > 0


def test_double_backward_is_refused_in_words():
    q, k, v = (torch.randn(1, 9, 1, 8, requires_grad=True) for _ in range(3))
    o = rf.attention(q, k, v)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?i)double backward|differentiate twice|second"):
        dq.square().sum().backward()


def test_sink_gradient_together_with_the_gradient_of_lse():
    judge(Case(F32, (65, 65), (40, 40), 2, 2, 16, 16, causal=True, sink=True, use_lse=True, used_k=(40, 0)))
