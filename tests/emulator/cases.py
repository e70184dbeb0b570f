"""Every small kernel with inputs and the NumPy (or torch) answer: run inside a context, they raise if it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.runtime import from_dlpack

from emulator.kernels import (
    barriers,
    bulk,
    clusters,
    elementwise,
    fragments,
    gemm_sm90,
    gemm_sm100,
    reductions,
    scheduling,
    tma,
)
from emulator.placement import Placement
from refluent.emulator import cudart

BOTH = ("sm_90a", "sm_100a")


_compiled: dict[tuple[Case | None, str, str], Callable] = {}
_running: Case | None = None
_placement = Placement()


@dataclass(frozen=True)
class Case:
    name: str
    arches: tuple[str, ...]
    body: Callable[[], None]
    num_sms: int = 8  # multiprocessors of the chip that it is meant for

    def run(self, device: str = "cpu") -> Placement:
        """`device`: "cpu" inside a context of the emulator, "cuda" for a real one. Returns what the launches left."""
        global _running, _placement
        _running, _placement = self, Placement(device)
        self.body()
        return _placement


CASES: list[Case] = []


def launch(function, *arguments, static=()):
    """Call a @cute.jit function; compiled once for each case and architecture. `static`: its Constexpr arguments."""
    chip = cudart.active()
    key = (_running, getattr(function, "__qualname__", ""), chip.arch if chip else "device")
    if key not in _compiled:
        _compiled[key] = cute.compile(function, *arguments, *static)
    _compiled[key](*arguments)
    _placement.launched()


def case(*arches: str, num_sms: int = 8, **variants: dict) -> Callable:
    """Register a case, or one for each variant's keyword arguments."""

    def register(function):
        for name, arguments in (variants or {"": {}}).items():
            label = f"{function.__name__}-{name}" if name else function.__name__
            CASES.append(Case(label, arches or BOTH, lambda f=function, a=arguments: f(**a), num_sms))
        return function

    return register


def on_gpu(tensor):
    return from_dlpack(_placement.place(tensor.detach()), assumed_align=16)


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def close(got, expected, tolerance):
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)


@case()
def axpy():
    x, y = torch.randn(300), torch.randn(300)
    expected = 2.0 * x + y
    launch(elementwise.axpy, on_gpu(x), on_gpu(y), 2.0, 300)
    close(y, expected, 1e-6)


@case()
def row_sums():
    x, sums = torch.randn(6, 300), torch.empty(6)
    launch(reductions.row_sums, on_gpu(x), on_gpu(sums))
    close(sums, x.double().sum(1), 1e-4)


@case()
def total():
    x, result = torch.randint(-99, 99, (6, 300)).float(), torch.zeros(1)  # whole numbers: right in any order
    launch(reductions.total, on_gpu(x), on_gpu(result))
    same(result, x.sum()[None])


@case()
def ordered_total():
    x, result, turn = torch.randn(6, 128), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    launch(reductions.ordered_total, on_gpu(x), on_gpu(result), on_gpu(turn))
    close(result, x.double().sum()[None], 1e-4)
    assert turn.item() == 6


@case()
def bulk_copies():
    x, y = torch.randn(4 * bulk.TILE), torch.empty(4 * bulk.TILE)
    launch(bulk.double, on_gpu(x), on_gpu(y))
    same(y, 2 * x)


@case()
def bulk_reduce_in_turns():
    x, sums, turn = torch.randn(5, bulk.TILE), torch.zeros(bulk.TILE), torch.zeros(1, dtype=torch.int32)
    launch(bulk.accumulate, on_gpu(x), on_gpu(sums), on_gpu(turn))
    expected = torch.zeros(bulk.TILE)
    for row in x:
        expected += row
    same(sums, expected)


@case()
def named_barriers():
    x, y = torch.randn(7, barriers.HALF), torch.empty(7, barriers.HALF)
    launch(barriers.turns, on_gpu(x), on_gpu(y))
    same(y, x.flip(1))


@case()
def mbarrier_ring():
    x, y = torch.randn(11, barriers.HALF), torch.empty(11, barriers.HALF)
    launch(barriers.ring, on_gpu(x), on_gpu(y))
    same(y, x.flip(1))


