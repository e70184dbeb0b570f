"""The memory a kernel can reach: global allocations handed in, shared windows, tensor memory.

Global addresses are host addresses; every access is looked up in the table of registered blocks, so that a wild kernel
cannot touch anything else. Shared memory is one byte array a CTA, indexed by the offset inside its window.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refluent.emulator.footprint import GRANULE, RECORD, Footprint
from refluent.emulator.launch import Allocation
from refluent.emulator.state import CTA_RANK_SHIFT, SHARED_START, SHARED_WINDOW

TMEM_LANES, TMEM_COLUMNS = 128, 512
BLOCK_FRESH, BLOCK_READ_ONLY = 1, 2  # flags in the table
_TABLE_WORDS = 4  # base, end, shadow address, flags


class MemoryFault(Exception):
    """An access outside what the kernel may touch, or misaligned."""


@dataclass(eq=False)
class Block:
    """One piece of global memory. `fresh`: nothing has written it, reading it first is a finding."""

    base: int
    nbytes: int
    name: str = ""
    fresh: bool = False
    read_only: bool = False
    owner: Any = None  # kept alive
    alive: Callable[[], bool] | None = None  # handed in from outside: whether this memory is still its owner's
    data: np.ndarray = field(init=False)
    shadow: np.ndarray | None = None

    def __post_init__(self) -> None:
        raw = (ctypes.c_uint8 * self.nbytes).from_address(self.base)
        self.data = np.ctypeslib.as_array(raw)

    @property
    def end(self) -> int:
        return self.base + self.nbytes


def zeroed(nbytes: int, align: int = 64) -> np.ndarray:
    """Zeroed bytes that the system commits page by page when they are touched."""
    raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes]


class GlobalMemory:
    """The table of registered blocks, shared with native code."""

    def __init__(self, shadowed: bool = False) -> None:
        self.shadowed = shadowed
        self.blocks: list[Block] = []  # sorted by base
        self.hidden: dict[int, Block] = {}  # by base: of earlier calls, out of reach until they are handed in again
        self.table = np.zeros((16, _TABLE_WORDS), np.uint64)
        self.header = np.zeros(4, np.uint64)  # table address, count, index of the last hit, the footprint's header
        self.footprint: Footprint | None = None
        self._publish()

    def register(
        self,
        base: int,
        nbytes: int,
        name: str = "",
        *,
        fresh: bool = False,
        read_only: bool = False,
        owner: Any = None,
    ) -> Block | None:
        """Make [base, base + nbytes) accessible. A block inside a registered one is that one; older blocks that
        overlap otherwise are replaced (their memory was given back to the system and handed out again)."""
        if nbytes == 0:
            return None
        for block in self.blocks:
            if block.base <= base and base + nbytes <= block.end:
                return block
        self.blocks = [block for block in self.blocks if block.end <= base or base + nbytes <= block.base]
        block = Block(base, nbytes, name, fresh, read_only, owner)
        if self.shadowed:
            block.shadow = zeroed((nbytes // GRANULE + 2) * RECORD)
        self.blocks.append(block)
        self.blocks.sort(key=lambda item: item.base)
        self._publish()
        return block

    def hand_in(self, part: Allocation) -> Block | None:
        """Make memory from outside accessible, for one call. What is known of it from earlier calls is known again."""
        block = self.hidden.pop(part.address, None)
        if block is None or block.nbytes != part.nbytes or not (block.alive and block.alive()):
            block = self.register(part.address, part.nbytes, part.name, fresh=part.fresh, owner=part.owner)
        else:
            block.owner = part.owner
            self.blocks.append(block)
            self.blocks.sort(key=lambda item: item.base)
        if block is not None:
            block.alive = part.alive
            block.fresh &= part.fresh
            self._publish()
        return block

    def take_back(self) -> None:
        """The call is over: what was handed in is out of reach, and not kept alive."""
        handed = [block for block in self.blocks if block.alive is not None]
        self.blocks = [block for block in self.blocks if block.alive is None]
        self.hidden = {base: block for base, block in self.hidden.items() if block.alive and block.alive()}
        for block in handed:
            block.owner = None
            self.hidden[block.base] = block
        self._publish()

    def unregister(self, block: Block) -> None:
        self.blocks.remove(block)
        self._publish()

    def _publish(self) -> None:
        count = len(self.blocks)
        if count > len(self.table):
            self.table = np.zeros((2 * count, _TABLE_WORDS), np.uint64)
        for row, block in zip(self.table, self.blocks):
            shadow = block.shadow.ctypes.data if block.shadow is not None else 0
            flags = BLOCK_FRESH * block.fresh | BLOCK_READ_ONLY * block.read_only
            row[:] = (block.base, block.end, shadow, flags)
        self.header[:3] = (self.table.ctypes.data, count, 0)

    def watch(self) -> Footprint:
        """Note every access to the blocks that there are, from now on."""
        self.footprint = Footprint(self.blocks)
        self.header[3] = self.footprint.address
        return self.footprint

    def note(self, block: Block, starts: np.ndarray | int, nbytes: int, write: bool) -> None:
        """For operations that reach into a block by themselves: they access `nbytes` at every start (addresses)."""
        if self.footprint is not None and nbytes:
            self.footprint.note(block, np.atleast_1d(np.asarray(starts, np.int64)), nbytes, write)

    def find(self, address: int, nbytes: int = 1) -> Block:
        """The block that holds [address, address + nbytes); MemoryFault if none does."""
        low, high = 0, len(self.blocks)
        while low < high:
            middle = (low + high) // 2
            if self.blocks[middle].base <= address:
                low = middle + 1
            else:
                high = middle
        if low and address + nbytes <= self.blocks[low - 1].end:
            return self.blocks[low - 1]
        raise MemoryFault(f"global memory [0x{address:x}, 0x{address + nbytes:x}) {self.nearest(address)}")

    def nearest(self, address: int) -> str:
        """How an address outside relates to the blocks that there are."""
        if not self.blocks:
            return "was not handed in: no memory was"
        block = min(self.blocks, key=lambda b: min(abs(address - b.base), abs(address - b.end)))
        name = block.name or "a block"
        span = f"{name} [0x{block.base:x}, 0x{block.end:x})"
        if block.base <= address < block.end:
            return f"runs past the end of {span}"
        if address >= block.end:
            return f"was not handed in: {address - block.end} bytes past the end of {span}"
        return f"was not handed in: {block.base - address} bytes before {span}"

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes [address, address + nbytes) themselves (uint8), to read."""
        block = self.find(address, nbytes)
        self.note(block, address, nbytes, False)
        return block.data[address - block.base : address - block.base + nbytes]

    def gather(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """(n, nbytes) uint8: the bytes at each address."""
        if not len(addresses):
            return np.empty((0, nbytes), np.uint8)
        addresses = np.asarray(addresses, np.int64)
        block = self.find(int(addresses.min()))
        if int(addresses.max()) + nbytes <= block.end:
            self.note(block, addresses, nbytes, False)
            return block.data[(addresses - block.base)[:, None] + np.arange(nbytes)]
        out = np.empty((len(addresses), nbytes), np.uint8)
        for row, address in zip(out, addresses.tolist()):
            row[:] = self.view(address, nbytes)
        return out

    def scatter(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write row i of values (n, nbytes) uint8 at address i, in order."""
        for row, address in zip(values, addresses.tolist()):
            self.writable(address, len(row))[:] = row

    def writable(self, address: int, nbytes: int) -> np.ndarray:
        """Like view, for writing: read-only blocks (kernel parameters, constants) are refused."""
        block = self.find(address, nbytes)
        if block.read_only:
            raise MemoryFault(f"write to read-only memory at 0x{address:x} ({block.name})")
        self.note(block, address, nbytes, True)
        return block.data[address - block.base : address - block.base + nbytes]


def shared_window(end: int, fill: int) -> np.ndarray:
    """A CTA's shared memory: uint8, indexed by window offset; [0x400, end) is usable and holds `fill`."""
    window = zeroed((end + 1023) // 1024 * 1024 + 1024)
    window[SHARED_START:] = fill
    return window


def shared_offset(address: int) -> int:
    """Offset inside the window of a shared or generic shared address."""
    return address & ((1 << CTA_RANK_SHIFT) - 1)


def shared_rank(address: int) -> int:
    """Rank in the cluster of the CTA that a shared or generic shared address names."""
    return (address & ~SHARED_WINDOW) >> CTA_RANK_SHIFT


def tensor_memory(fill: int) -> np.ndarray:
    """A CTA's tensor memory: (128 lanes, 512 columns) uint32."""
    return np.full((TMEM_LANES, TMEM_COLUMNS), fill, np.uint32)
