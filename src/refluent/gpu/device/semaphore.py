"""Turns in global memory: deterministic reductions add in a fixed order.

The adds are asynchronous bulk operations, so a turn is released only after they are complete (wait_group without
.read) and a proxy fence orders them with the release; the next one fences again before its own.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


@cute.jit
def wait_turn(counter: cute.Pointer, rank: cutlass.Int32):
    """Until `rank` turns have been released; by one thread."""
    seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
    while seen != rank:
        seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


@cute.jit
def release_turn(counter: cute.Pointer):
    """The next turn; by the thread whose bulk operations are complete."""
    cute.arch.fence_proxy("async.global")
    cute.arch.red(counter, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
