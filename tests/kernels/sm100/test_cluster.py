"""Clusters of two: neighbouring key blocks that load Q and dO for each other, beside the matrix."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.layout import Rows
from kernels.sm100.runs import ARCH, Run
from refluent import emulator
from refluent.emulator.ptx import parse
from refluent.gpu.launch import compiled
from refluent.gpu.launch.variant import Variant
from refluent.gpu.plans.sm100 import THREADS

pytestmark = pytest.mark.emulator
BF16, FP16 = torch.bfloat16, torch.float16


def call(queries, keys, heads=1, heads_kv=1, d=64, dv=64, dtype=BF16, ctas=0, cluster=2, **options):
    """The sequences' lengths, of which the longest is the tensors'; packed=True packs them, empty ones too."""
    torch.manual_seed(11)
    packed = options.pop("packed", False)
    sides = [Rows(max(lengths), lengths, lengths if packed else None) for lengths in (queries, keys)]
    (q, do), (k, v) = (
        [rows.tensor(count, width, dtype) for width in (d, dv)] for rows, count in zip(sides, (heads, heads_kv))
    )
    for name, rows in zip("qk", sides):
        if rows.packed:
            options |= {f"cu_seqlens_{name}": rows.cu_seqlens(), f"max_seqlen_{name}": rows.seqlen}
        elif rows.seqused() is not None:
            options[f"seqused_{name}"] = rows.seqused()
    return Run(do, q, k, v, sides[0].statistic(heads), options, ctas, cluster)


CASES = {
    "an odd number of blocks": lambda: call((300,), (300,), 2, 2),
    "one block": lambda: call((150,), (100,), dtype=FP16),
    "causal, persistent": lambda: call((270,), (400,), 2, 2, ctas=2, causal=True),
    # Query blocks that one of the pair alone sees; an add is a single chunk, and the staging buffers alternate.
    "band": lambda: call((520,), (500,), d=32, dv=32, window=(30, 10)),
    "left side": lambda: call((300,), (520,), d=32, dv=96, window=(100, None)),
    "packed, grouped": lambda: call((130, 0, 290, 7), (260, 40, 0, 300), 4, 2, 32, packed=True, causal=True),
    "shortened, persistent": lambda: call((140, 0, 33), (270, 140, 0), ctas=3, window=(None, 60)),
    "in turns, grouped": lambda: call(
        (200,), (390,), 2, 1, deterministic=True, dropout_p=0.2, dropout_seed=3, dropout_offset=1
    ),
    "192 and 128": lambda: call((150,), (300,), d=192, dv=128, causal=True),
    "256, grouped": lambda: call((100,), (150,), 2, 1, 256, 256, FP16, softcap=3.0),
}
CI = 8  # of them, the last are compiled longest


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if i >= CI else ()) for i, name in enumerate(CASES)]
)
def test_gradients(name):
    run = CASES[name]()
    for schedule, seed in (("fair", 0), ("random", 1), ("random", 2)):
        run.check(run(schedule, seed))


def test_mods():
    """Each CTA of the pair has keys of its own, and query blocks that the other alone sees add nothing."""
    torch.manual_seed(3)
    bias, key = (torch.randn(shape).requires_grad_() for shape in ((2, 41), (2, 400)))

    def score(s, b, h, i, j):
        return s * (1 + 0.1 * torch.tanh(key[h, j])) + bias[h, (i - j).clamp(-20, 20) + 20]

    mods = {"score_mod": score, "mask_mod": lambda b, h, i, j: j % 7 < 5}
    run = call((270,), (300,), 2, 2, 32, 32, ctas=2, causal=True, **mods)
    for schedule, seed in (("fair", 0), ("random", 1)):
        run.check(run(schedule, seed))


def test_no_block_mask():
    mask = rf.create_block_mask(lambda b, h, i, j: i >= j, None, None, 130, 260)
    with pytest.raises(rf.UnsupportedError, match="pass cluster=1"):
        call((130,), (260,), block_mask=mask)()


def test_a_grid_has_whole_clusters():
    run = call((130,), (260,), ctas=3)
    run.check(run())
    (main,) = (launch for launch in run.report.launches if launch.block == (THREADS, 1, 1))
    assert (main.grid, main.cluster) == ((2, 1, 1), (2, 1, 1))


@pytest.mark.parametrize("cluster", [1, 2])
def test_what_is_multicast(cluster):
    """Loads of Q and dO, in boxes of 64 columns, and the two releases of each; never K or V."""
    with emulator.gpu(ARCH):
        ptx = compiled._build(Variant(ARCH, "bfloat16", 128, 64, cluster=cluster), "emulated").ptx
    (kernel,) = (k for k in parse(ptx).kernels.values() if k.reqntid == (THREADS, 1, 1) and "Backward" in k.name)
    words = [i.modifiers for i in kernel.instructions if "multicast::cluster" in i.modifiers]
    copies = sum("tensor" in modifiers for modifiers in words)
    assert (copies, len(words) - copies) == ((0, 0) if cluster == 1 else (3, 4))
