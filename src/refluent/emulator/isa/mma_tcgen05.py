"""tcgen05.mma's arithmetic: instruction descriptor, operands, accumulator layouts (sm_100a).

Source: PTX ISA, "tcgen05.mma", "Instruction descriptor", "Shared memory descriptor", "Data path layout organization".
A pair (cta_group::2) splits A's rows and B's columns between its CTAs, both at the descriptor's address in their own
shared memory; each CTA's tensor memory receives its rows of D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from refluent.emulator.isa import numeric, tmem
from refluent.emulator.isa.operand import DescriptorError, MatrixDescriptor, chunk_addresses, gather

_KIND_TYPES = {
    "kind::f16": {0: "f16", 1: "bf16"},
    "kind::tf32": {2: "tf32"},
    "kind::f8f6f4": {0: "e4m3", 1: "e5m2"},
}


class CtaMemory(Protocol):
    """What an MMA touches of one CTA: the shared window (uint8) and tensor memory (uint32, (128, 512))."""

    @property
    def shared(self) -> np.ndarray: ...
    @property
    def tmem(self) -> np.ndarray: ...


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor; m and n are the pair's totals for cta_group::2."""

    m: int
    n: int
    a_type: str
    b_type: str
    accumulate_f16: bool
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool

    @staticmethod
    def decode(word: int, kind: str) -> InstructionDescriptor:
        """Decode; DescriptorError for sparse, saturating or unknown fields."""
        types = _KIND_TYPES[kind]
        a_code, b_code, d_code = (word >> 7) & 7, (word >> 10) & 7, (word >> 4) & 3
        if word & 0xF or word >> 30 or (word >> 23) & 1 or (word >> 29) & 1:
            raise DescriptorError(
                f"instruction descriptor 0x{word:08x}: sparsity, saturation, shift or reserved bits are set"
            )
        if a_code not in types or b_code not in types or d_code > 1:
            raise DescriptorError(
                f"instruction descriptor 0x{word:08x}: types {a_code}, {b_code} -> {d_code} unknown in {kind}"
            )
        return InstructionDescriptor(
            m=((word >> 24) & 31) * 16,
            n=((word >> 17) & 63) * 8,
            a_type=types[a_code],
            b_type=types[b_code],
            accumulate_f16=d_code == 0,
            negate_a=bool(word >> 13 & 1),
            negate_b=bool(word >> 14 & 1),
            a_mn_major=bool(word >> 15 & 1),
            b_mn_major=bool(word >> 16 & 1),
        )

    def violation(self, cta_group: int) -> str | None:
        """Why the manual does not allow this shape, or None."""
        allowed = {1: (64, 128), 2: (128, 256)}[cta_group]
        if self.m not in allowed:
            return f"M = {self.m} with cta_group::{cta_group}; {allowed[0]} or {allowed[1]} exist"
        step = 8 if self.m == 64 else 16 if cta_group == 1 or self.m == 128 else 32
        if cta_group == 2 and self.m == 128:
            step = 32 if self.n > 32 else 16
        if not 8 <= self.n <= 256 or self.n % step:
            return f"N = {self.n} with M = {self.m}, cta_group::{cta_group}; multiples of {step} up to 256 exist"
        return None


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma with decoded operands; a is a shared memory descriptor or a tensor memory address."""

    shape: InstructionDescriptor
    cta_group: int
    d_address: int
    a: MatrixDescriptor | int
    b: MatrixDescriptor
    accumulate: bool
    disabled_lanes: tuple[int, ...] = ()  # 32-lane masks of D's lanes that keep their value, four words a CTA

    @property
    def flops(self) -> int:
        return 2 * self.shape.m * self.shape.n * self.k

    @property
    def k(self) -> int:
        return numeric.K_BYTES // numeric.ELEMENT_BYTES[self.shape.a_type]

    @property
    def shared_bytes(self) -> int:
        """What both operands have in shared memory, of all its CTAs."""
        rows = self.shape.n if isinstance(self.a, int) else self.shape.m + self.shape.n
        return rows * numeric.K_BYTES

    def a_addresses(self) -> np.ndarray | None:
        """Chunk addresses of A in each CTA's window, None when A is in tensor memory."""
        if isinstance(self.a, int):
            return None
        s = self.shape
        rows, element = s.m // self.cta_group, numeric.ELEMENT_BYTES[s.a_type]
        return chunk_addresses(self.a, rows, numeric.K_BYTES, element, s.a_mn_major)

    def b_addresses(self) -> np.ndarray:
        """Chunk addresses of B in each CTA's window."""
        s = self.shape
        rows, element = s.n // self.cta_group, numeric.ELEMENT_BYTES[s.b_type]
        return chunk_addresses(self.b, rows, numeric.K_BYTES, element, s.b_mn_major)

    def a_cells(self) -> tuple[np.ndarray, int, int] | None:
        """A in tensor memory: lanes, first column, columns; None when A is in shared memory."""
        if not isinstance(self.a, int):
            return None
        columns = numeric.K_BYTES // 4
        return (self.a >> 16) + self._operand_lanes(), self.a & 0xFFFF, columns

    def d_cells(self) -> tuple[np.ndarray, int, int]:
        """D in each CTA's tensor memory: lanes, first column, columns."""
        s, column = self.shape, self.d_address & 0xFFFF
        if s.m == 128 and self.cta_group == 2:
            return np.arange(128), column, s.n // 2
        return (self.d_address >> 16) + tmem.accumulator_lanes(s.m, self.cta_group), column, s.n

    def _operand_lanes(self) -> np.ndarray:
        if self.cta_group == 2 and self.shape.m == 128:
            return np.arange(64)
        return tmem.accumulator_lanes(self.shape.m, self.cta_group)

    def execute(self, ctas: Sequence[CtaMemory], model: str) -> None:
        """Read the operands, multiply, update D. `ctas`: the issuing CTA, or the pair, even rank first."""
        b = np.concatenate([self._read_b(cta) for cta in ctas]) if len(ctas) > 1 else self._read_b(ctas[0])
        for rank, cta in enumerate(ctas):
            kept = self._kept_lanes(rank)
            before = cta.tmem[kept].copy()
            self._update(cta, self._read_a(cta), b, model)
            cta.tmem[kept] = before

    def _kept_lanes(self, rank: int) -> np.ndarray:
        """Lanes of one CTA that disable-output-lane protects."""
        words = np.array(self.disabled_lanes[4 * rank : 4 * rank + 4], "<u4")
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))

    def _read_a(self, cta: CtaMemory) -> np.ndarray:
        s = self.shape
        element = numeric.ELEMENT_BYTES[s.a_type]
        cells = self.a_cells()
        if cells is None:
            addresses = self.a_addresses()
            assert addresses is not None  # a_cells() is None only for A in shared memory
            bits = gather(cta.shared, addresses, element, s.a_mn_major)
        else:
            lanes, column, columns = cells
            words = np.ascontiguousarray(cta.tmem[lanes, column : column + columns])
            bits = words.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[element])
        a = numeric.DECODE[s.a_type](bits)
        return -a if s.negate_a else a

    def _read_b(self, cta: CtaMemory) -> np.ndarray:
        s = self.shape
        bits = gather(cta.shared, self.b_addresses(), numeric.ELEMENT_BYTES[s.b_type], s.b_mn_major)
        b = numeric.DECODE[s.b_type](bits)
        return -b if s.negate_b else b

    def _update(self, cta: CtaMemory, a: np.ndarray, b: np.ndarray, model: str) -> None:
        s = self.shape
        lanes, column, columns = self.d_cells()
        cells = slice(column, column + columns)
        contiguous = len(lanes) == tmem.LANES
        old = cta.tmem[:, cells] if contiguous else cta.tmem[lanes, cells]
        c = None
        if self.accumulate:
            c = numeric.f16_to_f32(old.astype(np.uint16)) if s.accumulate_f16 else old.view(np.float32)
            if s.m == 128 and self.cta_group == 2:
                c = np.concatenate([c[:64], c[64:]], axis=1)
        d = numeric.multiply_accumulate(a, b, c, model, numeric.Product(s.a_type, s.b_type, s.accumulate_f16))
        if s.m == 128 and self.cta_group == 2:
            d = np.concatenate([d[:, : s.n // 2], d[:, s.n // 2 :]], axis=0)
        new = d.astype(np.float16).view(np.uint16).astype(np.uint32) if s.accumulate_f16 else d.view(np.uint32)
        if contiguous:
            cta.tmem[:, cells] = new
        else:
            cta.tmem[lanes, cells] = new
