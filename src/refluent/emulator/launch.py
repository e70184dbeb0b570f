"""One kernel launch as the driver captured it: everything the machine needs, nothing of where it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Allocation:
    """A piece of host memory that the kernel may touch as global memory: a whole storage, not a view of it.

    `fresh`: nothing has written it since it was allocated (torch.empty inside the context). `alive`: whether the memory
    is still that of the same owner, asked when this address is handed in again; None: it belongs to the machine.
    """

    address: int
    nbytes: int
    name: str = ""
    fresh: bool = False
    owner: Any = field(default=None, repr=False, compare=False)  # keeps the memory alive
    alive: Callable[[], bool] | None = field(default=None, repr=False, compare=False)  # whether its owner still lives

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True)
class LaunchRequest:
    """grid in CTAs, block in threads, cluster in CTAs; shared_bytes is the dynamic part; params: one bytes object for
    each parameter of the PTX entry, in order; programmatic: may start before its predecessor has finished."""

    ptx: str
    kernel: str
    arch: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    params: tuple[bytes, ...]
    stream: int = 0
    programmatic: bool = False
    cooperative: bool = False
    allocations: tuple[Allocation, ...] = ()

    @property
    def ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]
