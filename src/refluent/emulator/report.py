"""What a run says: findings, counters of every launch, and who waits for what when nothing moves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from refluent.emulator.ptx import Kernel

if TYPE_CHECKING:
    from refluent.emulator.cta import CTA, MachineWarp
    from refluent.emulator.grid import Launch
    from refluent.emulator.isa import AsyncOp
    from refluent.emulator.machine import Machine


def place(kernel: Kernel, instr: int) -> str:
    """An instruction by PTX line, text and source line."""
    if not 0 <= instr < len(kernel.instructions):
        return "an unknown instruction"
    found = kernel.instructions[instr]
    source = f" ({found.source[0]}:{found.source[1]})" if found.source else ""
    return f"PTX line {found.line}{source} `{found}`"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `lines` are PTX lines, `sources` (file, line) where line information is on."""

    kind: str
    text: str
    kernel: str = ""
    cta: tuple[int, int, int] | None = None
    warps: tuple[int, ...] = ()
    instructions: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    addresses: tuple[int, int] | None = None

    @classmethod
    def make(
        cls,
        kind: str,
        text: str,
        launch: Launch | None,
        cta: CTA | None = None,
        places: list[tuple[Kernel, int]] | None = None,
        warps: tuple[int, ...] = (),
        addresses: tuple[int, int] | None = None,
    ) -> Finding:
        found = [kernel.instructions[i] for kernel, i in places or [] if 0 <= i < len(kernel.instructions)]
        return cls(
            kind,
            text,
            launch.name if launch else "",
            cta.ctaid if cta else None,
            warps,
            tuple(instruction.index for instruction in found),
            tuple(instruction.line for instruction in found),
            tuple(instruction.source for instruction in found if instruction.source),
            addresses,
        )

    def __str__(self) -> str:
        where = f" in {self.kernel}" if self.kernel else ""
        return f"[{self.kind}]{where}: {self.text}"


class Counts:
    """Counters of a launch. Per warp index (over all CTAs): instructions, events; per kind of asynchronous operation:
    how many, bytes, floating-point operations."""

    def __init__(self, kernel: Kernel, warps: int, blocks: int) -> None:
        self.instructions = np.zeros(warps, np.uint64)
        self.events = [0] * warps
        self.setmaxnreg: dict[int, int] = {}
        self.operations: dict[str, list[int]] = {}
        self.by_warp: dict[tuple[int, str], list[int]] = {}

    def performed(self, op: AsyncOp) -> None:
        self.add(op.kind, op.warp.index, op.nbytes, op.flops)

    def add(self, kind: str, warp: int, nbytes: int, flops: int) -> None:
        """One more operation of a kind."""
        for row in (self.operations.setdefault(kind, [0, 0, 0]), self.by_warp.setdefault((warp, kind), [0, 0, 0])):
            row[0] += 1
            row[1] += nbytes
            row[2] += flops


@dataclass
class Role:
    """Warps of a CTA that do the same work."""

    warps: list[int]
    registers: int | None  # as setmaxnreg left them
    instructions: int
    events: int
    operations: dict[str, tuple[int, int, int]]  # kind: count, bytes, floating-point operations
    names: dict[str, int]  # instruction with its modifiers: how often a warp came to it, whatever its guard said


