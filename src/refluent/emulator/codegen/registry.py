"""Which instruction is emitted by what: native emitters by opcode and type, and the list of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from refluent.emulator.codegen.emitter import Emitter
from refluent.emulator.ptx import Addr, Instruction, UnsupportedPTX, Vec

INTEGER = tuple(f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in "bus")
ANY = "*"
TYPES = frozenset(
    [*INTEGER, "b128", "pred", "f16", "f16x2", "bf16", "bf16x2", "tf32", "f32", "f32x2", "f64", "u16x2", "s16x2"]
    + ["u8x4", "s8x4", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2", "e4m3x4", "e5m2x4", "e2m3x4"]
    + ["e3m2x4", "e2m1x4"]
)

Emit = Callable[[Emitter, Instruction, "Mods"], None]
EMITTERS: dict[tuple[str, str], Emit] = {}
WRITES: dict[str, int] = {"bra": 0, "brx": 0, "ret": 0, "exit": 0, "trap": 0}

# Events by opcode: how many leading operands they define (an address is never one). Operands of wgmma are left as
# read: its accumulators are both, and are written after the instruction has been passed.
EVENTS = {
    "applypriority": 0,
    "atom": 1,
    "bar": 0,
    "barrier": 0,
    "call": 1,
    "clusterlaunchcontrol": 1,
    "cp": 0,
    "discard": 0,
    "fence": 0,
    "griddepcontrol": 0,
    "ldmatrix": 1,
    "mbarrier": 1,
    "membar": 0,
    "mma": 1,
    "movmatrix": 1,
    "multimem": 1,
    "nanosleep": 0,
    "prefetch": 0,
    "prefetchu": 0,
    "red": 0,
    "setmaxnreg": 0,
    "stmatrix": 0,
    "tcgen05": 1,
    "tensormap": 0,
    "wgmma": 0,
}
# Loads and stores that order or poll memory are events, so that other warps get their turn.
SYNCHRONISING = frozenset(["volatile", "relaxed", "acquire", "release", "mmio", "async", "bulk"])


def emits(*opcodes: str, types: Iterable[str] = (ANY,), writes: int = 1) -> Callable[[Emit], Emit]:
    """Register the emitter of some opcodes for some types (the last modifier that names one)."""

    def register(emit: Emit) -> Emit:
        for opcode in opcodes:
            WRITES[opcode] = writes
            for kind in types:
                if (opcode, kind) in EMITTERS:
                    raise ValueError(f"{opcode}.{kind} has two emitters")
                EMITTERS[opcode, kind] = emit
        return emit

    return register


class Mods:
    """An instruction's modifiers, taken one by one; what is left over at the end is refused."""

    def __init__(self, emitter: Emitter, ins: Instruction) -> None:
        self.emitter = emitter
        self.left = list(ins.modifiers)
        kinds = [m for m in self.left if m in TYPES]
        self.kind = kinds[-1] if kinds else ""

    def take(self, *choices: str, default: str = "") -> str:
        """The first modifier that is one of `choices`; without a default one must be there."""
        for modifier in self.left:
            if modifier in choices:
                self.left.remove(modifier)
                return modifier
        if default or "" in choices:
            return default
        raise self.emitter.refuse(f"needs one of .{' .'.join(choices)}")

    def maybe(self, *choices: str) -> str:
        """Like take, but "" when there is none."""
        return self.take(*choices, "")

    def flag(self, name: str) -> bool:
        return bool(self.maybe(name))

    def last(self) -> str:
        """The type, which ends the list."""
        if not self.left or self.left[-1] not in TYPES:
            raise self.emitter.refuse("has no type")
        return self.left.pop()

    def done(self) -> None:
        if self.left:
            raise self.emitter.refuse(f"modifier .{self.left[0]}")


def is_event(ins: Instruction) -> bool:
    """Whether Python carries the instruction out."""
    if ins.opcode in ("ld", "st"):
        return not SYNCHRONISING.isdisjoint(ins.modifiers)
    if ins.opcode == "bar":
        return ins.modifiers[:1] != ("warp",)
    return ins.opcode in EVENTS


def event_writes(ins: Instruction) -> int:
    """How many leading operands an event defines."""
    match ins.opcode, ins.modifiers[:1]:
        case ("ld", _):
            return 1
        case ("st", _) | ("tcgen05", ("dealloc",)):
            return 0
        case ("bar" | "barrier", _) if "red" in ins.modifiers:
            return 1
        case ("call", _):
            return 1 if ins.operands and isinstance(ins.operands[0], Vec) else 0
    return EVENTS[ins.opcode]


def writes(ins: Instruction) -> int:
    """How many leading operands an instruction defines."""
    if is_event(ins):
        return event_writes(ins)
    return WRITES.get(ins.opcode, 1)


def emit(emitter: Emitter, ins: Instruction) -> None:
    """Emit a native instruction, guard included."""
    emitter.ins = ins
    mods = Mods(emitter, ins)
    found = EMITTERS.get((ins.opcode, mods.kind)) or EMITTERS.get((ins.opcode, ANY))
    if found is None:
        known = any(opcode == ins.opcode for opcode, _ in EMITTERS)
        raise emitter.refuse(f"type .{mods.kind or '(none)'}" if known else "the opcode")
    emitter.guard = None
    if ins.guard is not None:
        reg, negated = ins.guard
        guard = emitter.read(reg)
        emitter.guard = emitter.invert(guard) if negated else guard
    found(emitter, ins, mods)
    mods.done()
    emitter.guard = None


def operand_count(emitter: Emitter, ins: Instruction, *allowed: int) -> None:
    if len(ins.operands) not in allowed:
        raise emitter.refuse(f"{len(ins.operands)} operands")


__all__ = ["ANY", "EMITTERS", "INTEGER", "Addr", "Mods", "UnsupportedPTX", "emit", "emits", "event_writes", "is_event"]
__all__ += ["operand_count", "writes"]
