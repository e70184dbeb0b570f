"""How work reaches CTAs: a persistent loop over an atomic counter, cancelled launches, dependent launches."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

THREADS = 64


@cute.jit
def _square_row(x: cute.Tensor, y: cute.Tensor, row: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    for j in cutlass.range(thread, x.shape[1], THREADS):
        y[row, j] = x[row, j] * x[row, j]


@cute.kernel
def _persistent(x: cute.Tensor, y: cute.Tensor, counter: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    next_row = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(1))
    row, _, _ = cute.arch.block_idx()
    while row < x.shape[0]:
        _square_row(x, y, row)
        cute.arch.sync_threads()  # everyone has read next_row
        if thread == 0:
            next_row[0] = cute.arch.atomic_add(counter.iterator, cutlass.Int32(1)) + cute.arch.grid_dim()[0]
        cute.arch.sync_threads()
        row = next_row[0]


@cute.jit
def persistent(x: cute.Tensor, y: cute.Tensor, counter: cute.Tensor, ctas: cutlass.Constexpr):
    """y = x * x, rows handed out by an atomic counter (1,) int32 to as many CTAs as are given."""
    _persistent(x, y, counter).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _cancelling(x: cute.Tensor, y: cute.Tensor, rows_done: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    memory = cutlass.memory.SmemAllocator()
    response = memory.allocate_array(cutlass.Int32, 4, byte_alignment=16)
    answered = memory.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(answered, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    row, valid, phase = first, cutlass.Int32(1), cutlass.Int32(0)
    done = cutlass.Int32(0)
    while valid != 0:
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(answered, 16)
            cute.arch.issue_clc_query(answered, response, multicast=False)
        _square_row(x, y, row)
        done += 1
        cute.arch.mbarrier_wait(answered, phase)
        phase ^= 1
        row, _, _, valid = cute.arch.clc_response(response)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()  # everyone has read the response
    if thread == 0:
        rows_done[first] = done


@cute.jit
def cancelling(x: cute.Tensor, y: cute.Tensor, rows_done: cute.Tensor):
    """y = x * x; a CTA that is ready cancels the launch of another and does its row (sm_100)."""
    _cancelling(x, y, rows_done).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _first(x: cute.Tensor, y: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    _square_row(x, y, row)


@cute.kernel
def _second(y: cute.Tensor, z: cute.Tensor, wait: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(wait):
        cute.arch.griddepcontrol_wait()
    for j in cutlass.range(thread, y.shape[1], THREADS):
        z[row, j] = y[y.shape[0] - 1 - row, j] + 1.0


@cute.jit
def dependent(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, wait: cutlass.Constexpr = True):
    """y = x * x, then z = y + 1 with the rows reversed; the second kernel may start before the first has ended."""
    _first(x, y).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1])
    _second(y, z, wait).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], use_pdl=True)
