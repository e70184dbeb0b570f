"""Happens-before: the clocks of warps, barriers, fences, semaphores and launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refluent.emulator.check import shadow
from refluent.emulator.check.clocks import Channel, Clock, Space
from refluent.emulator.memory import RECORD, TMEM_COLUMNS, TMEM_LANES, zeroed
from refluent.emulator.state import offset_of

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, Cluster, MachineWarp
    from refluent.emulator.grid import Launch
    from refluent.emulator.ptx import Instruction

CONVERGED = offset_of("convergent") // 4
GRANULE_LANES = 16  # of tensor memory: no layout splits 16 lanes
_CHANNELS_A_WARP, _CHANNELS_A_CTA = 8, 96  # what a cluster's clocks have room for


Group = tuple[int, ...]  # threads that share a scope: of the GPU (), of a cluster (its index,), of a CTA (with rank)
SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "gl": 2, "sys": 3}  # how far they reach
GPU = SCOPES["gpu"]


def scope_of(instr: Instruction) -> int:
    """The scope that an instruction names (the GPU's when it names none)."""
    return next((SCOPES[name] for name in instr.modifiers if name in SCOPES), GPU)


def _narrow(instr: Instruction) -> bool:
    return instr.opcode in ("ld", "st", "atom", "red", "fence", "membar") and scope_of(instr) < GPU


def _groups(warp: MachineWarp, scope: int) -> list[Group]:
    """The groups within which a release or acquire of this scope by the warp pairs with others: a release reaches
    every group that holds it, up to its scope, and an acquire looks into those, up to its own."""
    cluster, cta = warp.cta.cluster, warp.cta
    groups: list[Group] = [()]
    if cta.launch.clocks.narrow:
        groups = [(cluster.index, cta.rank), (cluster.index,), ()][: min(scope, GPU) + 1]
    return groups


class SyncClocks:
    """Clocks of a barrier: what arrivals of this phase and earlier ones knew, and what completed phases did."""

    __slots__ = ("channel", "done", "init", "pending")

    def __init__(self, space: Space) -> None:
        self.pending = Clock(space)
        self.done = Clock(space)
        self.channel: Channel | None = None
        self.init: tuple[int, int] | None = None  # slot and tick of the warp that initialised it


class LaunchClocks:
    """Which actors a launch has. `floor`: what a warp of it may take as ordered when it starts."""

    def __init__(self, base: int, capacity: int, floor: int) -> None:
        self.base, self.capacity, self.floor = base, capacity, floor
        self.spaces: dict[int, Space] = {}
        self.narrow = False  # whether it has releases or acquires of a scope below the GPU


class CTAClocks:
    """Shadow memory and channels of a CTA."""

    def __init__(self, cta: CTA) -> None:
        self.shadow = zeroed((cta.shared_end // 2 + 2) * RECORD)
        self.channels: dict[int, Channel] = {}  # of mbarriers, by offset: never reused for something else
        self._tmem: np.ndarray | None = None

    @property
    def tmem(self) -> np.ndarray:
        if self._tmem is None:
            self._tmem = zeroed(TMEM_LANES // GRANULE_LANES * TMEM_COLUMNS * RECORD)
        return self._tmem


class Order:
    """What happened before what. Handlers call arrive, flip and wait for barriers, publish and learn for semaphores."""

    def __init__(self) -> None:
        self.found = shadow.finding_list()
        self.next_actor = 1
        self.launches: list[Launch] = []
        # What was released at a word of memory, by launch (first actor), word and group of threads: rows by cluster.
        self.semaphores: dict[tuple[int, int, Group], dict[int, np.ndarray]] = {}

    # The life of a launch

    def launched(self, launch: Launch) -> None:
        need = launch.cluster_size * (launch.warps * _CHANNELS_A_WARP + _CHANNELS_A_CTA)
        capacity = 1 << (need - 1).bit_length()
        base = (self.next_actor + capacity - 1) // capacity * capacity
        self.next_actor = base + capacity * launch.total_clusters
        launch.clocks = LaunchClocks(base, capacity, base if launch.after is None else launch.after.clocks.base)
        launch.clocks.narrow = any(map(_narrow, launch.kernel.instructions))
        self.launches.append(launch)

    def launch_ends(self, launch: Launch) -> None:
        for key in [key for key in self.semaphores if key[0] == launch.clocks.base]:
            del self.semaphores[key]

    def cluster_starts(self, cluster: Cluster) -> None:
        known: LaunchClocks = cluster.launch.clocks
        space = Space(known.base + cluster.index * known.capacity, cluster.index, known.capacity)
        known.spaces[cluster.index] = space
        cluster.clocks = space
        for cta in cluster.ctas:
            cta.clocks = CTAClocks(cta)

    def cluster_ends(self, cluster: Cluster) -> None:
        """Nothing to do: clocks go with the warps, the names of actors stay for the findings of others."""

    def warp_starts(self, warp: MachineWarp) -> None:
        ctas = warp.cta.cluster.ctas
        clock = Clock(warp.cta.cluster.clocks)
        clock.floor = warp.cta.launch.clocks.floor
        warp.clocks = clock
        warp.slot = clock.space.slot(warp.name)
        context = warp.context[0]
        context["checks"] = 1
        context["shadow"][: len(ctas)] = [peer.clocks.shadow.ctypes.data for peer in ctas]
        warp.who = context["who"]
        self.identify(warp.who, clock, clock.space.base + warp.slot, 1)

    def identify(self, who: np.ndarray, clock: Clock, actor: int, tick: int) -> None:
        space = clock.space
        launch = self.launch_of(space.base)
        known: LaunchClocks = launch.clocks
        remote = clock.remote.address if clock.remote is not None else 0
        who[:] = (
            actor,
            tick,
            clock.address,
            space.stride,
            remote,
            space.base,
            clock.floor,
            known.base,
            known.capacity,
            launch.total_clusters,
            self.found.ctypes.data,
            tick,
            0,
        )

    def describe_address(self, address: int) -> str:
        """Which block of global memory an address lies in."""
        return ""

    def launch_of(self, actor: int) -> Launch:
        for launch in reversed(self.launches):
            if actor >= launch.clocks.base:
                return launch
        raise LookupError(f"no launch has actor {actor}")

    # Synchronisation of warps

    def released(self, warp: MachineWarp) -> Clock:
        """The warp's clock for somebody to learn; what the warp does from now on is not part of it."""
        clock: Clock = warp.clocks
        who = warp.who
        tick, converged = int(who[shadow.TICK]), int(warp.words[CONVERGED])
        clock.rows[0, warp.slot] = tick + converged
        if converged != who[shadow.LANE_SEEN]:
            who[shadow.LANE_BASE], who[shadow.LANE_SEEN] = tick, converged
        who[shadow.TICK] = tick + 1
        return clock

    def converge(self, warp: MachineWarp) -> None:
        """A convergent instruction: what the warp's lanes did before is ordered before what they do now."""
        who = warp.who
        who[shadow.TICK] += 1
        who[shadow.LANE_BASE] = who[shadow.TICK]

    def learned(self, warp: MachineWarp) -> None:
        """After something was joined into the warp's clock."""
        clock: Clock = warp.clocks
        if clock.remote is not None:
            warp.who[shadow.REMOTE] = clock.remote.address
        warp.who[shadow.FLOOR] = clock.floor

    def sync(self, cluster: Cluster) -> SyncClocks:
        """Clocks for a barrier of this cluster."""
        return SyncClocks(cluster.clocks)

    def arrive(self, sync: SyncClocks, warp: MachineWarp, relaxed: bool = False) -> None:
        """The warp arrives at a barrier. Relaxed: only mbarrier initialisations fenced for it go with the arrival."""
        clock = self.released(warp)
        if relaxed:
            sync.pending.join_initialised(clock)
        else:
            sync.pending.join(clock)

    def flip(self, sync: SyncClocks) -> None:
        """The phase is complete: those who wait learn what its arrivals knew."""
        channel = sync.channel
        if channel is not None:
            sync.pending.rows[0, channel.slot] = channel.tick
            channel.tick += 1
        sync.done.join(sync.pending)

    def wait(self, sync: SyncClocks, warp: MachineWarp, relaxed: bool = False) -> None:
        """The warp has seen the phase complete."""
        if relaxed:
            warp.clocks.join_initialised(sync.done)
        else:
            warp.clocks.join(sync.done)
            self.learned(warp)

    def mbarrier(self, cta: CTA, offset: int, warp: MachineWarp) -> SyncClocks:
        """Clocks of an mbarrier that the warp has just initialised."""
        sync = SyncClocks(cta.cluster.clocks)
        sync.channel = self.channel_of(cta, offset)
        clock = self.released(warp)
        sync.init = (warp.slot, int(clock.rows[0, warp.slot]))
        return sync

    def channel_of(self, cta: CTA, offset: int) -> Channel:
        """Where operations that complete on the mbarrier at an offset of a CTA are seen."""
        channels: dict[int, Channel] = cta.clocks.channels
        if offset not in channels:
            owner = f"operations that complete on {cta.name} mbarrier 0x{offset:x}"
            channels[offset] = Channel(cta.cluster.clocks, owner)
            channels[offset].tick = 1
        return channels[offset]

    def mark_mbarrier(self, warp: MachineWarp, cta: CTA, offset: int, live: bool) -> None:
        """From now on (or no longer) are the 8 bytes an mbarrier, which nothing else may touch."""
        shadow.mark(cta.clocks.shadow.ctypes.data, offset // 2, 4, live)

    def sees_init(self, sync: SyncClocks, clock: Clock, asynchronous: bool = False) -> bool:
        """Whether the mbarrier's initialisation is ordered before (asynchronous: and visible to the async proxy)."""
        if sync.init is None:
            return True
        slot, tick = sync.init
        rows = clock.rows
        if rows[shadow.INITIALISED, slot] >= tick:
            return True
        return bool(rows[shadow.FENCED_SHARED if asynchronous else shadow.BEFORE, slot] >= tick)

    def fence_proxy(self, warp: MachineWarp, shared: bool, in_global: bool) -> None:
        """fence.proxy.async: generic writes that happened before are visible to async operations ordered after."""
        clock = self.released(warp)
        if shared:
            shadow.raise_row(clock.address, shadow.FENCED_SHARED, clock.space.width, clock.space.stride)
        if in_global:
            shadow.raise_row(clock.address, shadow.FENCED_GLOBAL, clock.space.width, clock.space.stride)

    def fence_init(self, warp: MachineWarp) -> None:
        """fence.mbarrier_init."""
        clock = self.released(warp)
        shadow.raise_row(clock.address, shadow.INITIALISED, clock.space.width, clock.space.stride)

    def thread_fence(self, warp: MachineWarp, scope: int) -> None:
        """membar, fence.acq_rel: pairs with relaxed accesses before (learns) and after (publishes) it."""
        for word, other in warp.groups.pop("observed", {}).items():
            self.learn(warp, word, min(scope, other))
        warp.groups["fenced"] = self.released(warp).copy(), scope

    def observe(self, warp: MachineWarp, words: list[int], acquire: bool, scope: int) -> None:
        """A load with memory order, or an atomic, has read these words."""
        if acquire:
            for word in words:
                self.learn(warp, word, scope)
        else:
            warp.groups.setdefault("observed", {}).update(dict.fromkeys(words, scope))

    def announce(self, warp: MachineWarp, words: list[int], release: bool, scope: int) -> None:
        """A store with memory order, or an atomic, is about to write these words."""
        if release:
            clock: Clock | None = self.released(warp)
        else:
            clock, reach = warp.groups.get("fenced", (None, scope))
            scope = min(scope, reach)
        if clock is not None:
            base, groups = warp.cta.launch.clocks.base, _groups(warp, scope)
            for word in words:
                for group in groups:
                    clock.publish(self.semaphores.setdefault((base, word, group), {}))

    def learn(self, warp: MachineWarp, word: int, scope: int) -> None:
        """What was released at a word of memory happened before, if each side is in the other's scope."""
        for group in _groups(warp, scope):
            parts = self.semaphores.get((warp.cta.launch.clocks.base, word, group))
            if parts:
                warp.clocks.learn(parts, warp.cta.launch.total_clusters)
                self.learned(warp)

    def launch_edge(self, warp: MachineWarp) -> None:
        """griddepcontrol.wait: everything that earlier launches did has happened before."""
        warp.clocks.floor = warp.cta.launch.clocks.base
        self.learned(warp)
