"""docs/emulator-mutants.md: what became of every mutant, as tables."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from emulator.mutant_arguments import ARGUMENTS, BLIND_SPOT, HARMLESS, argument_of
from emulator.mutants import CHECK, SCHEDULES, STOPPED, SURVIVED, WRONG, Mutant, Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "emulator-mutants.md"
Outcomes = dict[Mutant, Outcome]
_CLASSES = (CHECK, STOPPED, WRONG, SURVIVED)
_INTRODUCTION = """\
# The emulator's checks, measured by mutants

Every synchronisation instruction of known-good kernels (`tests/emulator/kernels`: GEMMs for sm_90a and sm_100a with one
CTA and with a pair, pipelines of TMA, multicast, bulk and cp.async copies, semaphores, barriers, dependent launches) is
deleted or weakened, one at a time, by the rules of `tests/emulator/mutation_rules.py`. Each mutant runs with all checks
on, under one schedule after another ({schedules}), until a check names it or a deadlock or
fault is reported. This file is written by `python -m emulator.mutants` in `tests/`; `tests/emulator/test_mutants.py`
fails when it no longer holds.

Of {total} mutants {named} ({share:.0%}) are named by a check or by the report of a deadlock or fault, {wrong} show only
in wrong numbers, {survivors} survive: {harmless} harmless ones, {blind} that the checks are blind to.
"""
_MENDED = """\
## Blind spots that mutants have shown, mended since

- An acquire or release of too narrow a scope (`.cta` between CTAs) counted as if it reached everybody.
- Reductions by `cp.reduce.async.bulk` never race with each other, so nothing named a broken turn of a deterministic
  sum; the check `order`, asked for by name, does.
- A kernel that cancels launches (`clusterlaunchcontrol`) was run with so few CTAs that there was nothing to cancel.
"""


def named_share(outcomes: Outcomes) -> float:
    return sum(outcome.named for outcome in outcomes.values()) / len(outcomes)


def document(outcomes: Outcomes) -> str:
    """The whole file."""
    classes = Counter(outcome.how for outcome in outcomes.values())
    schedules = ", ".join(f"{name} {seed}" if name == "random" else name for name, seed in SCHEDULES)
    introduction = _INTRODUCTION.format(
        schedules=schedules,
        total=len(outcomes),
        named=classes[CHECK] + classes[STOPPED],
        share=named_share(outcomes),
        wrong=classes[WRONG],
        survivors=classes[SURVIVED],
        harmless=_verdicts(outcomes)[HARMLESS],
        blind=_verdicts(outcomes)[BLIND_SPOT],
    )
    parts = [
        introduction,
        "## By kernel\n",
        _counted(outcomes, "kernel", lambda mutant: mutant.kernel),
        "## By instruction and change\n",
        _counted(outcomes, "change", lambda mutant: f"{_short(mutant.instruction)}: {mutant.rule}"),
        "## By finding\n",
        _findings(outcomes),
        "## Not named, and why\n",
        *_arguments(outcomes),
        _MENDED,
    ]
    return "\n".join(parts)


def _verdicts(outcomes: Outcomes) -> Counter[str]:
    arguments = (argument_of(str(mutant)) for mutant, outcome in outcomes.items() if outcome.how == SURVIVED)
    return Counter(argument.verdict for argument in arguments if argument is not None)


def _counted(outcomes: Outcomes, title: str, key: Callable[[Mutant], str]) -> str:
    rows: dict[str, Counter[str]] = {}
    for mutant, outcome in outcomes.items():
        rows.setdefault(key(mutant), Counter())[outcome.how] += 1
    lines = [f"| {title} | mutants | {' | '.join(_CLASSES)} |", "| --- " + "| ---: " * 5 + "|"]
    for name, counts in rows.items() if title == "kernel" else sorted(rows.items()):
        cells = [str(counts[how] or "") for how in _CLASSES]
        lines.append(f"| {name} | {counts.total()} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(instruction: str) -> str:
    """An instruction without what says nothing about how it synchronises."""
    skip = ("sync", "aligned", "b64", "b32", "u32", "s32", "tile", "global", "parity", "add", "arrive::one")
    words = [word for word in instruction.split(".") if word not in skip and "::" not in word and word != "shared"]
    return ".".join(words) if not instruction.startswith(("bar", "fence.proxy")) else instruction


def _findings(outcomes: Outcomes) -> str:
    counts = Counter(kind for outcome in outcomes.values() for kind in outcome.kinds)
    lines = ["| kind | mutants that it names |", "| --- | ---: |"]
    lines += [f"| {kind} | {count} |" for kind, count in counts.most_common()]
    return "\n".join(lines) + "\n"


def _arguments(outcomes: Outcomes) -> list[str]:
    open_ = {mutant: outcome for mutant, outcome in outcomes.items() if not outcome.named}
    parts = []
    for argument in ARGUMENTS:
        held = [(m, outcome) for m, outcome in open_.items() if argument_of(str(m)) is argument]
        text = f"**{argument.verdict.capitalize()}** ({len(held)}): {argument.text}"
        lines = [textwrap.fill(text, 120), ""]
        lines += [f"- `{m}`{' (wrong numbers)' if outcome.how == WRONG else ''}" for m, outcome in held]
        parts.append("\n".join(lines) + "\n")
    return parts
