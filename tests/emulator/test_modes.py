"""Arguments of emulator.gpu() that choose among what a chip may do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from emulator.kernels import gemm_sm90  # noqa: E402
from refluent import emulator  # noqa: E402

pytestmark = pytest.mark.emulator
N = 128


@cute.kernel
def _exponentials(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = cute.math.exp2(x[thread], fastmath=True)


@cute.jit
def exponentials(x: cute.Tensor, y: cute.Tensor):
    _exponentials(x, y).launch(grid=[1, 1, 1], block=[N, 1, 1])


def test_approximations_are_exact_or_perturbed_by_seed():
    x = torch.linspace(-4, 4, N)
    results = []
    for options in ({}, {"approx": "perturbed"}, {"approx": "perturbed"}, {"approx": "perturbed", "seed": 1}):
        y = torch.empty(N)
        with emulator.gpu("sm_90a", **options):
            exponentials(from_dlpack(x), from_dlpack(y))
        results.append(y)
    exact, first, again, other = results
    torch.testing.assert_close(exact, torch.exp2(x), rtol=1.2e-7, atol=0)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, exact)
    torch.testing.assert_close(first, exact, rtol=2.0**-21, atol=0)


def test_accumulator_cuts_where_the_published_model_does():
    a, b = (torch.randn(64, 64).bfloat16() for _ in range(2))
    results = {}
    for accumulator in ("fp32", "truncate"):
        c = torch.empty(64, 64)
        with emulator.gpu("sm_90a", accumulator=accumulator):
            gemm_sm90.Gemm((64, 64, 64), 2)(*(from_dlpack(x, assumed_align=16) for x in (a, b, c)))
        results[accumulator] = c
    exact = a.double() @ b.double().t()
    assert not torch.equal(*results.values())
    for c in results.values():
        torch.testing.assert_close(c.double(), exact, rtol=0, atol=1e-4)
    # Four steps that cut towards zero: what is left out has the sum's sign more often than not.
    short = {}
    for accumulator, c in results.items():
        error = (exact - c) * exact.sign()
        short[accumulator] = (error[error != 0] > 0).double().mean()
    assert short["truncate"] > 0.6
    assert abs(short["fp32"] - 0.5) < 0.06


@cute.kernel
def _tickets(counter: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread == 0:
        y[block] = cute.arch.atomic_add(counter.iterator, cutlass.Int32(1))


@cute.jit
def tickets(counter: cute.Tensor, y: cute.Tensor):
    _tickets(counter, y).launch(grid=[y.shape[0], 1, 1], block=[32, 1, 1], smem=200 * 1024)


def order_of_ctas(**options):
    counter, y = torch.zeros(1, dtype=torch.int32), torch.empty(24, dtype=torch.int32)
    with emulator.gpu("sm_90a", num_sms=2, **options):
        tickets(from_dlpack(counter), from_dlpack(y))
    return y.argsort().tolist()


def test_ctas_start_in_the_order_that_is_asked_for():
    assert order_of_ctas() == list(range(24))
    assert order_of_ctas(cta_order="reverse") == list(range(24))[::-1]
    shuffled = order_of_ctas(cta_order="random", seed=3)
    assert sorted(shuffled) == list(range(24))
    assert shuffled == order_of_ctas(cta_order="random", seed=3)
    assert shuffled != order_of_ctas(cta_order="random", seed=4)


@cute.kernel
def _through(x: cute.Tensor, y: cute.Tensor, fenced: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    tile = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(4 * N), byte_alignment=128)
    load = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), cutlass.Float32, num_bits_per_copy=128
    )
    store = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), cutlass.Float32, num_bits_per_copy=4 * N * 32)
    cute.copy(load, cute.local_tile(x, (4,), (thread,)), cute.local_tile(tile, (4,), (thread,)))
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    if cutlass.const_expr(fenced):
        cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if thread == 0:
        cute.copy(store, tile, y)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def through(x: cute.Tensor, y: cute.Tensor, fenced: cutlass.Constexpr):
    _through(x, y, fenced).launch(grid=[1, 1, 1], block=[N, 1, 1])


@pytest.mark.parametrize(
    ("checks", "fenced", "found"),
    [("all", False, []), (("all", "cp.async"), False, ["cp.async"]), (("all", "cp.async"), True, [])],
)
def test_cp_async_needs_a_proxy_fence_if_asked_for(checks, fenced, found):
    x, y = torch.randn(4 * N), torch.empty(4 * N)
    with emulator.gpu("sm_90a", checks=checks, on_finding="record") as chip:
        through(from_dlpack(x, assumed_align=16), from_dlpack(y, assumed_align=16), fenced)
    assert [finding.kind for finding in chip.report().findings] == found
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("option", "value"), [("accumulator", "exact"), ("approx", "sloppy"), ("cta_order", "forward"), ("schedule", "bad")]
)
def test_unknown_modes_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*'{value}'"):
        emulator.gpu("sm_90a", **{option: value})
