"""A ring of buffers between a producer and a consumer, as two rows of mbarriers, and the roles' step counters.

`step` counts uses of the ring since the kernel began: stage step % stages, phase (step // stages) % 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05


@dataclass(frozen=True)
class Ring:
    """full[s]: stage s holds data; empty[s]: its consumers are done. Pointers to mbarriers in shared memory."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr

    def stage(self, step):
        return step % self.stages

    def wait_full(self, step) -> None:
        """Consumer: until the producer has filled the step's stage."""
        cute.arch.mbarrier_wait(self.full + step % self.stages, (step // self.stages) % 2)

    def wait_empty(self, step) -> None:
        """Producer: until the consumers have released what the stage held before (at once, the first time)."""
        cute.arch.mbarrier_wait(self.empty + step % self.stages, ((step // self.stages) % 2) ^ 1)

    def full_at(self, step) -> cute.Pointer:
        return self.full + step % self.stages

    def empty_at(self, step) -> cute.Pointer:
        return self.empty + step % self.stages


@cute.jit
def arrive(barrier: cute.Pointer):
    """One arrival for the whole warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def commit(barrier: cute.Pointer, cluster: cutlass.Constexpr = 1):
    """An arrival when everything the tensor unit has been given is done, at every CTA's barrier of the cluster."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier, mask(cluster) if cutlass.const_expr(cluster > 1) else None)


def mask(cluster: int) -> cutlass.Int16:
    """A multicast's mask of CTAs."""
    return cutlass.Int16((1 << cluster) - 1)


@cute.jit
def expect(barrier: cute.Pointer, nbytes: cutlass.Int32):
    """Announce the bytes of a stage."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)
