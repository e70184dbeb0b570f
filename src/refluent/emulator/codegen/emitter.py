"""The LLVM IR text of one basic block: register values in their cheapest form, stored once at the end.

Inside a block registers are SSA values of 32 lanes. Lanes that do not execute the block compute too; their results
are dropped when registers that live on are stored under the lane mask at the end.

A value keeps whichever forms it was made or used in: bits (`<32 x iN>`), floating point, two halves (a 64-bit
register that is only packed and unpacked never becomes 64-bit lanes), or for predicates a lane mask (i32) and a
vector of i1. f32 arithmetic leaves NaN payloads to the host; they become PTX's canonical NaN when bits are wanted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from refluent.emulator.ptx import Imm, Instruction, Kernel, Operand, Pred, Reg, Sink, UnsupportedPTX
from refluent.emulator.state import RegisterLayout, offset_of

FLOAT_TYPE = {16: "half", 32: "float", 64: "double"}
CANONICAL_NAN = {16: 0x7FFF, 32: 0x7FFFFFFF}


def vec(kind: str) -> str:
    return f"<32 x {kind}>"


class Val:
    """A 32-lane value in one or more forms (SSA names or constants)."""

    __slots__ = ("bits", "fp", "halves", "int_", "lane_mask", "lanes")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.int_: str | None = None
        self.fp: str | None = None
        self.halves: tuple[Val, Val] | None = None
        self.lane_mask: str | None = None
        self.lanes: str | None = None


class Library:
    """Helper functions of a module, each added once when first asked for."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}

    def add(self, name: str, definition: str) -> None:
        self.text.setdefault(name, definition)

    def declare(self, name: str, declaration: str) -> None:
        self.text.setdefault("declare " + name, declaration)