@dataclass
class LaunchReport:
    """One launch that has completed."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    roles: list[Role]
    operations: dict[str, tuple[int, int, int]]
    processes: int = 1  # that it ran in
    obstacle: str = ""  # why it ran in one process where several were asked for

    @property
    def instructions(self) -> int:
        return sum(role.instructions for role in self.roles)

    @property
    def events(self) -> int:
        return sum(role.events for role in self.roles)

    @property
    def flops(self) -> int:
        return sum(row[2] for row in self.operations.values())

    def __str__(self) -> str:
        shape = f"grid {self.grid}, block {self.block}"
        if self.cluster != (1, 1, 1):
            shape += f", cluster {self.cluster}"
        if self.processes > 1:
            shape += f", in {self.processes} processes"
        lines = [f"{self.kernel}: {shape}, {self.shared_bytes} bytes of dynamic shared memory"]
        if self.obstacle:
            lines.append(f"  in one process: {self.obstacle}")
        for role in self.roles:
            registers = f", {role.registers} registers" if role.registers is not None else ""
            head = f"warps {ranges(role.warps)}{registers}"
            lines.append(f"  {head}: {role.instructions:,} warp instructions, {role.events:,} events")
            for kind, (count, nbytes, flops) in sorted(role.operations.items()):
                work = f", {nbytes:,} bytes" if nbytes else ""
                work += f", {flops:,} flops" if flops else ""
                lines.append(f"    {kind}: {count:,}{work}")
        return "\n".join(lines)


@dataclass
class Report:
    """str() is readable; `findings` and `launches` are for programs."""

    arch: str
    seed: int
    schedule: str
    findings: list[Finding] = field(default_factory=list)
    launches: list[LaunchReport] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set, repr=False)

    def add(
        self,
        kind: str,
        text: str,
        launch: Launch | None,
        cta: CTA | None = None,
        warp: MachineWarp | None = None,
        instr: int | None = None,
    ) -> Finding:
        """Enter a finding at one instruction."""
        places = []
        if launch is not None and instr is not None:
            places = [(launch.kernel, instr)]
            text = f"{warp.name if warp else ''} at {place(launch.kernel, instr)}: {text}".strip()
        finding = Finding.make(kind, text, launch, cta, places, (warp.index,) if warp else ())
        self.enter(finding)
        return finding

    def enter(self, finding: Finding) -> None:
        """Enter a finding unless one of its kind stands for these instructions already."""
        key = (finding.kind, finding.kernel, finding.instructions or finding.text)
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(finding)

    def launched(self, launch: Launch) -> None:
        """Enter a completed launch."""
        operations = {kind: (row[0], row[1], row[2]) for kind, row in launch.counts.operations.items()}
        self.launches.append(
            LaunchReport(
                launch.name,
                launch.grid,
                launch.block,
                launch.cluster,
                launch.request.shared_bytes,
                _roles(launch),
                operations,
                max(launch.processes, 1),
                launch.obstacle,
            )
        )

    def __str__(self) -> str:
        lines = [f"emulated {self.arch}, schedule {self.schedule}, seed {self.seed}"]
        lines += [str(launch) for launch in self.launches]
        lines.append(f"{len(self.findings)} findings" if self.findings else "no findings")
        lines += [str(finding) for finding in self.findings]
        return "\n".join(lines)


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _roles(launch: Launch) -> list[Role]:
    """Warps that execute mostly the same code under the same setmaxnreg are one role."""
    lengths = launch.program.block_lengths.astype(np.float64)
    entered = launch.counters > 0
    groups: list[list[int]] = []
    for warp in range(launch.warps):
        for group in groups:
            first = group[0]
            if launch.counts.setmaxnreg.get(first) != launch.counts.setmaxnreg.get(warp):
                continue
            both = float(lengths @ (entered[first] & entered[warp]))
            either = float(lengths @ (entered[first] | entered[warp]))
            if both >= 0.8 * either:
                group.append(warp)
                break
        else:
            groups.append([warp])
    return [_role(launch, group) for group in groups]


def _role(launch: Launch, warps: list[int]) -> Role:
    counts = launch.counts
    operations: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for (warp, kind), row in counts.by_warp.items():
        if warp in warps:
            operations[kind] = [a + b for a, b in zip(operations[kind], row)]
    entered = launch.counters[warps].sum(0)
    names: dict[str, int] = defaultdict(int)
    for block, times in zip(launch.program.compiled.blocks, entered.tolist()):
        if times:
            for instr in launch.kernel.instructions[block.start : block.end]:
                names[instr.name] += times
    return Role(
        warps,
        counts.setmaxnreg.get(warps[0]),
        int(sum(counts.instructions[warp] for warp in warps)),
        sum(counts.events[warp] for warp in warps),
        {kind: (row[0], row[1], row[2]) for kind, row in operations.items()},
        dict(names),
    )


def waiting_report(machine: Machine, kind: str) -> str:
    """Who waits for what: the text of a deadlock or livelock."""
    lines = [
        "deadlock: no warp can go on"
        if kind == "deadlock"
        else "livelock: the warps that can run only poll, and nothing that they poll changes"
    ]
    groups: dict[tuple[str, int, str], list[MachineWarp]] = defaultdict(list)
    for warp in machine.sleeping:
        groups[(warp.cta.name, warp.instr, warp.blocked.reason())].append(warp)
    for warp in machine.schedule:
        groups[(warp.cta.name, warp.instr, "polls")].append(warp)
    for (cta, instr, reason), warps in groups.items():
        numbers = ranges([warp.index for warp in warps])
        lines.append(f"  {cta} warps {numbers} at {place(warps[0].cta.launch.kernel, instr)}: {reason}")
    for op in machine.ready_ops:
        lines.append(f"  ready, not performed: {op.describe()}")
    for launch in machine.launches:
        if launch.waiting:
            lines.append(f"  {len(launch.waiting)} clusters of {launch.name} wait for a free multiprocessor")
    return "\n".join(lines)
