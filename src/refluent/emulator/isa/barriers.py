"""Named barriers (bar, barrier.cta) and cluster barriers (barrier.cluster).

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: bar, barrier" and "barrier.cluster".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from refluent.emulator.isa import CONTINUE, Handler, Modifiers, Outcome, blocked, handles
from refluent.emulator.ptx import Imm, Instruction, Kernel, Operand, Pred, Reg
from refluent.emulator.report import place, ranges
from refluent.emulator.state import LANES

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, Cluster, MachineWarp
    from refluent.emulator.machine import Machine

NAMED_BARRIERS = 16


class NamedBarrier:
    """One of a CTA's 16. Counts threads, a warp always as 32."""

    def __init__(self, machine: Machine, cta: CTA, number: int) -> None:
        self.machine, self.cta, self.number = machine, cta, number
        self.waiters: list[MachineWarp] = []
        self.expected = 0  # threads; 0 while nobody has arrived
        self.everybody = False  # no count was given: every warp that has not left
        self.arrived: list[tuple[MachineWarp, int]] = []  # warp, instruction
        self.phase = 0
        self.accumulated = 0
        self.result = 0
        self.sync: Any = machine.check.sync(cta.cluster)
        self.seen: dict[int, int] = {}  # instructions that ever arrived: how often

    @property
    def threads(self) -> int:
        return LANES * len(self.arrived)

    def arrive(self, warp: MachineWarp, count: int | None) -> bool:
        """One warp arrives; whether that completes the phase."""
        expected = LANES * len([w for w in self.cta.warps if not w.finished]) if count is None else count
        if self.arrived and expected != self.expected and not self.everybody:
            self._complain(warp, f"expects {expected} threads, others of this phase {self.expected}")
        if any(other is warp and self._waits(instr) for other, instr in self.arrived):
            self._complain(warp, "the warp waits in this phase already: lanes of one warp arrive separately")
        self.expected, self.everybody = expected, count is None
        self.arrived.append((warp, warp.instr))
        self.seen[warp.instr] = self.seen.get(warp.instr, 0) + 1
        self.machine.check.arrive(self.sync, warp)
        return self._complete_if_full(warp)

    def _waits(self, instr: int) -> bool:
        """Whether an arrival also waits; one that does not (bar.arrive) may be followed by another of the same warp."""
        return "arrive" not in self.cta.launch.kernel.instructions[instr].modifiers

    def _complete_if_full(self, warp: MachineWarp) -> bool:
        if self.threads < self.expected:
            return False
        if self.threads > self.expected:
            self._complain(warp, f"{self.threads} threads have arrived, {self.expected} are expected")
        self.machine.check.flip(self.sync)
        self.phase += 1
        self.arrived.clear()
        self.result, self.accumulated = self.accumulated, 0
        self.machine.wake(self)
        return True

    def warp_left(self, warp: MachineWarp) -> None:
        """A warp has left the kernel: barriers for everybody no longer count it."""
        if self.arrived and self.everybody:
            self.expected -= LANES
            self._complete_if_full(warp)

    def _complain(self, warp: MachineWarp, text: str) -> None:
        self.machine.finding("barrier", f"named barrier {self.number}: {text}", self.cta, warp)

    def explain(self) -> str:
        """For a deadlock report."""
        kernel = self.cta.launch.kernel
        here = {warp.index for warp, _ in self.arrived}
        missing = [warp.index for warp in self.cta.warps if warp.index not in here and not warp.finished]
        text = (
            f"named barrier {self.number}, phase {self.phase}: {self.threads} of {self.expected} threads have arrived "
            f"(warps {ranges(sorted(here))}); warps that have not: {ranges(missing) or 'none that still run'}"
        )
        others = [index for index in self.seen if index not in {instr for _, instr in self.arrived}]
        if others:
            text += "; arrivals seen earlier: " + ", ".join(place(kernel, index) for index in others[:4])
        return text


def named_barrier(machine: Machine, cta: CTA, number: int) -> NamedBarrier:
    """The CTA's barrier of this number."""
    if number not in cta.named:
        cta.named[number] = NamedBarrier(machine, cta, number)
    return cta.named[number]


