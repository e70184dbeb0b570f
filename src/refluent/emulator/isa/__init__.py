"""Events: the instructions that Python executes, and the asynchronous operations that they start.

A module of this package registers, per opcode, a `prepare(instr, kernel) -> handler`. It resolves operands and
modifiers once, refusing what it does not know, and the handler is then called for every execution:
`handler(machine, cta, warp, mask) -> Outcome`. The longest registered prefix of "opcode.modifier.modifier" wins.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from refluent.emulator.ptx import Instruction, Kernel, UnsupportedPTX

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.machine import Machine


class Waitable(Protocol):
    """Anything a warp can sleep on: whoever changes it calls machine.wake(it)."""

    waiters: list[MachineWarp]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a handler says: the warp goes on, lets others run first, or sleeps."""

    name: str


CONTINUE = Outcome("continue")
YIELD = Outcome("yield")  # done, but the warp polls: somebody else should run before it goes on


@dataclass(frozen=True, slots=True)
class Blocked(Outcome):
    """The warp sleeps until machine.wake(on). Then `then` is called, or, without it, the handler once more.

    `reason` is evaluated only for reports. `timeout`: what to call instead when nothing else in the machine can move
    (mbarrier.try_wait gives up and returns false).
    """

    on: Waitable
    reason: Callable[[], str]
    then: Callable[[], Outcome] | None = None
    timeout: Callable[[], Outcome] | None = None


def blocked(
    on: Waitable,
    reason: Callable[[], str] | str,
    then: Callable[[], Outcome] | None = None,
    timeout: Callable[[], Outcome] | None = None,
) -> Blocked:
    """A Blocked outcome; `reason` may be a plain text."""
    text = (lambda: reason) if isinstance(reason, str) else reason
    return Blocked("blocked", on, text, then, timeout)


Handler = Callable[["Machine", "CTA", "MachineWarp", int], Outcome]
Prepare = Callable[[Instruction, Kernel], Handler]

HANDLERS: dict[str, Prepare] = {}

# Modules that register handlers; imported on first use.
MODULES = ("barriers", "mbarrier", "sync", "atomics", "bulk", "copies", "tma", "wgmma", "tcgen05", "fragments", "calls")


def handles(*names: str) -> Callable[[Prepare], Prepare]:
    """Register a prepare function for opcodes or dotted prefixes: @handles("mbarrier.init")."""

    def register(prepare: Prepare) -> Prepare:
        for name in names:
            if name in HANDLERS:
                raise ValueError(f"two handlers for {name}")
            HANDLERS[name] = prepare
        return prepare

    return register


def load_handlers() -> None:
    """Import every module that registers handlers."""
    for name in MODULES:
        importlib.import_module(f"refluent.emulator.isa.{name}")


def find(instr: Instruction) -> Prepare | None:
    """The prepare function for an instruction, or None when no handler knows its opcode."""
    words = (instr.opcode, *instr.modifiers)
    for length in range(len(words), 0, -1):
        prepare = HANDLERS.get(".".join(words[:length]))
        if prepare is not None:
            return prepare
    return None


def prepare(instr: Instruction, kernel: Kernel) -> Handler:
    """The handler of one instruction of a kernel."""
    found = find(instr)
    if found is None:
        raise unsupported(instr, kernel, "no handler executes this instruction")
    return found(instr, kernel)


def unsupported(instr: Instruction, kernel: Kernel, why: str) -> UnsupportedPTX:
    """The refusal of an instruction, naming it, its line and the kernel."""
    source = f" ({instr.source[0]}:{instr.source[1]})" if instr.source else ""
    return UnsupportedPTX(f"{instr.name}: {why}; PTX line {instr.line}{source} of kernel {kernel.name}: {instr}")


class Modifiers:
    """Takes an instruction's modifiers apart; what is left over at done() is refused."""

    def __init__(self, instr: Instruction, kernel: Kernel, skip: int = 0) -> None:
        self.instr, self.kernel = instr, kernel
        self.left = list(instr.modifiers[skip:])

    def flag(self, name: str) -> bool:
        """Whether the modifier is there."""
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def choose(self, names: Iterable[str], default: str | None = None) -> str:
        """The one of `names` that is there; without a default its absence is refused."""
        for name in names:
            if self.flag(name):
                return name
        if default is None:
            raise self.refuse(f"none of {', '.join(names)} among its modifiers")
        return default

    def take(self, prefix: str) -> str | None:
        """The first modifier that starts with `prefix`."""
        for name in self.left:
            if name.startswith(prefix):
                self.left.remove(name)
                return name
        return None

    def done(self) -> None:
        if self.left:
            raise self.refuse(f"modifiers not understood: {', '.join('.' + name for name in self.left)}")

    def refuse(self, why: str) -> UnsupportedPTX:
        return unsupported(self.instr, self.kernel, why)


@dataclass(eq=False, slots=True)
class AsyncOp:
    """One asynchronous operation: queued by machine.submit, performed when the schedule decides.

    It runs in one or two stages, once every operation in `after` is done: `read` (optional: takes the source, after
    which the source may be overwritten) and `perform` (memory effects, then the completion: mbarrier bytes and the
    like). Waiting: machine.wait_for(ops, reason) gives the Outcome.
    """

    kind: str  # "tma load": names the operation in reports; the timeline's bar
    cta: CTA
    warp: MachineWarp
    instr: int  # index of the instruction that issued it
    perform: Callable[[], None]
    describe: Callable[[], str]
    read: Callable[[], None] | None = None
    after: Sequence[AsyncOp] = ()  # in-order queues: operations it must follow
    nbytes: int = 0  # moved, for the counters
    flops: int = 0
    row: str = "TMA"  # row of the timeline: "TMA", "tensor", "bulk"
    channel: Any = None  # check.Channel that publishes its effects (an mbarrier's, or the issuing warp's)
    source_channel: Any = None  # check.Channel on which its reads complete, where they can be waited for alone
    source_tick: int = 0
    waited: bool = False  # somebody has waited for it
    done: bool = False
    read_done: bool = False
    waiters: list[MachineWarp] = field(default_factory=list)
    stamp: Any = None  # the checker's: clock at issue
    tick: int = 0  # the checker's: its place on its channel
    order: int = 0  # position among all submitted operations
    time: int = 0  # logical time of issue
    waiting: int = 0  # operations of `after` that are not done
    followers: list[AsyncOp] = field(default_factory=list)  # operations that wait for this one

    @property
    def name(self) -> str:
        return f"{self.kind} of {self.warp.name}"
