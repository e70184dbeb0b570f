"""What the main kernel of a backward does, counted in the emulator: by role, and a step in clocks beside the design's.

A step's counts are the difference of two runs of one CTA, of which one walks one query block more: what a tile costs
once (loads of K and V, the epilogue) cancels. Clocks are those of the unit alone, at its full rate: they say which
unit bounds a step, not how long it takes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from refluent.gpu.plans.sm100 import THREADS, backward_plan
from refluent.gpu.sm100 import emulated
from refluent.gpu.sm100.backward.context import COMPUTE_WARP, LOAD_WARP, MMA_WARP, REDUCE_WARP, WARPS
from refluent.problem import Inputs, Needs, Options, Problem

if TYPE_CHECKING:
    from refluent.emulator.report import LaunchReport, Report

ROLES = {
    "reduce": range(REDUCE_WARP, COMPUTE_WARP),
    "compute": range(COMPUTE_WARP, MMA_WARP),
    "MMA": range(MMA_WARP, LOAD_WARP),
    "load": range(LOAD_WARP, LOAD_WARP + 1),
    "idle": range(LOAD_WARP + 1, WARPS),
}
LANES = 32
MMA_FLOPS, SHARED_BYTES, EXP2 = 8192, 128, 16  # a multiprocessor's, a clock
HEAD_DIM = 128
BLOCKS = 4  # query blocks of the shorter run: every ring has wrapped


@dataclass(frozen=True)
class Work:
    """What the warps of a role have done. operations: kind -> [count, bytes, flops]; names: instructions by name."""

    registers: int | None
    instructions: int
    operations: dict[str, tuple[int, int, int]]
    names: Counter[str]

    def minus(self, other: Work) -> Work:
        operations = {}
        for kind, row in self.operations.items():
            less = other.operations.get(kind, (0, 0, 0))
            operations[kind] = (row[0] - less[0], row[1] - less[1], row[2] - less[2])
        names = Counter({name: times - other.names[name] for name, times in self.names.items()})
        return Work(self.registers, self.instructions - other.instructions, operations, names)

    def shared_accesses(self, opcode: str) -> dict[str, int]:
        """Its ld.shared or st.shared instructions by name."""
        return {name: times for name, times in self.names.items() if times and name.startswith(f"{opcode}.shared")}

    def shared_bytes(self, opcode: str) -> int:
        """What they move, all lanes."""
        return sum(times * LANES * access_bytes(name) for name, times in self.shared_accesses(opcode).items())


def access_bytes(name: str) -> int:
    """Of a load's or store's lane, by the instruction's name: 16 for st.shared.v4.b32."""
    vector, bits = re.search(r"\.v(\d)", name), re.search(r"\.[bfsu](\d+)$", name)
    if bits is None:
        raise ValueError(f"{name} names no type")
    return int(bits[1]) // 8 * (int(vector[1]) if vector else 1)


def main_launch(report: Report) -> LaunchReport:
    """The main kernel's launch among a backward's."""
    (found,) = (launch for launch in report.launches if launch.block == (THREADS, 1, 1))
    return found


def by_role(launch: LaunchReport) -> dict[str, Work]:
    """What each role of the main kernel has done."""
    made = {}
    for name, warps in ROLES.items():
        parts = [role for role in launch.roles if role.warps[0] in warps]
        operations: dict[str, tuple[int, int, int]] = {}
        names: Counter[str] = Counter()
        for part in parts:
            names.update(part.names)
            for kind, row in part.operations.items():
                count, nbytes, flops = operations.get(kind, (0, 0, 0))
                operations[kind] = (count + row[0], nbytes + row[1], flops + row[2])
        made[name] = Work(parts[0].registers, sum(part.instructions for part in parts), operations, names)
    return made


