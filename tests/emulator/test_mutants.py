"""The checks are measured: of mutants of known-good kernels nearly all are named, and the others are argued."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from emulator.mutant_arguments import ARGUMENTS, argument_of
from emulator.mutant_table import DOCUMENT, document, named_share
from emulator.mutants import Subject, all_outcomes, known_good, sample
from emulator.mutation_rules import mutations
from refluent.emulator.ptx import parse

pytestmark = pytest.mark.emulator
EVERY = 18  # of the mutants, in the sample


def wrong(mutant, outcome) -> str | None:
    """What is wrong with how a mutant fared, in words."""
    argument = argument_of(str(mutant))
    if outcome.named and argument is not None:
        return f"{mutant}: named ({', '.join(outcome.kinds)}), and yet argued to survive"
    if not outcome.named and argument is None:
        return f"{mutant}: {outcome.how}; nothing names it, and no argument says why"
    return None


def complaints(outcomes) -> list[str]:
    return [text for mutant, outcome in outcomes.items() if (text := wrong(mutant, outcome))]


@pytest.mark.parametrize("name", known_good())
def test_a_sample(name):
    subject = Subject(*known_good()[name])
    chosen = sample(subject.mutants, EVERY)
    assert chosen
    found = complaints({mutant: subject.outcome(mutant) for mutant in chosen})
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def outcomes():
    return all_outcomes()


@pytest.mark.mutants
@pytest.mark.full
def test_every_mutant_is_named_or_argued(outcomes):
    found = complaints(outcomes)
    assert not found, "\n".join(found)


@pytest.mark.mutants
@pytest.mark.full
def test_enough_are_named(outcomes):
    assert len(outcomes) >= 150
    assert named_share(outcomes) >= 0.7


@pytest.mark.mutants
@pytest.mark.full
def test_arguments_are_about_mutants(outcomes):
    names = {str(mutant) for mutant in outcomes}
    assert len(names) == len(outcomes)
    argued = [identity for argument in ARGUMENTS for identity in argument.identities()]
    assert len(argued) == len(set(argued))
    assert set(argued) <= names, sorted(set(argued) - names)


@pytest.mark.mutants
@pytest.mark.full
def test_the_document_says_so(outcomes):
    assert document(outcomes) == DOCUMENT.read_text(), "run `python -m emulator.mutants` in tests/"


HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k()\n.reqntid 128, 1, 1\n{\n"
REGISTERS = ".reg .b32 a, n;\n.reg .b64 s, g;\n.reg .pred p;\n.reg .b16 m;\n"


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 n, n, 1;", {}),
        ("ld.shared.b32 n, [a];", {}),
        (
            "mbarrier.init.shared.b64 [a], n;",
            {
                "deleted": "",
                "count + 1": "{ .reg .b32 mutated; add.s32 mutated, n, 1; mbarrier.init.shared.b64 [a], mutated; }",
                "count - 1": "{ .reg .b32 mutated; add.s32 mutated, n, -1; mbarrier.init.shared.b64 [a], mutated; }",
            },
        ),
        (
            "mbarrier.arrive.expect_tx.shared.b64 s, [a], 64;",
            {
                "deleted": "",
                "relaxed": "mbarrier.arrive.relaxed.cluster.expect_tx.shared.b64 s, [a], 64;",
                "bytes + 16": "mbarrier.arrive.expect_tx.shared.b64 s, [a], 80;",
                "bytes - 16": "mbarrier.arrive.expect_tx.shared.b64 s, [a], 48;",
                "no bytes": "mbarrier.arrive.expect_tx.shared.b64 s, [a], 0;",
            },
        ),
        (
            "mbarrier.try_wait.parity.shared.b64 p, [a], 1, 100;",
            {
                "deleted": "setp.eq.u32 p, 0, 0;",
                "other parity": "mbarrier.try_wait.parity.shared.b64 p, [a], 0, 100;",
                "relaxed": "mbarrier.try_wait.parity.relaxed.cluster.shared.b64 p, [a], 1, 100;",
            },
        ),
        ("bar.sync 0;", {"deleted": "", "arrive only": "bar.arrive 0, 128;", "count - 32": "bar.sync 0, 96;"}),
        ("bar.sync 2, 64;", {"deleted": "", "arrive only": "bar.arrive 2, 64;", "count - 32": "bar.sync 2, 32;"}),
        (
            "cp.async.bulk.wait_group 0;",
            {
                "deleted": "",
                "one group more": "cp.async.bulk.wait_group 1;",
                "read": "cp.async.bulk.wait_group.read 0;",
            },
        ),
        ("bar.arrive 2, 64;", {"deleted": "", "count - 32": "bar.arrive 2, 32;"}),
        ("barrier.cluster.arrive.release;", {"deleted": "", "relaxed": "barrier.cluster.arrive.relaxed;"}),
        (
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a], n;",
            {"deleted": "", "relaxed": "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [a], n;"},
        ),
        (
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [a], m;",
            {
                "deleted": "",
                **{
                    f"to CTA {rank}": "{ .reg .b16 mutated; mov.b16 mutated, " + str(rank + 1) + "; tcgen05.commit."
                    "cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [a], mutated; }"
                    for rank in (0, 1)
                },
            },
        ),
        ("fence.proxy.async;", {"deleted": "", "other space": "fence.proxy.async.shared::cta;"}),
        (
            "red.release.gpu.global.add.s32 [g], n;",
            {
                "relaxed": "red.relaxed.gpu.global.add.s32 [g], n;",
                "scope cta": "red.release.cta.global.add.s32 [g], n;",
                "deleted": "",
            },
        ),
    ],
)
def test_rules(instruction, expected):
    (instr,) = parse(f"{HEAD}{REGISTERS}{instruction}\n}}").kernels["k"].instructions
    found = dict(mutations(instr, 128))
    assert found == expected
    for text in found.values():
        parse(f"{HEAD}{REGISTERS}{text}\n}}")
