"""Which granules of global memory the clusters of a launch read and write: whether they are independent.

A granule (2 bytes, as in the checks' shadow) has two words: the cluster that wrote it, and the cluster that read it or
MANY. A granule that one cluster writes, in whatever way, and another one touches is a conflict. Kept in processes that
run a part of a launch (parallel.py), with checks and without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from refluent.emulator.check.shadow import READ_SLOTS, READS, SLOT
from refluent.emulator.native import load32, load64, store8, store32, store64

if TYPE_CHECKING:
    from refluent.emulator.memory import Block

GRANULE = 2
RECORD = 64  # bytes of shadow a granule
MANY = 0xFFFFFFFF
# The header, int64 words: the cluster that runs (its index + 1), conflicts so far, then two words a block: the address
# of its granules (0: nobody can write it) and of its chunks, a byte for as many granules as share a page of the map.
CLUSTER, CONFLICTS, FIRST = range(3)
_CHUNK_BITS = 9


@njit(cache=True)
def note(header: int, index: int, offset: int, nbytes: int, write: bool) -> None:
    """The cluster that runs accesses [offset, offset + nbytes) of a block."""
    granules = load64(header + 8 * (FIRST + 2 * index))
    if granules == 0:
        return
    chunks = load64(header + 8 * (FIRST + 2 * index + 1))
    cluster = load64(header)
    for granule in range(offset >> 1, ((offset + nbytes - 1) >> 1) + 1):
        at = granules + 8 * granule
        writer, reader = load32(at), load32(at + 4)
        if writer == cluster and (write or reader == cluster):
            continue
        store8(chunks + (granule >> _CHUNK_BITS), 1)
        if (writer != 0 and writer != cluster) or (write and reader != 0 and reader != cluster):
            store64(header + 8 * CONFLICTS, load64(header + 8 * CONFLICTS) + 1)
        if write:
            store32(at, cluster)
        elif reader != cluster:
            store32(at + 4, cluster if reader == 0 else MANY)


@njit(cache=True)
def _note_spans(header: int, index: int, base: int, starts: np.ndarray, nbytes: int, write: bool) -> None:
    for i in range(len(starts)):
        note(header, index, starts[i] - base, nbytes, write)


@njit(cache=True)
def _merge_reads(shadow: int, granules: np.ndarray, records: int, first_actor: int) -> None:
    """Enter the reads by actors from `first_actor` on, those of the launch, into a shadow that lacks them."""
    for i in range(len(granules)):
        record = shadow + RECORD * granules[i]
        for j in range(READ_SLOTS):
            source = records + RECORD * i + READS + SLOT * j
            actor = load32(source)
            if actor < first_actor:
                continue
            slot = actor & (READ_SLOTS - 1)
            for k in range(READ_SLOTS):
                if load32(record + READS + SLOT * k) < first_actor:
                    slot = k
                    break
            target = record + READS + SLOT * slot
            store64(target, load64(source))
            store32(target + 8, load32(source + 8))


@dataclass
class Touched:
    """What a process leaves in one block: granules, which of them it wrote, their bytes, and the checks' records."""

    base: int
    granules: np.ndarray
    written: np.ndarray  # bool, beside granules
    data: np.ndarray  # (written granules, 2) uint8
    records: np.ndarray | None  # (granules, 64) uint8

    def apply(self, block: Block, first_actor: int) -> None:
        """Enter it into the block."""
        wrote = self.granules[self.written]
        at = wrote * GRANULE
        block.data[at] = self.data[:, 0]
        whole = at + 1 < block.nbytes
        block.data[at[whole] + 1] = self.data[whole, 1]
        if block.shadow is None or self.records is None:
            return
        shadow = block.shadow.reshape(-1, RECORD)
        shadow[wrote] = self.records[self.written]
        reads = np.ascontiguousarray(self.records[~self.written])
        _merge_reads(block.shadow.ctypes.data, self.granules[~self.written], reads.ctypes.data, first_actor)


class Footprint:
    """The maps of every block that can be written, from now on."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = list(blocks)
        self._index = {block.base: index for index, block in enumerate(blocks)}
        self._header = np.zeros(FIRST + 2 * len(blocks), np.int64)
        self._maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for index, block in enumerate(blocks):
            if not block.read_only:
                count = (block.nbytes + 1) // GRANULE
                granules, chunks = np.zeros((count, 2), np.uint32), np.zeros((count >> _CHUNK_BITS) + 1, np.uint8)
                self._maps[index] = granules, chunks
                self._header[FIRST + 2 * index : FIRST + 2 * index + 2] = granules.ctypes.data, chunks.ctypes.data

    @property
    def address(self) -> int:
        return int(self._header.ctypes.data)

    @property
    def conflicts(self) -> int:
        return int(self._header[CONFLICTS])

    def begin(self, cluster: int) -> None:
        """Accesses are this cluster's from now on."""
        self._header[CLUSTER] = cluster + 1

    def note(self, block: Block, starts: np.ndarray, nbytes: int, write: bool) -> None:
        """The cluster accesses `nbytes` at every start, all inside the block."""
        _note_spans(self.address, self._index[block.base], block.base, starts, nbytes, write)

    def touched(self) -> list[Touched]:
        """Everything that was accessed, block by block."""
        parts = []
        for index, (granules, chunks) in self._maps.items():
            block = self._blocks[index]
            in_chunk = np.arange(1 << _CHUNK_BITS)
            which = ((np.flatnonzero(chunks) << _CHUNK_BITS)[:, None] + in_chunk).ravel()
            which = which[which < len(granules)]
            users = granules[which]
            used = users.any(1)
            which, written = which[used], users[used, 0] != 0
            at = which[written] * GRANULE
            data = np.stack([block.data[at], block.data[np.minimum(at + 1, block.nbytes - 1)]], 1)
            records = None if block.shadow is None else block.shadow.reshape(-1, RECORD)[which]
            if len(which):
                parts.append(Touched(block.base, which, written, data, records))
        return parts


def independent(parts: list[list[Touched]], blocks: dict[int, Block]) -> bool:
    """Whether no process wrote a granule that another one touched."""
    states: dict[int, np.ndarray] = {}  # of each granule: 0 untouched, 1 read, 3 written
    for part in parts:
        for touched in part:
            count = blocks[touched.base].nbytes // GRANULE + 1
            state = states.setdefault(touched.base, np.zeros(count, np.uint8))
            before = state[touched.granules]
            if before[touched.written].any() or (before & 2).any():
                return False
            state[touched.granules] = np.where(touched.written, 3, before | 1)
    return True