class Emitter:
    """Collects the lines of one block's function."""

    def __init__(self, kernel: Kernel, layout: RegisterLayout, library: Library, options: Options) -> None:
        self.kernel = kernel
        self.layout = layout
        self.library = library
        self.options = options
        self.lines: list[str] = []
        self.count = 0
        self.env: dict[Reg, Val] = {}
        self.dirty: dict[Reg, None] = {}
        self.guard: Val | None = None
        self.ins: Instruction | None = None

    # lines

    def name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def op(self, text: str) -> str:
        """Append `%new = text` and return %new."""
        self.count += 1
        name = f"%v{self.count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def refuse(self, what: str) -> UnsupportedPTX:
        assert self.ins is not None
        return UnsupportedPTX(
            f"{self.ins.name}: {what} (PTX line {self.ins.line}, kernel {self.kernel.name}): not known to the emulator"
        )

    # making values

    def from_bits(self, name: str, bits: int) -> Val:
        val = Val(bits)
        val.int_ = name
        return val

    def from_float(self, name: str, bits: int) -> Val:
        val = Val(bits)
        val.fp = name
        return val

    def from_halves(self, low: Val, high: Val) -> Val:
        val = Val(2 * low.bits)
        val.halves = (low, high)
        return val

    def from_lanes(self, name: str) -> Val:
        val = Val(1)
        val.lanes = name
        return val

    def from_mask(self, name: str) -> Val:
        val = Val(1)
        val.lane_mask = name
        return val

    def constant(self, value: int, bits: int) -> Val:
        return self.from_bits(f"splat (i{bits} {value & ((1 << bits) - 1)})", bits)

    # forms

    def bits(self, val: Val) -> str:
        """`<32 x iN>` form."""
        if val.int_ is None:
            val.int_ = self._make_bits(val)
        return val.int_

    def _make_bits(self, val: Val) -> str:
        n = val.bits
        if val.fp is not None:
            kind = vec(FLOAT_TYPE[n])
            raw = self.op(f"bitcast {kind} {val.fp} to {vec(f'i{n}')}")
            if n == 64:
                return raw
            nan = self.op(f"fcmp uno {kind} {val.fp}, zeroinitializer")
            return self.select(nan, f"splat (i{n} {CANONICAL_NAN[n]})", raw, f"i{n}")
        assert val.halves is not None
        low, high = (self.bits(half) for half in val.halves)
        h = n // 2
        wide_low = self.op(f"zext {vec(f'i{h}')} {low} to {vec(f'i{n}')}")
        wide_high = self.op(f"zext {vec(f'i{h}')} {high} to {vec(f'i{n}')}")
        up = self.op(f"shl {vec(f'i{n}')} {wide_high}, splat (i{n} {h})")
        return self.op(f"or disjoint {vec(f'i{n}')} {up}, {wide_low}")

    def fp(self, val: Val) -> str:
        """Floating-point form (half, float, double by width)."""
        if val.fp is None:
            n = val.bits
            bits = self.bits(val)
            if bits.startswith("splat"):
                val.fp = f"bitcast ({vec(f'i{n}')} {bits} to {vec(FLOAT_TYPE[n])})"
            else:
                val.fp = self.op(f"bitcast {vec(f'i{n}')} {bits} to {vec(FLOAT_TYPE[n])}")
        return val.fp

    def halves(self, val: Val) -> tuple[Val, Val]:
        """Low and high half of a 32-, 64- or 128-bit value."""
        if val.halves is None:
            n, h = val.bits, val.bits // 2
            bits = self.bits(val)
            if bits.startswith("splat"):
                number = int(bits.split()[-1].rstrip(")"))
                val.halves = (self.constant(number, h), self.constant(number >> h, h))
            else:
                low = self.op(f"trunc {vec(f'i{n}')} {bits} to {vec(f'i{h}')}")
                up = self.op(f"lshr {vec(f'i{n}')} {bits}, splat (i{n} {h})")
                high = self.op(f"trunc {vec(f'i{n}')} {up} to {vec(f'i{h}')}")
                val.halves = (self.from_bits(low, h), self.from_bits(high, h))
        return val.halves

    def lanes(self, val: Val) -> str:
        """`<32 x i1>` form of a predicate."""
        if val.lanes is None:
            val.lanes = self.op(f"bitcast i32 {val.lane_mask} to <32 x i1>")
        return val.lanes

    def mask(self, val: Val) -> str:
        """i32 form of a predicate."""
        if val.lane_mask is None:
            val.lane_mask = self.op(f"bitcast <32 x i1> {val.lanes} to i32")
        return val.lane_mask

    def select(self, lanes: str, yes: str, no: str, kind: str) -> str:
        return self.op(f"select <32 x i1> {lanes}, {vec(kind)} {yes}, {vec(kind)} {no}")

    # registers and operands

    def pointer(self, reg: Reg) -> str:
        return self.op(f"getelementptr i8, ptr %regs, i64 {self.layout.offset(reg)}")

    def read(self, reg: Reg) -> Val:
        val = self.env.get(reg)
        if val is None:
            val = self.env[reg] = self._load(reg)
        return val

    def _load(self, reg: Reg) -> Val:
        at = self.pointer(reg)
        if reg.bits == 1:
            return self.from_mask(self.op(f"load i32, ptr {at}, align 4"))
        if reg.bits == 128:
            high = self.op(f"getelementptr i8, ptr {at}, i64 256")
            pair = [self.op(f"load <32 x i64>, ptr {p}, align 64") for p in (at, high)]
            return self.from_halves(self.from_bits(pair[0], 64), self.from_bits(pair[1], 64))
        n = reg.storage
        return self.from_bits(self.op(f"load <32 x i{n}>, ptr {at}, align 64"), n)

    def write(self, target: Operand, val: Val) -> None:
        """Define a destination operand under the instruction's guard."""
        if isinstance(target, Sink):
            return
        if not isinstance(target, Reg):
            raise self.refuse(f"destination {target}")
        if target.storage != val.bits:
            raise self.refuse(f"{val.bits}-bit result in {target.bits}-bit register {target.name}")
        if self.guard is not None:
            val = self.blend(self.guard, val, self.read(target))
        self.env[target] = val
        self.dirty[target] = None

    def blend(self, guard: Val, new: Val, old: Val) -> Val:
        """`new` in the guard's lanes, `old` elsewhere."""
        if new.bits == 1:
            g = self.mask(guard)
            take = self.op(f"and i32 {self.mask(new)}, {g}")
            keep_lanes = self.op(f"xor i32 {g}, -1")
            keep = self.op(f"and i32 {self.mask(old)}, {keep_lanes}")
            return self.from_mask(self.op(f"or i32 {take}, {keep}"))
        if new.bits == 128 or (new.int_ is None and new.halves is not None and old.halves is not None):
            pairs = zip(self.halves(new), self.halves(old))
            low, high = (self.blend(guard, a, b) for a, b in pairs)
            return self.from_halves(low, high)
        if new.int_ is None and new.fp is not None and old.fp is not None:
            kind = FLOAT_TYPE[new.bits]
            return self.from_float(self.select(self.lanes(guard), new.fp, old.fp, kind), new.bits)
        name = self.select(self.lanes(guard), self.bits(new), self.bits(old), f"i{new.bits}")
        return self.from_bits(name, new.bits)

    def value(self, operand: Operand, bits: int) -> Val:
        """A source operand as `bits` wide lanes. A wider or narrower register is refused, an immediate is cut."""
        if isinstance(operand, Reg):
            if operand.storage != bits:
                raise self.refuse(f"{operand.bits}-bit register {operand.name} where {bits} bits are wanted")
            return self.read(operand)
        if isinstance(operand, Imm):
            return self.constant(operand.value, bits)
        raise self.refuse(f"operand {operand}")

    def float_value(self, operand: Operand, bits: int) -> Val:
        """A source operand of a floating-point instruction: literals are converted to its width.

        16-bit formats have no literals: there an immediate is the bits.
        """
        if isinstance(operand, Imm) and bits > 16:
            if operand.float_bits != bits:
                number = operand.as_float()
                code, word = {32: ("<f", "<I"), 64: ("<d", "<Q")}[bits]
                return self.constant(struct.unpack(word, struct.pack(code, number))[0], bits)
            return self.constant(operand.value, bits)
        return self.value(operand, bits)

    def predicate(self, operand: Operand) -> Val:
        """A predicate source operand: %p, !%p or an immediate."""
        if isinstance(operand, Pred):
            return self.invert(self.read(operand.reg))
        if isinstance(operand, Reg) and operand.bits == 1:
            return self.read(operand)
        if isinstance(operand, Imm):
            return self.from_mask("-1" if operand.value else "0")
        raise self.refuse(f"operand {operand} where a predicate is wanted")

    def invert(self, val: Val) -> Val:
        if val.lane_mask is None:
            return self.from_lanes(self.op(f"xor <32 x i1> {val.lanes}, splat (i1 true)"))
        return self.from_mask(self.op(f"xor i32 {val.lane_mask}, -1"))

    # the record

    def field(self, name: str, element: int = 0, size: int = 4) -> str:
        """Pointer to a field of the warp's record."""
        return self.op(f"getelementptr i8, ptr %s, i64 {offset_of(name) + element * size}")

    def load_field(self, name: str, kind: str = "i32", element: int = 0) -> str:
        size = 8 if kind in ("i64", "ptr") else 4
        return self.op(f"load {kind}, ptr {self.field(name, element, size)}, align {size}")

    def store_field(self, name: str, value: str, kind: str = "i32") -> None:
        self.line(f"store {kind} {value}, ptr {self.field(name)}, align {8 if kind == 'i64' else 4}")

    def splat(self, scalar: str, kind: str) -> str:
        one = self.op(f"insertelement <32 x {kind}> poison, {kind} {scalar}, i64 0")
        return self.op(f"shufflevector <32 x {kind}> {one}, <32 x {kind}> poison, <32 x i32> zeroinitializer")

    def active(self) -> str:
        """i32: lanes that execute the current instruction."""
        if self.guard is None:
            return "%mask"
        return self.op(f"and i32 %mask, {self.mask(self.guard)}")

    # the end of the block

    def store_registers(self, keep: Iterable[Reg]) -> None:
        for reg in keep:
            if reg in self.dirty:
                self._store(reg, self.env[reg])

    def _store(self, reg: Reg, val: Val) -> None:
        at = self.pointer(reg)
        if reg.bits == 1:
            old = self.op(f"load i32, ptr {at}, align 4")
            kept = self.op(f"and i32 {old}, %others")
            new = self.op(f"and i32 {self.mask(val)}, %mask")
            both = self.op(f"or disjoint i32 {kept}, {new}")
            self.line(f"store i32 {both}, ptr {at}, align 4")
        elif reg.bits == 128:
            for half, step in zip(self.halves(val), (0, 256)):
                p = self.op(f"getelementptr i8, ptr {at}, i64 {step}")
                self._store_lanes(p, self.bits(half), 64)
        else:
            self._store_lanes(at, self.bits(val), val.bits)

    def _store_lanes(self, at: str, value: str, bits: int) -> None:
        kind = f"<32 x i{bits}>"
        old = self.op(f"load {kind}, ptr {at}, align 64")
        new = self.op(f"select <32 x i1> %lanes, {kind} {value}, {kind} {old}")
        self.line(f"store {kind} {new}, ptr {at}, align 64")


class Options:
    """What changes the code that is generated."""

    def __init__(self, approx: str = "exact") -> None:
        if approx not in ("exact", "perturbed"):
            raise ValueError(f"approx must be 'exact' or 'perturbed', not {approx!r}")
        self.approx = approx
