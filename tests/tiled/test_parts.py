"""The parts of the tiled backend by themselves: which tiles are walked, dropout bits, padding, torch's own kernel."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from refluent import accuracy, reference, tiled
from refluent.problem import Needs
from refluent.tiled import cpu_flash, hardware, parallel
from refluent.tiled.dropout import keep_mask, philox, threshold
from refluent.tiled.operands import Exponential
from refluent.tiled.padding import Side
from refluent.tiled.products import Products
from refluent.tiled.scores import Workspace
from refluent.tiled.visible import BlockMap, Keep, Tile, Visibility
from refluent.tiled.walk import TileSize, chunks, default_tile, host_segments
from tiled.calls import bind, check, run

TILE = TileSize(m=32, n=32, scores=1 << 19)


def operands(sq: int, sk: int, heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, s, heads, 16, dtype=dtype) for s in (sq, sk, sk, sq))


def visited(tile: TileSize, **options: Any) -> list[Tile]:
    sizes = options.pop("sizes", (256, 256))
    q, k, v, _ = operands(*sizes)
    problem, inputs, _ = bind(q, k, v, **options)
    blocks = None if problem.options.block_mask is None else BlockMap(problem, inputs)
    tiles: list[Tile] = []
    for segment in host_segments(problem, inputs):
        for chunk in chunks(segment, problem, tile, *((blocks.by_batch, blocks.by_head) if blocks else (False, False))):
            visibility = Visibility(problem, inputs, chunk, tile, blocks)
            for i0 in range(0, segment.len_q, tile.m):
                tiles.extend(visibility.tiles(i0, min(i0 + tile.m, segment.len_q)))
    return tiles


@pytest.mark.parametrize(
    ("options", "count", "masked"),
    [
        ({}, 64, 0),
        ({"causal": True}, 36, 8),
        ({"causal": True, "sizes": (256, 128)}, 10, 4),  # the first half of the rows sees nothing
        ({"causal": True, "sizes": (128, 256)}, 4 * 4 + 10, 4),
        ({"window": (32, 0)}, 8 + 7, 8 + 7),
        ({"window": (64, 64)}, 8 + 2 * 7 + 2 * 6, 2 * 6),
        ({"causal": True, "window": (None, 5)}, 36, 8),
    ],
)
def test_tiles_without_visible_scores_are_skipped(options: dict[str, Any], count: int, masked: int) -> None:
    tiles = visited(TILE, **options)
    assert len(tiles) == count
    assert sum(tile.keep is not None for tile in tiles) == masked


def test_block_mask_skips_tiles_and_its_mask_inside_full_blocks() -> None:
    documents = torch.arange(256) // 64
    mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 256, 256, "cpu", 64)
    tiles = visited(TILE, block_mask=mask)
    assert len(tiles) == 4 * 4
    assert all(tile.keep is None for tile in tiles)
    by_head = create_block_mask(lambda b, h, i, j: (i // 128 == h) & (j < 64), None, 2, 256, 256, "cpu", 64)
    assert len(visited(TILE, block_mask=by_head)) == 2 * 4 * 2


def test_mask_mod_that_empties_a_tile_skips_it() -> None:
    documents = torch.arange(256) // 32
    assert len(visited(TILE, mask_mod=lambda b, h, i, j: documents[i] == documents[j])) == 8


@pytest.mark.parametrize("window", [(None, None), (40, 3), (0, None)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(70, 70), (50, 90), (90, 50)])
def test_tiles_cover_what_is_visible_exactly(sizes: tuple[int, int], causal: bool, window: Any) -> None:
    seen = torch.zeros(sizes, dtype=torch.int32)
    for tile in visited(TileSize(16, 24, 1 << 19), sizes=sizes, causal=causal, window=window):
        ones = torch.ones(tile.i1 - tile.i0, tile.j1 - tile.j0)
        if tile.keep is not None:
            tile.keep.zero_(ones)
        seen[tile.i0 : tile.i1, tile.j0 : tile.j1] += ones.int()
    i, j = torch.arange(sizes[0])[:, None], torch.arange(sizes[1])
    diagonal = i + sizes[1] - sizes[0]
    expected = torch.ones(sizes, dtype=torch.bool)
    if causal:
        expected &= j <= diagonal
    if window[0] is not None:
        expected &= j >= diagonal - window[0]
    if window[1] is not None:
        expected &= j <= diagonal + window[1]
    assert torch.equal(seen, expected.int())


@pytest.mark.parametrize("group", [1, 3, 8, 64])
def test_default_tile_bounds_memory(group: int) -> None:
    q, k = torch.randn(1, 4, 2 * group, 16), torch.randn(1, 4, 2, 16)
    tile = default_tile(bind(q, k, k)[0])
    assert group * tile.m * tile.n <= 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_clears_any_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 3.0], [1.0, math.nan, -0.0, 2.0]], dtype=dtype)
    keep = Keep(torch.tensor([[False, False, False, True], [True, False, True, False]]), dtype)
    scores = torch.empty_like(x)
    keep.scores(x, out=scores)
    expected = torch.tensor([[-math.inf] * 3 + [3.0], [1.0, -math.inf, 0.0, -math.inf]], dtype=dtype)
    assert torch.equal(scores, expected)
    keep.zero_(x)
    assert torch.equal(x, torch.tensor([[0.0, 0.0, 0.0, 3.0], [1.0, 0.0, 0.0, 0.0]], dtype=dtype))


def test_philox_known_answers() -> None:
    """The test vectors of the Random123 distribution, philox4x32 with 10 rounds."""
    word = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((word,) * 4, (word,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in vectors:
        c = tuple(torch.tensor(x) for x in counter)
        k = tuple(torch.tensor(x) for x in key)
        assert tuple(int(x) for x in philox((c[0], c[1], c[2], c[3]), (k[0], k[1]))) == expected


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-1, -(2**40)), (2**62 + 5, 2**33 + 1)])
def test_dropout_bits_are_the_oracles(seed: int, offset: int) -> None:
    heads, sq, sk, b = 3, 13, 18, 2
    expected = torch.from_numpy(np.asarray(reference.dropout_mask(seed, offset, b, heads, sq, sk, 0.37))).bool()
    stream = (b * heads + torch.arange(heads))[None, :, None, None]
    for i0, i1, j0, j1 in ((0, 13, 0, 18), (3, 8, 5, 6), (4, 5, 7, 18), (12, 13, 17, 18)):
        kept = keep_mask(torch.tensor([seed, offset]), 0.37, stream, i0, i1, j0, j1)
        assert torch.equal(kept[0], expected[:, i0:i1, j0:j1])


def test_dropout_threshold_stays_a_word() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 1 << 31
    assert threshold(1 - 2.0**-40) == (1 << 32) - 1


@pytest.mark.parametrize("size", [0.5, 40.0, 700.0])
def test_exponentials_are_put_right(size: float) -> None:
    """Rows of exp(x - c) in float32 after the correction: no common error is left, whatever c."""
    c = torch.rand(500, 1) * size
    x = c - torch.rand(500, 64)
    exponential = Exponential(binary=True)
    minus = exponential.minus(c)
    residual = exponential.residual(c, minus)
    assert residual is not None
    got = exponential.of(x, minus, torch.empty_like(x)) * residual.neg().exp()
    error = got.double() / torch.exp(x.double() - c.double()) - 1
    assert error.abs().max() < 6e-7
    assert error.mean(-1).abs().max() < 2e-7


LOW = torch.finfo(torch.float32).min
FAR = [-1.1e9, -8e9, -1e10, LOW, 5e8, 1e10, 1e30]


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("sink", [None, 0.0, "far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_scores_of_any_size(far: float, sink: Any, dtype: torch.dtype) -> None:
    """Rows that see far scores alone, rows that meet them in their first tile, in their last one, and not at all."""
    q, k, v, do = operands(100, 100, dtype=dtype)
    i, j = torch.arange(100)[:, None], torch.arange(100)
    hidden = (i < 20) | ((i < 40) & (j < 50)) | ((i >= 60) & (i < 80) & (j >= 50))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    value = torch.tensor(far, dtype=torch.float32)
    options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: torch.where(hidden[i, j], value, s)}
    if sink is not None:
        options["sink"] = torch.full((2,), far if sink == "far" else sink, dtype=wide)
    if far < 0:
        do[:, :20] = 0  # float32 has no lse that tells -1e9 from -1e9 + log(100): what the backward makes of them
        check(q, k, v, do, tile=TILE, **options)
    else:
        got = run(q, k, v, do, tile=TILE, **options)
        accuracy.expect(q, k, v, **options).check_forward(got.o, got.lse, got.max_score)
    got = run(q, k, v, torch.ones_like(do), tile=TILE, **options)
    assert all(x.isfinite().all() for x in got.tensors().values())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 6e4), (torch.float32, 6e4), (torch.float64, 1e140)])
def test_products_of_any_size(dtype: torch.dtype, size: float, sign: int) -> None:
    x = torch.full((1, 70, 1, 8), size, dtype=dtype)
    got = run(x, sign * x, x, torch.ones_like(x), tile=TILE)
    accuracy.expect(x, sign * x, x).check_forward(got.o, got.lse, got.max_score)
    assert got.gradients.dv.isfinite().all()


def test_tiles_do_not_drift_apart() -> None:
    """A row's largest score stays as it is over many tiles: none of them may change what the first ones added."""
    q, k = torch.ones(1, 1, 1, 8), torch.full((1, 4096, 1, 8), 106.1)
    k[:, 0] += 0.01
    v = torch.randn(1, 4096, 1, 8)
    got = run(q, k, v, torch.ones(1, 1, 1, 8), tile=TileSize(16, 16, 1 << 19))
    expected = reference.attention(q, k, v)
    assert (got.lse - expected.lse).abs().max() < 6e-5  # 2 units of 300 in float32
    torch.testing.assert_close(got.o.double(), expected.o, rtol=0, atol=1e-6)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("sizes", [(5, 7, 3), (256, 300, 64)])  # below and above the size from which oneDNN is used
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products(
    units: int, sizes: tuple[int, int, int], dtype: torch.dtype, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "onednn_beats_mkl", lambda: onednn and torch.backends.mkldnn.is_available())
    m, n, k = sizes
    a, b = torch.randn(units, m, k, dtype=dtype), torch.randn(units, n, k, dtype=dtype).transpose(1, 2)
    q, keys, v, _ = operands(4, 4, dtype=dtype)
    products = Products(bind(q, keys, v)[0], Workspace(torch.device("cpu")))
    expected = a.double() @ b.double()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(products.fresh("x", a, b).double(), expected, rtol=tolerance, atol=tolerance)
    wide = torch.ones(units, m, n + 4, dtype=dtype)
    for acc in (torch.ones(units, m, n, dtype=dtype), wide[:, :, 2:-2]):
        products.add(acc, a, b)
        torch.testing.assert_close(acc.double(), expected + 1, rtol=tolerance, atol=tolerance)
    assert torch.equal(wide[:, :, :2], torch.ones(units, m, 2, dtype=dtype))


