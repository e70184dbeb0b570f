"""Which granules of global memory the clusters of a launch read and write: whether they are independent.

A granule (2 bytes, as in the checks' shadow) has two words: the cluster that wrote it, and the cluster that read it or
MANY. A granule that one cluster writes, in whatever way, and another one touches is a conflict. Kept in processes that
run a part of a launch (parallel.py), with checks and without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from refluent.emulator.check.shadow import READ_SLOTS, READS, SLOT, WRITE, WRITTEN
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


# With their types, so that they are compiled before processes fork.
@njit("void(int64, int64, int64, int64[::1], int64, boolean)", cache=True)
def _note_spans(header: int, index: int, base: int, starts: np.ndarray, nbytes: int, write: bool) -> None:
    for i in range(len(starts)):
        note(header, index, starts[i] - base, nbytes, write)


@njit("int64(uint32[:, ::1], uint8[::1], uint32[::1], boolean[::1])", cache=True)
def _collect(granules: np.ndarray, chunks: np.ndarray, which: np.ndarray, written: np.ndarray) -> int:
    """Enter the granules of the marked chunks that were touched, and whether they were written; how many."""
    count = 0
    for chunk in range(len(chunks)):
        if chunks[chunk]:
            for granule in range(chunk << _CHUNK_BITS, min((chunk + 1) << _CHUNK_BITS, len(granules))):
                if granules[granule, 0] or granules[granule, 1]:
                    which[count] = granule
                    written[count] = granules[granule, 0] != 0
                    count += 1
    return count


@njit("void(uint8[::1], uint32[::1], uint8[:, ::1], boolean)", cache=True)
def _copy(data: np.ndarray, granules: np.ndarray, values: np.ndarray, store: bool) -> None:
    """Copy granules between a block and `values`; the last one of a block may have one byte."""
    for i in range(len(granules)):
        for byte in range(GRANULE):
            at = GRANULE * np.int64(granules[i]) + byte
            if at < len(data):
                if store:
                    data[at] = values[i, byte]
                else:
                    values[i, byte] = data[at]


@njit("void(int64, uint32[::1], uint32[:, ::1], boolean)", cache=True)
def _copy_writes(shadow: int, granules: np.ndarray, writes: np.ndarray, store: bool) -> None:
    """Copy the last write of granules (three words, and which bytes are written) between their shadow and `writes`."""
    for i in range(len(granules)):
        record = shadow + RECORD * np.int64(granules[i])
        for word in range(4):
            at = record + (WRITTEN if word == 3 else WRITE + 4 * word)
            if store:
                store32(at, writes[i, word])
            else:
                writes[i, word] = load32(at)
        if store:
            for slot in range(READ_SLOTS):  # whoever is ordered after the write is ordered after these
                store32(record + READS + SLOT * slot, 0)


@njit("int64(int64, uint32[::1], uint32[:, ::1], int64)", cache=True)
def _collect_reads(shadow: int, granules: np.ndarray, reads: np.ndarray, first_actor: int) -> int:
    """Enter the reads by actors from `first_actor` on, those of the launch: granule and three words. How many."""
    count = 0
    for i in range(len(granules)):
        for slot in range(READ_SLOTS):
            source = shadow + RECORD * np.int64(granules[i]) + READS + SLOT * slot
            if load32(source) >= first_actor:
                reads[count, 0] = granules[i]
                for word in range(3):
                    reads[count, 1 + word] = load32(source + 4 * word)
                count += 1
    return count


@njit("void(int64, uint32[:, ::1], int64)", cache=True)
def _merge_reads(shadow: int, reads: np.ndarray, first_actor: int) -> None:
    """Enter such reads into a shadow that lacks them; earlier launches' give way."""
    for i in range(len(reads)):
        slots = shadow + RECORD * np.int64(reads[i, 0]) + READS
        target: Any = np.int64(reads[i, 1]) & (READ_SLOTS - 1)
        for slot in range(READ_SLOTS):
            if load32(slots + SLOT * slot) < first_actor:
                target = slot
                break
        for word in range(3):
            store32(slots + SLOT * target + 4 * word, reads[i, 1 + word])


@dataclass
class Touched:
    """What a process leaves in one block."""

    base: int
    granules: np.ndarray  # (n,) uint32
    written: np.ndarray  # (n,) bool: which of them it wrote
    data: np.ndarray  # (written, 2) uint8: what they hold
    writes: np.ndarray  # the checks' records of these, and of the reads of others
    reads: np.ndarray

    def apply(self, block: Block, first_actor: int) -> None:
        """Enter it into the block."""
        wrote = self.granules[self.written]
        _copy(block.data, wrote, self.data, True)
        if block.shadow is not None:
            shadow = block.shadow.ctypes.data
            _copy_writes(shadow, wrote, self.writes, True)
            _merge_reads(shadow, self.reads, first_actor)


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

    def touched(self, first_actor: int) -> list[Touched]:
        """Everything that was accessed, block by block; `first_actor`: of the launch."""
        parts = []
        for index, (granules, chunks) in self._maps.items():
            room = np.count_nonzero(chunks) << _CHUNK_BITS
            which, written = np.empty(room, np.uint32), np.empty(room, np.bool_)
            count = _collect(granules, chunks, which, written)
            if count:
                parts.append(_touched(self._blocks[index], which[:count], written[:count], first_actor))
        return parts


def _touched(block: Block, granules: np.ndarray, written: np.ndarray, first_actor: int) -> Touched:
    wrote, only_read = granules[written], granules[~written]
    data, writes = np.zeros((len(wrote), GRANULE), np.uint8), np.zeros((len(wrote), 4), np.uint32)
    reads = np.empty((0, 4), np.uint32)
    _copy(block.data, wrote, data, False)
    if block.shadow is not None:
        shadow = block.shadow.ctypes.data
        _copy_writes(shadow, wrote, writes, False)
        reads = np.empty((READ_SLOTS * len(only_read), 4), np.uint32)
        reads = reads[: _collect_reads(shadow, only_read, reads, first_actor)]
    return Touched(block.base, granules, written, data, writes, reads)


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
