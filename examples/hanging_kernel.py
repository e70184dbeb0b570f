"""A pipeline that hangs: one warp loads tiles by TMA-like bulk copies into a ring of stages, another one adds them up.

The ring's `empty` barriers wait for two arrivals, but only one warp arrives: with more tiles than stages the producer
waits forever. `--mended` counts one arrival. See docs/emulator.md.

    refluent emulate --arch sm_90a examples/hanging_kernel.py [--mended]
"""

from __future__ import annotations

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

STAGES, TILES, TILE = 2, 5, 32


@cute.kernel
def kernel(x: cute.Tensor, total: cute.Tensor, arrivals: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    memory = cutlass.memory.SmemAllocator()
    ring = memory.allocate_tensor(cutlass.Float32, cute.make_layout((TILE, STAGES)), byte_alignment=128)
    full = memory.allocate_array(cutlass.Int64, STAGES)
    empty = memory.allocate_array(cutlass.Int64, STAGES)
    if thread == 0:
        for s in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init(empty + s, arrivals)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=TILE * 32)
    if thread == 0:  # the producer
        for t in cutlass.range(TILES):
            stage, phase = t % STAGES, (t // STAGES) % 2
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE * 4)
            cute.copy(load, cute.local_tile(x, (TILE,), (t,)), ring[None, stage], mbar_ptr=full + stage)
    if thread >= 32:  # the consumer
        mine = cutlass.Float32(0)
        for t in cutlass.range(TILES):
            stage, phase = t % STAGES, (t // STAGES) % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            mine += ring[thread - 32, stage]
            cute.arch.sync_warp()
            if thread == 32:
                cute.arch.mbarrier_arrive(empty + stage)
        total[thread - 32] = mine


@cute.jit
def host(x: cute.Tensor, total: cute.Tensor, arrivals: cutlass.Constexpr):
    kernel(x, total, arrivals).launch(grid=[1, 1, 1], block=[64, 1, 1])


if __name__ == "__main__":
    x, total = torch.randn(TILES * TILE, device="cuda"), torch.zeros(TILE, device="cuda")
    host(from_dlpack(x, assumed_align=16), from_dlpack(total), 1 if "--mended" in sys.argv else 2)
    print("largest error", (total - x.view(TILES, TILE).sum(0)).abs().max().item())
