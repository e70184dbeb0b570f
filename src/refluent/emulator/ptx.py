"""PTX as data: modules, kernels, variables, instructions and their operands; parse() makes them from text.

What an instruction means, and which modifiers it may carry, is not decided here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

SHARED_START = 0x400  # the system's own part of shared memory comes first


class UnsupportedPTX(NotImplementedError):
    """PTX that the emulator does not know: names the construct, its line and the kernel."""


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: `index` counts within its storage class."""

    name: str
    bits: int  # 1 (predicate), 8, 16, 32, 64, 128
    index: int

    @property
    def storage(self) -> int:
        """Width of the class that holds it: 8-bit registers live in 16-bit ones."""
        return 16 if self.bits == 8 else self.bits


@dataclass(frozen=True, slots=True)
class Imm:
    """An integer, or a floating-point literal's bits (`float_bits` 32 or 64)."""

    value: int
    float_bits: int = 0

    def unsigned(self, bits: int) -> int:
        """The operand's bit pattern in an integer or untyped instruction of this width."""
        return self.value & ((1 << bits) - 1)

    def as_float(self) -> float:
        """Value of a floating-point literal (an integer stands for itself)."""
        if self.float_bits == 32:
            return float(struct.unpack("<f", struct.pack("<I", self.value))[0])
        if self.float_bits == 64:
            return float(struct.unpack("<d", struct.pack("<Q", self.value))[0])
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable or function by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The bit bucket `_`."""


@dataclass(frozen=True, slots=True)
class Pred:
    """A negated predicate operand `!%p`."""

    reg: Reg
    negated: bool = True


@dataclass(frozen=True, slots=True)
class Addr:
    """`[base + offset]`."""

    base: Reg | Symbol | Imm
    offset: int


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b}`, a vector register, a parenthesised list, or a tensor coordinate list."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Composite:
    """A bracketed list `[a, {b, c}]`, as tensor copies take it."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Dual:
    """Two destinations `d|p`."""

    first: Operand
    second: Operand


@dataclass(slots=True)
class Label:
    """A branch target: index of the instruction it stands before, set when its scope closes."""

    name: str
    target: int = -1


Operand = Reg | Imm | Symbol | Special | Sink | Pred | Addr | Vec | Composite | Dual | Label
Guard = tuple[Reg, bool]  # register, negated


@dataclass(slots=True)
class Instruction:
    """One instruction. `line` counts PTX lines from 1, `source` is (file, line) of the kernel's author or None."""

    index: int
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    source: tuple[str, int] | None

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    def __str__(self) -> str:
        guard = f"@{'!' if self.guard[1] else ''}{self.guard[0].name} " if self.guard else ""
        return f"{guard}{self.name} {', '.join(map(show, self.operands))}".rstrip() + ";"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: `offset` within its space (params, shared, local), `index` of a global or const one in `symbols`."""

    name: str
    space: str  # param, shared, local, global, const
    size: int
    align: int
    offset: int = 0
    index: int = 0
    data: bytes | None = None
    dynamic: bool = False


@dataclass(slots=True)
class Kernel:
    """One `.entry`, with everything that it refers to."""

    name: str
    params: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    symbols: list[Variable] = field(default_factory=list)  # global and const variables, by index
    registers: dict[str, Reg] = field(default_factory=dict)
    register_counts: dict[int, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)  # of the outermost scope
    call_params: dict[str, Reg] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    param_size: int = 0
    local_size: int = 0  # bytes a lane
    static_shared: int = SHARED_START  # end of the static variables: where dynamic shared memory starts
    digest_text: str = ""
    target: str = ""

    @property
    def reqntid(self) -> tuple[int, ...] | None:
        return self.directives.get("reqntid")


@dataclass(slots=True)
class Module:
    """A PTX file."""

    version: str
    target: str
    kernels: dict[str, Kernel]


def parse(text: str) -> Module:
    """Parse a PTX file. Raises UnsupportedPTX where it is not understood."""
    from refluent.emulator.ptx_parser import Parser

    return Parser(text).module()


def show(operand: Operand) -> str:
    """An operand as PTX writes it."""
    match operand:
        case Reg(name=name) | Symbol(name=name) | Special(name=name) | Label(name=name):
            return name
        case Imm(value=value, float_bits=0):
            return str(value)
        case Imm(value=value, float_bits=bits):
            return f"0f{value:08X}" if bits == 32 else f"0d{value:016X}"
        case Sink():
            return "_"
        case Pred(reg=reg):
            return f"!{reg.name}"
        case Addr(base=base, offset=offset):
            return f"[{show(base)}{offset:+d}]" if offset else f"[{show(base)}]"
        case Vec(items=items):
            return "{" + ", ".join(map(show, items)) + "}"
        case Composite(items=items):
            return "[" + ", ".join(map(show, items)) + "]"
        case Dual(first=first, second=second):
            return f"{show(first)}|{show(second)}"
