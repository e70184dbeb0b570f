"""What one warp is made of: the record that native code and Python share, and its register file.

A warp's registers live in one buffer, 32 lanes side by side: 128-bit registers as two planes of 64 bits
(low, high), then 64-, 32- and 16-bit registers, then predicates, each predicate one 32-bit lane mask.
Everything is little-endian and aligned to 64 bytes, so that a 32-bit register is two full vector registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refluent.emulator.ptx import Addr, Imm, Kernel, Pred, Reg, Symbol

LANES = 32
FULL_MASK = 0xFFFFFFFF
STACK_DEPTH = 64
NO_BLOCK = 0xFFFFFFFF

# What run() returns.
EVENT = 1  # `instr` is to be handled by Python under `event_mask`; afterwards run() goes on at `pc`
EXIT = 2  # every lane has left the kernel
FAULT = 3  # `fault` and `instr` say what and where
BUDGET = 4  # the budget of backward jumps is used up; run() goes on at `pc`

# Native faults. Codes from FAULT_MEMORY on belong to the memory runtime.
FAULT_STACK = 1  # more divergence than the stack holds
FAULT_SYNC = 2  # a .sync instruction names lanes that are not executing it
FAULT_TRAP = 3  # trap
FAULT_BRANCH = 4  # brx index out of range
FAULT_MEMORY = 16

FAULT_TEXT = {
    FAULT_STACK: "the divergence stack is full",
    FAULT_SYNC: "a .sync instruction names lanes in its member mask that are not executing it",
    FAULT_TRAP: "trap",
    FAULT_BRANCH: "the index of brx.idx is outside its list of targets",
}

# Generic addresses. Global addresses are host addresses (below 2^56).
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
SHARED_START = 0x400  # the first 1 KB of shared memory belongs to the system
CTA_RANK_SHIFT = 24

# Spaces, as the memory runtime is told them.
GENERIC, GLOBAL, SHARED, SHARED_CLUSTER, LOCAL, PARAM = range(6)

# Entries of the table of runtime functions at `runtime`.
RUNTIME_MEM_ACCESS = 0
RUNTIME_ENTRIES = 8

_U32, _U64 = "<u4", "<u8"
_FIELDS: list[tuple[Any, ...]] = [
    ("regs", _U64),  # register file
    ("cta", _U64),  # context for the memory runtime, opaque here
    ("counters", _U64),  # one u64 a block: how often it was entered
    ("local", _U64),  # local memory: 32 lanes of local_size bytes
    ("params", _U64),  # kernel parameters; their generic addresses are host addresses
    ("symbols", _U64),  # u64 a module variable: its generic address
    ("runtime", _U64),  # u64 a runtime function: its address
    ("budget", "<i8"),  # backward jumps left before BUDGET
    ("clock", _U64),  # %clock, %clock64; each read adds one
    ("globaltimer", _U64),  # nanoseconds; each read adds one
    ("gridid", _U64),
    ("pc", _U32),  # the block to enter
    ("mask", _U32),  # lanes executing
    ("exited", _U32),  # lanes that have left (or never existed)
    ("event", _U32),  # what run() returned last
    ("instr", _U32),  # instruction of the event or fault
    ("event_mask", _U32),  # lanes that execute the event: mask and guard
    ("fault", _U32),
    ("stack_depth", _U32),
    ("stack", _U32, (STACK_DEPTH, 3)),  # reconvergence block, block to go on at, lanes
    ("ctaid", _U32, (3,)),
    ("nctaid", _U32, (3,)),
    ("ntid", _U32, (3,)),
    ("clusterid", _U32, (3,)),
    ("nclusterid", _U32, (3,)),
    ("cluster_ctaid", _U32, (3,)),
    ("cluster_nctaid", _U32, (3,)),
    ("cluster_ctarank", _U32),
    ("cluster_nctarank", _U32),
    ("warpid", _U32),
    ("nwarpid", _U32),
    ("smid", _U32),
    ("nsmid", _U32),
    ("shared_base", _U32),  # cluster_ctarank << 24
    ("dynamic_smem_size", _U32),
    ("total_smem_size", _U32),
    ("local_size", _U32),  # bytes a lane
    ("param_size", _U32),
    ("seed", _U32),  # of perturbed approximations
    ("is_explicit_cluster", _U32),
    ("warp_barriers", _U32),  # how many bar.warp.sync have been executed: they order memory among lanes
    ("convergent", _U32),  # how many .sync instructions have been executed; memory is not ordered by them
]


def _layout() -> np.dtype[Any]:
    """Plain fields in order, then the 64-byte aligned lane arrays, in a record of a multiple of 64 bytes."""
    names, formats, offsets = [], [], []
    offset = 0
    aligned = [("tid", _U32, (3, LANES)), ("addresses", _U64, (LANES,)), ("data", _U64, (4, LANES))]
    for group, alignment in ((_FIELDS, 1), (aligned, 64)):
        for name, *rest in group:
            fmt = np.dtype((rest[0], rest[1])) if len(rest) > 1 else np.dtype(rest[0])
            step = max(alignment, fmt.base.itemsize)
            offset = (offset + step - 1) // step * step
            names.append(name)
            formats.append(fmt)
            offsets.append(offset)
            offset += fmt.itemsize
    size = (offset + 63) // 64 * 64
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


WARP_STATE = _layout()


def offset_of(field: str) -> int:
    """Byte offset of a field of WARP_STATE."""
    fields = WARP_STATE.fields
    assert fields is not None
    return int(fields[field][1])


def aligned_bytes(count: int) -> np.ndarray:
    """(count,) zeroed bytes on a 64-byte boundary."""
    raw = np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]


@dataclass(frozen=True)
class RegisterLayout:
    """How many registers of each width a kernel has, and where each class starts in the buffer (bytes)."""

    n128: int
    n64: int
    n32: int
    n16: int
    npred: int

    @classmethod
    def of(cls, kernel: Kernel) -> RegisterLayout:
        count = kernel.register_counts
        return cls(count.get(128, 0), count.get(64, 0), count.get(32, 0), count.get(16, 0), count.get(1, 0))

    @property
    def at64(self) -> int:
        return self.n128 * 16 * LANES

    @property
    def at32(self) -> int:
        return self.at64 + self.n64 * 8 * LANES

    @property
    def at16(self) -> int:
        return self.at32 + self.n32 * 4 * LANES

    @property
    def at_pred(self) -> int:
        return self.at16 + self.n16 * 2 * LANES

    @property
    def size(self) -> int:
        return (self.at_pred + 4 * self.npred + 63) // 64 * 64

    def offset(self, reg: Reg) -> int:
        """Byte offset of a register."""
        match reg.storage:
            case 128:
                return reg.index * 16 * LANES
            case 64:
                return self.at64 + reg.index * 8 * LANES
            case 32:
                return self.at32 + reg.index * 4 * LANES
            case 16:
                return self.at16 + reg.index * 2 * LANES
            case _:
                return self.at_pred + reg.index * 4


class _Word:
    """A 32-bit field of the record as a Python int."""

    def __init__(self, field: str, element: int = 0) -> None:
        self.at = offset_of(field) // 4 + element

    def __get__(self, warp: Warp, owner: type | None = None) -> int:
        return int(warp.words[self.at])

    def __set__(self, warp: Warp, value: int) -> None:
        warp.words[self.at] = value


class _Long:
    """A 64-bit field of the record as a Python int."""

    def __init__(self, field: str) -> None:
        self.at = offset_of(field) // 8

    def __get__(self, warp: Warp, owner: type | None = None) -> int:
        return int(warp.longs[self.at])

    def __set__(self, warp: Warp, value: int) -> None:
        warp.longs[self.at] = value


_LANE_BITS = np.uint32(1) << np.arange(LANES, dtype=np.uint32)


def lanes(mask: int) -> np.ndarray:
    """(32,) bool: which lanes a mask names."""
    return (_LANE_BITS & np.uint32(mask)) != 0


def mask_of(active: np.ndarray) -> int:
    """The mask of a (32,) bool array."""
    return int(np.bitwise_or.reduce(np.where(active, _LANE_BITS, np.uint32(0))))


class Warp:
    """One warp's record and registers, seen from Python.

    `regs32` is (n32, 32) uint32, `regs64` (n64, 32) uint64, `regs16` (n16, 32) uint16, `regs128` (n128, 2, 32)
    uint64 (low, high), `preds` (npred,) uint32 lane masks: views, so that writing into them writes the register.
    """

    pc = _Word("pc")
    mask = _Word("mask")
    exited = _Word("exited")
    event = _Word("event")
    instr = _Word("instr")
    event_mask = _Word("event_mask")
    fault = _Word("fault")
    stack_depth = _Word("stack_depth")
    shared_base = _Word("shared_base")
    warpid = _Word("warpid")
    budget = _Long("budget")
    clock = _Long("clock")
    globaltimer = _Long("globaltimer")

    def __init__(self, kernel: Kernel, counters: np.ndarray | None = None) -> None:
        """A warp of `kernel` with cleared registers, all lanes active at block 0. Pointers (cta, params, symbols,
        runtime, local) and special registers are the machine's to fill, through `record`."""
        layout = RegisterLayout.of(kernel)
        self.layout = layout
        self.kernel = kernel
        self.block = aligned_bytes(WARP_STATE.itemsize)
        self.record = self.block.view(WARP_STATE)[0]
        self.words = self.block.view(np.uint32)
        self.longs = self.block.view(np.uint64)
        self.buffer = aligned_bytes(layout.size)
        part = self.buffer
        self.regs128 = part[: layout.at64].view(np.uint64).reshape(layout.n128, 2, LANES)
        self.regs64 = part[layout.at64 : layout.at32].view(np.uint64).reshape(layout.n64, LANES)
        self.regs32 = part[layout.at32 : layout.at16].view(np.uint32).reshape(layout.n32, LANES)
        self.regs16 = part[layout.at16 : layout.at_pred].view(np.uint16).reshape(layout.n16, LANES)
        self.preds = part[layout.at_pred : layout.at_pred + 4 * layout.npred].view(np.uint32)
        self.counters = counters
        self.address = self.block.ctypes.data
        self.record["regs"] = self.buffer.ctypes.data
        if counters is not None:
            self.record["counters"] = counters.ctypes.data
        self.mask = FULL_MASK

    def view(self, reg: Reg) -> np.ndarray:
        """The register itself: (32,), or (2, 32) for 128 bits. Not for predicates."""
        match reg.storage:
            case 32:
                return self.regs32[reg.index]
            case 64:
                return self.regs64[reg.index]
            case 16:
                return self.regs16[reg.index]
            case 128:
                return self.regs128[reg.index]
        raise TypeError(f"{reg.name} is a predicate: read it with predicate()")

    def get(self, operand: Reg | Imm, dtype: Any = None) -> np.ndarray:
        """(32,) raw bits of a register or immediate; `dtype` reinterprets (same size) or sizes an immediate."""
        if isinstance(operand, Reg):
            bits = self.view(operand)
            return bits if dtype is None or bits.dtype == dtype else bits.view(dtype)
        if isinstance(operand, Imm):
            return np.full(LANES, operand.unsigned(np.dtype(dtype or np.uint32).itemsize * 8), dtype or np.uint32)
        raise TypeError(f"no lane values in {operand!r}")

    def set(self, reg: Reg, values: np.ndarray | int, mask: int = FULL_MASK) -> None:
        """Write the lanes of `mask`. Values are raw bits of the register's own width, or a scalar."""
        target = self.view(reg)
        if mask == FULL_MASK:
            target[...] = values
        else:
            np.copyto(target, np.asarray(values, target.dtype), where=lanes(mask))

    def predicate(self, operand: Reg | Pred | Imm) -> int:
        """Lane mask of a predicate operand."""
        if isinstance(operand, Pred):
            value = int(self.preds[operand.reg.index])
            return value ^ FULL_MASK if operand.negated else value
        if isinstance(operand, Imm):
            return FULL_MASK if operand.value else 0
        return int(self.preds[operand.index])

    def set_predicate(self, reg: Reg, value: int, mask: int = FULL_MASK) -> None:
        """Set the lanes of `mask` of a predicate to those of `value`."""
        old = int(self.preds[reg.index])
        self.preds[reg.index] = (old & ~mask) | (value & mask)

    def locate(self, operand: Addr | Reg | Symbol) -> np.ndarray:
        """(32,) uint64 addresses in the operand's own state space (a 32-bit base wraps at 32 bits)."""
        if not isinstance(operand, Addr):
            operand = Addr(operand, 0)
        base, offset = operand.base, operand.offset
        if isinstance(base, Reg):
            if base.bits == 32:
                return (self.regs32[base.index] + np.uint32(offset & FULL_MASK)).astype(np.uint64)
            return self.regs64[base.index] + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        if isinstance(base, Imm):
            return np.full(LANES, base.value + offset, np.uint64)
        return np.full(LANES, self.symbol_address(base) + offset, np.uint64)

    def symbol_address(self, symbol: Symbol) -> int:
        """Address of a variable or parameter in its own state space."""
        variable = self.kernel.variables[symbol.name]
        match variable.space:
            case "shared":
                return self.shared_base | variable.offset
            case "param":
                return int(self.record["params"]) + variable.offset
            case "local":
                return variable.offset
        table = int(self.record["symbols"])
        return int(_peek(table + 8 * variable.index))

    def scalar(self, operand: Reg | Imm, mask: int) -> int:
        """Value of the lowest lane of `mask`: for operands that must agree in a warp."""
        if isinstance(operand, Imm):
            return operand.value
        lane = (mask & -mask).bit_length() - 1
        return int(self.view(operand)[lane])


def _peek(address: int) -> int:
    import ctypes

    return int(ctypes.c_uint64.from_address(address).value)


def reset(warps: Sequence[Warp]) -> None:
    """Back to block 0 with cleared registers."""
    for warp in warps:
        warp.buffer[...] = 0
        warp.pc = warp.stack_depth = warp.exited = warp.fault = 0
        warp.mask = FULL_MASK
