"""Data motion of one TMA box between global memory and a CTA's shared window (tile mode, 1 to 5 dimensions).

Source: PTX ISA, "Tensors", "Tile mode", "Swizzle modes"; the descriptor is parsed by tensormap.py. A box lies dense in
shared memory, innermost dimension first, its 16-byte chunks permuted by the swizzle on the absolute address.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from refluent.emulator.isa.operand import CHUNK, swizzle_address
from refluent.emulator.tensormap import TensorMap

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Region:
    """The part of a box inside its tensor; per dimension, innermost first: first position in the box, and count."""

    address: int  # of the first element inside; bytes
    first: tuple[int, ...]
    count: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    element_bytes: int

    @property
    def empty(self) -> bool:
        return 0 in self.count

    @property
    def end(self) -> int:
        """One past the last byte inside."""
        return (
            self.address + self.element_bytes + sum((n - 1) * s for n, s in zip(self.count, self.strides, strict=True))
        )

    @property
    def nbytes(self) -> int:
        return self.element_bytes * int(np.prod(self.count))

    def view(self, buffer: np.ndarray, base: int) -> np.ndarray:
        """The region as an array (outermost dimension first) over `buffer` (uint8), whose first byte is at `base`."""
        return np.ndarray(
            shape=self.count[::-1],
            dtype=_UNSIGNED[self.element_bytes],
            buffer=buffer.data,
            offset=self.address - base,
            strides=self.strides[::-1],
        )

    def rows(self) -> tuple[np.ndarray, int]:
        """Global byte addresses of the innermost runs, and the bytes of each run (for the checker)."""
        starts = np.array([self.address], np.int64)
        for count, stride in zip(self.count[1:], self.strides[1:], strict=True):
            starts = (starts[:, None] + np.arange(count, dtype=np.int64)[None, :] * stride).ravel()
        return starts, self.count[0] * self.element_bytes


def clip(tensor: TensorMap, coordinates: tuple[int, ...]) -> Region:
    """The part of the box at `coordinates` (innermost first, may be negative) that lies inside the tensor."""
    first, count, address = [], [], tensor.address
    for coordinate, extent, dim, stride in zip(coordinates, tensor.box, tensor.dims, tensor.strides, strict=True):
        low = max(0, -coordinate)
        high = min(extent, dim - coordinate)
        first.append(low)
        count.append(max(0, high - low))
        address += (coordinate + low) * stride
    return Region(address, tuple(first), tuple(count), tensor.strides, tensor.element_bytes)


@lru_cache(maxsize=4096)
def shared_chunks(start: int, nbytes: int, swizzle: int) -> np.ndarray:
    """Index (address / 16) of each 16-byte chunk of a dense box at window address `start`, in box order."""
    return swizzle_address(np.arange(start, start + nbytes, CHUNK), swizzle) >> 4


def load_box(tensor: TensorMap, region: Region, source: np.ndarray | None, base: int) -> np.ndarray:
    """The box as 16-byte chunks (complex128), out-of-bounds elements filled."""
    box = np.zeros(tensor.box[::-1], _UNSIGNED[tensor.element_bytes])
    if tensor.oob_fill == "nan" and not region.empty:
        box[...] = _nan_bits(tensor.element)
    if not region.empty and source is not None:
        box[inside(region)] = region.view(source, base)
        if tensor.to_tf32:
            box[...] = _round_to_tf32(box)
    return box.reshape(-1).view(np.complex128)


def box_elements(tensor: TensorMap, chunks: np.ndarray) -> np.ndarray:
    """16-byte chunks read from shared memory as the box's elements, outermost dimension first (unsigned bits)."""
    return chunks.view(_UNSIGNED[tensor.element_bytes]).reshape(tensor.box[::-1])


def inside(region: Region) -> tuple[slice, ...]:
    """Slices (outermost first) of the box positions that lie inside the tensor."""
    return tuple(slice(f, f + n) for f, n in zip(region.first[::-1], region.count[::-1], strict=True))


def _nan_bits(element: str) -> int:
    return {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f32.ftz": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}[element]


def _round_to_tf32(bits: np.ndarray) -> np.ndarray:
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.where(finite, rounded, bits)
