"""Producer and consumer in one CTA: a ring of mbarriers without TMA, and turns by named barriers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

HALF = 64  # threads of each side
FULL, EMPTY = 1, 2  # named barriers; 0 is sync_threads'


@cute.kernel
def _turns(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    slot = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(HALF), byte_alignment=16)
    rows = x.shape[0]
    if thread < HALF:
        for row in cutlass.range(rows):
            if row > 0:
                cute.arch.barrier(barrier_id=EMPTY, number_of_threads=2 * HALF)
            slot[thread] = x[row, thread]
            cute.arch.barrier_arrive(barrier_id=FULL, number_of_threads=2 * HALF)
    else:
        for row in cutlass.range(rows):
            cute.arch.barrier(barrier_id=FULL, number_of_threads=2 * HALF)
            y[row, thread - HALF] = slot[2 * HALF - 1 - thread]
            if row + 1 < rows:
                cute.arch.barrier_arrive(barrier_id=EMPTY, number_of_threads=2 * HALF)


@cute.jit
def turns(x: cute.Tensor, y: cute.Tensor):
    """y = x (rows, HALF) with each row reversed: one half of the CTA hands rows to the other."""
    _turns(x, y).launch(grid=[1, 1, 1], block=[2 * HALF, 1, 1])


@cute.kernel
def _ring(x: cute.Tensor, y: cute.Tensor, stages: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    memory = cutlass.memory.SmemAllocator()
    ring = memory.allocate_tensor(cutlass.Float32, cute.make_layout((HALF, stages)), byte_alignment=16)
    full = memory.allocate_array(cutlass.Int64, stages)
    empty = memory.allocate_array(cutlass.Int64, stages)
    if thread == 0:
        for s in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + s, HALF)
            cute.arch.mbarrier_init(empty + s, HALF)
    cute.arch.sync_threads()
    for row in cutlass.range(x.shape[0]):
        stage, phase = row % stages, (row // stages) % 2
        if thread < HALF:
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            ring[thread, stage] = x[row, thread]
            cute.arch.mbarrier_arrive(full + stage)
        else:
            cute.arch.mbarrier_wait(full + stage, phase)
            y[row, thread - HALF] = ring[2 * HALF - 1 - thread, stage]
            cute.arch.mbarrier_arrive(empty + stage)


@cute.jit
def ring(x: cute.Tensor, y: cute.Tensor, stages: cutlass.Constexpr = 3):
    """The same through a ring of stages: every thread arrives at mbarriers."""
    _ring(x, y, stages).launch(grid=[1, 1, 1], block=[2 * HALF, 1, 1])
