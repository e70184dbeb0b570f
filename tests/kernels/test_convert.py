"""The convert kernel: every element of the output, and nothing beside it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from kernels import entries
from kernels.layout import NAN, SIDES, Rows
from refluent import emulator

pytestmark = pytest.mark.emulator
FACTOR = 0.37


def launch(rows, *, heads=2, head_dim=64, padded=64, tile=128, dtype=torch.bfloat16, wide=None, far=0, turn=False):
    """(accumulator, output) of one launch; the output is NaN beforehand, and so is what the accumulator pads."""
    accumulator = torch.full((heads, rows.blocks(tile), padded // 4, tile, 4), NAN)
    shape = (rows.tokens,) if rows.packed else (rows.batch, rows.seqlen)
    out = torch.full((*shape, heads, wide or head_dim), NAN, dtype=dtype)[..., :head_dim]
    if far:
        base = torch.empty((rows.batch - 1) * far + out[0].numel(), dtype=dtype)  # touched where it is used, no further
        out = base.as_strided(out.shape, (far, *out.stride()[1:])).fill_(NAN)
    for b in range(rows.batch):
        values = torch.randn(rows.lengths[b], heads, head_dim)
        for r in range(rows.lengths[b]):
            block = rows.first_block(b, tile) + r // tile
            columns = values[r].view(heads, head_dim // 4, 4)
            accumulator[:, block, : head_dim // 4, r % tile] = columns
    seqused = rows.seqused()
    with emulator.gpu("sm_100a", checks="none" if far else "all") as gpu:
        name = str(dtype).removeprefix("torch.")
        kernel = entries.convert(gpu.arch, name, tile, padded, rows.packed, seqused is not None, turn)
        kernel(
            turned(accumulator) if turn else accumulator,
            out,
            rows.cu_seqlens(),
            seqused,
            FACTOR,
            rows.seqlen,
            rows.tokens,
            rows.batch,
        )
    return accumulator, out


def turned(accumulator):
    """(heads, blocks, d / 4, tile, 4) -> (heads, blocks, tile / 4, d, 4)."""
    heads, blocks, quads, tile, _ = accumulator.shape
    rows = accumulator.transpose(2, 3).reshape(heads, blocks, tile // 4, 4, 4 * quads)
    return rows.transpose(3, 4).contiguous()


def check(rows, accumulator, out, tile=128):
    heads, head_dim = out.shape[-2:]
    expected = torch.full_like(out, NAN if rows.packed else 0.0)
    for b in range(rows.batch):
        target = rows.of(expected, b)
        for r in range(rows.lengths[b]):
            block = rows.first_block(b, tile) + r // tile
            columns = accumulator[:, block, : head_dim // 4, r % tile].reshape(heads, head_dim)
            target[r] = (columns * FACTOR).to(out.dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", SIDES.values(), ids=list(SIDES))
def test_layouts(rows):
    check(rows, *launch(rows))


@pytest.mark.parametrize(("head_dim", "padded"), [(8, 32), (40, 64), (72, 96), (128, 128)])
def test_columns_past_the_head_dimension_are_not_written(head_dim, padded):
    rows = Rows(37, (37, 37))
    accumulator, out = launch(rows, head_dim=head_dim, padded=padded, dtype=torch.float16, wide=head_dim + 16)
    check(rows, accumulator, out)
    beside = out.as_strided((2, 37, 2, 16), out.stride(), head_dim)
    assert beside.isnan().all()


def test_tiles_of_64_rows():
    rows = Rows(70, (70,))
    check(rows, *launch(rows, head_dim=200, padded=256, tile=64), tile=64)


@pytest.mark.parametrize("rows", SIDES.values(), ids=list(SIDES))
def test_transposed(rows):
    check(rows, *launch(rows, head_dim=136, padded=192, tile=64, wide=152, turn=True), tile=64)


def test_strides_past_32_bits():
    """The last sequence of the output starts 2^31 + 2000 elements after the first."""
    rows = Rows(9, (9, 9, 9))
    check(rows, *launch(rows, far=(1 << 30) + 1000))
