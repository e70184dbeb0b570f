"""Tensor memory geometry (sm_100a): where tcgen05.ld / st put registers and where accumulators lie.

A cell is (lane, column), 128 lanes x 512 columns x 32 bits a CTA; an address is lane << 16 | column.
Source: PTX ISA, "Tensor Memory addressing", "tcgen05 data movement shapes" and "tcgen05.mma data path layouts".
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

LANES, COLUMNS = 128, 512

# Cells of one repeat, per shape: (registers, columns); the functions below give thread t's cell of register i.
_SHAPES = {"32x32b": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "16x32bx2": (1, 1)}


def registers_per_repeat(shape: str) -> int:
    return _SHAPES[shape][0]


@lru_cache(maxsize=256)
def transfer_cells(shape: str, repeats: int, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lane (relative to the address's lane) and column (relative) of register i, thread t: two (registers, 32) arrays.

    `split` is the immediate of .16x32bx2: columns between its two halves.
    """
    t = np.arange(32)[None, :]
    registers, columns = _SHAPES[shape]
    index = np.arange(registers * repeats)[:, None]
    r, i = index // registers, index % registers
    if shape == "32x32b":
        lane, column = t + 0 * r, r + 0 * t
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t % 2) + 0 * r, columns * r + (t // 2) % 2
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * i, columns * r + t % 4
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (i >> 1), columns * r + 2 * (t % 4) + (i & 1)
    else:
        lane, column = t % 16 + 0 * r, r + (t // 16) * split
    return lane.astype(np.int64), column.astype(np.int64)


@lru_cache(maxsize=64)
def accumulator_lanes(m: int, cta_group: int) -> np.ndarray:
    """Lane of each of the accumulator rows that one CTA holds (M / cta_group rows), M = 128 over a pair aside."""
    rows = m // cta_group
    if rows == 128:
        return np.arange(128)
    if cta_group == 1 and rows == 64:
        row = np.arange(64)
        return row % 16 + 32 * (row // 16)
    raise ValueError(f"no accumulator layout for M = {m}, cta_group::{cta_group}")
