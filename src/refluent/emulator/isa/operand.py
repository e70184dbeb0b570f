"""Matrix operands in shared memory: the descriptors of wgmma (sm_90a) and tcgen05 (sm_100a) and where their bytes lie.

Sources: PTX ISA, "Shared memory matrix layout", "Matrix descriptor" (wgmma) and "Shared memory descriptor"
(tcgen05). Both describe canonical layouts of 8-row core matrices; a 16-byte chunk is never split by them, so an
operand is gathered chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CHUNK = 16  # bytes that every canonical layout and every swizzle keep together
_SWIZZLE_BYTES_SM100 = {0: 0, 2: 128, 4: 64, 6: 32}
_SWIZZLE_BYTES_SM90 = {0: 0, 1: 128, 2: 64, 3: 32}


class DescriptorError(ValueError):
    """A matrix descriptor that the manual does not define, or that this emulator does not know."""


@dataclass(frozen=True)
class MatrixDescriptor:
    """One operand in shared memory. All fields are bytes; `start` is the address inside the CTA's window."""

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int

    @staticmethod
    @lru_cache(maxsize=8192)
    def decode(word: int, arch: int) -> MatrixDescriptor:
        """Decode the 64-bit word of a tcgen05 (arch 100) or wgmma (arch 90) descriptor."""
        if arch >= 100:
            table, code, version = _SWIZZLE_BYTES_SM100, (word >> 61) & 7, (word >> 46) & 3
            if version != 1:
                raise DescriptorError(
                    f"shared memory descriptor 0x{word:016x}: version bits [46:48) are {version}, not 1"
                )
        else:
            table, code = _SWIZZLE_BYTES_SM90, (word >> 62) & 3
        if code not in table:
            raise DescriptorError(f"shared memory descriptor 0x{word:016x}: layout type {code} is not supported")
        descriptor = MatrixDescriptor(
            start=(word & 0x3FFF) << 4,
            leading=((word >> 16) & 0x3FFF) << 4,
            stride=((word >> 32) & 0x3FFF) << 4,
            base_offset=(word >> 49) & 7,
            swizzle=table[code],
        )
        if descriptor.base_offset:
            raise DescriptorError(
                f"shared memory descriptor 0x{word:016x}: base offset {descriptor.base_offset} is not 0"
            )
        return descriptor


def swizzle_address(address: np.ndarray, swizzle: int) -> np.ndarray:
    """Apply the 32, 64 or 128 byte swizzle to absolute byte addresses (0: none)."""
    if swizzle == 0:
        return address
    bits = {32: 1, 64: 3, 128: 7}[swizzle]
    return address ^ (((address >> 7) & bits) << 4)


def operand_end(addresses: np.ndarray) -> int:
    """One past the last byte of an operand's chunks."""
    return int(addresses.max()) + CHUNK


@lru_cache(maxsize=8192)
def chunk_addresses(descriptor: MatrixDescriptor, rows: int, k_bytes: int, element: int, mn_major: bool) -> np.ndarray:
    """Byte addresses of an operand's 16-byte chunks.

    K-major: shape (rows, k_bytes / 16), a chunk holds consecutive k of one row. MN-major: shape
    (k, rows * element / 16) with k = k_bytes / element, a chunk holds consecutive rows of one k.
    """
    d, width = descriptor, descriptor.swizzle
    if not mn_major:
        row = np.arange(rows)[:, None]
        chunk = np.arange(k_bytes // CHUNK)[None, :]
        if width:
            address = d.start + (row // 8) * d.stride + (row % 8) * width + chunk * CHUNK
        else:
            address = d.start + (row // 8) * d.stride + (row % 8) * CHUNK + chunk * d.leading
    else:
        if element != 2:
            raise DescriptorError(f"an MN-major operand of {element}-byte elements is not defined")
        per_chunk = CHUNK // element
        k = np.arange(k_bytes // element)[:, None]
        row = np.arange(0, rows, per_chunk)[None, :]
        address = d.start + _mn_major_offset(d, row, k, element)
    return swizzle_address(address, width).astype(np.int64)


def _mn_major_offset(d: MatrixDescriptor, row: np.ndarray, k: np.ndarray, element: int) -> np.ndarray:
    if d.swizzle:
        span = d.swizzle // element
        return (row // span) * d.leading + (row % span) * element + (k % 8) * d.swizzle + (k // 8) * d.stride
    return (row // 8) * d.stride + (k % 8) * CHUNK + (k // 8) * d.leading


def gather(window: np.ndarray, addresses: np.ndarray, element: int, mn_major: bool) -> np.ndarray:
    """Read an operand as unsigned integers of `element` bytes, shape (rows, k), from a CTA's shared window (uint8)."""
    chunks = window.view(np.complex128)[addresses >> 4]
    values = chunks.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[element])
    return values.T if mn_major else values
