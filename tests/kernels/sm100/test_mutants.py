"""Every synchronisation instruction of the compiled backward matters to a check, or it is argued why not."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from emulator.mutants import sample
from kernels.sm100.mutant_arguments import BY_IDENTITY
from kernels.sm100.mutants import CALLS, all_outcomes, subject

pytestmark = pytest.mark.emulator
EVERY = 40  # of the mutants, in CI's sample


def complaints(outcomes):
    """What is wrong with how mutants fared, in words."""
    found = []
    for mutant, outcome in outcomes.items():
        argued = str(mutant) in BY_IDENTITY
        if outcome.named and argued:
            found.append(f"{mutant}: named ({', '.join(outcome.kinds)}), and yet argued to survive")
        if not outcome.named and not argued:
            found.append(f"{mutant}: {outcome.how}; nothing names it, and no argument says why")
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_sample(name):
    made = subject(name)
    chosen = sample(made.mutants, EVERY)
    assert not complaints({mutant: made.outcome(mutant) for mutant in chosen})


@pytest.mark.full
def test_all():
    outcomes = all_outcomes()
    assert len(outcomes) >= 400
    assert sum(outcome.named for outcome in outcomes.values()) >= 0.7 * len(outcomes)
    assert not complaints(outcomes)
    assert set(BY_IDENTITY) <= {str(mutant) for mutant in outcomes}
