"""Block masks in the Blackwell backward: lists of any block size, tiles that are skipped, everything else with them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.layout import Rows
from kernels.sm100.test_mods import FP16, call, check, learned, packed
from refluent.gpu.launch.blocks import states_of, tile_lists
from refluent.masks import bind_block_mask
from refluent.mods import library
from refluent.problem import Options, Problem

pytestmark = pytest.mark.emulator
DOCUMENTS = torch.tensor([0] * 20 + [1] * 200 + [2] * 30 + [3] * 350)


def documents(b, h, i, j):
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)


def by_head(b, h, i, j):
    return (i // 60 + h + 2 * b) % 3 == j // 70 % 3


def mask(fn, batch=None, heads=None, q=300, k=400, size=128):
    return rf.create_block_mask(fn, batch, heads, q, k, BLOCK_SIZE=size)


def of_lists(dense, size, fn=None, full=None):
    """A BlockMask of torch's from a map of blocks."""
    lists = [x for blocks in (dense, full) if blocks is not None for x in rf.masks.list_blocks(blocks)]
    return torch.nn.attention.flex_attention.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=fn)


def random_map(batch, heads, m, n, share=0.3):
    return torch.rand(batch, heads, m, n) < share


def halves(dense, size, fn):
    """Every other column of blocks is full where it is listed."""
    odd = torch.arange(dense.shape[-1]) % 2 == 1
    return of_lists(dense & ~odd, size, fn, dense & odd)


CASES = {
    "documents": lambda: call(300, 400, block_mask=mask(documents)),
    "16 by 48": lambda: call(300, 400, block_mask=mask(documents, size=(16, 48)), deterministic=True),
    "256": lambda: call(300, 400, block_mask=mask(by_head, 2, 2, size=256), causal=True),
    "of heads": lambda: call(
        300, 400, 4, 2, block_mask=mask(by_head, 2, 4, size=(64, 32)), deterministic=True, window=(250, 90), ctas=3
    ),
    "of batches, grouped": lambda: call(
        300, 400, 4, 1, dtype=FP16, block_mask=mask(by_head, 2, None, size=(32, 80)), causal=True, deterministic=True
    ),
    "lists alone": lambda: call(
        300, 400, block_mask=of_lists(random_map(1, 2, 19, 13), (16, 32)), deterministic=True, dlse=True
    ),
    "full and partial": lambda: call(
        300, 400, mask_mod=library.dilated(2), score_mod=library.alibi(torch.full((2,), 0.02).requires_grad_()),
        block_mask=halves(random_map(2, 1, 10, 9), (32, 48), documents),
    ),
    "packed": lambda: call(
        packed(140, 0, 300), packed(260, 40, 150), 4, 2, block_mask=mask(by_head, 3, None, size=(64, 64)), causal=True,
        deterministic=True, sink=torch.randn(4), softcap=2.0, score_mod=library.relative_bias(learned(4, 41)),
    ),
    "used": lambda: call(
        Rows(300, (140, 290)), Rows(400, (0, 333)), block_mask=mask(documents, size=48), dropout_p=0.2, dropout_seed=3,
        dropout_offset=0,
    ),
    "head dimension 256": lambda: call(
        150, 200, 2, 1, d=256, dv=256, block_mask=mask(documents, None, None, 150, 200, (48, 16)), deterministic=True
    ),
    "head dimension 192": lambda: call(150, 300, d=192, dv=128, block_mask=mask(by_head, 2, 2, 150, 300, (80, 112))),
}  # fmt: skip
SAMPLE = {"of heads", "lists alone", "packed"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in CASES])
def test_gradients(name, record_errors):
    torch.manual_seed(6)
    check(CASES[name](), record=record_errors)


def test_tiles_that_are_not_listed_are_not_computed():
    """NaN in the keys and values of other documents reaches nothing: 0 times NaN would be NaN."""
    ids = torch.arange(384) // 128
    run = call(384, 384, block_mask=mask(library.document_mask(ids), None, None, 384, 384))
    for tensor in (run.k, run.v):
        tensor[:, 128:256] = float("nan")
    made = run()
    assert made.dq[:, :128].isfinite().all()
    assert made.dq[:, 256:].isfinite().all()
    for grad in (made.dk, made.dv):
        assert grad[:, :128].isfinite().all()
        assert grad[:, 256:].isfinite().all()


def test_nothing_listed():
    run = call(200, 200, block_mask=of_lists(torch.zeros(1, 1, 2, 2, dtype=torch.bool), 128), deterministic=True)
    made = run()
    assert not any(grad.any() for grad in (made.dq, made.dk, made.dv))


def test_bits():
    """The rank among the listed key blocks orders the sums, however many are skipped."""
    torch.manual_seed(6)
    run = CASES["of heads"]()
    first = run()
    for seed in range(4):
        again = run("random", seed, num_sms=(8, 3)[seed % 2])
        assert all(torch.equal(one, other) for one, other in zip(first[:3], again[:3]))


@pytest.mark.parametrize("size", [(16, 16), (48, 80), (128, 128), (144, 256), (512, 32)])
@pytest.mark.parametrize(("d", "dv", "m", "n"), [(64, 64, 128, 128), (192, 128, 64, 128), (256, 256, 64, 64)])
def test_lists(size, d, dv, m, n):
    """Of tiles, from lists of blocks: by key tile and by query tile, ascending, each that holds some of a block."""
    torch.manual_seed(1)
    q, k = 700, 900
    blocks = random_map(2, 1, -(-q // size[0]), -(-k // size[1]), 0.1)
    spec, tensors, _ = bind_block_mask(of_lists(blocks, size), 2, 3, q, k, torch.device("cpu"))
    problem = Problem(Options(block_mask=spec), 2, q, k, 3, 3, d, dv, torch.bfloat16, torch.device("cpu"))
    counts, tiles, key_counts, key_tiles = tile_lists(problem, states_of(tensors))
    scores = blocks.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[..., :q, :k]
    for b in range(2):
        for at in range(-(-k // n)):
            expected = [r for r in range(-(-q // m)) if scores[b, 0, r * m : (r + 1) * m, at * n : (at + 1) * n].any()]
            assert tiles[b, 2, at, : counts[b, 2, at]].tolist() == expected
        for at in range(-(-q // m)):
            expected = [r for r in range(-(-k // n)) if scores[b, 0, at * m : (at + 1) * m, r * n : (r + 1) * n].any()]
            assert key_tiles[b, 1, at, : key_counts[b, 1, at]].tolist() == expected
