"""Every feature on tiles of awkward sizes, against the oracle, with lengths read on the host and on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refluent.tiled.walk import TileSize
from strategies import Case, build, cases
from tiled.calls import check, check_exactly, run

SMALL = TileSize(m=16, n=32, scores=2048)
UNEVEN = TileSize(m=34, n=18, scores=1)
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

PLAIN = Case(F64, (75, 75), (75, 75), heads_kv=2, group=2, head_dim=16, head_dim_v=24)
CASES = {
    "plain": PLAIN,
    "causal": replace(PLAIN, causal=True),
    "more keys": replace(PLAIN, lengths_k=(113, 113), causal=True),
    "more queries": replace(PLAIN, lengths_q=(113, 113), causal=True, use_lse=True),
    "window": replace(PLAIN, window=(9, 3)),
    "left window": replace(PLAIN, window=(20, None), causal=True, lengths_k=(90, 90)),
    "softcap": replace(PLAIN, softcap=2.0, scale=0.7),
    "sink": replace(PLAIN, sink=True, causal=True, use_lse=True, lengths_q=(90, 90)),
    "dlse": replace(PLAIN, use_lse=True),
    "alibi": replace(PLAIN, score_mod="alibi", causal=True),
    "table": replace(PLAIN, score_mod="table"),
    "gain": replace(PLAIN, score_mod="gain", softcap=5.0),
    "square": replace(PLAIN, score_mod="square", softcap=5.0),
    "minus_inf": replace(PLAIN, score_mod="minus_inf", window=(3, 0)),
    "constant": replace(PLAIN, score_mod="constant", mask_mod="sparse"),
    "documents": replace(PLAIN, mask_mod="documents"),
    "mask by head": replace(PLAIN, mask_mod="heads", causal=True),
    "blocks": replace(PLAIN, block_mask=("documents", 16, 32, False, False)),
    "blocks by head": replace(PLAIN, block_mask=("heads", 48, 16, True, True), causal=True, mask_mod="sparse"),
    "nothing": replace(PLAIN, mask_mod="nothing", sink=True, use_lse=True),
    "dropout": replace(PLAIN, dropout_p=0.3, causal=True),
    "seqused": replace(PLAIN, used_q=(75, 11), used_k=(0, 60), causal=True, use_lse=True),
    "varlen": replace(
        PLAIN,
        packed_q=True,
        packed_k=True,
        lengths_q=(0, 33, 70, 0, 1),
        lengths_k=(5, 33, 41, 0, 90),
        tail_q=7,
        tail_k=9,
        causal=True,
        use_lse=True,
        sink=True,
    ),
    "packed q": replace(PLAIN, packed_q=True, lengths_q=(33, 50), used_k=(70, 9), tail_q=3, window=(10, 10)),
    "packed k": replace(PLAIN, packed_k=True, lengths_k=(33, 50), used_q=(70, 9), tail_k=3, dropout_p=0.2),
    "no keys": replace(PLAIN, lengths_k=(0, 0), sink=True, use_lse=True),
    "no queries": replace(PLAIN, lengths_q=(0, 0)),
    "all": replace(
        PLAIN,
        packed_q=True,
        packed_k=True,
        lengths_q=(80, 0, 45),
        lengths_k=(64, 17, 77),
        used_q=(70, 0, 45),
        used_k=(64, 9, 70),
        tail_q=3,
        tail_k=5,
        causal=True,
        window=(50, None),
        softcap=4.0,
        score_mod="temperature",
        mask_mod="prefix",
        block_mask=("documents", 32, 16, True, True),
        sink=True,
        dropout_p=0.1,
        use_lse=True,
    ),
}


@pytest.mark.parametrize("host_lengths", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("tile", [SMALL, UNEVEN], ids=["small", "uneven"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_features(case: Case, tile: TileSize, host_lengths: bool, poisoned: None) -> None:
    call = build(case)
    check_exactly(call.q, call.k, call.v, call.do, call.dlse, tile=tile, host_lengths=host_lengths, **call.options)


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize("name", ["causal", "table", "sink", "dropout", "varlen", "all"])
def test_types(name: str, dtype: torch.dtype, poisoned: None) -> None:
    call = build(replace(CASES[name], dtype=dtype, head_dim=64, head_dim_v=32))
    check(call.q, call.k, call.v, call.do, call.dlse, tile=SMALL, **call.options)


@pytest.mark.parametrize("strides", ["transposed", "sliced", "every other row"])
@pytest.mark.parametrize("do_strides", ["stride 0", "last not 1", "transposed"])
def test_strides(strides: str, do_strides: str) -> None:
    for name in ("causal", "varlen"):
        call = build(replace(CASES[name], strides=strides, do_strides=do_strides))
        for host_lengths in (True, False):
            check(call.q, call.k, call.v, call.do, call.dlse, tile=SMALL, host_lengths=host_lengths, **call.options)


@settings(max_examples=40)
@given(
    case=cases(longest=150),
    m=st.integers(7, 80),
    n=st.integers(7, 80),
    scores=st.sampled_from([1, 5000, 1 << 20]),
    host_lengths=st.booleans(),
)
def test_tile_sizes_change_nothing(case: Case, m: int, n: int, scores: int, host_lengths: bool) -> None:
    """Any call gives the same numbers, its dropout mask included, however it is cut and whoever reads its lengths."""
    call = build(replace(case, dtype=F64, layout="bshd"))
    whole = run(call.q, call.k, call.v, call.do, call.dlse, tile=TileSize(512, 512, 1 << 24), **call.options)
    cut = run(
        call.q,
        call.k,
        call.v,
        call.do,
        call.dlse,
        tile=TileSize(m, n, scores),
        host_lengths=host_lengths,
        **call.options,
    )
    for name, expected in whole.tensors().items():
        torch.testing.assert_close(cut.tensors()[name], expected, rtol=1e-10, atol=1e-11)
