"""Random calls, forward and backward, against the float64 oracle under the accuracy rule."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import refluent as rf
from calls import call, expect, judge, judge_gradients, leaves
from poison import poisoned_memory
from strategies import DTYPES, MASKS, MODS, Built, Case, build, cases, long_cases


@given(cases(varlen=False))
def test_dense(record_errors, case):
    record_errors(case.dtype, judge(case))


@given(cases(varlen=True))
def test_varlen(record_errors, case):
    record_errors(case.dtype, judge(case))


@given(long_cases())
def test_several_tiles_of_rows_or_keys(record_errors, case):
    record_errors(case.dtype, judge(case))


@given(st.sampled_from(DTYPES), st.booleans(), st.integers(300, 700), st.integers(0, 10**6))
def test_plain_calls_of_several_tiles(dtype, causal, length, seed):
    """Nothing but causal or not: the calls that a faster kernel of torch's own may serve."""
    judge(Case(dtype, (length,), (length,), 1, 2, 32, 32, causal=causal, seed=seed, use_lse=bool(seed % 2)))


@given(cases(), st.data())
def test_gradients_only_where_asked(case, data):
    built = build(case)
    names = list(leaves(built))
    asked = data.draw(st.sets(st.sampled_from(names), min_size=1))
    for name, leaf in leaves(built).items():
        leaf.requires_grad_(name in asked)
    expected = expect(built)
    o = call(built)
    with poisoned_memory():
        o.backward(built.do)
    if built.dlse is not None:  # o alone was used
        expected = expect(dataclasses.replace(built, dlse=None))
    judge_gradients(built, expected)


@given(cases())
def test_raw_backward(case):
    """attention_backward gives what autograd gives: to the bit, from the same o and lse."""
    built = build(case)
    o, lse = call(built, return_lse=True)
    raw = raw_backward(built, o.detach(), lse.detach())
    expect(built).check_backward(raw.dq, raw.dk, raw.dv, raw.dsink, raw.dcaptured)
    if not case.sink:
        assert raw.dsink is None
    assert set(raw.dcaptured) == set(built.captured)


@given(cases())
def test_deterministic_gives_the_same_bits(case):
    runs = []
    for _ in range(3):
        built = build(case)
        o, lse = call(built, return_lse=True, deterministic=True)
        raw = raw_backward(built, o.detach(), lse.detach(), deterministic=True)
        runs.append([o, lse, raw.dq, raw.dk, raw.dv, *([raw.dsink] if case.sink else []), *raw.dcaptured.values()])
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert torch.equal(one, two)


@given(cases(varlen=False))
def test_forward_without_grad_is_the_same(case):
    built = build(case)
    o = call(built)
    with torch.no_grad():
        again = call(built)
    assert not again.requires_grad
    expected = expect(dataclasses.replace(built, do=None, dlse=None))
    expected.check_forward(o)
    expected.check_forward(again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score_mod", [None, *MODS])
def test_every_score_mod_with_everything(score_mod, dtype):
    """Each mod once with all other features on, dense and varlen, so that no draw of luck leaves one out."""
    common = {
        "heads_kv": 2,
        "group": 2,
        "head_dim": 24,
        "head_dim_v": 16,
        "causal": True,
        "window": (50, None),
        "softcap": 3.0,
        "sink": True,
        "use_lse": True,
        "dropout_p": 0.2,
        "score_mod": score_mod,
        "mask_mod": "sparse",
        "seed": 5,
    }
    judge(Case(dtype, (70, 70), (90, 90), used_k=(80, 33), block_mask=("heads", 32, 16, False, True), **common))
    judge(Case(dtype, (37, 0, 65), (37, 12, 80), packed_q=True, packed_k=True, tail_q=3, used_q=(37, 0, 60), **common))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("as_blocks", [False, True])
def test_every_mask(mask, as_blocks):
    options = {"block_mask": (mask, 16, 48, True, True)} if as_blocks else {"mask_mod": mask}
    judge(Case(torch.float32, (150, 150), (200, 200), 1, 2, 16, 16, use_lse=True, **options))
    options = {"block_mask": (mask, 16, 48, True, False)} if as_blocks else {"mask_mod": mask}
    judge(Case(torch.float32, (150, 33), (100, 140), 1, 2, 16, 16, packed_q=True, packed_k=True, **options))


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_size(dim):
    other = 264 - dim
    judge(Case(torch.float32, (33,), (47,), 1, 2, dim, other, causal=True, softcap=2.0, use_lse=True))
    judge(Case(torch.bfloat16, (33, 12), (47, 8), 1, 1, dim, dim, packed_q=True, packed_k=True))


def raw_backward(built: Built, o: torch.Tensor, lse: torch.Tensor, **more: object) -> "rf.AttentionGradients":
    with poisoned_memory():
        return rf.attention_backward(
            built.do, built.q, built.k, built.v, o, lse, dlse=built.dlse, **built.options, **more
        )
