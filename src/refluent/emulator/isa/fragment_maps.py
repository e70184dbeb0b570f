"""Register fragments of the warp-level and warpgroup-level matrix instructions, and the data motion between them.

All maps give, for register i of thread t, the (row, column) it holds. Sources: PTX ISA, "ldmatrix", "stmatrix",
"Matrix fragments for mma.m16n8k*", "wgmma register fragments".
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=8)
def matrix_b16() -> tuple[np.ndarray, np.ndarray]:
    """Rows and first columns (16-bit elements) of the 8x8 matrix pair that thread t holds in one register."""
    t = np.arange(32)
    return t // 4, 2 * (t % 4)


def unpack_matrices(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """ldmatrix: rows (count, 8, 8) uint16 as addressed -> registers (count, 32) uint32."""
    m = rows.transpose(0, 2, 1) if transposed else rows
    row, column = matrix_b16()
    low, high = m[:, row, column].astype(np.uint32), m[:, row, column + 1].astype(np.uint32)
    return low | (high << np.uint32(16))


def pack_matrices(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """stmatrix: registers (count, 32) uint32 -> rows (count, 8, 8) uint16 as addressed."""
    m = np.empty((registers.shape[0], 8, 8), np.uint16)
    row, column = matrix_b16()
    m[:, row, column] = registers & np.uint32(0xFFFF)
    m[:, row, column + 1] = registers >> np.uint32(16)
    return np.ascontiguousarray(m.transpose(0, 2, 1)) if transposed else m


@lru_cache(maxsize=64)
def accumulator_f32(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (0..15 of the warp's slab) and columns of a float32 accumulator 16 x `columns`: (registers, 32) arrays."""
    j, t = np.arange(columns // 2)[:, None], np.arange(32)[None, :]
    row = t // 4 + 8 * ((j >> 1) & 1)
    column = 8 * (j >> 2) + 2 * (t % 4) + (j & 1)
    return row, column


@lru_cache(maxsize=64)
def _accumulator_f16(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for float16: two consecutive columns a register, so (registers, 32, 2) arrays."""
    j, t, half = np.arange(columns // 4)[:, None, None], np.arange(32)[None, :, None], np.arange(2)[None, None, :]
    return t // 4 + 8 * (j & 1) + 0 * half, 8 * (j >> 1) + 2 * (t % 4) + half


@lru_cache(maxsize=64)
def _orders(columns: int, f16: bool) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions: matrix element of each register slot, and register slot of each matrix element."""
    row, column = _accumulator_f16(columns) if f16 else accumulator_f32(columns)
    to_registers = (row * columns + column).ravel()
    to_matrix = np.empty_like(to_registers)
    to_matrix[to_registers] = np.arange(to_registers.size)
    return to_registers, to_matrix


def read_accumulator(registers: np.ndarray, f16: bool) -> np.ndarray:
    """Accumulator registers (count, 32) uint32 of one warp -> float32 (16, columns)."""
    columns = registers.shape[0] * (4 if f16 else 2)
    values = registers.view(np.float16 if f16 else np.float32).reshape(-1)
    matrix = values.take(_orders(columns, f16)[1]).reshape(16, columns)
    return matrix.astype(np.float32) if f16 else matrix


def write_accumulator(values: np.ndarray, f16: bool) -> np.ndarray:
    """float32 (16, columns) -> registers (count, 32) uint32 of one warp."""
    slots = values.reshape(-1).take(_orders(values.shape[1], f16)[0])
    return (slots.astype(np.float16) if f16 else slots).view(np.uint32).reshape(-1, 32)


def a_fragment_words(registers: np.ndarray) -> np.ndarray:
    """A fragment of 16 rows x 32 bytes: registers (4, 32) uint32 -> words (16, 8) uint32."""
    i, t = np.arange(4)[:, None], np.arange(32)[None, :]
    words = np.empty((16, 8), np.uint32)
    words[t // 4 + 8 * (i & 1), t % 4 + 4 * (i >> 1)] = registers
    return words


def b_fragment_words(registers: np.ndarray) -> np.ndarray:
    """B fragment of 8 columns x (16 bytes a register): registers (n, 32) uint32 -> words (8, 4 n) uint32."""
    count = registers.shape[0]
    i, t = np.arange(count)[:, None], np.arange(32)[None, :]
    words = np.empty((8, 4 * count), np.uint32)
    words[t // 4 + 0 * i, t % 4 + 4 * i] = registers
    return words


def a_fragment_words_k8(registers: np.ndarray) -> np.ndarray:
    """A fragment of 16 rows x 16 bytes (m16n8k8, 16-bit): registers (2, 32) -> words (16, 4)."""
    i, t = np.arange(2)[:, None], np.arange(32)[None, :]
    words = np.empty((16, 4), np.uint32)
    words[t // 4 + 8 * i, t % 4 + 0 * i] = registers
    return words