def check_convergent(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> None:
    """A convergent instruction needs every lane of the warp that has not left."""
    if mask != warp.live and machine.check.enabled:
        machine.finding(
            "divergence",
            f"executed by lanes 0x{mask:08x} only, of 0x{warp.live:08x}: every lane of the warp has to",
            cta,
            warp,
        )


def _scalar(operand: Operand) -> Callable[[MachineWarp, int], int]:
    if isinstance(operand, Imm):
        value = operand.value
        return lambda warp, mask: value
    assert isinstance(operand, Reg)
    register = operand
    return lambda warp, mask: warp.scalar(register, mask)


@handles("bar", "barrier")
def _prepare_barrier(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel)
    mods.flag("cta")
    kind = mods.choose(("sync", "arrive", "red"))
    mods.flag("aligned")
    if kind == "red":
        return _prepare_reduction(instr, mods)
    mods.done()
    operands = instr.operands
    number = _scalar(operands[0])
    count = _scalar(operands[1]) if len(operands) > 1 else None
    if kind == "arrive" and count is None:
        raise mods.refuse("needs a thread count")

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        check_convergent(machine, cta, warp, mask)
        barrier = named_barrier(machine, cta, _number(machine, warp, number(warp, mask)))
        threads = _threads(machine, warp, count(warp, mask)) if count is not None else None
        complete = barrier.arrive(warp, threads)
        if kind == "arrive":
            return CONTINUE
        return _pass(machine, barrier, warp) if complete else _wait(machine, barrier, warp)

    return handler


def _number(machine: Machine, warp: MachineWarp, number: int) -> int:
    if not 0 <= number < NAMED_BARRIERS:
        raise machine.fault(warp, f"barrier {number}: a CTA has barriers 0 to {NAMED_BARRIERS - 1}")
    return number


def _threads(machine: Machine, warp: MachineWarp, count: int) -> int:
    if count <= 0 or count % LANES:
        raise machine.fault(warp, f"a thread count of {count} is not a positive multiple of the warp size")
    return count


def _pass(machine: Machine, barrier: NamedBarrier, warp: MachineWarp) -> Outcome:
    machine.check.wait(barrier.sync, warp)
    return CONTINUE


def _wait(
    machine: Machine, barrier: NamedBarrier, warp: MachineWarp, finish: Callable[[], None] | None = None
) -> Outcome:
    def then() -> Outcome:
        if finish is not None:
            finish()
        return _pass(machine, barrier, warp)

    return blocked(barrier, barrier.explain, then)


def _prepare_reduction(instr: Instruction, mods: Modifiers) -> Handler:
    op = mods.choose(("popc", "and", "or"))
    mods.choose(("u32",) if op == "popc" else ("pred",))
    mods.done()
    target, *rest = instr.operands
    number, source = _scalar(rest[0]), rest[-1]
    count = _scalar(rest[1]) if len(rest) == 3 else None
    assert isinstance(target, Reg)
    assert isinstance(source, (Reg, Pred, Imm))

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        check_convergent(machine, cta, warp, mask)
        barrier = named_barrier(machine, cta, _number(machine, warp, number(warp, mask)))
        votes = warp.predicate(source) & mask
        if op == "popc":
            barrier.accumulated += votes.bit_count()
        else:
            barrier.accumulated |= int(votes != mask if op == "and" else votes != 0)

        def finish() -> None:
            result = barrier.result
            if op == "popc":
                warp.set(target, result, mask)
            else:
                truth = (result == 0) == (op == "and")
                warp.set_predicate(target, mask if truth else 0, mask)

        threads = _threads(machine, warp, count(warp, mask)) if count is not None else None
        if barrier.arrive(warp, threads):
            finish()
            return _pass(machine, barrier, warp)
        return _wait(machine, barrier, warp, finish)

    return handler


class ClusterBarrier:
    """The hardware barrier of a cluster: every thread that has not left arrives once, then waits."""

    def __init__(self, machine: Machine, cluster: Cluster) -> None:
        self.machine, self.cluster = machine, cluster
        self.waiters: list[MachineWarp] = []
        self.arrived: set[MachineWarp] = set()
        self.phase = 0
        self.phases: dict[MachineWarp, int] = {}  # of each warp: arrivals it has waited for
        self.sync: Any = machine.check.sync(cluster)

    def _expected(self) -> list[MachineWarp]:
        return [warp for cta in self.cluster.ctas for warp in cta.warps if not warp.finished]

    def arrive(self, warp: MachineWarp, relaxed: bool) -> None:
        if warp in self.arrived:
            self.machine.finding("barrier", "the warp arrives at the cluster barrier twice in a phase", warp.cta, warp)
            return
        self.machine.check.arrive(self.sync, warp, relaxed)
        self.arrived.add(warp)
        self.check_complete()

    def check_complete(self) -> None:
        """Complete the phase if everybody who has not left is there."""
        if self.arrived and self.arrived.issuperset(self._expected()):
            self.machine.check.flip(self.sync)
            self.phase += 1
            for warp in self.arrived:
                self.phases[warp] = self.phase
            self.arrived.clear()
            self.machine.wake(self)

    def explain(self) -> str:
        """For a deadlock report."""
        missing: dict[str, list[int]] = {}
        for warp in self._expected():
            if warp not in self.arrived:
                missing.setdefault(warp.cta.name, []).append(warp.index)
        text = "; ".join(f"{cta} warps {ranges(warps)}" for cta, warps in missing.items())
        return f"the cluster barrier, phase {self.phase}: not arrived: {text}"


def cluster_barrier(machine: Machine, cluster: Cluster) -> ClusterBarrier:
    if cluster.barrier is None:
        cluster.barrier = ClusterBarrier(machine, cluster)
    found: ClusterBarrier = cluster.barrier
    return found


@handles("barrier.cluster.arrive")
def _prepare_cluster_arrive(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=2)
    relaxed = mods.choose(("release", "relaxed"), "release") == "relaxed"
    mods.flag("aligned")
    mods.done()

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        check_convergent(machine, cta, warp, mask)
        cluster_barrier(machine, cta.cluster).arrive(warp, relaxed)
        return CONTINUE

    return handler


@handles("barrier.cluster.wait")
def _prepare_cluster_wait(instr: Instruction, kernel: Kernel) -> Handler:
    mods = Modifiers(instr, kernel, skip=2)
    mods.flag("acquire")
    mods.flag("aligned")
    mods.done()

    def handler(machine: Machine, cta: CTA, warp: MachineWarp, mask: int) -> Outcome:
        check_convergent(machine, cta, warp, mask)
        barrier = cluster_barrier(machine, cta.cluster)
        if warp in barrier.arrived:
            return blocked(barrier, barrier.explain)
        if barrier.phases.pop(warp, None) is None:
            machine.finding("barrier", "barrier.cluster.wait without an arrive before it", cta, warp)
        machine.check.wait(barrier.sync, warp)
        return CONTINUE

    return handler
