"""Windows, visible ranges and block masks against brute force and against torch's own BlockMask."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import refluent.masks as masks
import refluent.mods as mods

CPU = torch.device("cpu")
IDS = torch.arange(2)[:, None] + torch.arange(400)[None, :] // torch.tensor([[37], [90]])
LISTS = (
    "kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices "
    "q_num_blocks q_indices full_q_num_blocks full_q_indices"
).split()
RULES = {
    "documents": (lambda b, h, i, j: IDS[b, i] == IDS[b, j], 2, None),
    "causal": (lambda b, h, i, j: j <= i, None, None),
    "by head": (lambda b, h, i, j: (i + j) // 40 % (h + 2) == 0, None, 3),
    "by both": (lambda b, h, i, j: (j <= i + 30 * h) & (IDS[b, i] == IDS[b, j]), 2, 3),
    "nothing": (lambda b, h, i, j: i < 0, None, None),
    "everything": (lambda b, h, i, j: True, None, None),
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (None, None)),
        ((None, None), (None, None)),
        ((-1, 0), (None, 0)),
        ((3, -1), (3, None)),
        ([3, 4], (3, 4)),
    ],
)
def test_windows_are_normalised(given, expected):
    assert masks.normalize_window(given) == expected


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (3, TypeError, "window must be None or a pair"),
        ((1, 2, 3), TypeError, "window must be None or a pair"),
        ((1.5, 0), TypeError, "window left must be an int or None, got 1.5"),
        ((0, True), TypeError, "window right must be an int or None, got True"),
        ((0, -2), ValueError, "window right must be >= 0, or -1 or None for open, got -2"),
    ],
)
def test_bad_windows_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        masks.normalize_window(given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 2), (0, 0), (4, 1), (30, 30)])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (7, 7), (5, 9), (9, 5), (1, 12), (12, 1)])
def test_ranges_against_brute_force(causal, window, sq, sk):
    i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None, :]
    allowed = torch.ones(sq, sk, dtype=torch.bool)
    allowed &= (j <= i) if causal else True
    allowed &= (j >= i - window[0]) if window[0] is not None else True
    allowed &= (j <= i + window[1]) if window[1] is not None else True
    options = {"seqlen_q": sq, "seqlen_k": sk, "causal": causal, "window": window}
    for first in range(sq):
        for last in range(first, sq):
            seen = allowed[first : last + 1]
            lo, hi = masks.key_range(first, last, **options)
            assert 0 <= lo <= hi
            assert _set(lo, hi) >= set(seen.any(0).nonzero().flatten().tolist())
            if seen.any():
                assert seen.any(0).nonzero().flatten().tolist() == list(range(lo, hi))
            lo, hi = masks.interior_key_range(first, last, **options)
            assert _set(lo, hi) == set(seen.all(0).nonzero().flatten().tolist())
    for first in range(sk):
        for last in range(first, sk):
            seen = allowed[:, first : last + 1]
            lo, hi = masks.query_range(first, last, **options)
            assert 0 <= lo <= hi
            if seen.any():
                assert seen.any(1).nonzero().flatten().tolist() == list(range(lo, hi))


def _set(lo, hi):
    return set(range(lo, hi))


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"BLOCK_SIZE": 16.0}, TypeError, r"BLOCK_SIZE must be an int or a pair of ints .*, got 16.0"),
        ({"BLOCK_SIZE": (16,)}, TypeError, r"BLOCK_SIZE must be an int or a pair of ints .*, got \(16,\)"),
        ({"BLOCK_SIZE": "a"}, TypeError, "BLOCK_SIZE must be an int or a pair of ints .*, got 'a'"),
        ({"BLOCK_SIZE": (16, 16.0)}, TypeError, "BLOCK_SIZE must be an int or a pair"),
        ({"BLOCK_SIZE": (16, -16)}, ValueError, r"BLOCK_SIZE must be multiples of 16, got \(16, -16\)"),
        ({"B": "x"}, TypeError, "B must be an int or None, got 'x'"),
        ({"B": 0}, ValueError, "B must be at least 1 or None, got 0"),
        ({"H": 0}, ValueError, "H must be at least 1 or None, got 0"),
        ({"H": True}, TypeError, "H must be an int or None, got True"),
        ({"Q_LEN": 10.0}, TypeError, "Q_LEN must be an int, got 10.0"),
        ({"KV_LEN": 0}, ValueError, "KV_LEN must be at least 1, got 0"),
        ({"device": "nope"}, ValueError, "device must be a torch.device, its name or None, got 'nope'"),
        ({"device": 1.5}, TypeError, "device must be a torch.device, its name or None, got 1.5"),
    ],
)
def test_create_block_mask_refuses_in_words(more, error, text):
    arguments = {"B": None, "H": None, "Q_LEN": 10, "KV_LEN": 20} | more
    with pytest.raises(error, match=text):
        masks.create_block_mask(lambda b, h, i, j: j <= i, **arguments)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block_size", [128, 64, (16, 48), (96, 32)])
@pytest.mark.parametrize(("sq", "sk"), [(256, 256), (300, 170), (61, 333), (1, 400)])
def test_create_block_mask_makes_what_torch_makes(name, block_size, sq, sk):
    fn, batch, heads = RULES[name]
    if name == "everything":
        expected = torch_block_mask(lambda b, h, i, j: i >= 0, batch, heads, sq, sk, "cpu", BLOCK_SIZE=block_size)
    else:
        expected = torch_block_mask(fn, batch, heads, sq, sk, "cpu", BLOCK_SIZE=block_size)
    got = masks.create_block_mask(fn, batch, heads, sq, sk, BLOCK_SIZE=block_size)
    assert got.BLOCK_SIZE == expected.BLOCK_SIZE
    assert got.seq_lengths == (sq, sk)
    for field in LISTS:
        assert torch.equal(getattr(got, field), getattr(expected, field)), field


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block_size", [(16, 48), (64, 32)])
@pytest.mark.parametrize("has_transpose", [True, False])
def test_taken_apart_a_block_mask_says_the_same(name, block_size, has_transpose):
    fn, batch, heads = RULES[name]
    sq, sk = 150, 210
    block_mask = masks.create_block_mask(fn, batch, heads, sq, sk, BLOCK_SIZE=block_size)
    if not has_transpose:
        block_mask.q_num_blocks = block_mask.q_indices = None
        block_mask.full_q_num_blocks = block_mask.full_q_indices = None
    spec, lists, traced = masks.bind_block_mask(block_mask, 2, 3, sq, sk, CPU)
    masks.check_block_tensors(lists)
    assert (spec.block_m, spec.block_n, spec.has_full) == (*block_size, True)
    assert spec.mask_mod == mods.mask_mod(fn).mod == traced.mod
    assert hash(spec) == hash(masks.BlockSpec(*block_size, traced.mod, True))
    seen, part, full = _expand(spec, lists, traced, sq, sk)
    rule = mods.mask_mod(fn)
    assert torch.equal(seen, _dense(rule, sq, sk, seen.shape[:2]))
    assert not (part & full).any()
    for num, idx, q_num, q_idx in (lists[0:2] + lists[4:6], lists[2:4] + lists[6:8]):
        by_query = masks.dense_blocks(num, idx, -(-sk // block_size[1]))
        by_key = masks.dense_blocks(q_num, q_idx, -(-sq // block_size[0]))
        assert torch.equal(by_query, by_key.transpose(-1, -2))
    again = masks.to_block_mask(spec, lists, fn, seqlen_q=sq, seqlen_k=sk)
    for field in LISTS[:4]:
        assert torch.equal(getattr(again, field), getattr(block_mask, field))


def _dense(traced, sq, sk, sizes):
    at = [torch.arange(n).view(shape) for n, shape in zip((*sizes, sq, sk), _SHAPES)]
    return traced.mod.evaluate(None, *at, traced.captured).expand(*sizes, sq, sk)


_SHAPES = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))


def _expand(spec, lists, traced, sq, sk):
    """Positions that a block mask allows, and its partial and full blocks, by loops over the lists."""
    batch, heads, num_m = lists.kv_num.shape
    seen = torch.zeros(batch, heads, sq, sk, dtype=torch.bool)
    part = torch.zeros(batch, heads, num_m, -(-sk // spec.block_n), dtype=torch.bool)
    full = part.clone()
    inside = _dense(traced, sq, sk, (batch, heads))
    for num, idx, where in ((lists.kv_num, lists.kv_idx, part), (lists.full_kv_num, lists.full_kv_idx, full)):
        for b in range(batch):
            for h in range(heads):
                for m in range(num_m):
                    for n in idx[b, h, m, : num[b, h, m]].tolist():
                        where[b, h, m, n] = True
                        rows = slice(m * spec.block_m, (m + 1) * spec.block_m)
                        columns = slice(n * spec.block_n, (n + 1) * spec.block_n)
                        block = seen[b, h, rows, columns]
                        block |= True if where is full else inside[b, h, rows, columns]
    return seen, part, full


def test_a_longer_mask_is_cropped():
    fn = RULES["documents"][0]
    long = masks.create_block_mask(fn, 2, None, 400, 400, BLOCK_SIZE=64)
    long.kv_indices[..., -1] = 99  # past the counts: anything
    short = masks.create_block_mask(fn, 2, None, 150, 210, BLOCK_SIZE=64)
    spec, lists, traced = masks.bind_block_mask(long, 2, 5, 150, 210, CPU)
    masks.check_block_tensors(lists)
    assert lists.kv_num.shape == (2, 1, 3)
    assert lists.kv_idx.shape == (2, 1, 3, 4)
    assert lists.q_idx.shape == (2, 1, 4, 3)
    seen, *_ = _expand(spec, lists, traced, 150, 210)
    expected, *_ = _expand(*masks.bind_block_mask(short, 2, 5, 150, 210, CPU), 150, 210)
    assert torch.equal(seen, expected)


def test_without_full_blocks_and_without_a_function():
    num = torch.tensor([[[1, 2]]], dtype=torch.int32)
    idx = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(num, idx, BLOCK_SIZE=32)
    spec, lists, traced = masks.bind_block_mask(block_mask, 1, 2, 64, 64, CPU)
    assert traced is None
    assert spec == masks.BlockSpec(32, 32, None, False)
    assert lists.full_kv_num is None
    assert lists.full_q_idx is None
    assert lists.q_num.tolist() == [[[2, 1]]]
    assert lists.q_idx.tolist() == [[[[0, 1], [1, 0]]]]


def test_many_strips_and_blocks_at_a_time(monkeypatch):
    expected = masks.create_block_mask(RULES["by both"][0], 2, 3, 300, 333, BLOCK_SIZE=32)
    monkeypatch.setattr(masks, "_CHUNK", 2 * 3 * 32 * 64)
    got = masks.create_block_mask(RULES["by both"][0], 2, 3, 300, 333, BLOCK_SIZE=32)
    for field in LISTS:
        assert torch.equal(getattr(got, field), getattr(expected, field))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"BLOCK_SIZE": 24}, "BLOCK_SIZE must be multiples of 16, got 24"),
        ({"BLOCK_SIZE": (0, 16)}, "BLOCK_SIZE must be multiples of 16"),
        ({"Q_LEN": 0}, "must be at least 1"),
        ({"B": -1}, "must be at least 1"),
    ],
)
def test_create_block_mask_refuses(arguments, text):
    given = {"B": None, "H": None, "Q_LEN": 64, "KV_LEN": 64, **arguments}
    with pytest.raises(ValueError, match=text):
        masks.create_block_mask(lambda b, h, i, j: i >= j, **given)


@pytest.mark.parametrize(
    ("change", "arguments", "error", "text"),
    [
        ({"BLOCK_SIZE": (24, 64)}, {}, ValueError, r"BLOCK_SIZE must be multiples of 16, got \(24, 64\)"),
        ({}, {"batch": 3}, ValueError, r"dimensions must be 1 or full \(3, 5\), got \(2, 1\)"),
        ({}, {"seqlen_q": 300}, ValueError, "covers 192 queries and 256 keys, but the sequences have 300 and 210"),
        ({}, {"seqlen_k": 257}, ValueError, "covers 192 queries and 256 keys, but the sequences have 150 and 257"),
        ({}, {"device": torch.device("meta")}, ValueError, "block_mask must be on meta, got cpu"),
    ],
)
def test_block_masks_that_do_not_fit(change, arguments, error, text):
    block_mask = masks.create_block_mask(RULES["documents"][0], 2, None, 150, 210, BLOCK_SIZE=64)
    for field, value in change.items():
        setattr(block_mask, field, value)
    given = {"batch": 2, "heads": 5, "seqlen_q": 150, "seqlen_k": 210, "device": CPU, **arguments}
    with pytest.raises(error, match=text):
        masks.bind_block_mask(block_mask, **given)


def test_anything_but_a_block_mask_is_refused():
    with pytest.raises(TypeError, match="block_mask must be a torch BlockMask or None, got Tensor"):
        masks.bind_block_mask(torch.ones(2, 2), 1, 1, 2, 2, CPU)


@pytest.mark.parametrize(
    ("field", "index", "value", "text"),
    [
        ("kv_num", (0, 0, 0), 9, "kv_num_blocks must be between 0 and 4"),
        ("kv_num", (0, 0, 0), -1, "kv_num_blocks must be between 0 and 4"),
        ("kv_idx", (0, 0, 0, 0), 4, "kv_indices must be between 0 and 3"),
        ("full_q_num", (1, 0, 1), 9, "full_q_num_blocks must be between 0 and 3"),
        ("kv_idx", (0, 0, 1, 1), 0, "lists a block twice in one row"),
        ("q_idx", (0, 0, 0, 1), 2, "not the transpose"),
    ],
)
def test_lists_that_contradict_themselves(field, index, value, text):
    block_mask = masks.create_block_mask(RULES["documents"][0], 2, None, 150, 210, BLOCK_SIZE=64)
    lists = masks.bind_block_mask(block_mask, 2, 5, 150, 210, CPU)[1]
    lists = lists._replace(**{field: getattr(lists, field).clone()})
    getattr(lists, field)[index] = value
    with pytest.raises(ValueError, match=text):
        masks.check_block_tensors(lists)


def test_a_block_both_partial_and_full():
    num, idx = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="both as partial and as full"):
        masks.check_block_tensors(masks.BlockTensors(num, idx, num, idx, num, idx, num, idx))
