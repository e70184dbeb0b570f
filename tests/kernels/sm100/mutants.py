"""Mutants of the compiled backward: each synchronisation instruction deleted or weakened (tests/emulator/mutants.py).

`python -m kernels.sm100.mutants`, in tests/, runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import refluent as rf
from emulator.mutants import Mutant, Outcome, Subject
from kernels.sm100.runs import ARCH, BACKEND, ORDERED, Run
from poison import poisoned_memory
from refluent import emulator
from refluent.gpu import launch

NUM_SMS = 4


@dataclass(frozen=True)
class Call:
    """A small call of some variant, as a case of the emulator's mutants: run() raises where a gradient is wrong."""

    name: str
    heads: int
    heads_kv: int
    seqlens: tuple[int, int]
    options: tuple[tuple[str, Any], ...]
    ctas: int = 0

    def run(self) -> None:
        made = _made.get(self.name) or _made.setdefault(self.name, self._make())
        with poisoned_memory():
            gradients = launch_with(self.ctas, made)
        made.check(gradients)

    def _make(self) -> Run:
        torch.manual_seed(5)
        queries, keys = self.seqlens
        q, do = (torch.randn(1, queries, self.heads, 64).bfloat16() for _ in range(2))
        k, v = (torch.randn(1, keys, self.heads_kv, 64).bfloat16() for _ in range(2))
        return Run(do, q, k, v, None, dict(self.options), self.ctas)


_made: dict[str, Run] = {}


def launch_with(ctas: int, run: Run) -> Any:
    """Inside an open context."""
    main = launch.backward
    launch.backward = lambda *arguments: main(*arguments, ctas=ctas)
    try:
        return rf.attention_backward(run.do, run.q, run.k, run.v, run.o, run.lse, backend=BACKEND, **run.options)
    finally:
        launch.backward = main


class BackwardSubject(Subject):
    def _gpu(self, **options: Any) -> emulator.Gpu:
        checks = ORDERED if dict(self.case.options).get("deterministic") else "all"
        return emulator.gpu(self.arch, num_sms=NUM_SMS, checks=checks, strict=True, **options)


CALLS = {
    call.name: call
    for call in (
        Call("causal", 2, 2, (270, 300), (("causal", True),), ctas=3),
        Call("ordered", 2, 1, (270, 140), (("deterministic", True),), ctas=3),
    )
}


def subject(name: str) -> BackwardSubject:
    return BackwardSubject(CALLS[name], ARCH)


def all_outcomes(show: Callable[[str], None] = lambda line: None) -> dict[Mutant, Outcome]:
    """Run every mutant of every call."""
    outcomes = {}
    for name in CALLS:
        made = subject(name)
        for mutant in made.mutants:
            outcome = outcomes[mutant] = made.outcome(mutant)
            show(f"{outcome.how:20} {','.join(outcome.kinds):24} {outcome.schedule:9} {mutant.line:5} {mutant}")
    return outcomes


if __name__ == "__main__":
    all_outcomes(lambda line: print(line, flush=True))
