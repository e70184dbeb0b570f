"""One thread an element: the plainest kernels, in the ways the DSL can be called."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

THREADS = 128


@cute.kernel
def _axpy(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + tid
    if i < n:
        y[i] = a * x[i] + y[i]


@cute.jit
def axpy(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    """y += a * x over the first n elements."""
    _axpy(x, y, a, n).launch(grid=[cute.ceil_div(n, THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.jit
def axpy_untyped(x, y, a: cutlass.Float32, n: cutlass.Int32):
    """Without annotations: takes torch tensors and arrays as they are."""
    _axpy(x, y, a, n).launch(grid=[cute.ceil_div(n, THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.jit
def axpy_on_stream(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32, stream: cuda.CUstream):
    _axpy(x, y, a, n).launch(grid=[cute.ceil_div(n, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def axpy_pointers(x: cute.Pointer, y: cute.Pointer, a: cutlass.Float32, n: cutlass.Int32):
    layout = cute.make_layout(n)
    _axpy(cute.make_tensor(x, layout), cute.make_tensor(y, layout), a, n).launch(
        grid=[cute.ceil_div(n, THREADS), 1, 1], block=[THREADS, 1, 1]
    )


@cute.jit
def axpy_twice(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    """Two launches in one host function: the second may start early, and is a cluster of two."""
    grid = [cute.round_up(cute.ceil_div(n, THREADS), 2), 1, 1]
    _axpy(x, y, a, n).launch(grid=grid, block=[THREADS, 1, 1])
    _axpy(x, y, a, n).launch(
        grid=grid, block=[THREADS, 1, 1], cluster=[2, 1, 1], smem=2048, use_pdl=True, cooperative=False
    )


@cute.jit
def axpy_bad_grid(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    """A grid that its cluster does not divide: the driver refuses it."""
    _axpy(x, y, a, n).launch(grid=[3, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1])


@cute.jit
def axpy_then_bad(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    """A good launch, then one that the driver refuses."""
    axpy(x, y, a, n)
    axpy_bad_grid(x, y, a, n)
