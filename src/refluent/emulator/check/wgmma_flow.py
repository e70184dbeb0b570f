"""The register rules of wgmma, checked on the kernel's text along every path.

Until wgmma.wait_group says that an operation is complete, its accumulators may not be read or written, except by
another wgmma, and the registers of its A fragment may not be written; and wgmma.fence has to stand between a write to
such a register and the operation that uses it, and before the first operation (PTX ISA, "wgmma.mma_async",
"wgmma.fence"). A plain mov passes the state of its source on: compilers move accumulators between operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from refluent.emulator.codegen.flow import Block, registers_in
from refluent.emulator.codegen.registry import writes
from refluent.emulator.ptx import Instruction, Kernel, Reg, Vec

MOST_GROUPS = 8  # committed groups told apart; older ones count as one
S = TypeVar("S")


@dataclass(frozen=True)
class Group:
    """What the operations of one group hold: accumulators and A registers, each with the operation's index."""

    accumulators: frozenset[tuple[Reg, int]] = frozenset()
    fragments: frozenset[tuple[Reg, int]] = frozenset()

    def __or__(self, other: Group) -> Group:
        return Group(self.accumulators | other.accumulators, self.fragments | other.fragments)


Flight = tuple[Group, ...]  # the open group, then committed ones, newest first
Dirty = frozenset[Reg | None]  # registers written since the last fence; None: no fence yet


def violations(kernel: Kernel, blocks: Sequence[Block]) -> list[tuple[int, str]]:
    """(instruction, what is wrong with it), once an instruction; empty for kernels without wgmma."""
    operations = [ins for ins in kernel.instructions if _is_operation(ins)]
    if not operations:
        return []
    found: dict[int, str] = {}
    grounded: Flight = ()
    in_flight = _entries(kernel, blocks, grounded, _join_flight, _fly)
    for ins, flight in _states(kernel, blocks, in_flight, _fly):
        for text in _touched(kernel, flight, ins):
            found.setdefault(ins.index, text)
    used = frozenset(reg for ins in operations for reg in (*_accumulators(ins), *_fragment(ins)))

    def soil(dirty: Dirty, ins: Instruction) -> Dirty:
        return _soil(dirty, ins, used)

    clean: Dirty = frozenset()
    unfenced = _entries(kernel, blocks, clean, _join_dirty, soil, first=frozenset([None]))
    for ins, dirty in _states(kernel, blocks, unfenced, soil):
        if _is_operation(ins) and None in dirty:
            found.setdefault(ins.index, "no wgmma.fence stands before it on some path")
        elif _is_operation(ins) and dirty & {*_accumulators(ins), *_fragment(ins)}:
            found.setdefault(ins.index, "registers that it uses were written after the last wgmma.fence")
    return sorted(found.items())


def _entries(
    kernel: Kernel,
    blocks: Sequence[Block],
    nothing: S,
    join: Callable[[S, S], S],
    after: Callable[[S, Instruction], S],
    first: S | None = None,
) -> list[S]:
    """The state at the start of every block: the smallest that holds on all paths."""
    entry = [nothing for _ in blocks]
    entry[0] = nothing if first is None else first
    pending = set(range(len(blocks)))
    while pending:
        block = blocks[pending.pop()]
        state = entry[block.index]
        for ins in kernel.instructions[block.start : block.end]:
            state = after(state, ins)
        for successor in block.successors:
            if successor < len(blocks):
                joined = join(entry[successor], state)
                if joined != entry[successor]:
                    entry[successor] = joined
                    pending.add(successor)
    return entry


def _states(
    kernel: Kernel, blocks: Sequence[Block], entry: list[S], after: Callable[[S, Instruction], S]
) -> Iterator[tuple[Instruction, S]]:
    """Every instruction with the state before it."""
    for block, state in zip(blocks, entry, strict=True):
        for ins in kernel.instructions[block.start : block.end]:
            yield ins, state
            state = after(state, ins)


def _is_operation(ins: Instruction) -> bool:
    return ins.opcode == "wgmma" and ins.modifiers[0] == "mma_async"


def _accumulators(ins: Instruction) -> Iterator[Reg]:
    return registers_in(ins.operands[0])


def _fragment(ins: Instruction) -> Iterator[Reg]:
    """Registers of A, none when it lies in shared memory."""
    return registers_in(ins.operands[1]) if isinstance(ins.operands[1], Vec) else iter(())


def _join_flight(a: Flight, b: Flight) -> Flight:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return tuple(g | shorter[i] if i < len(shorter) else g for i, g in enumerate(longer))


def _join_dirty(a: Dirty, b: Dirty) -> Dirty:
    return a | b


def _fly(state: Flight, ins: Instruction) -> Flight:
    """What is in flight behind an instruction."""
    if _is_operation(ins):
        held = Group(
            frozenset((reg, ins.index) for reg in _accumulators(ins)),
            frozenset((reg, ins.index) for reg in _fragment(ins)),
        )
        return ((state[0] if state else Group()) | held, *state[1:])
    if ins.opcode == "wgmma" and ins.modifiers[0] == "commit_group":
        groups = (Group(), *(state or (Group(),)))
        if len(groups) > MOST_GROUPS:
            groups = (*groups[: MOST_GROUPS - 1], groups[MOST_GROUPS - 1] | groups[MOST_GROUPS])
        return groups
    if ins.opcode == "wgmma" and ins.modifiers[0] == "wait_group":
        return state[: getattr(ins.operands[0], "value", 0) + 1]
    if _is_copy(ins):
        return tuple(_copied(group, *ins.operands) for group in state)
    return state


def _is_copy(ins: Instruction) -> bool:
    return ins.opcode == "mov" and len(ins.operands) == 2 and all(isinstance(op, Reg) for op in ins.operands)


def _copied(group: Group, target: object, source: object) -> Group:
    assert isinstance(target, Reg)
    copies = frozenset((target, operation) for reg, operation in group.accumulators if reg == source)
    return Group(group.accumulators | copies, group.fragments) if copies else group


def _written(ins: Instruction) -> set[Reg]:
    return {reg for operand in ins.operands[: writes(ins)] for reg in registers_in(operand)}


def _touched(kernel: Kernel, state: Flight, ins: Instruction) -> Iterator[str]:
    if ins.opcode == "wgmma" or _is_copy(ins) or not state:
        return
    mentioned = {reg for operand in ins.operands for reg in registers_in(operand)}
    written = _written(ins)
    for group in state:
        for held, touching, what in ((group.accumulators, mentioned, "accumulator"), (group.fragments, written, "A")):
            for reg, operation in held:
                if reg in touching:
                    line = kernel.instructions[operation].line
                    yield f"touches {reg.name}, {what} register of the wgmma at PTX line {line}, still in flight"


def _soil(dirty: Dirty, ins: Instruction, used: frozenset[Reg]) -> Dirty:
    """Registers of operations that were written since the last fence, behind an instruction."""
    if ins.opcode == "wgmma":
        return frozenset() if ins.modifiers[0] == "fence" else dirty
    if _is_copy(ins) and ins.operands[1] in used and ins.operands[1] not in dirty:
        return dirty
    return dirty | (_written(ins) & used)
