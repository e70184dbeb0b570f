"""Mutants of known-good kernels: every synchronisation instruction deleted or weakened, one at a time, by rule.

The PTX that the driver captured is changed as text and translated again. A mutant runs under one schedule after another
with all checks on, until something names it. Who is not named is argued in mutant_arguments.py. In tests/,
`python -m emulator.mutants` runs all of them and writes docs/emulator-mutants.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from emulator import cases
from emulator.cases import CASES, Case
from emulator.kernels import barriers, clusters, gemm_sm90, gemm_sm100, scheduling
from emulator.mutation_rules import mutations
from refluent import emulator
from refluent.emulator.codegen.jit import compile_kernel
from refluent.emulator.errors import DeadlockError, FaultError
from refluent.emulator.grid import Program, translate
from refluent.emulator.ptx import parse

SCHEDULES = (("fair", 0), ("late", 0), ("early", 0), ("random", 0), ("random", 1))
CHECK, STOPPED, WRONG, SURVIVED = "check", "deadlock or fault", "wrong numbers only", "survivor"
NUM_SMS = 1  # holds every CTA of these kernels, but of the one that cancels launches


def _sized_later(tensor: torch.Tensor, mode: int, divisibility: int = 1) -> Any:
    """An argument with an extent that the compiler does not know: it keeps the loop over it, or most of it."""
    return cases.on_gpu(tensor).mark_compact_shape_dynamic(mode=mode, stride_order=(0, 1), divisibility=divisibility)


def _gemm(kernel: Callable, m: int, n: int, k: int) -> None:
    """Few CTAs, and k long enough for the ring of stages to go round several times."""
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    c = torch.full((m, n), -7.0)
    cases.launch(kernel, _sized_later(a, 1, 8), _sized_later(b, 1, 8), cases.on_gpu(c))
    cases.close(c, a.double() @ b.double().t(), 1e-4 * k**0.5)


def _multicast() -> None:
    """With one stage: with more, a CTA is never so far ahead that it could write a slot that is still read."""
    x, y = torch.randn(100, 64), torch.empty(2, 64)
    cases.launch(clusters.Multicast(16, 64, 2, 1).sums, _sized_later(x, 0), cases.on_gpu(y))
    cases.close(y, x.double().sum(0) * torch.arange(1, 3)[:, None], 1e-3)


def _mbarrier_ring() -> None:
    x = torch.randn(17, barriers.HALF)
    y = torch.empty_like(x)
    cases.launch(barriers.ring, _sized_later(x, 0), cases.on_gpu(y))
    cases.same(y, x.flip(1))


def _cancelling() -> None:
    """More rows than a multiprocessor holds CTAs, so that some launches are cancelled."""
    x, y, rows_done = torch.randn(70, 100), torch.empty(70, 100), torch.zeros(70, dtype=torch.int32)
    cases.launch(scheduling.cancelling, cases.on_gpu(x), cases.on_gpu(y), cases.on_gpu(rows_done))
    cases.same(y, x * x)


OWN = (
    Case("wgmma_gemm", ("sm_90a",), lambda: _gemm(gemm_sm90.Gemm((128, 64, 64), 2), 128, 72, 64 * 11)),
    Case("tcgen05_gemm", ("sm_100a",), lambda: _gemm(gemm_sm100.Gemm((128, 64, 64), 2), 128, 72, 64 * 11)),
    Case("tcgen05_pair", ("sm_100a",), lambda: _gemm(gemm_sm100.Gemm((128, 64, 64), 2, True), 128, 72, 64 * 11)),
    Case("multicast", ("sm_100a",), _multicast),
    Case("mbarrier_ring", ("sm_90a",), _mbarrier_ring),
    Case("cancelling", ("sm_100a",), _cancelling),
)
AS_THEY_ARE = {
    "named_barriers": "sm_90a",
    "bulk_copies": "sm_90a",
    "bulk_reduce_in_turns": "sm_100a",
    "cp_async": "sm_90a",
    "rotate-two": "sm_100a",
    "rotate_async-two": "sm_90a",
    "tma_load-swizzle128": "sm_90a",
    "tma_store-swizzle128": "sm_100a",
    "tma_reduce-swizzle128": "sm_90a",
    "row_sums": "sm_90a",
    "ordered_total": "sm_100a",
    "persistent": "sm_90a",
    "dependent": "sm_90a",
    "warp_mma": "sm_90a",
}
CHECKS = {"bulk_reduce_in_turns": ("all", "order")}  # it promises the same bits in every run


def known_good() -> dict[str, tuple[Case, str]]:
    """The kernels that are mutated, each on one architecture."""
    by_name = {case.name: case for case in CASES}
    chosen = [(case, case.arches[0]) for case in OWN] + [(by_name[name], arch) for name, arch in AS_THEY_ARE.items()]
    return {case.name: (case, arch) for case, arch in chosen}


@dataclass(frozen=True)
class Mutant:
    """One changed instruction, the `number`-th of its name in the module: `after` replaces PTX line `line`."""

    kernel: str
    instruction: str
    number: int
    rule: str
    line: int
    after: str

    def __str__(self) -> str:
        """Its identity: stays the same as long as the kernel and the compiler do."""
        return f"{self.kernel} {self.instruction} {self.number} {self.rule}"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: its class, the kinds of finding, and the schedule that showed it."""

    how: str
    kinds: tuple[str, ...] = ()
    schedule: str = ""

    @property
    def named(self) -> bool:
        return self.how in (CHECK, STOPPED)


