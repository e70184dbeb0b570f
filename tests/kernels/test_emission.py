"""Mods as device code, one thread a score: values and gradients against torch's own, operation by operation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cutlass
import cutlass.cute as cute
from hypothesis import given, settings
from hypothesis import strategies as st

import refluent.mods as mods
from mods.test_random import SIZES, TREES, evaluate, oracle
from refluent import emulator
from refluent.gpu.device import arithmetic
from refluent.gpu.device.arithmetic import Source
from refluent.gpu.launch import fakes
from refluent.gpu.launch.call import pass_captured
from refluent.gpu.sm100.backward.context import tuple_of
from refluent.mods.emit import TABLE, Position, ScoreMod, refusal

pytestmark = pytest.mark.emulator
COUNT = 2 * 2 * 5 * 6  # scores of SIZES
THREADS = 128


class Probe:
    """Runs a score_mod, and its gradient where `backward`, for every score of SIZES."""

    def __init__(self, mod, backward):
        self.mod = ScoreMod(mod, [c.differentiable and backward for c in mod.captured], False, arithmetic)
        self.backward = backward

    @cute.jit
    def __call__(
        self, score: cute.Tensor, g: cute.Tensor, captured: tuple | None, value: cute.Tensor, grads: cute.Tensor, stream
    ):
        self.kernel(score, g, tuple_of(captured), value, grads).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, score: cute.Tensor, g: cute.Tensor, captured: tuple, value: cute.Tensor, grads: cute.Tensor):
        at, _, _ = cute.arch.thread_idx()
        if at < COUNT:
            self.one(score, g, captured, value, grads, at)

    def one(self, score, g, captured, value, grads, at):
        _, heads, rows, keys = SIZES
        j, rest = at % keys, at // keys
        i, rest = rest % rows, rest // rows
        place = Position(rest // heads, rest % heads, i, j)
        mod, sources = self.mod, [Source(t, d) for t, d in zip(captured, self.mod.dtypes, strict=True)]
        nodes = mod.forward.column(mod.forward.shared(place, sources), i, score[at])
        value[at] = mod.forward.value(nodes, mod.result, "f32")
        if self.backward:
            nodes = mod.backward.column(mod.backward.shared(place, sources), i, score[at], g[at])
            outputs = [mod.dscore, *(s.value for s in mod.scatters)]
            for row, node in enumerate(outputs):
                grads[row, at] = cutlass.Float32(0) if node is None else mod.backward.value(nodes, node, "f32")


def run(traced, score, g, backward=True):
    """value, dscore and the gradient of each read that has one, of SIZES."""
    assert refusal(traced.mod) is None
    probe = Probe(traced.mod, backward)
    kind = cutlass.Float32
    value, grads = torch.zeros(COUNT), torch.zeros(1 + len(probe.mod.scatters), COUNT)
    plane = fakes.make_fake_tensor(kind, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
    with emulator.gpu("sm_100a"):
        compiled = cute.compile(
            probe,
            fakes.vector(kind),
            fakes.vector(kind),
            tuple(fakes.captured(c.dtype, c.ndim) for c in traced.mod.captured) or None,
            fakes.vector(kind),
            plane,
            fakes.stream(),
            options=fakes.TVM_FFI,
        )
        captured = pass_captured(traced.captured, traced.mod)
        compiled(score.reshape(-1), g.reshape(-1), captured or None, value, grads)
    return value.view(SIZES), grads.view(-1, *SIZES)


def inputs(seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(SIZES, generator=random) * 2, torch.randn(SIZES, generator=random)


def compare(fn, **tolerance):
    """Against torch on broadcast tensors; the derivative by torch's autograd."""
    mods.clear_cache()
    score, g = inputs()
    value, grads = run(mods.score_mod(fn), score, g)
    at = [torch.arange(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(SIZES)]
    leaf = score.clone().requires_grad_()
    expected = (fn(leaf, *at) + 0 * leaf).float()
    tolerance = {"rtol": 2e-6, "atol": 2e-6, "equal_nan": True, **tolerance}
    torch.testing.assert_close(value, expected.detach(), **tolerance)
    (ds,) = torch.autograd.grad(expected, leaf, g)
    torch.testing.assert_close(grads[0], ds, **tolerance)


SMOOTH = {
    "exponentials": lambda s, b, h, i, j: torch.exp(s) + torch.exp2(-s) + 2.5**s,
    "logarithms": lambda s, b, h, i, j: torch.log(s) + torch.log2(s.abs()) + torch.log10(s * s + 1),
    "roots": lambda s, b, h, i, j: s.abs().sqrt() + s.rsqrt() + s.reciprocal() + s**0.5,
    "powers": lambda s, b, h, i, j: s**2 - s**3 + s**4 * 0.1 + s**-1 + s.square() + s.abs() ** 1.3 + s**-3.0,
    "hyperbolic": lambda s, b, h, i, j: torch.tanh(s) + torch.sigmoid(3 * s) + torch.nn.functional.silu(s),
    "softplus": lambda s, b, h, i, j: torch.nn.functional.softplus(s * 9) + torch.nn.functional.logsigmoid(s),
    "kinks": lambda s, b, h, i, j: s.abs() + s.relu() - s.clamp(-1, 0.5) + torch.maximum(s, s * s) + s.clamp(min=1.0),
    "choices": lambda s, b, h, i, j: torch.where(j > i, s, -s / 3).masked_fill(j == 2, 0.5) + s.sign() * s.sgn(),
    "sums": lambda s, b, h, i, j: 1 - s + torch.add(s, s, alpha=3) - torch.sub(s, i, alpha=2) + torch.addcmul(s, s, s),
    "steps": lambda s, b, h, i, j: s.floor() + s.ceil() * s + s.trunc() + s.round() + torch.lerp(s, s * s, 0.3),
    "divisions": lambda s, b, h, i, j: (
        s / 3 + s / (1 + s * s) + s % 0.7 + (i.float() / 7) // 0.3 + (s * 7).detach() // 1.5
    ),
    "16 bits": lambda s, b, h, i, j: s.half() * 1.1 + s.bfloat16().float() * 3 + (i / 3).half() + s.double() * 2,
    "no number": lambda s, b, h, i, j: torch.where(torch.isnan(s.sqrt()), s, 2 * s) + torch.isinf(1 / (s * 0)) * 1.0,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_functions_of_scores(name):
    compare(SMOOTH[name], rtol=1e-5)


BIG = 1 << 33
WHOLE = {
    "floor division": lambda s, b, h, i, j: (i - j) // 3 + (j - 3 * i) // -4 * 100,
    "remainder": lambda s, b, h, i, j: (i - j) % 3 + (j - 3 * i) % -4 * 100,
    "truncated": lambda s, b, h, i, j: torch.div(i - 2 * j, 3, rounding_mode="trunc"),
    "floored": lambda s, b, h, i, j: torch.div(i - 2 * j, h + 3, rounding_mode="floor") + (i - 4) % (b + 2),
    "shifts": lambda s, b, h, i, j: ((i - j) >> 1) + ((j + 1) << 3) + ((i + 9) >> j) + (3 << i),
    "bits": lambda s, b, h, i, j: ((i | 5) ^ (j & 3)) + (~i & 12) + (-i | j),
    "choices": lambda s, b, h, i, j: torch.minimum(i, 2 * j).clamp(1, 4) + (i - j).abs() + torch.maximum(b, h) ** 2,
    "comparisons": lambda s, b, h, i, j: ((i < j) | (h == 1) & ~(j >= 3)) * 2 + (i != j) + (i <= 2) * (j > 1),
    "logic": lambda s, b, h, i, j: torch.logical_or(torch.logical_not(i), j > 3) + torch.logical_xor(i > 2, j) * 4,
    "types": lambda s, b, h, i, j: (i * 77).to(torch.int8) + (j * 99).to(torch.uint8) + (s * 30).to(torch.int32),
    "64 bits": lambda s, b, h, i, j: ((i * BIG + j * 5) // 7) % 1001 + ((j * BIG) >> 31) + (i * BIG > j * BIG),
    "wraps": lambda s, b, h, i, j: (i.to(torch.int32) * 1_500_000_000 + 7) % 1000,
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(name):
    """Exact: what comes out is small enough for float32."""
    compare(lambda s, b, h, i, j: s + WHOLE[name](s, b, h, i, j), rtol=1e-7, atol=0)


TENSORS = {
    dtype: (torch.randn(2, 5) * 40).to(dtype).requires_grad_(dtype.is_floating_point)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    )
} | {
    dtype: torch.randint(100, 250, (2, 5)).to(dtype) for dtype in (torch.uint8, torch.uint16, torch.uint32)
} | {torch.bool: torch.rand(2, 5) > 0.5}  # fmt: skip


@pytest.mark.parametrize("dtype", TENSORS, ids=str)
def test_types_of_captured_tensors(dtype):
    tensor = TENSORS[dtype]
    if dtype in (torch.uint16, torch.uint32):
        tensor = (tensor.long() + torch.iinfo(dtype).max - 250).to(dtype)
    mods.clear_cache()
    traced = mods.score_mod(lambda s, b, h, i, j: s * 0 + tensor[h, i].to(torch.float32))
    value, grads = run(traced, *inputs(), backward=tensor.is_floating_point())
    expected = tensor.detach().to(torch.float32)[None, :, :, None].expand(SIZES)
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    if tensor.is_floating_point():
        torch.testing.assert_close(grads[1], inputs()[1], rtol=0, atol=0)


def test_indices():
    """Negative ones count from the end; ones outside are moved to the nearest; any strides; 0-d tensors."""
    table, gain = torch.arange(12.0).view(3, 4).t(), torch.tensor(0.5)
    whole = torch.tensor([3, -1, 2, 900, -77], dtype=torch.int64)

    def fn(s, b, h, i, j):
        return s * gain + table[-1 - h, 2] + 100 * table[whole[i], -3] + 10_000 * table[j - 2, j - i]

    mods.clear_cache()
    score, g = inputs()
    value, _ = run(mods.score_mod(fn), score, g)
    _, h, i, j = (torch.arange(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(SIZES))
    row, distance = whole[i].clamp(-4, 3), (j - i).clamp(-3, 2)
    expected = score * gain + table[-1 - h, 2] + 100 * table[row, 0] + 10_000 * table[(j - 2).clamp(-4, 3), distance]
    torch.testing.assert_close(value, expected.float(), rtol=1e-6, atol=0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(tree=TREES, seed=st.integers(0, 1000))
def test_random_mods(tree, seed):
    random = torch.Generator().manual_seed(seed)
    captured = {
        "slope": torch.randn(2, generator=random),
        "bias": torch.randn(2, 2, 6, 6, generator=random).transpose(2, 3),
        "table": torch.randn(7, 2, generator=random),
        "gain": torch.randn((), generator=random),
        "bucket": torch.randint(0, 7, (6,), generator=random, dtype=torch.int32),
    }
    mods.clear_cache()
    traced = mods.score_mod(lambda s, b, h, i, j: evaluate(tree, {**captured, "s": s, "b": b, "h": h, "i": i, "j": j}))
    score, g = inputs(seed)
    value, grads = run(traced, score, g)
    expected, ds, _ = oracle(tree, captured, score, g)
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[0].double(), ds, rtol=1e-4, atol=1e-4)


def test_the_table_is_whole():
    """Each entry is computed by a function that is there, and the tests above run it."""
    assert all(hasattr(arithmetic, function) for _, function in TABLE.values())
