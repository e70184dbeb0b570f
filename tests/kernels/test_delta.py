"""The delta kernel against its formulas in float64: statistics, cleared memory, dsink."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from emulator.recorder import recording
from kernels import entries
from kernels.layout import NAN, SIDES, Rows
from refluent import emulator

pytestmark = pytest.mark.emulator
INF = math.inf


@dataclass
class Run:
    """Inputs and outputs of one launch."""

    rows: Rows
    tile_m: int
    o: torch.Tensor
    do: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    sink: torch.Tensor | None
    lse_log2: torch.Tensor
    dpsum: torch.Tensor
    clear: torch.Tensor
    dsink: torch.Tensor | None


def launch(
    rows,
    *,
    heads=2,
    head_dim_v=64,
    padded=64,
    tile_m=128,
    dtype=torch.bfloat16,
    dlse=False,
    sink=None,
    prepare=None,
    checks="all",
):
    """Run the kernel on random rows; what does not count holds NaN, and so does every output beforehand."""
    o, do = (rows.tensor(heads, head_dim_v, dtype) for _ in range(2))
    lse = rows.statistic(heads)
    grad = rows.statistic(heads) if dlse else None
    for b in range(rows.batch):  # rows that see no key
        rows.statistic_of(lse, b)[0, 3::7] = -INF
        if dlse:
            rows.statistic_of(grad, b)[0, 3::7] = NAN
        rows.of(o, b)[3::7, 0] = 0
    blocks = rows.blocks(tile_m)
    statistics = [torch.full((heads, blocks * tile_m), NAN) for _ in range(2)]
    clear = torch.full((4 * 1001,), NAN)
    sinks = (None, None, None)
    if sink is not None:
        sinks = (torch.randn(heads).to(sink), torch.full((heads, blocks), NAN), torch.full((heads,), NAN, dtype=sink))
    made = Run(rows, tile_m, o, do, lse, grad, sinks[0], *statistics, clear, sinks[2])
    if prepare is not None:
        prepare(made)
    cu_seqlens, seqused = rows.cu_seqlens(), rows.seqused()
    with emulator.gpu("sm_100a", checks=checks) as gpu:
        kernel = entries.delta(
            gpu.arch,
            str(dtype).removeprefix("torch."),
            tile_m,
            padded,
            rows.packed,
            seqused is not None,
            dlse,
            None if sink is None else str(sink).removeprefix("torch."),
        )
        kernel(
            made.o, made.do, made.lse, made.dlse, made.sink, *statistics, clear, *sinks[1:], cu_seqlens, seqused,
            rows.seqlen, rows.tokens, rows.batch,
        )  # fmt: skip
    return made


def check(run):
    """Every output, everywhere."""
    rows, tile = run.rows, run.tile_m
    lse_log2, dpsum = torch.full_like(run.lse_log2, INF), torch.zeros_like(run.dpsum)
    dsink, largest = 0.0, 0.0
    for b in range(rows.batch):
        o, do, lse = rows.of(run.o, b).double(), rows.of(run.do, b).double(), rows.statistic_of(run.lse, b).double()
        delta = (o * do).sum(-1).T
        if run.dlse is not None:
            delta = delta - rows.statistic_of(run.dlse, b)
        empty = lse == -INF
        delta = delta.masked_fill(empty, 0)
        at = rows.first_block(b, tile) * tile
        lse_log2[:, at : at + lse.shape[1]] = (lse * math.log2(math.e)).masked_fill(empty, INF)
        dpsum[:, at : at + lse.shape[1]] = delta
        if run.sink is not None:
            part = -torch.exp(run.sink.double()[:, None] - lse).masked_fill(empty, 0) * delta
            dsink, largest = dsink + part.sum(-1), max(largest, part.abs().max().item() if part.numel() else 0)
    torch.testing.assert_close(run.lse_log2, lse_log2, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run.dpsum, dpsum, rtol=1e-5, atol=1e-5)
    assert not run.clear.any()
    if run.sink is not None:
        kind = run.sink.dtype
        rtol = max(1e-5, torch.finfo(kind).eps)
        torch.testing.assert_close(run.dsink, dsink.to(kind), rtol=rtol, atol=1e-5 * largest)


@pytest.mark.parametrize("rows", SIDES.values(), ids=list(SIDES))
def test_layouts(rows):
    check(launch(rows, dlse=True, sink=torch.float32))


@pytest.mark.parametrize(("head_dim_v", "padded"), [(8, 32), (40, 64), (72, 96), (128, 128)])
def test_head_dimensions(head_dim_v, padded):
    check(launch(Rows(37, (37, 37)), head_dim_v=head_dim_v, padded=padded, dtype=torch.float16))


@pytest.mark.parametrize("head_dim_v", [136, 256])
def test_tiles_of_64_rows(head_dim_v):
    check(launch(Rows(70, (70,)), head_dim_v=head_dim_v, padded=256, tile_m=64, heads=1))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_dsink_has_the_type_of_the_sink(kind):
    check(launch(Rows(140, (140,)), sink=kind))


def test_rows_that_see_the_sink_alone():
    """lse is the sink there and o is 0: delta is -dlse, and dsink the sum of dlse."""

    def alone(run):
        run.lse.copy_(run.sink[None, :, None].expand_as(run.lse))
        run.dlse.normal_()
        run.o.zero_()

    run = launch(Rows(9, (9, 9)), dlse=True, sink=torch.float32, prepare=alone)
    check(run)
    torch.testing.assert_close(run.dsink, run.dlse.sum((0, 2)), rtol=1e-5, atol=1e-5)


def test_strides():
    """do as a slice of a fused projection, heads before positions; lse and dlse with positions outermost, expanded."""

    def views(run):
        wide = torch.full((2, 2, 150, 192), NAN, dtype=run.do.dtype)
        run.do = wide[..., 64:128].transpose(1, 2).copy_(run.do)
        run.lse = run.lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        run.dlse = torch.randn(2, 2, 1).expand(2, 2, 150)

    run = launch(SIDES["dense"], dlse=True, prepare=views)
    assert run.do.stride() == (2 * 150 * 192, 192, 150 * 192, 1)
    check(run)


def test_strides_past_32_bits():
    """The last sequence of do starts 2^31 + 2000 elements after the first."""

    def far(run):
        step = (1 << 30) + 1000
        base = torch.empty(2 * step + 9 * 128, dtype=run.do.dtype)  # touched where it is used, no further
        run.do = base.as_strided(run.do.shape, (step, 128, 64, 1)).copy_(run.do)

    check(launch(Rows(9, (9, 9, 9)), prepare=far, checks="none"))  # the checks' shadow of 4 GB would not fit


def test_more_sequences_than_a_grid_is_high():
    """80,000 sequences in one dimension of the grid."""
    heads, rows = 2, Rows(16, (16,) * 80_000)
    row, one = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(1)
    o = row.as_strided((rows.batch, 16, heads, 64), (0, 0, 0, 1))
    lse = one.as_strided((rows.batch, heads, 16), (0, 0, 0))
    statistic = torch.zeros(heads, rows.batch * 128)
    with recording("sm_100a") as gpu:
        kernel = entries.delta(gpu.arch, "bfloat16", 128, 64)
        kernel(o, o, lse, None, None, statistic, statistic, torch.zeros(4), None, None, None, None, 16, 16, rows.batch)
    (launched,) = gpu.recorder.launches
    assert launched.grid == (160_000, 1, 1)
