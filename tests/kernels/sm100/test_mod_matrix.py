"""Score functions, masks and block masks with everything else: configurations in which every two levels meet.

CI runs a sample; `pytest -m full` the rest too.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.layout import Rows
from kernels.sm100.pairwise import all_pairs, cover, extend, pairs_of
from kernels.sm100.runs import Run
from kernels.sm100.test_blocks import of_lists
from refluent.gpu.plans.sm100 import backward_plan
from refluent.mods import library

pytestmark = pytest.mark.emulator
STATIC = {
    "dtype": (torch.bfloat16, torch.float16),
    "dims": ((64, 64), (128, 128), (32, 96), (192, 128), (256, 256)),
    "score": (
        "none", "alibi", "alibi fixed", "relative", "t5", "bias", "bias shared", "temperature", "labels", "tanh",
        "rows",
    ),
    "mask": ("none", "documents", "prefix", "dilated", "sink window"),
    "blocks": ("none", "16 by 48", "128", "80 by 256", "lists alone"),
    "heads": ("mha", "group 2", "mqa 4"),
    "sides": ("none", "right", "both"),
    "layout": ("dense", "used", "packed"),
    "softcap": (False, True),
    "dropout": (False, True),
    "deterministic": (False, True),
    "dlse": (False, True),
    "sink": (False, True),
}  # fmt: skip
RUNTIME = {
    "size": ("odd", "long k", "few", "one row"),
    "lengths": ("all", "middle empty"),
    "captured": ("contiguous", "turned", "sliced"),
    "window": ("wide", "narrow"),
    "ctas": (0, 3),
}
EACH = 3
TABLE = {**STATIC, **RUNTIME}


def rows():
    return extend([variant for variant in cover(STATIC) for _ in range(EACH)], STATIC, RUNTIME)


def level(row, name):
    return TABLE[name][row[name]]


def captured(row, *shape, dtype=torch.float32, scale=1.0):
    """Random numbers, laid out as the level says."""
    kind = level(row, "captured")
    made = torch.randn(shape) * scale
    if kind == "turned":
        made = made.to(dtype).movedim(0, -1).contiguous().movedim(-1, 0)
    if kind == "sliced":
        made = torch.stack([made, torch.full(shape, torch.nan)], -1).to(dtype)[..., 0]
    return made.to(dtype).requires_grad_()


def score_mod(row, batch, heads, q, k):
    def of(*shape, **more):
        return captured(row, *shape, **more)

    kind = level(row, "score")
    if kind == "temperature":
        gain, cold = of(), of(heads, dtype=torch.bfloat16)
        return lambda s, b, h, i, j: s * (1 + 0.1 * gain) + s * torch.sigmoid(cold[h])
    if kind == "labels":
        names, affinity = torch.randint(0, 4, (batch, max(q, k)), dtype=torch.int32), of(4, 4)
        return lambda s, b, h, i, j: s + affinity[names[b, i], names[b, j]]
    if kind == "rows":
        row_bias, key_bias = of(batch, q), of(k, heads, dtype=torch.float16)
        return lambda s, b, h, i, j: s * torch.tanh(row_bias[b, i]) + key_bias[j, h]
    return {
        "none": lambda: None,
        "alibi": lambda: library.alibi(of(heads, scale=0.02)),
        "alibi fixed": lambda: library.alibi(library.alibi_slopes(heads)),
        "relative": lambda: library.relative_bias(of(heads, 61)),
        "t5": lambda: library.t5_bias(of(16, heads)),
        "bias": lambda: library.additive_bias(of(batch, heads, q, k)),
        "bias shared": lambda: library.additive_bias(of(1, 1, q, k, dtype=torch.bfloat16)),
        "tanh": lambda: library.softcap(1.5),
    }[kind]()


def mask_mod(row, batch, q, k):
    return {
        "none": lambda: None,
        "documents": lambda: library.document_mask(torch.randint(0, 3, (batch, q)), torch.randint(0, 3, (k,))),
        "prefix": lambda: library.prefix_lm(torch.randint(0, k, (batch,), dtype=torch.int32)),
        "dilated": lambda: library.dilated(3),
        "sink window": lambda: library.sink_window(7, 90, shift=k - q),
    }[level(row, "mask")]()


def block_mask(row, batch, heads, q, k):
    kind = level(row, "blocks")
    if kind == "none":
        return None
    if kind == "lists alone":
        return of_lists(torch.rand(1, heads, -(-q // 32), -(-k // 64)) < 0.5, (32, 64))
    size = {"16 by 48": (16, 48), "128": 128, "80 by 256": (80, 256)}[kind]

    def stripes(b, h, i, j):
        return (i + b * 30) // 90 % 2 == (j + 20 * h) // 110 % 2

    return rf.create_block_mask(stripes, batch, heads if kind == "128" else None, q, k, BLOCK_SIZE=size)


def prepare(number, row) -> Run:
    torch.manual_seed(2000 + number)
    (d, dv), dtype = level(row, "dims"), level(row, "dtype")
    plan = backward_plan(d, dv)
    m, n = plan.tile_m, plan.tile_n
    q, k = {"odd": (m + 37, n + 61), "long k": (m + 9, 2 * n + 3), "few": (m + 1, 17), "one row": (1, n + 5)}[
        level(row, "size")
    ]
    group = {"mha": 1, "group 2": 2, "mqa 4": 4}[level(row, "heads")]
    heads_kv = 1 if group == 4 else 2
    heads, layout = group * heads_kv, level(row, "layout")
    sides = [Rows(size, (size, size)) for size in (q, k)]
    if layout != "dense":
        lengths = [(size, 0 if level(row, "lengths") == "middle empty" else size // 2, min(size, 9)) for size in (q, k)]
        sides = [Rows(max(own), own, own if layout == "packed" else None) for own in lengths]
    queries, keys = sides
    batch = queries.batch
    left, right = {"none": (None, None), "right": (None, 0), "both": (130, 41)}[level(row, "sides")]
    if left and level(row, "window") == "narrow":
        left, right = 33, 0
    options = {"window": (left, right), "deterministic": level(row, "deterministic")}
    options |= {"score_mod": score_mod(row, batch, heads, q, k), "mask_mod": mask_mod(row, batch, q, k)}
    options |= {"block_mask": block_mask(row, batch, heads, q, k)}
    if level(row, "softcap"):
        options["softcap"] = 1.7
    if level(row, "dropout"):
        options |= {"dropout_p": 0.2, "dropout_seed": number, "dropout_offset": 5}
    if level(row, "sink"):
        options["sink"] = torch.randn(heads)
    for name, side in (("q", queries), ("k", keys)):
        if side.seqused() is not None:
            options[f"seqused_{name}"] = side.seqused()
        if side.packed:
            options |= {f"cu_seqlens_{name}": side.cu_seqlens(), f"max_seqlen_{name}": side.seqlen}
    tensors = (
        queries.tensor(heads, dv, dtype), queries.tensor(heads, d, dtype), keys.tensor(heads_kv, d, dtype),
        keys.tensor(heads_kv, dv, dtype),
    )  # fmt: skip
    return Run(*tensors, queries.statistic(heads) if level(row, "dlse") else None, options, level(row, "ctas"))


def name_of(number, row):
    words = [f"{number:03}"] + [str(level(row, n)) for n in ("dims", "score", "mask", "blocks", "heads", "layout")]
    words += [n for n in ("softcap", "dropout", "deterministic", "dlse", "sink") if level(row, n)]
    return "-".join(words).replace(" ", "_")


def cases():
    return [
        pytest.param(number, row, id=name_of(number, row), marks=() if number % 64 == 0 else pytest.mark.full)
        for number, row in enumerate(rows())
    ]


@pytest.mark.parametrize(("number", "row"), cases())
def test_gradients(number, row, record_errors):
    """By the accuracy rule; and captured tensors' as the torch backend has them, from the same o and lse."""
    run = prepare(number, row)
    same = rf.attention_backward(
        run.do, run.q, run.k, run.v, run.o, run.lse, dlse=run.dlse, backend="torch", **run.options
    )
    for schedule, seed in (("fair", 0), ("random", 2 * number), ("random", 2 * number + 1)):
        made = run(schedule, seed)
        record_errors(run.q.dtype, run.check(made))
        assert made.dcaptured.keys() == same.dcaptured.keys()
        for name, grad in made.dcaptured.items():
            expected = same.dcaptured[name].double()
            assert torch.linalg.vector_norm(grad - expected) <= 0.02 * torch.linalg.vector_norm(expected), name


def test_every_pair_of_levels_meets():
    made = rows()
    assert len(made) >= 150
    assert all_pairs(TABLE) == {pair for row in made for pair in pairs_of(row, list(TABLE))}