class Subject:
    """A known-good kernel, its PTX and its mutants."""

    def __init__(self, case: Case, arch: str) -> None:
        self.case, self.arch = case, arch
        texts: set[str] = set()

        def remember(ptx: str, kernel: str) -> Program:
            texts.add(ptx)
            return translate(ptx, kernel)

        # Known good: right and silent under every schedule that its mutants will see.
        for schedule, seed in SCHEDULES:
            gpu = self._gpu(on_finding="raise", schedule=schedule, seed=seed)
            gpu.machine.translate = remember
            with gpu:
                self._run()
        (self.ptx,) = texts
        self.mutants = list(self._mutants())

    def _gpu(self, **options: Any) -> emulator.Gpu:
        return emulator.gpu(self.arch, num_sms=NUM_SMS, checks=CHECKS.get(self.case.name, "all"), **options)

    def _run(self) -> None:
        torch.manual_seed(0)
        self.case.run()

    def _mutants(self) -> Iterator[Mutant]:
        lines = self.ptx.splitlines()
        seen: dict[str, int] = {}
        for kernel in parse(self.ptx).kernels.values():
            threads = (kernel.reqntid or (0,))[0]
            for instr in kernel.instructions:
                number = seen[instr.name] = seen.get(instr.name, 0) + 1
                for rule, after in mutations(instr, threads):
                    before = lines[instr.line - 1].split()
                    assert before[0].startswith(instr.opcode), f"not alone on its line: {before}"
                    yield Mutant(self.case.name, instr.name, number, rule, instr.line, after)

    def outcome(self, mutant: Mutant) -> Outcome:
        """Run the mutant under one schedule after another until it is named."""
        lines = self.ptx.splitlines()
        lines[mutant.line - 1] = mutant.after
        kernels, programs = parse("\n".join(lines)).kernels, {}

        def mutated(ptx: str, kernel: str) -> Program:
            assert ptx == self.ptx
            if kernel not in programs:
                programs[kernel] = Program(compile_kernel(kernels[kernel]))
            return programs[kernel]

        found = Outcome(SURVIVED)
        for schedule, seed in SCHEDULES:
            label = f"{schedule} {seed}" if schedule == "random" else schedule
            run = self._outcome(mutated, label, schedule=schedule, seed=seed)
            if run.named:
                return run
            if run.how == WRONG and found.how == SURVIVED:
                found = run
        return found

    def _outcome(self, mutated: Callable[[str, str], Program], label: str, **options: Any) -> Outcome:
        gpu = self._gpu(on_finding="record", **options)
        gpu.machine.translate = mutated
        how = SURVIVED
        try:
            with gpu:
                self._run()
        except (DeadlockError, FaultError):
            how = STOPPED
        except AssertionError:
            how = WRONG
        if gpu.open_findings():
            how = CHECK
        kinds = tuple(sorted({finding.kind for finding in gpu.report().findings}))
        return Outcome(how, kinds, "" if how == SURVIVED else label)


def sample(mutants: list[Mutant], every: int) -> list[Mutant]:
    """Every n-th mutant, those of one rule and instruction side by side first."""
    return sorted(mutants, key=lambda mutant: (mutant.instruction, mutant.rule))[::every]


def all_outcomes(show: Callable[[str], None] = lambda line: None) -> dict[Mutant, Outcome]:
    """Run every mutant of every kernel."""
    outcomes = {}
    for case, arch in known_good().values():
        subject = Subject(case, arch)
        for mutant in subject.mutants:
            outcomes[mutant] = subject.outcome(mutant)
            show(f"{outcomes[mutant].how:20} {','.join(outcomes[mutant].kinds):24} {mutant}")
    return outcomes


if __name__ == "__main__":
    from emulator.mutant_table import DOCUMENT, document

    found = all_outcomes(lambda line: print(line, flush=True))
    DOCUMENT.write_text(document(found))
