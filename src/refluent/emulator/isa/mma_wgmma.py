"""wgmma.mma_async's arithmetic (sm_90a): m64nNk(32 bytes), A from shared memory or registers, B from shared memory.

Source: PTX ISA, "wgmma.mma_async", "Matrix descriptor format", "Register fragments".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from refluent.emulator.isa import fragment_maps, numeric
from refluent.emulator.isa.operand import MatrixDescriptor, chunk_addresses, gather, operand_end

M = 64  # rows of one wgmma, 16 a warp


@dataclass(frozen=True)
class WgmmaShape:
    """What the opcode says: columns, operand types, accumulator type, majorness of A and B."""

    n: int
    a_type: str
    b_type: str
    accumulate_f16: bool
    negate_a: bool = False
    negate_b: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False

    @property
    def registers(self) -> int:
        """Accumulator registers a thread."""
        return self.n // 4 if self.accumulate_f16 else self.n // 2

    @property
    def flops(self) -> int:
        return 2 * M * self.n * (numeric.K_BYTES // numeric.ELEMENT_BYTES[self.a_type])

    def a_addresses(self, a: MatrixDescriptor, slab: int | None = None) -> np.ndarray:
        """Chunks of A: all 64 rows, or the 16 of warp `slab`."""
        chunks = chunk_addresses(a, M, numeric.K_BYTES, numeric.ELEMENT_BYTES[self.a_type], self.a_mn_major)
        if slab is None:
            return chunks
        if not self.a_mn_major:
            return chunks[16 * slab : 16 * slab + 16]
        per_chunk = 16 // numeric.ELEMENT_BYTES[self.a_type]
        return chunks[:, 16 * slab // per_chunk : (16 * slab + 16) // per_chunk]

    def b_addresses(self, b: MatrixDescriptor) -> np.ndarray:
        return chunk_addresses(b, self.n, numeric.K_BYTES, numeric.ELEMENT_BYTES[self.b_type], self.b_mn_major)

    @lru_cache(maxsize=4096)  # noqa: B019 - shapes are few and live as long as the kernel
    def operands_end(self, a: MatrixDescriptor | None, b: MatrixDescriptor) -> int:
        """One past the last byte of shared memory that the operands reach."""
        end = operand_end(self.b_addresses(b))
        return end if a is None else max(end, operand_end(self.a_addresses(a)))

    def read_a(self, window: np.ndarray, a: MatrixDescriptor, slab: int | None = None) -> np.ndarray:
        """A (64, k) float32, or the 16 rows of warp `slab`, from shared memory."""
        element = numeric.ELEMENT_BYTES[self.a_type]
        bits = gather(window, self.a_addresses(a, slab), element, self.a_mn_major)
        return self._signed(numeric.DECODE[self.a_type](bits))

    def slab_from_registers(self, registers: np.ndarray) -> np.ndarray:
        """A (16, k) float32 from one warp's fragment, (4, 32) uint32."""
        words = fragment_maps.a_fragment_words(registers)
        bits = words.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[numeric.ELEMENT_BYTES[self.a_type]])
        return self._signed(numeric.DECODE[self.a_type](bits))

    def read_b(self, window: np.ndarray, b: MatrixDescriptor) -> np.ndarray:
        """B (n, k) float32 from shared memory."""
        element = numeric.ELEMENT_BYTES[self.b_type]
        values = numeric.DECODE[self.b_type](gather(window, self.b_addresses(b), element, self.b_mn_major))
        return -values if self.negate_b else values

    def _signed(self, a: np.ndarray) -> np.ndarray:
        return -a if self.negate_a else a
