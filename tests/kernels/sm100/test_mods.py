"""score_mod and mask_mod in the Blackwell backward, with the gradients of what they read, against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import refluent as rf
from kernels.layout import Rows
from kernels.sm100.runs import Run
from mods.test_random import TREES, evaluate
from refluent.mods import library

pytestmark = pytest.mark.emulator
BF16, FP16 = torch.bfloat16, torch.float16
CLOSE = 0.02
SCHEDULES = (("fair", 0), ("random", 1), ("random", 2))


def call(queries, keys, heads=2, heads_kv=2, d=32, dv=32, dtype=BF16, ctas=0, dlse=False, **options) -> Run:
    torch.manual_seed(11)
    if isinstance(queries, int):
        queries = Rows(queries, (queries,) * 2)
    if isinstance(keys, int):
        keys = Rows(keys, (keys,) * 2)
    q, do = queries.tensor(heads, d, dtype), queries.tensor(heads, dv, dtype)
    k, v = keys.tensor(heads_kv, d, dtype), keys.tensor(heads_kv, dv, dtype)
    for name, rows in (("q", queries), ("k", keys)):
        if rows.seqused() is not None:
            options[f"seqused_{name}"] = rows.seqused()
        if rows.packed:
            options |= {f"cu_seqlens_{name}": rows.cu_seqlens(), f"max_seqlen_{name}": rows.seqlen}
    return Run(do, q, k, v, queries.statistic(heads) if dlse else None, options, ctas)


def packed(*lengths):
    return Rows(max(lengths), lengths, lengths)


def learned(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def check(run: Run, schedules=SCHEDULES, record=None):
    """By the accuracy rule; captured tensors, whose rule is wide, by backend "torch" with the same o and lse too."""
    same = rf.attention_backward(
        run.do, run.q, run.k, run.v, run.o, run.lse, dlse=run.dlse, backend="torch", **run.options
    )
    for schedule, seed in schedules:
        made = run(schedule, seed)
        errors = run.check(made)
        if record is not None:
            record(run.q.dtype, errors)
        for name, grad in made.dcaptured.items():
            expected = same.dcaptured[name].double()
            error, size = torch.linalg.vector_norm(grad.double() - expected), torch.linalg.vector_norm(expected)
            assert error <= CLOSE * size, f"{name}: {error} of {size}"


def in_ci(names, sample):
    return [pytest.param(name, marks=() if name in sample else pytest.mark.full) for name in names]


LIBRARY = {
    "alibi": lambda: {"score_mod": library.alibi(learned(2)), "causal": True},
    "alibi, fixed": lambda: {"score_mod": library.alibi(library.alibi_slopes(2))},
    "relative bias": lambda: {"score_mod": library.relative_bias(learned(2, 41, dtype=BF16))},
    "t5": lambda: {"score_mod": library.t5_bias(learned(32, 2))},
    "t5, one direction": lambda: {"score_mod": library.t5_bias(learned(16, 2), bidirectional=False), "causal": True},
    "additive bias": lambda: {"score_mod": library.additive_bias(learned(2, 2, 140, 150))},
    "additive bias, shared": lambda: {"score_mod": library.additive_bias(learned(1, 1, 140, 150, dtype=BF16))},
    "softcap": lambda: {"score_mod": library.softcap(1.3), "scale": 0.4},
    "documents": lambda: {"mask_mod": library.document_mask(torch.arange(140) // 33, torch.arange(150) // 35)},
    "documents of each sequence": lambda: {
        "mask_mod": library.document_mask(
            torch.randint(0, 3, (2, 140), dtype=torch.int32), torch.randint(0, 3, (2, 150), dtype=torch.int32)
        )
    },
    "prefix": lambda: {"mask_mod": library.prefix_lm(torch.tensor([20, 133]), shift=10)},
    "sink window": lambda: {"mask_mod": library.sink_window(5, 40)},
    "dilated": lambda: {"mask_mod": library.dilated(3, shift=10)},
}


SAMPLE = {"alibi", "relative bias", "t5", "additive bias", "softcap", "documents of each sequence", "dilated"}


@pytest.mark.parametrize("name", in_ci(LIBRARY, SAMPLE))
def test_library(name, record_errors):
    torch.manual_seed(3)
    check(call(140, 150, **LIBRARY[name]()), record=record_errors)


def gathered(kind, affinity, temperature):
    """One label a token as the index of another read; a 0-d tensor."""

    def fn(s, b, h, i, j):
        return s * temperature + affinity[kind[b, i], kind[b, j]]

    return fn


def of_rows(rows):
    return lambda s, b, h, i, j: s + rows[i, h].tanh()


def of_keys(keys):
    return lambda s, b, h, i, j: s + keys[b, j] * 2


def of_both(rows, keys):
    return lambda s, b, h, i, j: torch.where(i > j, s * torch.sigmoid(rows[h, i]), s + keys[j])


def of_everything(slope, row, key, table):
    def fn(s, b, h, i, j):
        return s * (1 + 0.1 * row[b, i]) + slope[h] * s.tanh() + key[h, j] + table[(i + 2 * j) % 7, h]

    return fn


READS = {
    "labels": lambda: gathered(torch.randint(0, 3, (2, 150)), learned(3, 3), learned()),
    "rows": lambda: of_rows(learned(2, 140).t()),
    "keys": lambda: of_keys(learned(2, 150, dtype=FP16)),
    "both": lambda: of_both(learned(2, 140), learned(150, dtype=torch.float64)),
    "everything": lambda: of_everything(learned(4), learned(2, 200), learned(4, 300), learned(7, 4)),
}


WAYS = [f"{name}{exact}" for name in READS for exact in ("", ", exact")]


@pytest.mark.parametrize("way", in_ci(WAYS, {"everything", "labels, exact"}))
def test_gradients_of_reads(way, record_errors):
    """Exact sums are those of a deterministic call."""
    torch.manual_seed(3)
    name, _, deterministic = way.partition(", ")
    run = call(140, 150, score_mod=READS[name](), window=(90, 30), deterministic=bool(deterministic), dlse=True)
    check(run, record=record_errors)


def test_deterministic_gradients_of_reads():
    """The same bits under every schedule, of sums in registers, over a warp and score by score."""
    torch.manual_seed(3)
    run = call(
        Rows(200, (200,)), Rows(300, (300,)), 4, 2, score_mod=READS["everything"](), causal=True, deterministic=True
    )
    first = run()
    run.check(first)
    for seed in range(4):
        again = run("random", seed, num_sms=(8, 2, 3)[seed % 3])
        assert all(torch.equal(first.dcaptured[name], grad) for name, grad in again.dcaptured.items())
        assert torch.equal(first.dq, again.dq)


def everything(bias, documents):
    def score(s, b, h, i, j):
        return 3 * torch.tanh(s / 3) + bias[b, h % 2, i, j] * 0.5

    return {"score_mod": score, "mask_mod": lambda b, h, i, j: (documents[b, i] == documents[b, j]) | (j % 5 == 0)}


TOGETHER = {
    "packed, grouped": lambda: call(
        packed(140, 0, 60), packed(150, 30, 10), 4, 2, dropout_p=0.2, dropout_seed=5, dropout_offset=9,
        softcap=2.5, dlse=True, window=(100, 20), sink=torch.randn(4), deterministic=True,
        **everything(learned(3, 2, 160, 160), torch.randint(0, 3, (3, 160))),
    ),
    "used, causal": lambda: call(
        Rows(170, (140, 33)), Rows(180, (171, 0)), 3, 1, dtype=FP16, causal=True, softcap=1.5, ctas=2,
        **everything(learned(2, 2, 180, 180).transpose(2, 3), torch.randint(0, 3, (2, 180), dtype=torch.int16)),
    ),
    "192 and 128": lambda: call(
        90, 150, d=192, dv=128, dropout_p=0.3, dropout_seed=1, dropout_offset=0,
        **everything(learned(2, 2, 150, 150, dtype=BF16), torch.randint(0, 3, (2, 150), dtype=torch.uint8)),
    ),
    "256": lambda: call(
        90, 100, 2, 1, d=256, dv=256, deterministic=True,
        **everything(learned(2, 2, 100, 100), torch.randint(0, 2, (2, 100)).bool()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", in_ci(TOGETHER, {"packed, grouped", "192 and 128"}))
def test_together(name, record_errors):
    torch.manual_seed(4)
    check(TOGETHER[name](), record=record_errors)


@pytest.mark.parametrize(
    ("scale", "softcap"),
    [
        pytest.param(scale, cap, marks=() if bool(cap) == (scale == 0) else pytest.mark.full)
        for scale in (-0.3, 0.0)
        for cap in (None, 1.5)
    ],
)
def test_scales_that_are_not_positive(scale, softcap):
    """What a mask hides has no weight, before and behind a function of the scores."""
    torch.manual_seed(5)
    more = {"mask_mod": lambda b, h, i, j: (i + j) % 3 > 0, "causal": True, "scale": scale, "softcap": softcap}
    check(call(40, 50, **more), SCHEDULES[:1])
    check(call(40, 50, score_mod=library.alibi(learned(2)), **more), SCHEDULES[:1])


def test_rows_that_see_nothing_by_a_mask():
    """NaN in their do reaches nothing."""
    torch.manual_seed(5)
    run = call(140, 150, score_mod=library.alibi(learned(2)), mask_mod=lambda b, h, i, j: (i % 50 > 3) & (i >= j))
    expected = run()
    run.do[:, torch.arange(140) % 50 <= 3] = float("nan")
    made = run()
    assert all(torch.equal(one, other) for one, other in zip(made[:3], expected[:3]))


def test_nothing_comes_from_masked_positions():
    """Neither NaN nor inf, of the function, of its derivative, of what it reads there."""
    torch.manual_seed(5)
    poison = torch.randn(2, 140, 150)
    poison[:, torch.arange(150) > torch.arange(140)[:, None]] = float("nan")
    poison.requires_grad_()
    gain = torch.tensor(1.0, requires_grad=True)

    def fn(s, b, h, i, j):
        return s * gain * torch.sqrt((i - j).float()) + poison[h, i, j] + torch.where(j > 100, s / (j <= i), s)

    check(call(140, 150, score_mod=fn, mask_mod=lambda b, h, i, j: j < i))
    check(call(140, 140, score_mod=lambda s, b, h, i, j: (s * (i >= j)).abs().sqrt() / (i >= j), causal=True))


def test_no_derivative_where_no_gradient_arrives():
    """An infinite slope where ds is 0 adds nothing."""
    torch.manual_seed(5)
    gain = torch.ones(40, requires_grad=True)
    for factor in (1.0, gain):

        def steep(s, b, h, i, j, factor=factor):
            s = s * (factor if isinstance(factor, float) else factor[i])
            return ((s * (i >= 7)).abs() + (i >= 7)).sqrt()

        run = call(40, 50, score_mod=steep)
        run.do[:, :7] = 0
        made = run()
        assert not made.dq[:, :7].any()
        assert made.dq[:, 7:].isfinite().all()
        assert made.dk.isfinite().all()
        assert all(grad.isfinite().all() and not grad[:7].any() for grad in made.dcaptured.values())


def test_a_function_of_positions_alone():
    """No gradient goes back to q and k, and one does to what is read."""
    torch.manual_seed(5)
    table = learned(2, 7)
    run = call(40, 50, score_mod=lambda s, b, h, i, j: s * 0 + table[h, (i + j) % 7])
    alone = call(40, 50, score_mod=lambda s, b, h, i, j: table[h, (i + j) % 7])
    made = alone()
    assert not made.dq.any()
    assert not made.dk.any()
    run.expected.check_backward(dv=made.dv, dcaptured=made.dcaptured)


class Tree:
    """An expression of test_random.py over tensors of its own."""

    def __init__(self, tree):
        self.tree = tree
        self.slope = learned(2)
        self.bias = learned(2, 2, 64, 64).transpose(2, 3)
        self.table = learned(7, 2)
        self.gain = learned()
        self.bucket = torch.randint(0, 7, (64,), dtype=torch.int32)

    def __call__(self, s, b, h, i, j):
        read = {"slope": self.slope, "bias": self.bias, "table": self.table, "gain": self.gain, "bucket": self.bucket}
        return evaluate(self.tree, {**read, "s": s, "b": b, "h": h, "i": i, "j": j}) + 0 * s


def check_random(tree, seed, deterministic, softcap):
    torch.manual_seed(seed)
    check(call(40, 50, score_mod=Tree(tree), deterministic=deterministic, softcap=softcap), SCHEDULES[:2])


RANDOM = {
    "tree": TREES, "seed": st.integers(0, 1000), "deterministic": st.booleans(), "softcap": st.sampled_from([None, 1.7])
}  # fmt: skip


@settings(max_examples=2, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(**RANDOM)
def test_random_mods(tree, seed, deterministic, softcap):
    check_random(tree, seed, deterministic, softcap)


@pytest.mark.full
@settings(max_examples=40, deadline=None, phases=(Phase.generate,))
@given(**RANDOM)
def test_more_random_mods(tree, seed, deterministic, softcap):
    check_random(tree, seed, deterministic, softcap)