def test_padding_goes_there_and_back() -> None:
    cu = torch.tensor([0, 0, 3, 3, 8, 8], dtype=torch.int32)
    packed = torch.arange(10.0)[:, None, None].expand(10, 2, 3).contiguous()
    packed[8:] = math.nan
    side = Side.of(packed, 5, cu, torch.tensor([0, 2, 0, 5, 9], dtype=torch.int32))
    padded = side.pad(packed)
    expected = torch.zeros(5, 5)
    expected[1, :2], expected[3] = torch.tensor([0.0, 1.0]), torch.arange(3.0, 8.0)
    assert torch.equal(padded[:, :, 0, 0], expected)
    back = side.unpad(padded)
    assert torch.equal(back[:, 0, 0], torch.tensor([0.0, 1, 0, 3, 4, 5, 6, 7, 0, 0]))
    rows = torch.arange(10.0).expand(2, 10)
    assert torch.equal(
        side.unpad_rows(side.pad_rows(rows, -1.0), -1.0)[1], torch.tensor([0.0, 1, -1, 3, 4, 5, 6, 7, -1, -1])
    )


KERNEL_CASES: list[tuple[tuple[int, int], dict[str, Any], bool]] = [
    ((50, 50), {"causal": True}, True),
    ((50, 50), {"window": (None, 0)}, True),
    ((50, 50), {"window": (49, 60)}, True),
    ((50, 70), {}, True),
    ((70, 50), {"causal": True}, True),  # rows that see nothing come first
    ((70, 50), {}, True),
    ((50, 70), {"causal": True}, False),
    ((50, 50), {"window": (10, 0)}, False),
    ((50, 50), {"softcap": 1.0}, False),
    ((50, 50), {"sink": torch.zeros(2)}, False),
    ((50, 0), {}, False),
    ((0, 50), {}, False),
]


