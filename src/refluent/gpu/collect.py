"""The kernel that makes a captured tensor's gradient of its accumulators."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from refluent.gpu.device.exact import read_exact

THREADS = 256


@cute.jit
def collect(accumulators: cute.Tensor, out: cute.Tensor, stream):
    """out (n,) of the captured tensor's type; accumulators (n,) float32, or int64, the first limbs of exact sums."""
    collect_kernel(accumulators, out).launch(
        grid=[cutlass.Int32((out.shape[0] + THREADS - 1) // THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.kernel
def collect_kernel(accumulators: cute.Tensor, out: cute.Tensor):
    at = cutlass.Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
    if at < out.shape[0]:
        if cutlass.const_expr(accumulators.element_type is cutlass.Int64):
            first = accumulators.iterator + cute.crd2idx(at, accumulators.layout)
            out[at] = read_exact(first).to(out.element_type)
        else:
            out[at] = accumulators[at].to(out.element_type)
