"""Basic blocks of a kernel: edges, immediate post-dominators, loop heads, live registers.

A block ends at a branch, at an exit, before a label, or at an event: an instruction that Python carries out. After
an event the warp goes on at the block that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from refluent.emulator.ptx import Addr, Composite, Dual, Imm, Instruction, Kernel, Label, Operand, Pred, Reg, Vec

EXITS = ("ret", "exit")


@dataclass(slots=True)
class Block:
    """Instructions [start, end) of a kernel. The last one may be a branch, an exit or an event."""

    index: int
    start: int
    end: int
    targets: list[int] = field(default_factory=list)  # of a branch, in order
    follows: int | None = None  # the block entered by falling through
    event: bool = False
    reconvergence: int | None = None  # immediate post-dominator; None is the end of the kernel
    is_reconvergence: bool = False  # some branch's lanes meet here
    is_loop_head: bool = False
    live_out: int = 0  # bit set of registers to be kept when the block (less its event) is done

    @property
    def successors(self) -> list[int]:
        return self.targets if self.follows is None else [*self.targets, self.follows]


@dataclass(slots=True)
class Flow:
    """The blocks of a kernel and the bit number of each register in the live sets."""

    blocks: list[Block]
    bit: dict[Reg, int]


def registers_in(operand: Operand) -> Iterator[Reg]:
    """Every register an operand mentions."""
    match operand:
        case Reg():
            yield operand
        case Pred(reg=reg):
            yield reg
        case Addr(base=Reg() as base):
            yield base
        case Vec(items=items) | Composite(items=items):
            for item in items:
                yield from registers_in(item)
        case Dual(first=first, second=second):
            yield from registers_in(first)
            yield from registers_in(second)


def build(kernel: Kernel, is_event: Callable[[Instruction], bool], writes: Callable[[Instruction], int]) -> Flow:
    """Blocks of `kernel`. `writes(instruction)` is how many leading operands an instruction defines."""
    blocks = _split(kernel, is_event)
    _post_dominators(kernel, blocks)
    _loop_heads(blocks)
    bit = {reg: i for i, reg in enumerate(kernel.registers.values())}
    _liveness(kernel, blocks, bit, writes)
    return Flow(blocks, bit)


def _branch_targets(instruction: Instruction) -> list[int]:
    found: list[int] = []
    for operand in instruction.operands:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        found += [item.target for item in items if isinstance(item, Label)]
    return found


def _split(kernel: Kernel, is_event: Callable[[Instruction], bool]) -> list[Block]:
    code = kernel.instructions
    starts = {0}
    events = set()
    for ins in code:
        if ins.opcode in ("bra", "brx"):
            starts.update(_branch_targets(ins))
            starts.add(ins.index + 1)
            if ins.opcode == "brx":
                # Lanes that go elsewhere run it again, so it stands alone.
                starts.add(ins.index)
        elif ins.opcode in EXITS or ins.opcode == "trap":
            starts.add(ins.index + 1)
        elif is_event(ins):
            events.add(ins.index)
            starts.add(ins.index + 1)
    starts.discard(len(code))
    order = sorted(starts)
    number = {start: i for i, start in enumerate(order)}
    end_of_code = len(order)
    blocks = []
    for i, start in enumerate(order):
        end = order[i + 1] if i + 1 < len(order) else len(code)
        block = Block(i, start, end)
        follows: int | None = i + 1
        if end > start:
            last = code[end - 1]
            block.event = last.index in events
            if last.opcode in ("bra", "brx"):
                block.targets = [number.get(t, end_of_code) for t in _branch_targets(last)]
                if last.guard is None:
                    follows = None
            elif last.opcode in EXITS and last.guard is None:
                follows = None
        block.follows = follows
        blocks.append(block)
    # Falling off the end leaves the kernel: an empty last block stands for that.
    blocks.append(Block(end_of_code, len(code), len(code)))
    return blocks


def _post_dominators(kernel: Kernel, blocks: list[Block]) -> None:
    """Immediate post-dominators (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm) on the reverse graph."""
    exit_node = len(blocks)
    leaving = _leaving(kernel, blocks)
    # Lanes that leave need not be waited for: where some go on, only their paths count. So what comes after an early
    # return runs with all lanes that are left, and not in two parts. A loop that ends in a return keeps it as its way
    # out: without one, nothing inside it would have a post-dominator.
    successors = [[n for n in b.successors if n not in leaving] or b.successors or [exit_node] for b in blocks]
    while stuck := set(range(len(blocks))) - _reaching(successors, exit_node):
        restored = [i for i in stuck if len(successors[i]) < len(blocks[i].successors)]
        for i in restored:
            successors[i] = blocks[i].successors
        if not restored:
            break
    predecessors: list[list[int]] = [[] for _ in range(exit_node + 1)]
    for i, nexts in enumerate(successors):
        for n in nexts:
            predecessors[n].append(i)
    order = _postorder(exit_node, predecessors)
    rank = {node: i for i, node in enumerate(order)}
    idom: dict[int, int] = {exit_node: exit_node}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new = -1
            for n in successors[node]:
                if n in idom and n in rank:
                    new = n if new < 0 else _meet(idom, rank, n, new)
            if new >= 0 and idom.get(node) != new:
                idom[node] = new
                changed = True
    for block in blocks:
        parent = idom.get(block.index, exit_node)
        block.reconvergence = None if parent == exit_node else parent
        if len(block.successors) > 1 and block.reconvergence is not None:
            blocks[block.reconvergence].is_reconvergence = True


def _reaching(successors: list[list[int]], target: int) -> set[int]:
    """Nodes from which a path leads to the target."""
    found = {target}
    grew = True
    while grew:
        grew = False
        for i in reversed(range(len(successors))):
            if i not in found and any(n in found for n in successors[i]):
                found.add(i)
                grew = True
    return found


def _leaving(kernel: Kernel, blocks: list[Block]) -> set[int]:
    """Blocks that do nothing but leave the kernel."""
    idle = {
        block.index
        for block in blocks
        if all(ins.opcode in ("bra", *EXITS) for ins in kernel.instructions[block.start : block.end])
    }
    found: set[int] = set()
    grew = True
    while grew:
        grew = False
        for block in blocks:
            if block.index in idle - found and all(n in found for n in block.successors):
                found.add(block.index)
                grew = True
    return found


def _meet(idom: dict[int, int], rank: dict[int, int], a: int, b: int) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = idom[a]
        while rank[b] < rank[a]:
            b = idom[b]
    return a


def _postorder(root: int, edges: list[list[int]]) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(edges[root]))]
    while stack:
        node, nexts = stack[-1]
        for n in nexts:
            if n not in seen:
                seen.add(n)
                stack.append((n, iter(edges[n])))
                break
        else:
            stack.pop()
            order.append(node)
    return order


def _loop_heads(blocks: list[Block]) -> None:
    """Targets of edges to a block that is still open in a depth-first walk: every cycle holds one."""
    state = [0] * len(blocks)
    stack = [(0, iter(blocks[0].successors))]
    state[0] = 1
    while stack:
        node, nexts = stack[-1]
        for n in nexts:
            if state[n] == 0:
                state[n] = 1
                stack.append((n, iter(blocks[n].successors)))
                break
            if state[n] == 1:
                blocks[n].is_loop_head = True
        else:
            state[node] = 2
            stack.pop()


def reads_and_writes(ins: Instruction, writes: int) -> tuple[set[Reg], set[Reg]]:
    """Registers an instruction reads and those it defines. A guarded definition keeps what was there."""
    reads: set[Reg] = set()
    defines: set[Reg] = set()
    for i, operand in enumerate(ins.operands):
        if i < writes and not isinstance(operand, Addr):
            defines.update(registers_in(operand))
        else:
            reads.update(registers_in(operand))
    if ins.guard is not None:
        reads.add(ins.guard[0])
        reads |= defines
    return reads, defines


def _liveness(kernel: Kernel, blocks: list[Block], bit: dict[Reg, int], writes: Callable[[Instruction], int]) -> None:
    uses, kills = [0] * len(blocks), [0] * len(blocks)
    last: list[tuple[int, int]] = [(0, 0)] * len(blocks)
    for block in blocks:
        use = kill = 0
        for ins in kernel.instructions[block.start : block.end]:
            reads, defines = reads_and_writes(ins, writes(ins))
            read = sum(1 << bit[r] for r in reads)
            define = sum(1 << bit[r] for r in defines)
            use |= read & ~kill
            kill |= define
            last[block.index] = (read, define)
        uses[block.index], kills[block.index] = use, kill
    live_in = list(uses)
    live_out = [0] * len(blocks)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for block in blocks:
        for n in block.successors:
            predecessors[n].append(block.index)
    work = list(range(len(blocks)))
    while work:
        i = work.pop()
        out = 0
        for n in blocks[i].successors:
            out |= live_in[n]
        live_out[i] = out
        new = uses[i] | (out & ~kills[i])
        if new != live_in[i]:
            live_in[i] = new
            work += predecessors[i]
    for block in blocks:
        block.live_out = live_out[block.index]
        if block.event:
            read, define = last[block.index]
            block.live_out = (block.live_out & ~define) | read


__all__ = ["EXITS", "Block", "Flow", "Imm", "build", "reads_and_writes", "registers_in"]
