"""How a synchronisation instruction can be deleted or weakened: replacement texts, by rule, from the instruction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from refluent.emulator.ptx import Imm, Instruction, Operand, Reg, show

Rule = tuple[str, str]  # name, replacement text
Rules = Callable[[Instruction, int], Iterator[Rule]]
_RULES: dict[str, Rules] = {}


def mutations(instr: Instruction, threads: int) -> Iterator[Rule]:
    """Every mutation of this instruction; nothing for one that does not synchronise. `threads`: of a CTA."""
    words = (instr.opcode, *instr.modifiers)
    for length in range(len(words), 0, -1):
        rules = _RULES.get(".".join(words[:length]))
        if rules is not None:
            break
    else:
        rules = _memory_order
    for name, text in rules(instr, threads):
        # The parser numbers registers of inner scopes: P1@12.
        yield name, re.sub(r"(?<=\w)@\d+", "", text)


def _rules_for(*names: str) -> Callable[[Rules], Rules]:
    def register(function: Rules) -> Rules:
        for name in names:
            _RULES[name] = function
        return function

    return register


def _with(
    instr: Instruction,
    old: str = "",
    new: str = "",
    *,
    remove: tuple[str, ...] = (),
    operands: dict[int, Operand] | None = None,
) -> str:
    """The instruction with one modifier replaced (by several, dotted) and operands replaced by position."""
    modifiers = tuple(new if m == old else m for m in instr.modifiers if m not in remove)
    given = tuple((operands or {}).get(i, operand) for i, operand in enumerate(instr.operands))
    return str(replace(instr, modifiers=tuple(m for m in modifiers if m), operands=given))


def _relaxed(instr: Instruction, order: str, after: str, scope: str = ".cluster") -> str:
    """The instruction relaxed: it names its order, or has it by default and `after` is what the order would follow."""
    if order in instr.modifiers:
        return _with(instr, order, "relaxed")
    return _with(instr, after, f"{after}.relaxed{scope}")


def _changed(instr: Instruction, position: int, operation: str, amount: int) -> str:
    """The instruction with an integer operand changed by an operation: at once, or in a register of its own."""
    operand: Operand = instr.operands[position]
    if isinstance(operand, Imm):
        value = operand.value + amount if operation == "add" else operand.value ^ amount
        return _with(instr, operands={position: Imm(value)})
    assert isinstance(operand, Reg)
    kind = "s32" if operation == "add" else "b32"
    changed = _with(instr, operands={position: Reg("mutated", 32, 0)})
    return f"{{ .reg .b32 mutated; {operation}.{kind} mutated, {show(operand)}, {amount}; {changed} }}"


@_rules_for("mbarrier.init")
def _init(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    yield "count + 1", _changed(instr, 1, "add", 1)
    yield "count - 1", _changed(instr, 1, "add", -1)


@_rules_for("mbarrier.arrive")
def _arrive(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    if "relaxed" not in instr.modifiers:
        yield "relaxed", _relaxed(instr, "release", "arrive")


@_rules_for("mbarrier.arrive.expect_tx")
def _expect(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield from _arrive(instr, threads)
    last = len(instr.operands) - 1
    yield "bytes + 16", _changed(instr, last, "add", 16)
    yield "bytes - 16", _changed(instr, last, "add", -16)
    yield "no bytes", _with(instr, operands={last: Imm(0)})


@_rules_for("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", f"setp.eq.u32 {show(instr.operands[0])}, 0, 0;"
    yield "other parity", _changed(instr, 2, "xor", 1)
    if "relaxed" not in instr.modifiers:
        yield "relaxed", _relaxed(instr, "acquire", "parity" if "parity" in instr.modifiers else instr.modifiers[0])


@_rules_for("bar.sync", "barrier.sync")
def _named_barrier(instr: Instruction, threads: int) -> Iterator[Rule]:
    number, *count = map(show, instr.operands)
    given = count[0] if count else str(threads)
    yield "deleted", ""
    yield "arrive only", f"bar.arrive {number}, {given};"
    if given.isdigit() and int(given) > 32:
        yield "count - 32", f"bar.sync {number}, {int(given) - 32};"


@_rules_for("bar.arrive", "barrier.arrive")
def _arrive_at_named(instr: Instruction, threads: int) -> Iterator[Rule]:
    number, count = map(show, instr.operands)
    yield "deleted", ""
    if count.isdigit() and int(count) > 32:
        yield "count - 32", f"bar.arrive {number}, {int(count) - 32};"


@_rules_for("barrier.cluster.arrive")
def _cluster_arrive(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    if "relaxed" not in instr.modifiers:
        yield "relaxed", _relaxed(instr, "release", "arrive", "")


@_rules_for("fence.proxy.async")
def _proxy(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    space = instr.modifiers[2] if len(instr.modifiers) > 2 else ""
    yield "other space", "fence.proxy.async.shared::cta;" if space in ("global", "") else "fence.proxy.async.global;"


@_rules_for("cp.async.bulk.wait_group")
def _bulk_wait(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    yield "one group more", _changed(instr, 0, "add", 1)
    if "read" not in instr.modifiers:
        yield "read", _with(instr, "wait_group", "wait_group.read")


@_rules_for("cp.async.wait_group", "wgmma.wait_group")
def _group_wait(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    yield "one group more", _changed(instr, 0, "add", 1)


@_rules_for("tcgen05.commit")
def _commit(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    if "multicast::cluster" in instr.modifiers:
        for rank in (0, 1):
            yield f"to CTA {rank}", _masked(instr, len(instr.operands) - 1, 1 << rank)


@_rules_for("cp.async.bulk.tensor")
def _copy(instr: Instruction, threads: int) -> Iterator[Rule]:
    """A multicast copy that brings its data and its bytes to one CTA only."""
    if "multicast::cluster" in instr.modifiers:
        masks = [i for i, operand in enumerate(instr.operands) if isinstance(operand, Reg) and operand.bits == 16]
        for rank in (0, 1):
            yield f"to CTA {rank}", _masked(instr, masks[0], 1 << rank)


def _masked(instr: Instruction, position: int, mask: int) -> str:
    changed = _with(instr, operands={position: Reg("mutated", 16, 0)})
    return f"{{ .reg .b16 mutated; mov.b16 mutated, {mask}; {changed} }}"


@_rules_for("setmaxnreg")
def _registers(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""
    value = instr.operands[0]
    assert isinstance(value, Imm)
    yield "other count", _with(instr, operands={0: Imm(value.value + (8 if "inc" in instr.modifiers else -8))})


@_rules_for(
    "fence.mbarrier_init",
    "fence.acq_rel",
    "fence.sc",
    "membar",
    "bar.warp.sync",
    "barrier.cluster.wait",
    "cp.async.commit_group",
    "cp.async.bulk.commit_group",
    "wgmma.fence",
    "wgmma.commit_group",
    "tcgen05.wait::ld",
    "tcgen05.wait::st",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    "tcgen05.alloc",
    "tcgen05.dealloc",
    "tcgen05.relinquish_alloc_permit",
    "griddepcontrol",
)
def _deleted(instr: Instruction, threads: int) -> Iterator[Rule]:
    yield "deleted", ""


def _memory_order(instr: Instruction, threads: int) -> Iterator[Rule]:
    """Loads, stores and atomics that carry an order."""
    if instr.opcode not in ("ld", "st", "atom", "red"):
        return
    order = [m for m in instr.modifiers if m in ("acquire", "release", "acq_rel")]
    if not order:
        return
    yield "relaxed", _with(instr, order[0], "relaxed")
    if instr.opcode == "red":
        yield "deleted", ""
    if "gpu" in instr.modifiers:
        yield "scope cta", _with(instr, "gpu", "cta")