@case()
def cp_async():
    x, y = torch.randn(5 * 512), torch.empty(5 * 512)
    launch(bulk.reverse_tiles, on_gpu(x), on_gpu(y))
    same(y.view(5, 512), x.view(5, 512).flip(1))


@case(two={"size": 2}, eight={"size": 8})
def rotate(size):
    x, y = torch.randn(16, clusters.THREADS), torch.empty(16, clusters.THREADS)
    launch(clusters.rotate, on_gpu(x), on_gpu(y), static=(size,))
    same(y, x.view(-1, size, clusters.THREADS).roll(1, 1).view(16, -1))


@case(two={"size": 2}, four={"size": 4})
def rotate_async(size):
    x = torch.randint(-(2**31), 2**31 - 1, (8, clusters.THREADS), dtype=torch.int32)
    y = torch.empty_like(x)
    launch(clusters.rotate_async, on_gpu(x), on_gpu(y), static=(size,))
    same(y, x.view(-1, size, clusters.THREADS).roll(1, 1).view(8, -1))


@case(two={"size": 2}, four={"size": 4})
def multicast(size):
    x, y = torch.randn(90, 32), torch.empty(size, 32)
    launch(clusters.Multicast(16, 32, size, 3).sums, on_gpu(x), on_gpu(y))
    close(y, x.double().sum(0) * torch.arange(1, size + 1)[:, None], 1e-3)