@pytest.mark.parametrize(("sizes", "options", "fits"), KERNEL_CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_torchs_kernel_where_it_fits(
    sizes: tuple[int, int], options: dict[str, Any], fits: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("_forward", "_backward"):
        inner = getattr(cpu_flash, name)

        def spy(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            calls.append(inner)
            return inner(*args, **kwargs)

        monkeypatch.setattr(cpu_flash, name, spy)
    q, k, v, do = operands(*sizes, dtype=dtype)
    if dtype == torch.bfloat16 and "sink" not in options:  # it sums a group's heads well enough for 16 bits
        q = torch.randn(1, sizes[0], 4, 16, dtype=dtype)
    do = torch.ones((), dtype=dtype).expand(q.shape)
    problem, inputs, _ = bind(q, k, v, return_max_score=False, **options)
    o, lse, none = tiled.forward(problem, inputs)
    assert none is None
    gradients = tiled.backward(problem, inputs, o, lse, do, None, Needs(dv=False))
    assert len(calls) == (2 if fits else 0)
    assert gradients.dv is None
    tiles = run(q, k, v, do, tile=TILE, **options)
    for name, got in (("o", o), ("lse", lse), ("dq", gradients.dq), ("dk", gradients.dk)):
        assert got is not None
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
        torch.testing.assert_close(got, tiles.tensors()[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("onednn", "bfloat16"), [(True, True), (True, False), (False, False)])
def test_long_calls_on_any_cpu(
    dtype: torch.dtype, onednn: bool, bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough for several default tiles, whatever way a CPU's strengths lead to."""
    monkeypatch.setattr(hardware, "onednn_beats_mkl", lambda: onednn and torch.backends.mkldnn.is_available())
    monkeypatch.setattr(hardware, "fast_bfloat16", lambda: bfloat16)
    q, k, v, do = (torch.randn(1, 600, heads, 64).to(dtype) for heads in (2, 1, 1, 2))
    check(q, k, v, do, causal=True, return_max_score=False)


def test_only_what_is_needed_is_made() -> None:
    q, k, v, do = operands(40, 40)
    problem, inputs, _ = bind(q, k, v, softcap=2.0)
    o, lse, _ = tiled.forward(problem, inputs)
    full = tiled.backward(problem, inputs, o, lse, do, None, Needs())
    for needs in (Needs(True, False, False), Needs(False, True, False), Needs(False, False, True)):
        part = tiled.backward(problem, inputs, o, lse, do, None, needs)
        for name in ("dq", "dk", "dv"):
            made, expected = getattr(part, name), getattr(full, name)
            assert (made is not None) == getattr(needs, name)
            if made is not None:
                torch.testing.assert_close(made, expected)


def test_nothing_spreads_from_an_empty_row() -> None:
    """do and dlse of rows that see nothing may hold NaN, beside a sink as well."""
    q, k, v, do = operands(60, 40, dtype=torch.float64)
    do[:, :20] = math.nan
    dlse = torch.randn(1, 2, 60, dtype=torch.float64)
    for options in ({}, {"sink": torch.randn(2, dtype=torch.float64)}):
        if not options:
            dlse[:, :, :20] = math.nan
        else:
            dlse = torch.nan_to_num(dlse)
        got = run(q, k, v, do, dlse, tile=TILE, causal=True, **options)
        assert all(x.isfinite().all() for name, x in got.tensors().items() if name not in ("lse", "max_score"))
        assert not got.gradients.dq[:, :20].any()


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_sharing_keeps_threads_settings(threads: int) -> None:
    def work(part: Any) -> tuple[Any, int, bool, bool]:
        assert threading.current_thread() is not threading.main_thread()
        return part, torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert parallel.share(range(7), work, 3) == [
        (range(0, 7, 3), 1, False, False),
        (range(1, 7, 3), 1, False, False),
        (range(2, 7, 3), 1, False, False),
    ]
    with torch.inference_mode():
        assert [result[3] for result in parallel.share(range(2), work, 3)] == [True, True]
    assert torch.get_num_threads() == threads
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [threads]


def test_sharing_hands_errors_on(threads: int) -> None:
    def work(part: Any) -> None:
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part"):
        parallel.share(range(5), work, 2)


def test_threads_change_nothing_and_repeat_to_the_bit(threads: int) -> None:
    q, k, v, do = (torch.randn(2, 300, heads, 16, dtype=torch.float64) for heads in (6, 3, 3, 6))
    slope, sink = torch.rand(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + slope[h] * (j - i), "sink": sink, "causal": True}
    shared, again = (run(q, k, v, do, **options).tensors() for _ in range(2))
    torch.set_num_threads(1)
    alone = run(q, k, v, do, **options).tensors()
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-11, atol=1e-11)
        assert torch.equal(shared[name], again[name])


def test_inference_mode_reaches_the_threads(threads: int) -> None:
    q, k, v, _ = operands(600, 600)
    with torch.inference_mode():
        problem, inputs, _ = bind(q.clone(), k.clone(), v.clone(), softcap=3.0)
        o, _, _ = tiled.forward(problem, inputs)
        assert o.is_inference()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    program = """
        import os, warnings, torch
        import refluent as rf
        warnings.simplefilter("ignore")
        torch.set_num_threads(2)
        q = torch.randn(1, 600, 2, 16)
        rf.attention(q, q, q, softcap=2.0)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(2)
            rf.attention(q, q, q, softcap=2.0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
