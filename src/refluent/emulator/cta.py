"""Launched work as handlers see it: clusters, their CTAs, and the warps of a CTA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator.exits import check_exit
from refluent.emulator.isa import Outcome
from refluent.emulator.memory import shared_window, tensor_memory
from refluent.emulator.state import FULL_MASK, LANES, Warp

if TYPE_CHECKING:
    from refluent.emulator.isa.barriers import NamedBarrier
    from refluent.emulator.isa.mbarrier import MBarrier
    from refluent.emulator.machine import Launch, Machine

FILL8, FILL32 = 0xFF, 0xFFFFFFFF  # NaN in every format: what nothing has written


class Condition:
    """Something to sleep on."""

    def __init__(self) -> None:
        self.waiters: list[MachineWarp] = []


class MachineWarp(Warp):
    """A warp in a CTA: registers and record (state.Warp) and what the machine keeps about it.

    `index` counts in the CTA, `warpgroup` is index // 4. `groups` holds per-warp queues of asynchronous operations by
    name, for whoever needs one.
    """

    def __init__(self, cta: CTA, index: int) -> None:
        super().__init__(cta.launch.kernel, cta.launch.block_counts(index))
        self.cta = cta
        self.index = index
        self.warpgroup = index // 4
        self.groups: dict[str, Any] = {}
        self.finished = False
        self.resume: Callable[[], Outcome] | None = None  # what to call when it runs next, before native code
        self.blocked: Any = None  # the Blocked outcome it sleeps on
        self.blocked_at = 0  # instruction
        self.time = 0  # logical time, for the timeline
        self.clocks: Any = None  # the checker's
        self.context: Any = None  # native memory context
        self.registers = 0  # a thread, setmaxnreg's accounting
        self.setmaxnreg: list[int] = []  # every value it asked for
        self.polled: Any = None  # what its last polling access saw
        self.local: Any = None  # local memory
        self.slot = 0  # the checker's
        self.who: Any = None

    @property
    def live(self) -> int:
        """Lanes that have not left the kernel."""
        return FULL_MASK & ~self.exited

    @property
    def name(self) -> str:
        return f"{self.cta.name} warp {self.index}"


class CTA:
    """A thread block: `shared` (uint8, window offsets), `tmem` ((128, 512) uint32), `rank` in its cluster."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster = cluster
        self.launch: Launch = cluster.launch
        self.machine: Machine = cluster.launch.machine
        self.rank = rank
        self.ctaid = ctaid
        self.shared_end = self.launch.shared_end
        self.shared: np.ndarray = shared_window(self.shared_end, FILL8)
        self._tmem: np.ndarray | None = None
        self.tmem_state: Any = None  # the tensor memory allocator's (isa/tcgen05.py)
        self.named: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        self.groups: dict[str, Any] = {}  # per-CTA queues of asynchronous operations, by name
        self.finished = False
        self.pool = 0  # free registers, setmaxnreg
        self.registers = Condition()
        self.launch_dependents = False
        self.clocks: Any = None
        self.threads = self.launch.threads
        self.warps = [MachineWarp(self, index) for index in range((self.threads + LANES - 1) // LANES)]

    @property
    def tmem(self) -> np.ndarray:
        if self._tmem is None:
            self._tmem = tensor_memory(FILL32)
        return self._tmem

    @property
    def name(self) -> str:
        return f"CTA {self.ctaid}"

    def warp_left(self, warp: MachineWarp) -> None:
        """A warp has left the kernel."""
        for barrier in self.named.values():
            barrier.warp_left(warp)
        if self.cluster.barrier is not None:
            self.cluster.barrier.check_complete()
        if all(other.finished for other in self.warps):
            self.finished = True
            check_exit(self.machine, self, warp)
            self.launch.cta_left(self)

    def peer(self, rank: int) -> CTA:
        """The CTA of this rank in the cluster."""
        return self.cluster.ctas[rank]

    @property
    def pair(self) -> tuple[CTA, CTA]:
        """The CTA pair (leader, follower) of cta_group::2."""
        leader = self.rank & ~1
        return self.cluster.ctas[leader], self.cluster.ctas[leader | 1]


class Cluster:
    """CTAs that run together and reach each other's shared memory."""

    def __init__(self, launch: Launch, index: int, origin: tuple[int, int, int]) -> None:
        self.launch = launch
        self.index = index
        self.origin = origin
        self.clocks: Any = None
        self.barrier: Any = None
        shape = launch.cluster
        self.ctas: list[CTA] = []
        for z in range(shape[2]):
            for y in range(shape[1]):
                for x in range(shape[0]):
                    ctaid = (origin[0] + x, origin[1] + y, origin[2] + z)
                    self.ctas.append(CTA(self, len(self.ctas), ctaid))

    @property
    def finished(self) -> bool:
        return all(cta.finished for cta in self.ctas)