def tiles_of(x, tile):
    """The packed tiles of x, zero outside, as kernels.tma has them."""
    counts = [-(-n // t) for n, t in zip(x.shape, tile)]
    full = np.zeros([c * t for c, t in zip(counts, tile)], x.numpy().dtype)
    full[tuple(slice(0, n) for n in x.shape)] = x.numpy()
    packed = []
    for index in range(prod(counts)):
        place = np.unravel_index(index, counts, order="F")
        cut = tuple(slice(p * t, (p + 1) * t) for p, t in zip(place, tile))
        packed.append(full[cut].ravel(order="F"))
    return torch.from_numpy(np.stack(packed))


SWIZZLES = {
    "rank1": {"shape": (100,), "tile": (64,), "swizzle": 0},
    "plain": {"shape": (20, 24), "tile": (8, 16), "swizzle": 0},
    "swizzle32": {"shape": (20, 24), "tile": (16, 8), "swizzle": 32},
    "swizzle64": {"shape": (20, 40), "tile": (16, 16), "swizzle": 64},
    "swizzle128": {"shape": (20, 72), "tile": (16, 32), "swizzle": 128},
    "rank3": {"shape": (5, 20, 40), "tile": (2, 8, 32), "swizzle": 128},
    "rank4": {"shape": (3, 5, 7, 16), "tile": (2, 2, 3, 8), "swizzle": 32},
    "rank5": {"shape": (3, 4, 5, 7, 16), "tile": (2, 2, 3, 3, 8), "swizzle": 0},
}


def spaced(shape):
    """A tensor whose dimensions do not merge, with room around it that must stay as it is."""
    space = torch.full([n + 4 for n in shape], -7.0)
    x = space[tuple(slice(0, n) for n in shape)]
    x.copy_(torch.randn(shape))
    return space, x


@case(**SWIZZLES)
def tma_load(shape, tile, swizzle):
    _, x = spaced(shape)
    expected = tiles_of(x, tile)
    packed = torch.empty_like(expected)
    launch(tma.TileCopy(tile, swizzle).load, on_gpu(x), on_gpu(packed))
    same(packed, expected)


@case(**SWIZZLES)
def tma_store(shape, tile, swizzle):
    space, x = spaced(shape)
    new = torch.randn(shape)
    expected = space.clone()
    expected[tuple(slice(0, n) for n in shape)] = new
    launch(tma.TileCopy(tile, swizzle).store, on_gpu(tiles_of(new, tile)), on_gpu(x))
    same(space, expected)


@case(swizzle128=SWIZZLES["swizzle128"], rank3=SWIZZLES["rank3"])
def tma_reduce(shape, tile, swizzle):
    space, x = spaced(shape)
    new = torch.randn(shape)
    expected = space.clone()
    expected[tuple(slice(0, n) for n in shape)] += new
    launch(tma.TileCopy(tile, swizzle, reduce=True).store, on_gpu(tiles_of(new, tile)), on_gpu(x))
    same(space, expected)


def gemm(kernel, m, n, k, dtype=torch.bfloat16, a_major="k", b_major="k"):
    a = torch.randn(m, k).to(dtype) if a_major == "k" else torch.randn(k, m).to(dtype).t()
    b = torch.randn(n, k).to(dtype) if b_major == "k" else torch.randn(k, n).to(dtype).t()
    c = torch.full((m + 1, n), -7.0)
    _placement.accumulates(a, b, rows=m + 1)
    launch(kernel, on_gpu(a), on_gpu(b), on_gpu(c[:m]))
    close(c[:m], a.double() @ b.double().t(), 1e-4 * k**0.5)
    assert (c[m] == -7.0).all()


@case(
    "sm_90a",
    odd={"tile": (128, 64, 64), "sizes": (200, 72, 136)},
    mn_major={"tile": (128, 64, 64), "sizes": (136, 72, 100), "a_major": "m", "b_major": "n"},
    registers={"tile": (64, 96, 64), "sizes": (64, 96, 200), "a_in_registers": True},
    half={"tile": (128, 128, 32), "sizes": (130, 130, 96), "dtype": torch.float16, "b_major": "k"},
)
def wgmma_gemm(tile, sizes, a_in_registers=False, **options):
    gemm(gemm_sm90.Gemm(tile, 3, a_in_registers), *sizes, **options)


@case(
    "sm_100a",
    odd={"tile": (128, 64, 64), "sizes": (200, 72, 136)},
    m64={"tile": (64, 64, 64), "sizes": (70, 72, 136)},
    mn_major={"tile": (128, 64, 64), "sizes": (136, 72, 100), "a_major": "m", "b_major": "n"},
    pair={"tile": (256, 128, 64), "sizes": (300, 136, 200), "pair": True},
    pair128={"tile": (128, 64, 64), "sizes": (200, 72, 136), "pair": True, "dtype": torch.float16},
    pair_mn={"tile": (256, 128, 64), "sizes": (264, 136, 96), "pair": True, "a_major": "m", "b_major": "n"},
)
def tcgen05_gemm(tile, sizes, pair=False, **options):
    gemm(gemm_sm100.Gemm(tile, 3, pair), *sizes, **options)


@case()
def persistent():
    x, y, counter = torch.randn(11, 100), torch.empty(11, 100), torch.zeros(1, dtype=torch.int32)
    launch(scheduling.persistent, on_gpu(x), on_gpu(y), on_gpu(counter), static=(3,))
    same(y, x * x)


@case("sm_100a", num_sms=1)
def cancelling():
    """One multiprocessor holds 32 of these CTAs: 38 launches are cancelled, so some CTA does three rows or more."""
    x, y, rows_done = torch.randn(70, 100), torch.empty(70, 100), torch.zeros(70, dtype=torch.int32)
    launch(scheduling.cancelling, on_gpu(x), on_gpu(y), on_gpu(rows_done))
    same(y, x * x)
    assert rows_done.sum() == 70
    if _placement.device == "cpu":
        assert rows_done.count_nonzero() == 32
        assert rows_done.max() >= 3


@case()
def dependent():
    x, y, z = torch.randn(6, 100), torch.empty(6, 100), torch.empty(6, 100)
    launch(scheduling.dependent, on_gpu(x), on_gpu(y), on_gpu(z))
    same(y, x * x)
    same(z, (x * x).flip(0) + 1)


@case()
def warp_mma():
    a, b, c = torch.randn(16, 16).half(), torch.randn(8, 16).half(), torch.empty(16, 8).half()
    _placement.accumulates(a, b, rows=16)
    launch(fragments.product, on_gpu(a), on_gpu(b), on_gpu(c))
    close(c, a.double() @ b.double().t(), 0.02)
