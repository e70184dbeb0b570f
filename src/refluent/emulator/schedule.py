"""Schedules: which warp runs next, for how long, and when asynchronous operations perform."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from refluent.emulator.cta import MachineWarp
from refluent.emulator.isa import AsyncOp

SCHEDULES = ("fair", "random", "late", "early")
CTA_ORDERS = ("linear", "random", "reverse")
_FAIR_QUANTUM = 4  # events a warp handles before the next one runs


class Schedule:
    """fair: warps in turn, operations soon, in order. random: both at random. early: operations as they are issued,
    warps in turn. late: a warp runs as far as it can, operations (one at a time, any of them) only when no warp can.

    Everything random comes from one generator: the same seed gives the same run.
    """

    def __init__(self, name: str, rng: random.Random, cta_order: str = "linear") -> None:
        if name not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
        if cta_order not in CTA_ORDERS:
            raise ValueError(f"cta_order must be one of {', '.join(CTA_ORDERS)}, got {cta_order!r}")
        self._cta_order = cta_order
        self.name = name
        self.rng = rng
        self.eager = name == "early"
        self.performed = False  # whether due() gave out anything last time
        self._in_turn = name in ("fair", "early")
        self._queue: deque[MachineWarp] = deque()
        self._pool: list[MachineWarp] = []
        self._horizon = 0  # fair: operations up to this order are due

    def __len__(self) -> int:
        return len(self._queue) + len(self._pool)

    def __iter__(self) -> Iterator[MachineWarp]:
        yield from self._queue
        yield from self._pool

    def clear(self) -> None:
        self._queue.clear()
        self._pool.clear()

    def cta_order(self, clusters: int) -> list[int]:
        """In which order the clusters of a launch get their places."""
        order = list(range(clusters))
        if self._cta_order == "random":
            self.rng.shuffle(order)
        return order[::-1] if self._cta_order == "reverse" else order

    def add(self, warp: MachineWarp) -> None:
        """This warp can run."""
        (self._queue if self._in_turn else self._pool).append(warp)

    def pick(self) -> MachineWarp | None:
        """The warp to run now."""
        if self._queue:
            return self._queue.popleft()
        if not self._pool:
            return None
        index = self.rng.randrange(len(self._pool))
        self._pool[index], self._pool[-1] = self._pool[-1], self._pool[index]
        return self._pool.pop()

    def quantum(self) -> int:
        """How many events the warp may handle before another is picked."""
        if self._in_turn:
            return _FAIR_QUANTUM
        return self.rng.randint(1, 8) if self.name == "random" else 1 << 30

    def gives_up(self) -> bool:
        """Whether a wait that may come back without success (mbarrier.try_wait) does so instead of sleeping."""
        return self.name == "late" or (self.name == "random" and self.rng.random() < 0.5)

    def due(self, ready: list[AsyncOp], idle: bool) -> list[AsyncOp]:
        """Take the operations that perform now out of `ready`. `idle`: no warp ran."""
        self.performed = False
        if not ready:
            return []
        chosen: list[Any]
        if self.name == "late":
            chosen = [ready.pop(self.rng.randrange(len(ready)))] if idle else []
        elif self.name == "random":
            chosen = []
            while ready and (self.rng.random() < 0.4 or (idle and not chosen)):
                chosen.append(ready.pop(self.rng.randrange(len(ready))))
        else:
            # Those that were there a turn ago: an operation never performs within the slice that issued it.
            chosen = [op for op in ready if op.order <= self._horizon or idle]
            self._horizon = max(self._horizon, max(op.order for op in ready))
            ready[:] = [op for op in ready if op not in chosen] if len(chosen) < len(ready) else []
        self.performed = bool(chosen)
        return chosen