def step() -> dict[str, Work]:
    """What one step of 128 queries by 128 keys of 128 dimensions makes each role do."""
    shorter, longer = (by_role(main_launch(_run(blocks))) for blocks in (BLOCKS, BLOCKS + 1))
    return {name: work.minus(shorter[name]) for name, work in longer.items()}


def _run(blocks: int) -> Report:
    """A backward with one key block and some query blocks; what the tensors hold decides nothing."""
    plan = backward_plan(HEAD_DIM, HEAD_DIM)
    rows = blocks * plan.tile_m
    device = torch.device("cpu")
    problem = Problem(Options(), 1, rows, plan.tile_n, 1, 1, HEAD_DIM, HEAD_DIM, torch.bfloat16, device)
    q, k = (torch.zeros(1, length, 1, HEAD_DIM, dtype=torch.bfloat16) for length in (rows, plan.tile_n))
    with emulated.gpu(checks="none") as chip:
        emulated.backward(problem, Inputs(q, k, k), q, torch.zeros(1, 1, rows), q, None, Needs())
    return chip.report()


@dataclass(frozen=True)
class Row:
    """Clocks of a unit for one purpose."""

    unit: str
    what: str
    clocks: float
    design: int
    counted: str  # from what
    extra: bool = False  # not in the unit's sum
    why: str = ""  # it is another than the design's


def table(work: dict[str, Work]) -> list[Row]:
    """A step's clocks, each beside what docs/kernels/sm100-backward.md's design says."""
    reduce, compute, mma, load = (work[name] for name in ("reduce", "compute", "MMA", "load"))
    products = {kind: row for kind, row in mma.operations.items() if kind.startswith("mma ") and row[2]}
    operands = mma.operations["mma operands in shared memory"][1]
    stored, added = reduce.shared_bytes("st"), reduce.operations["bulk reduce"][1]
    filled = {kind: load.operations[kind][1] for kind in ("tma load", "bulk load")}
    reads, exps = compute.shared_accesses("ld"), {n: t for n, t in compute.names.items() if t and n.startswith("ex2.")}
    return [
        Row(
            "tensor core",
            "five products",
            sum(row[2] for row in products.values()) / MMA_FLOPS,
            2560,
            ", ".join(f"{row[0]} {kind}" for kind, row in products.items()),
        ),
        _shared("operands of the products", operands, 2048, f"{operands:,} bytes"),
        _shared("dS", compute.shared_bytes("st"), 256, _listed(compute.shared_accesses("st"))),
        _shared("dQ staging", stored + added, 1024, f"{stored:,} bytes stored, {added:,} read by bulk reduce-adds"),
        Row(
            "shared memory",
            "fills of Q, dO, LSE, dPsum",
            sum(filled.values()) / SHARED_BYTES,
            512,
            " + ".join(f"{nbytes:,} bytes by {kind}" for kind, nbytes in filled.items()),
            extra=True,
            why="the design leaves out LSE and dPsum, 1,024 bytes",
        ),
        Row(
            "shared memory",
            "broadcasts of LSE, dPsum",
            float(sum(reads.values())),
            256,
            f"{_listed(reads)}, one clock each",
            extra=True,
            why="the design reads 16 bytes at a time; LSE is read in pairs of 8 bytes",
        ),
        Row("exp2", "P", sum(exps.values()) * LANES / EXP2, 1024, _listed(exps)),
    ]


def _shared(what: str, nbytes: int, design: int, counted: str) -> Row:
    return Row("shared memory", what, nbytes / SHARED_BYTES, design, counted)


def _listed(names: dict[str, int]) -> str:
    return ", ".join(f"{times} {name}" for name, times in sorted(names.items()))


def sums(rows: list[Row]) -> dict[str, tuple[float, int]]:
    """Clocks of each unit and the design's, extra rows aside."""
    made: dict[str, tuple[float, int]] = {}
    for row in rows:
        if not row.extra:
            clocks, design = made.get(row.unit, (0.0, 0))
            made[row.unit] = (clocks + row.clocks, design + row.design)
    return made
