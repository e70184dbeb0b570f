"""Vector clocks. Actors are the warps of a cluster and the channels on which asynchronous operations complete.

Within a cluster a clock is dense: one tick an actor, in four rows (shadow.BEFORE and its fellows). What a clock knows
about other clusters (through semaphores in global memory) is kept per cluster and shared between clocks until it
changes. What happened before a launch edge is known by one number, the floor: actors below it are all ordered.
"""

from __future__ import annotations

import numpy as np

from refluent.emulator.check import shadow
from refluent.emulator.check.shadow import ROWS


class Space:
    """The actors of one cluster. Actor = base + slot; slots are handed out as actors appear."""

    def __init__(self, base: int, index: int, capacity: int) -> None:
        self.base, self.index, self.capacity = base, index, capacity
        self.stride = 4 * capacity
        self.owners: list[str] = []

    @property
    def width(self) -> int:
        return len(self.owners)

    def slot(self, owner: str) -> int:
        """A slot for a new actor; the last one is shared when there are more than the space was made for."""
        if len(self.owners) < self.capacity:
            self.owners.append(owner)
        return len(self.owners) - 1


class Remote:
    """What a clock knows about other clusters. Never changed once made: clocks share it."""

    def __init__(self, parts: dict[int, np.ndarray], clusters: int) -> None:
        self.parts = parts
        self.table = np.zeros(clusters, np.int64)
        for index, rows in parts.items():
            self.table[index] = rows.ctypes.data
        self.address: int = self.table.ctypes.data


class Clock:
    """(4, capacity) ticks of the actors of a cluster, what is known of other clusters, and the floor."""

    __slots__ = ("address", "floor", "remote", "rows", "space")

    def __init__(self, space: Space) -> None:
        self.space = space
        self.rows = np.zeros((ROWS, space.capacity), np.int32)
        self.address: int = self.rows.ctypes.data
        self.remote: Remote | None = None
        self.floor = 0

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.space, clock.remote, clock.floor = self.space, self.remote, self.floor
        clock.rows = self.rows.copy()
        clock.address = clock.rows.ctypes.data
        return clock

    def join(self, other: Clock) -> None:
        """Learn everything that `other` knows."""
        space = self.space
        if other.space is space:
            shadow.join(self.address, other.address, space.width, space.stride, ROWS)
            if other.remote is not None and other.remote is not self.remote:
                self._join_parts(other.remote.parts, len(other.remote.table))
        if other.floor > self.floor:
            self.floor = other.floor

    def join_initialised(self, other: Clock) -> None:
        """Learn which mbarrier initialisations `other` has fenced, and no more."""
        row = shadow.INITIALISED
        np.maximum(self.rows[row], other.rows[row], out=self.rows[row])

    def publish(self, parts: dict[int, np.ndarray]) -> None:
        """Add everything that this clock knows to a semaphore's parts, which other clusters may hold on to."""
        known = dict(self.remote.parts) if self.remote is not None else {}
        known[self.space.index] = self.rows.copy()
        for index, rows in known.items():
            old = parts.get(index)
            if old is not rows:
                parts[index] = rows if old is None else np.maximum(old, rows)

    def learn(self, parts: dict[int, np.ndarray], clusters: int) -> None:
        """Take in a semaphore's parts."""
        own = parts.get(self.space.index)
        if own is not None:
            np.maximum(self.rows, own, out=self.rows)
        if len(parts) > (own is not None):
            self._join_parts(parts, clusters)

    def _join_parts(self, parts: dict[int, np.ndarray], clusters: int) -> None:
        known = dict(self.remote.parts) if self.remote is not None else {}
        changed = False
        for index, rows in parts.items():
            old = known.get(index)
            if index != self.space.index and old is not rows:
                known[index] = rows if old is None else np.maximum(old, rows)
                changed = True
        if changed:
            self.remote = Remote(known, clusters)


class Channel:
    """Where asynchronous operations complete: an actor. Ticks of a warp's own channel count the operations issued on
    it, those of an mbarrier's channel its phases."""

    __slots__ = ("actor", "own", "slot", "space", "tick")

    def __init__(self, space: Space, owner: str, own: bool = False) -> None:
        self.space = space
        self.own = own
        self.slot = space.slot(owner)
        self.actor = space.base + self.slot
        self.tick = 0
